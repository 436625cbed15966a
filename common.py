"""What the six training scripts share: first what the algorithms rest on, then what a run and its models need.

    processes       setup_device, rank, world_size, sum_over_ranks, gather_in_order
    sampling        sample -> Rollout
    log-probs       token_logprobs, token_values, micro_batches
    data            read_problems, encode_prompts, Shuffled; read_preferences, collate_preferences
    rewards         load_reward
    evaluation      evaluate
    the run         make_optimizer, Meter, Run (updates, metrics, checkpoints, signals)
    models          load_tokenizer, load_model, load_policy, shard, save_model
    command line    flag, RunConfig, launch, UserError
    built-in        the tiny model, its problems and its rankings
    verifiers       extract_answer, is_equivalent, is_worked_out, format_reward: these stand alone

Shapes:  P prompts, G completions of each, N = P·G rows, L padded prompt length, T padded completion length,
         V vocabulary, H hidden size, B rows of a micro-batch.

In a torchrun job every process holds the whole rollout (token ids are small) and works with the same rewards,
advantages and weights as a single process would. Only the expensive work is divided: `sample` decodes this rank's rows,
`load_reward` judges them, `micro_batches` deals out this rank's share of the update, and gradients are summed.
"""
import argparse
import cmath
import collections
import contextlib
import copy
import ctypes
import datetime
import difflib
import fcntl
import fnmatch
import functools
import gzip
import hashlib
import importlib.util
import inspect
import itertools
import json
import logging
import math
import multiprocessing
import operator
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import types
import unicodedata
import warnings
import zlib
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal, get_args, get_origin

import huggingface_hub
import numpy as np
import tokenizers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.utils import cached_file
from transformers import (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AttentionInterface,
                          AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer,
                          DynamicCache, HfArgumentParser, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM)

SYSTEM_PROMPT = ("Think about the problem step by step, then give the answer. Write your reasoning and your answer as "
                 "<think> reasoning here </think><answer> answer here </answer>.")


# --------------------------------------------------------------------------------------------------- processes

def setup_device() -> torch.device:
    """Join the torchrun job, if there is one; return this process's device. UserError if two were to share a GPU."""
    cuda, torchrun = torch.cuda.is_available(), "RANK" in os.environ
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        if (processes := int(os.environ.get("LOCAL_WORLD_SIZE", 1))) > torch.cuda.device_count():
            raise UserError(f"{processes} processes see {torch.cuda.device_count()} GPU(s): want one for each "
                            "(torchrun --nproc-per-node)")
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # plans anew for each shape; NaN at some lengths (pytorch #196678)
    else:
        # Otherwise threads sum the gradients of repeated indices in any order, and no run can be reproduced exactly.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # slow, and not needed for this
        if mkl_is_slow():  # `linear` then uses oneDNN, which would cache 1,024 compiled kernels of up to 1 MB each
            os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    with contextlib.suppress(AttributeError):  # other systems have no prctl or mallopt
        libc = ctypes.CDLL(None)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive a torchrun that is killed
        if not cuda:
            # Reuse the memory of freed tensors: if it went back, the system would have to zero new pages, 4 to 12% of
            # the tiny model's step. Blocks above 32 MB do go back: at large V they fragment the heap (5 GB, not 1).
            libc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD
            libc.mallopt(-3, 2 ** 25)  # M_MMAP_THRESHOLD
    if (cuda or torchrun) and not dist.is_initialized():  # FSDP2 needs a process group, on a single GPU too
        job = {} if torchrun else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        # Ranks wait for one that samples longer or downloads a model: the defaults (NCCL: ten minutes) are too short.
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=datetime.timedelta(hours=6), **job)
        sum_over_ranks(torch.zeros(1, device=device))  # NCCL allocates its buffers at the first sum: now, while it can
    return device


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The elementwise sum of every rank's `tensor`, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def unsharded(value):
    """Gather a sharded tensor (a parameter, a gradient, or a norm of either), of which each rank holds a part.
    Collective. Returns anything else unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def gather_in_order(mine: list) -> list:
    """Concatenate every rank's list, in rank order: the inverse of dealing out by `my_share`."""
    if world_size() == 1:
        return mine
    parts = [None] * world_size()
    dist.all_gather_object(parts, mine)
    return [item for part in parts for item in part]


def from_main_rank(value):
    """Rank 0's value, on every rank."""
    return gather_in_order([value])[0]


def my_share(total: int) -> range:
    """This rank's contiguous share of range(total)."""
    return range(total * rank() // world_size(), total * (rank() + 1) // world_size())


def on_main_rank(work):
    """Run `work()` on rank 0 while the others wait. Returns its result on rank 0, None on the others.

    If it raises a UserError or OSError, so does every rank. Any other exception is raised on rank 0 and ends the job.
    """
    result = problem = None
    if rank() == 0:
        try:
            result = work()
        except (UserError, OSError) as error:
            problem = error
    if problem := from_main_rank(problem):
        raise problem
    return result


PHASE_SECONDS = collections.Counter()  # seconds of the current step spent in each phase: see `timed`


@contextlib.contextmanager
def timed(phase: str):
    """A decorator: adds the seconds that the function takes to PHASE_SECONDS[phase]."""
    began = time.perf_counter()
    yield
    PHASE_SECONDS[phase] += time.perf_counter() - began


def say(message: str) -> None:
    """Print a line on rank 0's stderr without breaking the progress bar."""
    if rank() == 0:
        tqdm.write(message, file=sys.stderr)


say_once = functools.cache(say)  # the same message only once in a process


def progress(items, what: str):
    """`items` with a progress bar on rank 0's terminal, which appears if they take longer than five seconds."""
    return tqdm(items, desc=what, leave=False, delay=5, disable=rank() > 0 or None)


# ---------------------------------------------------------------------------------------------------- sampling

@dataclass
class Rollout:
    """N = P·G sampled completions, the rows of one prompt adjacent. Every rank holds all of them."""
    input_ids: torch.Tensor        # [N, L+T]  left-padded prompts, right-padded completions
    attention_mask: torch.Tensor   # [N, L+T]  1 on real tokens
    mask: torch.Tensor             # [N, T]    bool: completion tokens, including the EOS
    completions: list[str]         # decoded; special tokens stay only if <think> or <answer> is one
    finished: torch.Tensor         # [N]       bool: ended with EOS, not cut at max_new_tokens
    logprobs: torch.Tensor | None = None  # [N, T] float32: of the tokens as they were drawn (greedy: 0), 0 on padding

    @property
    def lengths(self) -> torch.Tensor:  # [N] completion tokens
        return self.mask.sum(1)


def eos_ids(model, tokenizer) -> list[int]:
    """Every id that ends a completion: the tokenizer's, and those of the generation config (chat models have two)."""
    configured = tree_leaves(getattr(model.generation_config, "eos_token_id", None))  # of one id, several or None
    return sorted({tokenizer.eos_token_id, *configured} - {None})


@contextlib.contextmanager
def evaluating(model):
    """Evaluation mode. Gradient checkpointing keeps layers in training mode, in which they ignore the KV cache."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def takes(model, name: str) -> bool:
    """Does the model's forward method have a parameter of this name?"""
    return name in inspect.signature(type(model).forward).parameters


@timed("rollout")
@torch.no_grad()
def sample(model, tokenizer, prompts, group_size: int, max_new_tokens: int, temperature: float = 1.0,
           greedy: bool = False) -> Rollout:
    """Sample `group_size` completions of each prompt from softmax(logits / temperature) over the whole vocabulary.

    prompts: a list of strings, used as they are, without a chat template (or one string), or of unpadded lists of ids.
    Temperature 0 is greedy. Any top-k, top-p or penalty in the model's generation config is ignored: the policy that is
    scored must be the policy that sampled. Collective: every rank passes the same prompts, decodes its share of the
    rows and gets the whole rollout. Raises ValueError for arguments that make no sense, and UserError if the model
    takes no DynamicCache.

    A token is drawn by inverting the cumulative distribution at a uniform random number. Every (row, position) has its
    own number, drawn up front. So apart from rounding in the model, the samples do not depend on which rows share a
    batch, when rows leave it, or how many ranks there are.
    """
    if (not hasattr(model, "config") or model.config.is_encoder_decoder or not cache_argument(model)
            or not model._supports_default_dynamic_cache()):  # the last: RWKV, MiniMax
        raise UserError(f"{type(model).__name__}: its state is no DynamicCache, or its forward method does not name it "
                        "(past_key_values), so it cannot be sampled from; of a wrapper (PEFT, DDP) pass what it wraps")
    device = model.device
    pad_id = tokenizer.pad_token_id or 0  # any would do: the mask says what is padding
    temperature = 0 if greedy else temperature
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts):
        prompts = encode(tokenizer, [(prompt, False) for prompt in prompts])
    if not (isinstance(prompts, list) and prompts and all(isinstance(ids, list) and ids for ids in prompts)
            and all(isinstance(token, int) for token in itertools.chain(*prompts))):
        raise ValueError("want a list of strings, or of unpadded lists of token ids (ints), none without tokens (of "
                         "chat messages, what apply_chat_template(…, tokenize=False) returns)")
    if len(set(gather_in_order([zlib.crc32(repr(prompts).encode())]))) > 1:  # a checksum is enough
        raise ValueError("sample is collective: every rank must pass the same prompts")
    if min(group_size, max_new_tokens) < 1 or not 0 <= temperature < math.inf:
        raise ValueError("want a group_size and max_new_tokens of at least 1, and a temperature from 0 on, finite")
    prompt_ids, prompt_mask, _ = collate(prompts, [[]] * len(prompts), pad_id, device)  # [P, L]
    N = len(prompts) * group_size
    draw = torch.rand if temperature else torch.zeros  # greedy decoding does not move the random state
    uniforms = draw(N, max_new_tokens, dtype=torch.float64, device="cpu")  # it may be over a gigabyte
    ends = torch.tensor(eos_ids(model, tokenizer), device=device)
    tokens = torch.zeros(N, max_new_tokens, dtype=torch.long, device=device)
    logprobs = torch.zeros(N, max_new_tokens, device=device, dtype=torch.float32)

    with evaluating(model), gathered(model):
        mine = torch.tensor(my_share(N), dtype=torch.long, device=device)
        prompt_lengths = prompt_mask.sum(1)  # [P]
        if rows_that_fit(model, prompt_ids.shape[1], max_new_tokens, group_size) < len(mine):
            # In turns, each as wide as its longest prompt: the longest ones first, so that similar ones meet.
            mine = mine[prompt_lengths[mine // group_size].argsort(descending=True, stable=True)]
        while len(mine) > 0:
            at_once = rows_that_fit(model, int(prompt_lengths[mine[0] // group_size]), max_new_tokens, group_size)
            rows, mine = mine[:at_once], mine[at_once:]
            tokens[rows], logprobs[rows] = decode(model, prompt_ids, prompt_mask, rows // group_size, ends,
                                                  max_new_tokens, uniforms[rows.cpu()].to(device), temperature)

    gather_in_order([None])  # waits for the slowest rank: one that waits inside NCCL notices no failure of another
    tokens, logprobs = sum_over_ranks(tokens), sum_over_ranks(logprobs)  # until here, other ranks' rows are zero
    is_end = torch.isin(tokens, ends)
    finished = is_end.any(1)
    lengths = torch.where(finished, is_end.int().argmax(1) + 1, max_new_tokens)  # up to the first end
    tokens = tokens[:, :lengths.max()]
    mask = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
    tokens, logprobs = tokens.where(mask, pad_id), logprobs[:, :tokens.shape[1]].where(mask, 0)
    # The texts leave out the end by position: it need not be a special token. Where <answer> is one, special tokens
    # stay: rewards have to see it. Row by row, for Python's ints are large.
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    skip_special = not any(token.special and token.content in TAGS for token in added)
    ids, text_lengths = tokens.cpu().numpy(), (lengths - finished.long()).tolist()
    completions = gather_in_order([tokenizer.decode(ids[i, :text_lengths[i]].tolist(), skip_special_tokens=skip_special)
                                   for i in my_share(N)])
    return Rollout(
        input_ids=torch.cat([prompt_ids.repeat_interleave(group_size, 0), tokens], 1),
        attention_mask=torch.cat([prompt_mask.repeat_interleave(group_size, 0), mask.long()], 1),
        mask=mask, completions=completions, finished=finished, logprobs=logprobs)


MOST_PROMPT_TOKENS = 2 ** 14  # that a CPU reads at a time, padding included


def rows_that_fit(model, prompt_length: int, max_new_tokens: int, group_size: int) -> int:
    """How many rows to decode at once: as many as fit into half of a GPU's free memory, or an eighth of a CPU
    machine's. A row takes its KV cache, its logits, and its share of one layer's activations while its group's prompt
    is read. On a CPU, the prompts have at most MOST_PROMPT_TOKENS together (a longer one is read alone): large batches
    need more padding and outgrow the CPU's caches. GSM8K's 1,319 questions took three times as long in one batch."""
    config = model.config.get_text_config()

    def size(name):  # None if the architecture has no such size (Mamba), or one per layer (Gemma 4)
        with contextlib.suppress(AttributeError, RuntimeError):
            return getattr(config, name)
    heads = size("num_attention_heads") or 1
    cache_width = (size("num_key_value_heads") or heads) * (size("head_dim") or config.hidden_size // heads)
    mlp_width = np.max(size("intermediate_size") or 4 * config.hidden_size)  # Gemma 3n has a list
    if model.device.type == "cuda":  # what PyTorch has reserved but does not use is free too
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        most = math.inf
    else:  # a quarter of the machine's memory
        most = max(1, MOST_PROMPT_TOKENS // prompt_length) * group_size
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    cache = 2 * config.num_hidden_layers * cache_width * (prompt_length + max_new_tokens)
    # Eager attention (Gemma 2) holds three copies of all heads' scores, sdpa only a mask.
    attention = 3 * heads if model.config._attn_implementation == "eager" else 1
    activations = (3 * mlp_width + attention * prompt_length) * prompt_length / group_size
    logits = 3 * 4 * config.vocab_size  # bytes of float32: logits, tempered logits, probabilities (`pick_tokens`)
    return max(1, int(min(most, free / 2 / ((cache + activations) * compute_dtype(model.device).itemsize + logits))))


def cache_argument(model) -> str | None:
    """The name under which the model's forward method takes a DynamicCache; None if its state is something else."""
    if model.config.model_type in ("recurrent_gemma", "xlm", "flaubert", "cpmant"):  # their forward alone does not tell
        return None
    names = "past_key_values", "cache_params", "cache"  # up to transformers 5.23; Mamba's then; from 5.24 on
    return next((name for name in names if takes(model, name)), None)


# A capture takes 0.03 to 0.1 s on an H200. So a graph has at least LEAST_COLUMNS columns, or all that the cache has,
# and one of at most LEAST_ROWS rows is kept until all of them have ended.
LEAST_COLUMNS, LEAST_ROWS = 256, 16


def decode(model, prompt_ids, prompt_mask, prompt_of, ends, max_new_tokens, uniforms, temperature):
    """Decode n rows, row i of prompt prompt_of[i] -> (tokens, their log-probs), [n, max_new_tokens] each, arbitrary
    after a row's end.

    prompt_ids, prompt_mask: [P, L]. prompt_of: [n], equal ones adjacent. ends: the EOS ids. uniforms: [n,
    max_new_tokens].

    Each prompt is read once, and its KV cache is copied to the rows of its group. A row that has ended leaves the
    batch, so that short completions cost nothing while the long ones continue. On CUDA, a step replays a captured graph
    if the model allows it (`GraphStep`).
    """
    n, device = len(prompt_of), prompt_ids.device
    prompts, rows = prompt_of.unique_consecutive(return_inverse=True)
    L = int(prompt_mask[prompts].sum(1).max())  # other prompts may be longer
    prompt_ids, mask = prompt_ids[prompts, -L:], prompt_mask[prompts, -L:]
    padded = not mask.all()  # otherwise the model gets no mask, which allows faster kernels
    cache = DynamicCache(config=model.config)
    with_cache = {cache_argument(model): cache, "use_cache": True}

    def forward(ids, mask, positions):  # models without position ids (Bloom) ignore them
        return model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1,
                     **with_cache).logits[:, -1]

    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = forward(prompt_ids, mask if padded else None, positions)[rows]  # [n, V]
    cache.reorder_cache(rows)  # one row per completion, no longer per prompt
    room = math.ceil((L + max_new_tokens) / 8) * 8 - L  # CUDA's attention kernels prefer a multiple of 8 columns
    for i, layer in enumerate(cache.layers):  # layer by layer, so that there are never two whole caches in memory
        window = getattr(layer, "sliding_window", None) or math.inf  # one that no row reaches hides nothing
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and L + room <= window:
            cache.layers[i] = RoomyLayer(layer, room)
    prompt_length = mask.sum(1)[rows]  # [n]
    mask = F.pad(mask, (0, room), value=1)[rows]  # [n, L+room]
    padded = padded and any(isinstance(layer, DynamicLayer) for layer in cache.layers)  # Mamba has no columns to mask
    graph = None
    look_every = 1 if device.type == "cpu" else 8  # to see which rows have ended, the CPU must wait for the GPU

    tokens = torch.zeros(n, max_new_tokens, dtype=torch.long, device=device)
    logprobs = torch.zeros(n, max_new_tokens, dtype=torch.float32, device=device)
    alive = torch.arange(n, device=device)  # [m] the rows that are still in the batch
    ended = torch.zeros(n, dtype=torch.bool, device=device)  # [m]
    for t in progress(range(max_new_tokens), f"sampling {n} rows"):
        chosen, logprobs[alive, t] = pick_tokens(logits, uniforms[alive, t], temperature)  # [m]
        tokens[alive, t] = chosen
        ended |= torch.isin(chosen, ends)
        if t + 1 == max_new_tokens:
            break
        if (t + 1) % look_every == 0:
            m = int((~ended).sum())
            if m == 0:
                break
            # A graph has a fixed number of rows, so it is given up only once half of them have ended.
            many_ended = m <= len(ended) // 2 and len(ended) > LEAST_ROWS
            if m < len(ended) and (graph is None or many_ended):
                # Move the m running rows to the first m places: those further back fill the places of ended rows.
                # For example, five rows, of which 1 and 3 have ended: stay = [0, 4, 2].
                stay = torch.arange(m, device=device)
                stay[ended[:m]] = m + (~ended[m:]).nonzero()[:, 0]
                alive, chosen, mask, ended = (x[stay] for x in (alive, chosen, mask, ended))
                cache.reorder_cache(stay)
                graph = None
        if graph is None or L + t >= graph.width:
            graph = None  # frees its memory before the next one is captured
            graph = capture_step(model, forward, cache, mask, L + t)
        ids, position = chosen[:, None], (prompt_length[alive] + t)[:, None]  # [m, 1]
        seen = mask[:, :L + t + 1] if padded else None
        logits = graph(ids, position, L + t) if graph else forward(ids, seen, position)
    return tokens, logprobs


class RoomyLayer(DynamicLayer):
    """A layer of DynamicCache that has room for all tokens to come.

    DynamicLayer copies its keys and values to append a token, and again to drop a row. Here a token is written into
    the column that waits for it, and only rows that move are copied.
    """
    column = None  # GraphStep sets it to a tensor, the column to write; attention then always reads `width` columns

    def __init__(self, layer: DynamicLayer, room: int):
        super().__init__()
        n, heads, self.length, _ = layer.keys.shape
        # A graph reads columns that were never written. Their attention weight is 0, but 0 · NaN would be NaN. On a CPU
        # they are not read, and memory that nobody touches costs nothing.
        new = torch.zeros if layer.keys.is_cuda else torch.empty
        self.keys, self.values = (new(n, heads, self.length + room, x.shape[3], dtype=x.dtype, device=x.device)
                                  for x in (layer.keys, layer.values))
        self.keys[:, :, :self.length], self.values[:, :, :self.length] = layer.keys, layer.values
        self.is_initialized = True

    def update(self, keys, values, *args, **kwargs):
        if self.column is not None:
            self.keys.index_copy_(2, self.column, keys)
            self.values.index_copy_(2, self.column, values)
            return self.keys[:, :, :self.width], self.values[:, :, :self.width]
        self.keys[:, :, self.length], self.values[:, :, self.length] = keys[:, :, 0], values[:, :, 0]
        self.length += 1
        return self.keys[:, :, :self.length], self.values[:, :, :self.length]

    def get_seq_length(self) -> int:
        return self.length

    def reorder_cache(self, stay) -> None:
        """Row i takes what row stay[i] holds, for as many rows as `stay` has. Only rows that move are copied."""
        i = (stay != torch.arange(len(stay), device=stay.device)).nonzero()[:, 0]
        for x in (self.keys, self.values):
            x[i, :, :self.length] = x[stay[i], :, :self.length]
        self.keys, self.values = self.keys[:len(stay)], self.values[:len(stay)]


class GraphStep:
    """One decoding step of m rows as a CUDA graph: a single launch instead of one for each of the model's kernels.

    Replaying a graph repeats the captured kernels on the same addresses. So what changes from step to step is kept in
    tensors that `__call__` overwrites, and attention reads a fixed `width` of the cache, with the columns to come
    masked. When those are full, or half of the rows have ended, `decode` captures a new graph.
    """

    def __init__(self, forward, cache, mask, column: int):
        self.forward, self.cache = forward, cache
        doubled = math.ceil(2 * (column + 1) / 64) * 64  # twice the columns so far, rounded up to a multiple of 64
        self.width = min(mask.shape[1], max(LEAST_COLUMNS, doubled))
        self.mask, self.columns = mask[:, :self.width].bool(), torch.arange(self.width, device=mask.device)
        self.ids, self.position = torch.zeros(2, len(mask), 1, dtype=torch.long, device=mask.device)
        self.column = torch.tensor([column], device=mask.device)
        for layer in cache.layers:  # they get these two, not this object: a cycle would keep the cache in memory
            layer.column, layer.width = self.column, self.width
        self.capture()

    def capture(self):
        """Record `run` as a graph that writes into `self.logits`."""
        self.graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(self.graph, capture_error_mode="thread_local")  # NCCL's own thread may call CUDA
        here, stream = torch.cuda.current_stream(), capture.capture_stream  # all captures share this stream
        stream.wait_stream(here)
        # A first run, without a capture, lets libraries initialize. In it, operations that wait for the GPU raise an
        # error: inside a capture they would leave the memory allocator broken.
        with warnings.catch_warnings(action="ignore"):  # PyTorch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(stream):
                self.run()
        finally:  # after an error too: what was launched before it still writes into the cache
            torch.cuda.set_sync_debug_mode("default")
            here.wait_stream(stream)
        with torch.cuda.stream(here), capture:  # the former restores the stream even if the capture fails
            self.logits = self.run()

    def run(self):
        seen = self.mask & (self.columns <= self.column)  # [m, width]
        # Build the additive mask once: given a boolean one, every layer would convert it again.
        bias = torch.zeros_like(seen, dtype=self.cache.layers[0].keys.dtype).masked_fill_(~seen, -math.inf)
        # Registered as "sdpa", not under a new name, because some models (Falcon) check for that name.
        AttentionInterface.register("sdpa", one_token_attention)
        try:
            return self.forward(self.ids, bias[:, None, None], self.position)
        finally:
            AttentionInterface.register("sdpa", sdpa_attention_forward)

    def __call__(self, ids, position, column: int):
        """Tokens and their positions, [m, 1] each, for a column of the cache -> logits [m, V], until the next call."""
        self.ids.copy_(ids)
        self.position.copy_(position)
        self.column.fill_(column)
        for layer in self.cache.layers:
            layer.length = column + 1
        self.graph.replay()
        return self.logits


def one_token_attention(module, query, key, value, attention_mask, **kwargs):
    """transformers' sdpa attention for one token per row, as 5.23 has it: query heads that share a KV head become
    several queries to it. Under a mask, 5.17 copies the keys and values to every query head, at every step.

    query [m, heads, 1, width], key and value [m, KV heads, columns, width] -> [m, 1, heads, width].
    """
    m, heads, _, width = query.shape
    one_mask = attention_mask is not None and attention_mask.shape[1] == 1  # Doge has one for each head
    if heads == key.shape[1] or not one_mask or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    query = query.reshape(m, key.shape[1], heads // key.shape[1], width)
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=kwargs.get("scaling"))
    return out.reshape(m, 1, heads, value.shape[3]), None


def can_use_graph(model, cache) -> bool:
    """Does `GraphStep` support the model? Only "sdpa" takes its 4D mask, and a sliding window must never fill up."""
    return (model.device.type == "cuda" and not hasattr(model, "no_graph")
            and model.config._attn_implementation == "sdpa"
            and all(isinstance(layer, RoomyLayer) for layer in cache.layers) and takes(model, "position_ids"))


def capture_step(model, forward, cache, mask, column: int) -> GraphStep | None:
    """A GraphStep; None where `can_use_graph` says no and, after one warning, where the capture fails."""
    try:
        return GraphStep(forward, cache, mask, column) if can_use_graph(model, cache) else None
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:  # ValueError: ALiBi wants a mask of two dimensions
        warnings.warn(f"{type(model).__name__}: sampling without a CUDA graph, which is slower: {innermost(error)}")
        model.no_graph = True
        for layer in cache.layers:
            layer.column = None


def pick_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, V] logits, of any dtype -> (token ids, their log-probs), [n] each: draws from softmax(logits / temperature);
    at 0, the likeliest token, with log-prob 0.

    The draw is the first token whose cumulative probability exceeds the uniform number. The cumulative sums are
    float64, because float32 would round the share of rare tokens away. Summing the whole vocabulary like that would
    be slow, so it is cut into blocks of 512 tokens: their sums tell in which block the draw falls, and how far into it.
    """
    if temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device, dtype=torch.float32)
    n, V = logits.shape
    size = min(V, 512)
    if temperature != 1.0:
        logits = logits.float() / temperature
    weights = logits.new_empty(n, math.ceil(V / size) * size, dtype=torch.float32)  # probabilities, not normalised
    torch.sub(logits, logits.amax(-1, keepdim=True).float(), out=weights[:, :V]).exp_()
    weights[:, V:] = 0  # the last block may be longer than what is left of the vocabulary
    weights = weights.view(n, -1, size)
    sums = weights.sum(-1).double()  # [n, blocks]
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1:]  # [n, 1]
    threshold = uniforms[:, None] * total
    block = torch.searchsorted(cumulative, threshold, right=True).clamp(max=sums.shape[1] - 1)  # clamped for NaN logits
    place = (threshold - F.pad(cumulative, (1, 0)).gather(1, block)) / sums.gather(1, block)  # in the block, 0 to 1
    place = place.clamp(max=1 - 2 ** -53)  # rounding may make it 1, but no cumulative sum exceeds the whole
    # Within the block, summed again in float64. (`sums` are float32's, so `place` is a share of the block's sum.)
    cumulative = weights[torch.arange(n, device=block.device), block[:, 0]].cumsum(-1, dtype=torch.float64)  # [n, size]
    token = torch.searchsorted(cumulative, place * cumulative[:, -1:], right=True)
    token = (block * size + token).clamp(max=V - 1)  # [n, 1]
    return token[:, 0], (weights.flatten(1).gather(1, token) / total).log()[:, 0].float()


def join_drawn(drawn, pad_id: int):
    """[(problems, rollout, rewards, correct), ...] -> one of each, padded to the longest prompt and completion."""
    problems, rollouts, rewards, correct = zip(*drawn)
    T = max(r.mask.shape[1] for r in rollouts)
    L = max(r.input_ids.shape[1] - r.mask.shape[1] for r in rollouts)

    def join(name, width, value=0):  # [n, l+t] or [n, t] each -> [N, width]: completions grow on the right
        parts = [F.pad(getattr(r, name), (0, T - r.mask.shape[1]), value=value) for r in rollouts]
        return torch.cat([F.pad(part, (width - part.shape[1], 0), value=value) for part in parts])
    rollout = Rollout(
        join("input_ids", L + T, pad_id), join("attention_mask", L + T), join("mask", T),
        sum((r.completions for r in rollouts), []), torch.cat([r.finished for r in rollouts]), join("logprobs", T))
    return sum(problems, []), rollout, torch.cat(rewards), torch.cat(correct)


# --------------------------------------------------------------------------------------------------- log-probs
#
# What each function saves, from the outermost to the innermost:
#   once_each            rows that are copies of another
#   completion_logprobs  logits of prompts and padding: only the states before completion tokens go through the head
#   hidden_states        left padding, and (`read_prefixes_once`) prefixes that several rows share
#   SlicedLogprobs       memory: of the logits only some columns exist at a time

# Most logits (tokens × vocabulary) at a time: 8 MB and 128 MB in float32. (A quarter makes an H200 a third slower.)
HEAD_SLICE = {"cpu": 2 ** 21, "cuda": 2 ** 25}
# Shared prefixes are read once if that saves more tokens than this, and more than a fifth of all: it costs an extra
# pass. (Saving up to 7,000 made a 1.5B model slower on an H200; 10,000 is extrapolated.)
SHARED_TOKENS = {"cpu": 400, "cuda": 10_000}


def token_logprobs(model, input_ids, attention_mask, num_completion_tokens: int, temperature: float = 1.0):
    """Log-probability of each of the last T = num_completion_tokens tokens, and entropy of the distribution it is from.

    input_ids, attention_mask: [B, L+T], with left-padded prompts and right-padded completions. Returns (logprobs,
    entropy), float32 [B, T], both of softmax(logits / temperature), with gradients. They are 0 on padding, and for the
    first token of a row, which nothing predicts.
    Call `model.eval()` first if the model has dropout. In a model with longrope (Phi-3) or dynamic RoPE scaling, a row
    that is longer than `context_length(model.config)` changes the log-probs of all. Raises ValueError if T leaves no
    column for a prompt or the shapes differ. There is no second derivative.

    [B, T, V] never exists (`SlicedLogprobs`), except for a head that `head_logits` cannot reproduce: a warning says so.
    (The first call checks this: `del model.head_is_sliceable` after changing the head. The check fails where only the
    model's own forward method autocasts, as with accelerate: call this inside `accelerator.autocast()`.)
    """
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"input_ids {[*input_ids.shape]} and attention_mask {[*attention_mask.shape]}: want one shape")
    if num_completion_tokens >= input_ids.shape[1]:
        raise ValueError("no prompt: nothing comes before the first token, so it has no log-prob")
    return once_each(completion_logprobs, model, input_ids, attention_mask, num_completion_tokens, temperature,
                     head_is_sliceable(model))


def once_each(function, model, input_ids, attention_mask, *args):
    """Call `function(model, input_ids, attention_mask, *args)`, which returns a tuple of tensors [B, …], with each
    distinct row once: short completions of a prompt are often equal. The gradients of copies add up."""
    distinct, copy_of = distinct_rows(input_ids.where(attention_mask > 0, -1))
    if len(distinct) == len(input_ids):  # no copies; padding becomes 0, since it may be no valid id (-100)
        return call_gathered(function, model, input_ids.where(attention_mask > 0, 0), attention_mask.long(), *args)
    out = call_gathered(function, model, distinct.clamp(min=0), (distinct >= 0).long(), *args)
    return tuple(values.index_select(0, copy_of) for values in out)


def distinct_rows(ids):
    """[B, L] -> (the distinct rows, sorted; for each of the B rows, its index among them)."""
    return [x.to(ids.device) for x in ids.cpu().unique(dim=0, return_inverse=True)]  # too little work for a GPU


def completion_tokens(attention_mask, T: int):
    """The real tokens in the last T columns that have one before them -> (their rows [n], their columns [n], the number
    [n] of the token before each, where its row's first real token is number 0)."""
    L = attention_mask.shape[1] - T
    before = attention_mask.cumsum(1)[:, L:] - 2  # [B, T]
    row, column = ((before >= 0) & (attention_mask[:, L:] > 0)).nonzero(as_tuple=True)
    return row, column, before[row, column]


def hidden_states(model, input_ids, attention_mask, row, number, logits: bool = False):
    """Hidden states [n, H], or the model's own logits [n, V], at token number[i] of row row[i], where the first real
    token of a row is number 0.

    The real tokens of each row move to the left, so that it begins at column 0 with position 0. In a causal model a
    token does not see what follows it, so no attention mask is needed and the fast causal kernels run.
    """
    width = int(number.max()) + 1 if len(row) else 1
    real_first = attention_mask.argsort(dim=1, descending=True, stable=True)  # columns, [B, L+T]
    ids = input_ids.gather(1, real_first[:, :width])  # [B, width]
    if logits:
        out = model(input_ids=ids, use_cache=False).logits[:, -width:]  # PEFT's prompt tuning adds tokens in front
    elif can_share_prefixes(model) and (shared := prefix_to_share(ids)):
        out = read_prefixes_once(model, ids, shared)
    else:
        out = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    # This is out[row, number], but the gradient of such indexing takes seven times as long on a CPU.
    return out.flatten(0, 1).index_select(0, row * width + number)


def can_share_prefixes(model) -> bool:
    """Can several rows continue from one KV cache? Not with gradient checkpointing (such layers take no cache), with
    sliding windows and the like (other kinds of cache layer), or on several ranks (they would gather every layer twice
    and hold all its gradients unsharded)."""
    return (world_size() == 1 and model.config._attn_implementation in ("sdpa", "eager")
            and takes(model.base_model, "position_ids") and cache_argument(model.base_model)  # RWKV: neither
            and not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
            and all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers))


def prefix_to_share(ids) -> int:
    """The prefix length at which reading each distinct prefix of ids [B, width] only once saves the most tokens, or 0
    if that is no more than a fifth of all tokens, or than SHARED_TOKENS."""
    rows = ids.cpu().unique(dim=0)  # sorted: those that share a prefix are neighbours
    differs = (rows[1:] != rows[:-1]).cumsum(1) > 0  # from the row above, in this column or before
    distinct = 1 + differs.sum(0)[:-1]  # prefixes of 1, 2, … columns
    saved = (len(ids) - distinct) * torch.arange(1, ids.shape[1], device="cpu")  # tokens
    if len(saved) == 0 or saved.max() <= max(ids.numel() / 5, SHARED_TOKENS[ids.device.type]):
        return 0
    return int(saved.argmax()) + 1


def read_prefixes_once(model, ids, shared: int):
    """Hidden states [B, width, H] of ids [B, width]. Each distinct prefix, of `shared` columns, is read once. Its KV
    cache is copied to its rows, which continue from there, and gradients flow back through the copies."""
    cache, positions = DynamicCache(config=model.config), torch.arange(ids.shape[1], device=ids.device)[None]
    with_cache = {cache_argument(model.base_model): cache, "use_cache": True}

    def read(ids, positions):
        return model.base_model(input_ids=ids, position_ids=positions, **with_cache).last_hidden_state
    prefixes, which = distinct_rows(ids[:, :shared])
    hidden = read(prefixes, positions[:, :shared])
    cache.reorder_cache(which)
    # The prefixes' hidden states must stay in the graph even if nothing reads them: on a GPU, FSDP gathers a layer's
    # weights for the backward pass only if its output has a gradient (of zeros, here), and the cache needs that pass.
    return torch.cat([hidden.index_select(0, which), read(ids[:, shared:], positions[:, shared:])], 1)


def head_logits(config, hidden, weight, bias=None):
    """[n, H] -> [n, V], with the bias, scale or soft cap that some architectures have: in float32 if scaled or capped,
    else in the weight's dtype.

    With some rows of the weight and the bias: the logits of that slice of the vocabulary.
    """
    config = config.get_text_config()
    logits = linear(hidden.to(weight.dtype), weight, bias)
    if scale := getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None):
        logits = logits.float() * scale  # Cohere; Falcon-H1
    if scale := getattr(config, "logits_scaling", None):  # Granite
        logits = logits.float() / scale
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma 2
        logits = cap * torch.tanh(logits.float() / cap)
    return logits


def completion_logprobs(model, input_ids, attention_mask, T, temperature, sliced: bool):
    """`token_logprobs` of rows [B, L+T], by slices of the vocabulary or from the model's own logits [B, L+T, V]."""
    row, column, before = completion_tokens(attention_mask, T)
    targets = input_ids[:, input_ids.shape[1] - T:][row, column]  # [n]
    states = hidden_states(model, input_ids, attention_mask, row, before, logits=not sliced)  # what predicts them
    if sliced:
        size = max(1, HEAD_SLICE[states.device.type] // max(1, len(states)))
        size -= size % min(size, 128)  # tensor cores want aligned rows
        head = model.get_output_embeddings().parameters()
        values = SlicedLogprobs.apply(model.config, targets, temperature, size, states, *head)
    else:
        # [n, V]; some models mask logits: −∞ · 0 would make the entropies NaN
        logp = (states.float() / temperature).clamp(min=-1e30).log_softmax(-1)
        values = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)  # entropy: −Σ p log p
    empty = torch.zeros(len(input_ids), T, dtype=torch.float32, device=targets.device)
    return tuple(empty.index_put((row, column), value) for value in values)


class SlicedLogprobs(torch.autograd.Function):
    """Log-probability of the targets y [n], and entropy H [n] (not the hidden size here) of the distributions, from
    hidden states [n, width].

    Of the logits `head_logits(config, hidden, *weights)`, [n, V], only `size` columns exist at a time.

    With z_v = logit_v / τ less the row's maximum,  log p_v = z_v − log Σ exp z  and  H = log Σ exp z − Σ p z. For each
    slice the forward pass keeps Σ exp z and Σ z exp z, with z less the slice's own maximum; in the end it shifts them
    to the maximum of the whole row (as in arXiv:1805.02867). The backward pass computes the logits again, and then
    ∂ log p_y / ∂ logit_v = (1[v = y] − p_v) / τ  and  ∂H / ∂ logit_v = −p_v (log p_v + H) / τ.
    """

    @staticmethod
    def forward(ctx, config, targets, temperature, size, hidden, *weights):
        ctx.set_materialize_grads(False)  # an unused output has gradient None, which saves its share of the work
        starts = range(0, len(weights[0]), size)
        largest, sums, sums_of_z, of_target = hidden.new_empty(4, len(hidden), len(starts), dtype=torch.float32)
        for i, start in enumerate(starts):
            logits = head_logits(config, hidden, *(w[start:start + size] for w in weights))
            largest[:, i] = logits.amax(1).float() / temperature
            z = torch.add(-largest[:, i, None], logits, alpha=1 / temperature)  # float32 also where logits are bfloat16
            column = (targets - start).clamp(0, logits.shape[1] - 1)  # the target's, if it is in this slice
            of_target[:, i] = z.gather(1, column[:, None])[:, 0]
            exp_z = z.exp()
            sums[:, i] = exp_z.sum(1)
            sums_of_z[:, i] = exp_z.mul_(z).sum(1)
        top = largest.amax(1, keepdim=True)
        shift = largest - top  # [n, slices]
        total = (shift.exp() * sums).sum(1)
        entropy = total.log() - (shift.exp() * (sums_of_z + shift * sums)).sum(1) / total
        ctx.arguments = config, temperature, size
        kind = hidden.device.type
        ctx.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), False)
        ctx.save_for_backward(targets, top, total.log(), entropy, hidden, *weights)
        of_target = (of_target + shift).gather(1, targets[:, None] // size)[:, 0]  # of the slice that the target is in
        return of_target - total.log(), entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("token_logprobs has no second derivative")
        config, temperature, size = ctx.arguments
        targets, top, log_total, entropy, hidden, *weights = ctx.saved_tensors
        grad = (torch.zeros_like(entropy) if grad is None else grad)[:, None] / temperature
        hidden = hidden.detach().float().requires_grad_()  # float32, since its gradient is a sum over the slices
        trained = ctx.needs_input_grad[5:]  # not a head that is frozen, as adapters leave it
        grad_weights = [torch.empty_like(w) if trains else None for w, trains in zip(weights, trained)]
        for start in range(0, len(weights[0]), size):
            part = [w[start:start + size].detach().requires_grad_(trains) for w, trains in zip(weights, trained)]
            with torch.enable_grad(), ctx.autocast:  # the same logits as in the forward pass
                logits = head_logits(config, hidden, *part)
            logp = torch.add(-top, logits.detach(), alpha=1 / temperature).sub_(log_total[:, None])
            probs, factor = logp.exp(), -grad
            if grad_entropy is not None:
                factor = logp.add_(entropy[:, None]).mul_(-grad_entropy[:, None] / temperature).sub_(grad)
            column = (targets - start).clamp(0, logp.shape[1] - 1)  # of the target, if it is in this slice
            in_slice = column == targets - start
            gradient = probs.mul_(factor).scatter_add_(1, column[:, None], (grad * in_slice[:, None]).to(logp))
            logits.backward(gradient.to(logits.dtype))
            for whole, w in zip(grad_weights, part):
                if whole is not None:
                    whole[start:start + size] = w.grad
        return None, None, None, None, hidden.grad, *grad_weights


@torch.no_grad()
def head_is_sliceable(model) -> bool:
    """Does `head_logits` give the model's own logits? Compared once, on eight tokens, with a warning if it does not."""
    known = vars(model)  # an attribute would be that of the model inside, where PEFT or torch.compile wraps one
    if "head_is_sliceable" in known:
        return known["head_is_sliceable"]

    def compare(model, ids):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        head = dict(model.get_output_embeddings().named_parameters())
        if not head.keys() <= {"weight", "bias"}:  # a head of yours, which may differ only once it has trained
            return False
        logits = head_logits(model.config, hidden, *head.values())
        own_logits = model(input_ids=ids, use_cache=False).logits
        tolerance = 1e-4 if own_logits.dtype == torch.float32 else 0.01  # bfloat16 rounds a cap or a scale
        return torch.allclose(logits.float(), own_logits.float(), tolerance, tolerance)
    try:
        ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
        with evaluating(model):
            same = call_gathered(compare, model, ids)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, TypeError, RuntimeError):  # no such head, or hidden states of another width
        same = False
    if not same:
        warnings.warn(f"{type(model).__name__}: its logits are not a plain head on the last hidden states, so "
                      "log-probs hold all logits at once; lower --micro_batch_tokens if memory runs out")
    known["head_is_sliceable"] = same
    return same


def token_values(model, input_ids, attention_mask, T: int):
    """Value [B, T], float32, of the state before each of the last T tokens, 0 on padding.

    `model` is a sequence classifier with one label, whose head is `score`.
    """
    def compute(model, input_ids, attention_mask):
        row, column, before = completion_tokens(attention_mask, T)
        hidden = hidden_states(model, input_ids, attention_mask, row, before)
        with torch.autocast(hidden.device.type, enabled=False):  # float32: in bfloat16, close scores would tie
            values = F.linear(hidden.float(), *(p.float() for p in model.score.parameters()))[:, 0]
        out = torch.zeros(len(input_ids), T, dtype=torch.float32, device=values.device)
        return (out.index_put((row, column), values),)
    return once_each(compute, model, input_ids, attention_mask)[0]


def sequence_scores(model, input_ids, attention_mask):
    """A sequence classifier's score [B], float32, at the last real token of each row, which may be the EOS."""
    # The same as the value before one more token, which itself is never read.
    return token_values(model, F.pad(input_ids, (0, 1)), F.pad(attention_mask, (0, 1), value=1), 1)[:, 0]


@torch.no_grad()
def rollout_values(model, batch, minibatches, max_tokens: int, compute=token_values) -> torch.Tensor:
    """Run `compute(model, input_ids, attention_mask, T)` -> [B, T] on the rows of `minibatches`, without gradient.
    Returns [N, T], the same on every rank: 0 in other rows, or if model is None. batch: a Rollout or Batch.

    Given an update's minibatches, this forms the same micro-batches as the update, so in bfloat16 both round alike.
    """
    out = torch.zeros(batch.mask.shape, dtype=torch.float32, device=batch.mask.device)
    for minibatch in minibatches if model is not None else []:
        for rows, input_ids, attention_mask, T in micro_batches(batch, minibatch, max_tokens):
            out[rows, :T] = compute(model, input_ids, attention_mask, T)
    return sum_over_ranks(out)


def rollout_logprobs(model, batch, minibatches, max_tokens: int, temperature: float) -> torch.Tensor:
    """Log-probs [N, T] of the rows of `minibatches`, without gradient; 0 elsewhere, or if model is None."""
    return rollout_values(model, batch, minibatches, max_tokens, lambda *args: token_logprobs(*args, temperature)[0])


def all_scores(model, batch, blocks, max_tokens: int) -> torch.Tensor:
    """The `sequence_scores` [N] of all rows of the batch, on every rank."""
    def compute(model, input_ids, attention_mask, T):
        return sequence_scores(model, input_ids, attention_mask)[:, None]  # in all T columns, none where T is 0
    return rollout_values(model, batch, [blocks], max_tokens, compute)[:, 0]


MAX_PADDING = 0.08  # the share of padding that ends a micro-batch, once it has a quarter of --micro_batch_tokens


def micro_batches(batch, blocks, max_tokens: int):
    """Divide the sequences of an optimizer step into micro-batches and yield this rank's, each (rows [B], input_ids
    [B, L+T], attention_mask [B, L+T], T), no wider than these rows need.

    batch: a Rollout or Batch. blocks: row numbers, or lists of rows that must stay together (answers to one prompt).
    A micro-batch has at most `max_tokens` tokens, with padding but without copies of a row, unless a single block has
    more. Blocks are dealt by length, the longest first, and equally long ones by row, so that copies meet. Where the
    next block would make too much of a micro-batch padding, another begins.

    Every rank yields the same number, since FSDP's gradient reduction waits for all. Where there are too few blocks for
    that, a rank yields the first block again, with T = 0: it must get no weight.
    """
    end = batch.input_ids.shape[1] - batch.mask.shape[1]  # of the prompts
    total, prompt = (mask.sum(1).tolist() for mask in (batch.attention_mask, batch.attention_mask[:, :end]))
    # All that follows the prompt counts, up to the last token: a mask that leaves out what a tool wrote has holes, and
    # between turns there may be padding.
    numbers = torch.arange(1, batch.mask.shape[1] + 1, device=batch.mask.device)  # of the columns
    completion = (batch.attention_mask[:, end:] * numbers).amax(1).tolist()
    blocks = [block if isinstance(block, list) else [int(block)] for block in blocks]
    rows = [row for block in blocks for row in block]
    ids = batch.input_ids[rows].where(batch.attention_mask[rows] > 0, -1).cpu().numpy()
    copy_of = {row: hash(ids.tobytes()) for row, ids in zip(rows, ids)}  # row: a number that equal rows share

    dealt = []  # the micro-batches, each a list of blocks
    held, L, T = {}, 0, 0  # of the last micro-batch: {distinct row: length of its block}, and its widths
    for block in sorted(blocks, key=lambda block: (-max(total[row] for row in block), block)):
        longest = max(total[row] for row in block)  # its rows stay together: padding up to this does not count
        new = {copy_of[row]: longest for row in block}
        widths = max(prompt[row] for row in block), max(completion[row] for row in block)
        held |= new  # suppose that the block joins the last micro-batch
        L, T = max(L, widths[0]), max(T, widths[1])
        size = len(held) * (L + T)
        padding = 1 - sum(held.values()) / len(held) / max(held.values())  # of the rows as `hidden_states` shifts them
        if not dealt or size > max_tokens / 4 and (size > max_tokens or padding > MAX_PADDING):
            dealt.append([])  # it does not fit: it begins the next one
            held, (L, T) = new, widths
        dealt[-1].append(block)
    while len(dealt) % world_size():  # halve the micro-batch with most blocks until every rank gets as many
        i = dealt.index(max(dealt, key=len))
        half = (len(dealt[i]) + 1) // 2
        dealt[i:i + 1] = dealt[i][:half], dealt[i][half:]
    for group in dealt[rank()::world_size()]:  # empty where there are too few blocks
        rows = [row for block in group or blocks[:1] for row in block]
        T = max(completion[row] for row in rows) if group else 0
        columns = slice(end - max(prompt[row] for row in rows), end + T)
        rows = torch.tensor(rows, device=batch.mask.device)
        yield rows, batch.input_ids[rows, columns], batch.attention_mask[rows, columns], T


# -------------------------------------------------------------------------------------------------------- data

@dataclass
class Problem:
    prompt: str | list       # as the row has it; `encode_prompts` renders chat messages
    prompt_ids: list[int]    # what the model reads
    answer: str | None       # the gold answer, for the verifier
    row: dict                # the whole row, for a reward function
    rendered: tuple = ()     # (text, whether a chat template wrote it) of the prompt
    begun: str = ""          # the answer's beginning, if the messages end with one
    opening: str = ""        # the <think> that the prompt ends with, or `begun` from its <think> on


def is_built_in(data: str) -> bool:
    return data.split(":")[0] == "arithmetic"


def arithmetic_digits(data: str) -> int:
    digits = data.partition(":")[2] if ":" in data else "2"
    if not digits.isdecimal() or not 1 <= int(digits) <= 12:
        raise UserError(f"{data}: the built-in data is arithmetic or arithmetic:DIGITS, with 1 to 12 digits")
    return int(digits)


def read_rows(data: str, split: str) -> list[tuple[dict, str]]:
    """(row, its place for error messages), of the built-in data, a JSON-lines file or a hub dataset."""
    if is_built_in(data):
        rows = [(row, data) for row in arithmetic_rows(arithmetic_digits(data), split)]
    elif kind := re.search(r"\.(parquet|csv)$", data):
        raise UserError(f"{data}: want JSON lines; datasets.load_dataset({kind[1]!r}, data_files={data!r}, "
                        "split='train').to_json('rows.jsonl') makes them of it")
    elif re.search(r"\.jsonl?(\.gz)?$", data) or os.path.exists(data) and not os.path.isdir(data):  # or a pipe
        rows = list(read_json_lines(data))
    else:
        name, config, own_split = (data.split(":", 2) + [None, None])[:3]  # a split may be train[:1000]
        with one_line_errors(f"{data}: no file, and no hub dataset that loads (those need pip install datasets)"):
            import datasets
            loaded = datasets.load_dataset(name, config, split=own_split or ("test" if split == "eval" else split))
            rows = [(row, f"{data} row {i}") for i, row in enumerate(loaded, 1)]
    if not rows:
        raise UserError(f"{data}: no rows")
    return rows


def read_json_lines(path: str):
    """Yield (row, place) of a file with one JSON object a line, gzipped or not. Empty lines are skipped."""
    open_file = gzip.open if path.endswith(".gz") else open
    with one_line_errors(f"{path}: cannot be read as JSON lines"), open_file(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{path} line {number}"
            with one_line_errors(f"{place}: want a JSON object, one a line"):
                row = json.loads(line.decode("utf-8-sig").strip())
                # A lone surrogate such as "\ud83d" cannot be encoded. (Checking every row would double the time.)
                if b"\\ud" in line.lower():
                    json.dumps(row, ensure_ascii=False).encode()
            if not isinstance(row, dict):
                raise UserError(f"{place}: want a JSON object, not {type(row).__name__}")
            yield row, place


# Where a short answer and a worked solution have columns of their own (MegaScience), the short one counts.
ANSWERS = ("final_answer", "expected_answer", "reference_answer", "answer", "solution")


def read_problems(data: str, split: str = "train", need_answer: bool = True) -> list[Problem]:
    """Rows with a prompt (`prompt`, `question` or `problem`; or preferences, for their prompts) and an answer (one of
    ANSWERS, or verl's `reward_model.ground_truth`), not yet encoded.

    A gold answer inside a worked solution (GSM8K's `#### 18`, MATH's `\\boxed{18}`) is taken out of it. With
    need_answer, rows whose answer is "proof" or a long text are left out, with a line that says how many.
    """
    problems = []
    for row, place in progress(read_rows(data, split), f"reading {data}"):
        if row.get("chosen") or row.get("responses"):
            with contextlib.suppress(ValueError):  # the rows of a reward model, for PPO
                row = {**row, "prompt": prompt_and_answers(row)[0]}
        prompt, verl = row_prompt(row), row.get("reward_model")
        if not is_prompt(prompt):
            given = f"it has {list(row)!r:.200}" if prompt is None else f"not {prompt!r:.200}"
            raise UserError(f"{place}: want a prompt (text, or messages with role and content, which are text) under "
                            f"prompt, question or problem; {given}")
        found = []
        for value in (*map(row.get, ANSWERS), verl.get("ground_truth") if isinstance(verl, dict) else None):
            if type(value) in (str, int) and str(value).strip():  # no bool
                found.append(str(value))
            elif type(value) is float and math.isfinite(value):
                found.append(f"{value:.15g}")  # 0.1 + 0.2 is 0.3
        if need_answer and not found:
            raise UserError(f"{place}: no answer (a string or a finite number) under answer or solution, which "
                            f"--reward verifier needs; it has {list(row)!r:.200}")
        # None is for a reward function. A proof's conclusion is no answer.
        answer = (extract_answer(found[0], closed_only=True) or found[0]) if found else None
        problems.append(Problem(prompt, [], answer, row))
    # NuminaMath writes "proof" where there is no answer.
    kept = [p for p in problems if not need_answer or p.answer != "proof" and len(p.answer) <= LONGEST_ANSWER]
    return say_left_out(data, problems, kept, f"rows whose answer is a proof, or longer than {LONGEST_ANSWER} "
                        "characters (in a worked solution, \\boxed{…} or #### has to mark it)")


def row_prompt(row: dict):
    """The prompt of a row: a string, or chat messages; None if it has none. It begins with the system message that a
    `system` column holds, as Orca's pairs have one."""
    prompt, system = row.get("prompt") or row.get("question") or row.get("problem") or None, row.get("system")
    if isinstance(system, str) and system.strip():
        turn = {"role": "system", "content": system}
        if isinstance(prompt, str) and system.strip() not in prompt:  # not rendered yet
            return [turn, {"role": "user", "content": prompt}]
        if isinstance(prompt, list) and is_prompt(prompt) and prompt[0]["role"] != "system":
            return [turn, *prompt]
    return prompt


def is_prompt(prompt) -> bool:
    """Whether it is a string, or a list of chat messages."""
    return isinstance(prompt, str) or isinstance(prompt, list) and prompt != [] and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt)


def read_train_and_eval(cfg, read=None) -> tuple[list, list]:
    """--data and --eval_data, as problems or by another `read(data, split)`."""
    if not cfg.data.strip():
        raise UserError("--data: is empty")
    read = read or functools.partial(read_problems, need_answer=cfg.reward == "verifier")
    eval_data = cfg.eval_data or (cfg.data if is_built_in(cfg.data) else "")  # a file has no held-out part
    held_out = read(eval_data, "eval") if eval_data else []  # first: the file may be missing, and --data take long
    return read(cfg.data, "train"), held_out


def encode(tokenizer, prompts: list[tuple[str, bool]]) -> list[list[int]]:
    """Token ids of prompts, each a text and whether a chat template wrote it.

    A template writes all the special tokens itself. Any other text gets in front what the tokenizer puts there, which
    is its BOS or nothing, unless it begins with it. No prompt gets an EOS: its completion follows.
    """
    with_special, plain = (tokenizer("1", add_special_tokens=special)["input_ids"] for special in (True, False))
    bos = with_special[:with_special.index(plain[0])]  # a list of one token, or of none
    texts = [text for text, _ in prompts]
    # In batches: twice as fast as one by one, without the memory that all at once would take. Each token id is one
    # object, however often it occurs: a token takes 8 bytes instead of 36.
    known = {}
    encoded = [list(map(known.setdefault, ids, ids)) for first in progress(range(0, len(texts), 100), "tokenizing")
               for ids in tokenizer(texts[first:first + 100], add_special_tokens=False)["input_ids"]]
    return [ids if templated or ids[:len(bos)] == bos else bos + ids for (_, templated), ids in zip(prompts, encoded)]


@functools.lru_cache(1)  # Gemma 3 has thousands of added tokens: 30 ms for every prompt
def special_tokens(tokenizer) -> tuple[str, ...]:
    """The texts of those with a role (BOS, EOS, padding) and of the others, such as Phi-3's <|user|>; no empty text."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(filter(None, (*tokenizer.all_special_tokens, *added)))


# Put before a chat template. Some (Llama 3.2's) ask for today's date, but a run that is resumed tomorrow needs the same
# prompts. 26 July 2024 is what Llama 3.2's falls back to.
ONE_DAY = ("{% macro strftime_now(form) %}{{ form.replace('%d', '26').replace('%b', 'Jul').replace('%B', 'July')"
           ".replace('%m', '07').replace('%Y', '2024') }}{% endmacro %}\n")


def apply_template(tokenizer, messages: list[dict], **kwargs) -> str:
    """Render chat messages with the tokenizer's chat template, as if it were `ONE_DAY`. Raises whatever the template
    raises, and ValueError if it leaves out a message other than a past answer (templates often shorten those)."""
    template = ONE_DAY + tokenizer.get_chat_template()
    # `datasets` writes null for a key that other rows have. Some templates look only whether the key is there.
    messages = [{key: value for key, value in m.items() if value is not None} for m in messages]
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **kwargs)
    asked = [m for m in messages if m["role"] != "assistant"]
    for m in asked:
        longest = sorted(re.findall(r"\w+", m["content"]), key=len, reverse=True)[:1]
        # SmolLM3's template strips its switch "/think" from system messages, which breaks SYSTEM_PROMPT's "</think>".
        words = m["content"].split() if m["content"] == SYSTEM_PROMPT else longest
        # Counted over all messages, since a word of the question may also be in the system prompt.
        if any(text.count(word) < sum(other["content"].count(word) for other in asked) for word in words):
            raise ValueError(f"it leaves out the message of role {m['role']}")
    return text


def is_begun(prompt) -> bool:
    """Whether chat messages end with the beginning of an answer."""
    return isinstance(prompt, list) and prompt[-1]["role"] == "assistant"


def render_prompt(prompt, tokenizer, system_prompt: str, default: str = SYSTEM_PROMPT, surplus: str = "",
                  thinking: str = "auto") -> tuple[str, bool]:
    """A string or chat messages -> (text for the model, whether a chat template wrote it).

    A last message of the assistant is the beginning of the answer, which the model continues.

    default: the system message where system_prompt is empty.
    surplus: what to leave off where a template ends the prompt with it (`answer_form`).
    thinking: on or off: ask the template to let the model think, or not to. auto: on if there is a default and no
        system_prompt (even if the messages bring their own); otherwise the template is not asked.
    """
    if system_prompt == "none":
        system_prompt = default = ""
    if isinstance(prompt, str) and prompt.lstrip().startswith(special_tokens(tokenizer)):
        return prompt, False  # a template has been applied to the data already, perhaps without its BOS
    if isinstance(prompt, str) and not tokenizer.chat_template:
        return f"{system_prompt}\n\n{prompt}" if system_prompt else prompt, False
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if messages[0]["role"] != "system" and (system_prompt or default):
        messages = [{"role": "system", "content": system_prompt or default}, *messages]
    begun = is_begun(messages)
    if not tokenizer.chat_template:
        turns = [f"{m['role'].capitalize()}: {m['content']}" for m in messages]
        return "\n\n".join(turns if begun else [*turns, "Assistant:"]), False
    asked = {}
    if thinking != "auto" or default and not system_prompt:
        # Qwen3's, DeepSeek's and MiniMind's names for it. Without them, some templates close <think> at once.
        asked = dict.fromkeys(("enable_thinking", "thinking", "open_thinking"), thinking != "off")
    ways = [messages]
    if messages[0]["role"] == "system" and len(messages) > 1:
        # Some templates (Gemma's) have no system role: put its text in front of the first message.
        first = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
        ways.append([first, *messages[2:]])
    for messages in ways:
        try:
            text = apply_template(tokenizer, messages, add_generation_prompt=not begun, continue_final_message=begun,
                                  **asked)
            return text if begun else text.removesuffix(surplus), True
        except Exception as error:  # templates are programs
            problem = error
    raise UserError(f"{tokenizer.name_or_path}: the chat template refuses a prompt: {problem} "
                    f"({ways[0][-1]['content'][-80:]!r})") from problem


def answer_form(tokenizer) -> tuple[str, str, list[int]]:
    """How a chat template writes a given answer, compared with its prompt for a new one -> (surplus, lead, tail):

    surplus   the end of the prompt that is missing before a given answer: R1's and Qwen3.5's <think>
    lead      what stands before a given answer instead: Qwen3's empty thought
    tail      the tokens after the answer: a special one, which may be another than the EOS (Gemma's <end_of_turn>), and
              what follows it, often a newline
    """
    question, answer = {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good evening."}
    try:
        prompt, _ = render_prompt([question], tokenizer, "none")
        text = apply_template(tokenizer, [question, answer])
    except Exception:  # there is no template, or it refuses these messages
        return "", "", [tokenizer.eos_token_id]
    before, _, after = text.rpartition(answer["content"])
    # Qwen3's prompt ends in "assistant\n", and `before` in "assistant\n<think>\n\n</think>\n\n"; R1's in
    # "<｜Assistant｜><think>\n" and "<｜Assistant｜>". Where they part, surplus and lead begin.
    # A thought that prompt and answer both open (Qwen3.5's) or both have empty (MiniMind's; DeepSeek-V3.1's is a mere
    # </think>) counts as the answer's, which may have one of its own. No tag is cut in two: "<think>" and "</think>"
    # (GLM-4.7's) share "<".
    shared = re.sub(r"(<think>\s*)?(</think>\s*)?$|<[^<>\s]*$", "", os.path.commonprefix([prompt, before]))
    surplus, lead = prompt[len(shared):], before[len(shared):]
    if question["content"] not in shared:  # they part before the answer: nothing to compare
        surplus = lead = ""
    ids = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]
    token = tokenizer.added_tokens_decoder.get(ids[0]) if ids else None
    return surplus, lead, ids if token and token.special else [tokenizer.eos_token_id]


def thought_opening(surplus: str) -> str:
    """The text that opens a thought: what the template ends its prompts with (`answer_form`), or else the usual one."""
    return surplus if surplus.rstrip().endswith("<think>") else "<think>\n"


def turn_end(tokenizer) -> int:
    """The token that ends an answer: the special token that the chat template puts after one, or else EOS."""
    return answer_form(tokenizer)[2][0]


def pad_unlike_eos(tokenizer) -> int:
    """If the pad token is one that ends answers, choose another one. Returns its id.

    transformers reads a score at the last token that is not padding, which has to be the EOS. Decoding leaves the pad
    token out, so it becomes another special token or, without one, a rare token: the last of the vocabulary.
    """
    ends = tokenizer.eos_token_id, turn_end(tokenizer)
    if tokenizer.pad_token_id in ends:
        special = sorted(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        other = next(i for i in (*special, *reversed(range(len(tokenizer)))) if i not in ends)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(other)
    return tokenizer.pad_token_id


def encode_answers(tokenizer, given: list[tuple[tuple[str, bool], list[int], str, bool]], lead: str) -> list[list[int]]:
    """Token ids of answers as they follow their prompts. given: each prompt as rendered, its token ids, the answer, and
    whether the prompt has begun it.

    lead: what a template puts before an answer (`answer_form`). An answer with a thought of its own gets no empty one.
    Each is tokenized together with its prompt, since SentencePiece tokenizers put a space before a text that stands
    alone. Only where the two merge at the seam, so that the prompt gets other tokens, does the answer stand alone.
    """
    answers = []
    for (_, templated), _, answer, begun in given:
        has_thought = answer.lstrip().startswith("<think>")
        front = re.split("</?think>", lead)[0] if has_thought else lead  # what is before a thought: GLM-4.5's newline
        answers.append(front + answer.lstrip() if templated and not begun else answer)
    whole = encode(tokenizer, [(text + answer, templated) for ((text, templated), *_), answer in zip(given, answers)])
    return [ids[len(prompt):] if ids[:len(prompt)] == prompt
            else tokenizer(answer, add_special_tokens=False)["input_ids"]
            for ids, (_, prompt, *_), answer in zip(whole, given, answers)]


def encode_prompts(problems: list, tokenizer, cfg, what: str, default_system_prompt: str = SYSTEM_PROMPT,
                   surplus: str = "") -> list:
    """Fill in `prompt_ids`; leave out prompts that are empty or too long (--max_prompt_tokens, or what the context
    leaves beside completions), and say how many. Collective. Raises UserError if none is left, if the template refuses
    one, or if ranks differ.

    problems: Problems or Preferences. what: the flag that they come from, for messages.
    """
    # Preferences have answers, which a template writes with or without a thought as they are.
    try:
        texts = [render_prompt(problem.prompt, tokenizer, cfg.system_prompt, default_system_prompt, surplus,
                               "auto" if isinstance(problem, Preference) else cfg.thinking)
                 for problem in progress(problems, "applying the template")]
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    for problem, (text, templated), ids in zip(problems, texts, encode(tokenizer, texts)):
        if cfg.model == "tiny" and tokenizer.unk_token_id in ids:
            cause = "--system_prompt" if cfg.system_prompt and text.startswith(cfg.system_prompt) else what
            raise UserError(f"{cause}: the tiny model reads digits and +-*=(),? alone, not {text[:40]!r}: set --model")
        problem.prompt_ids, problem.rendered = ids, (text, templated)
        if isinstance(problem, Preference):
            continue
        if is_begun(problem.prompt):
            problem.begun = problem.prompt[-1]["content"]
            problem.opening = "".join(problem.begun.partition("<think>")[1:])
        elif text.rstrip().endswith("<think>"):  # as reasoning models' templates do
            problem.opening = text[text.rindex("<think>"):]
        if isinstance(problem.prompt, list):
            problem.prompt = text
    limit = min(cfg.max_prompt_tokens, tokenizer.model_max_length - getattr(cfg, "max_new_tokens", 1))
    kept = [problem for problem in problems if 0 < len(problem.prompt_ids) <= limit]
    checksum(kept, what)  # refuses other rows on another machine
    say_left_out(what, problems, kept, f"prompts that are empty or longer than {limit} tokens (--max_prompt_tokens, or "
                 "the context less --max_new_tokens)")
    if kept and cfg.model != "tiny":  # a wrong column, or a template that stands twice, shows at a glance
        answer = kept[0].answers[0] if isinstance(kept[0], Preference) else kept[0].answer
        end, known = tokenizer.decode(kept[0].prompt_ids)[-100:], f", its answer is {answer!r:.100}" if answer else ""
        system = ""
        if default_system_prompt and default_system_prompt in kept[0].rendered[0]:
            system = " with a system prompt that asks for <think> and <answer> (--system_prompt none: without)"
        say(f"{what}: {len(kept)} rows{system}; the first prompt ends with {end!r}{known}")
    return kept


def say_left_out(what: str, rows: list, kept: list, which: str) -> list:
    """Say how many of the rows are left out, and which, and return those that are kept. UserError if none is."""
    if not kept and rows:
        raise UserError(f"{what}: no rows left: it has only {which}")
    if len(kept) < len(rows):
        say(f"{what}: left out {len(rows) - len(kept)} of {len(rows)} {which}")
    return kept


def checksum(items: list, what: str) -> int:
    """A checksum of what a run reads of its Problems or Preferences, in their order. Collective.

    what: the flag that they come from. Raises UserError if the ranks' items differ: they would wait for each other.
    """
    total, names = 0, ("answer", "answer_ids", "scores", "margin")
    for item in items:
        read = getattr(item, "prompt_ids", item), *(getattr(item, name, None) for name in names)
        total = zlib.crc32(repr(read).encode(), total)
    if len(set(gather_in_order([total]))) > 1:
        raise UserError(f"{what}: holds other rows, or the model another tokenizer, on another machine")
    return total


class Shuffled:
    """Endless passes over `items`, each in its own seeded order. `position` is all that --resume needs.

    `items` must not change. For another order, override `order`: a permutation for each epoch, always the same one. If
    the order depends on results, override `next`: draw with torch's generator, move `position` on, and keep in
    `run.extra` what the order depends on. To change the data in the middle of a run, draw from two of these, and keep
    the second's position there.
    Collective. Raises UserError if the ranks' items differ.
    """

    def __init__(self, items: list, seed: int):
        self.items, self.seed, self.position = items, seed, 0
        self.checksum = checksum(items, "--data")  # --resume refuses other ones

    def next(self, count: int) -> list:
        """The next `count` items; the same on every rank."""
        places = [divmod(p, len(self.items)) for p in range(self.position, self.position + count)]
        self.position += count
        orders = {epoch: self.order(epoch) for epoch in {epoch for epoch, _ in places}}  # yours may not be cached
        return [self.items[orders[epoch][i]] for epoch, i in places]

    def first(self, count: int) -> list:
        """The distinct ones among the first `count` items, without moving on."""
        return self.items if count >= len(self.items) else [self.items[i] for i in self.order(0)[:count]]

    @functools.lru_cache(2)  # a million rows take 18 ms to shuffle
    def order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.items))


Batch = collections.namedtuple("Batch", "input_ids attention_mask mask")  # the shapes are those of Rollout


def collate(prompts: list[list[int]], completions: list[list[int]], pad_id: int, device="cpu") -> Batch:
    """Left-pad prompts, right-pad completions: input_ids [N, L+T], attention_mask [N, L+T], mask [N, T] (bool)."""
    L, T = max(map(len, prompts)), max(map(len, completions))
    ids, real = np.full((len(prompts), L + T), pad_id), np.zeros((len(prompts), L + T), int)  # faster than lists
    for i, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        ids[i, L - len(p):L + len(c)], real[i, L - len(p):L + len(c)] = p + c, 1
    input_ids, attention_mask = (torch.as_tensor(x, device=device) for x in (ids, real))
    return Batch(input_ids, attention_mask, attention_mask[:, L:].bool())


# --------------------------------------------------------------------------------------------- preference data

@dataclass
class Preference:
    """A prompt and K ≥ 2 answers to it, best first. Rows with `chosen` and `rejected` have K = 2."""
    prompt: str | list            # as the row has it; messages may end with the beginning of the answers
    prompt_ids: list[int]
    answers: list[str]
    answer_ids: list[list[int]]   # each ends with its EOS (`turn_end`); in dpo.py not if it was cut
    scores: list[float]           # falling; equal ones are a tie and make no pair
    margin: float = 0.0           # optional `margin` of a row: by how much r⁺ should exceed r⁻
    ref_logprobs: torch.Tensor | None = None  # [K] of the answers under the reference, once dpo.py has computed them
    rendered: tuple = ()          # (text, whether a chat template wrote it) of the prompt

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The numbers of a better and a worse answer: K(K − 1)/2 pairs, less the ties."""
        return [(i, j) for (i, a), (j, b) in itertools.combinations(enumerate(self.scores), 2) if a > b]

    def split(self) -> list["Preference"]:
        """One preference of two answers for each pair."""
        return [replace(self, answers=[self.answers[i], self.answers[j]], scores=[self.scores[i], self.scores[j]],
                        answer_ids=[self.answer_ids[i], self.answer_ids[j]], ref_logprobs=None) for i, j in self.pairs]


def read_preferences(data: str, split: str = "train") -> list[Preference]:
    """Rows `prompt`, `chosen`, `rejected`; or whole dialogues without `prompt`; or `prompt`, `responses` (best first).

    Optional `scores` order the responses, and may tie. Not yet encoded. Rows that teach nothing, because their answers
    are equal or tie (also by `tie: true`, `status: "tie"`, `margin: 0` or equal ratings), are left out, with a line
    that says how many.
    """
    source = str(build_tiny_preferences(data, split)) if is_built_in(data) else data
    preferences = []
    for row, place in progress(read_rows(source, split), f"reading {data}"):
        try:
            preferences.append(read_preference(row))
        except ValueError as error:
            raise UserError(f"{place}: {error}") from None
    return say_left_out(data, preferences, [p for p in preferences if p], "rows whose answers are equal or tie")


def prompt_and_answers(row: dict) -> tuple:
    """The prompt of a preference's row (a string or chat messages), its answers, and their scores: K, …, 1 where the
    answers just stand best first. A malformed row raises ValueError."""
    prompt, answers, scores = row_prompt(row), [row.get("chosen"), row.get("rejected")], None
    if not all(answers) and row.get("responses"):
        answers, scores = row["responses"] if isinstance(row["responses"], list) else [], row.get("scores")
        unread = [name for name, value in row.items()
                  if isinstance(value, list) and re.search("scor|rating|rank|reward|label|prefer", name)
                  or is_number(value) and name in ("label", "preference", "choice", "best", "winner")]
        if scores is None and unread:
            raise ValueError(f"{unread[0]} beside responses: want scores, higher for better ones, or responses that "
                             "stand best first and nothing else that could order them")
    if any(isinstance(a, list) and a and isinstance(a[-1], dict) and a[-1].get("tool_calls") for a in answers):
        raise ValueError("an answer has tool_calls, which are not read: want text in its content")
    if len(answers) < 2 or not all(map(is_prompt, answers)):
        given = f"not {answers!r:.200}" if any(answers) else f"it has {list(row)!r:.200}"
        raise ValueError("want chosen and rejected, or a list of responses: two or more, text or messages (role and "
                         f"content, which are text); {given}")
    if prompt is not None and not is_prompt(prompt):
        raise ValueError("want a prompt (text, or messages with role and content)")
    if all(isinstance(answer, list) for answer in answers):
        prompt = prompt_of_conversations(answers, row, prompt)
    answers = [answer if isinstance(answer, str) else with_thought(answer[-1]) for answer in answers]
    if prompt is None:  # whole dialogues as text: "Human: hi Assistant: hello" and "Human: hi Assistant: go away"
        shared = re.match(".*[Aa]ssistant:", os.path.commonprefix(answers), re.S)
        if not shared:
            raise ValueError("no prompt, question or problem, and the answers are not dialogues that share a turn up "
                             f"to 'Assistant:'; it has {list(row)!r:.200}")
        prompt, answers = shared[0], [answer[shared.end():] for answer in answers]
    return prompt, answers, list(range(len(answers), 0, -1)) if scores is None else scores


def prompt_of_conversations(conversations: list[list[dict]], row: dict, prompt) -> str | list[dict] | None:
    """All turns before the last, which is the answer. A `prompt` beside them may be one of these turns, or all of them,
    or what comes before the first."""
    talks = [[(turn["role"], turn["content"].strip()) for turn in turns] for turns in conversations]
    if any(talk[:-1] != talks[0][:-1] for talk in talks):
        raise ValueError("want conversations that share all but their last turns")
    if any(talk[-1][0] in ("user", "system") for talk in talks):
        raise ValueError("want conversations that end with an answer")
    before, texts = conversations[0][:-1], [text for _, text in talks[0][:-1]]
    known = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    if known and before and before[0]["role"] == "assistant" and known[-1]["content"].strip() not in texts:
        return known + before
    if len(before) <= len(known):
        return prompt
    # A system message that only the prompt or the `system` column has goes in front.
    system = [turn for turn in known[:1] if turn["role"] == "system" and before[0]["role"] != "system"]
    return row_prompt({**row, "prompt": system + before})


def with_thought(message: dict) -> str:
    """The text of an answer, and before it the thought that vLLM and others keep under a key of its own."""
    thought = message.get("reasoning_content") or message.get("reasoning")
    begun = f"<think>\n{thought.strip()}\n</think>\n\n" if isinstance(thought, str) and thought.strip() else ""
    return begun + message["content"]


def read_preference(row: dict) -> Preference | None:
    """One row; None if it prefers nothing. A malformed one raises ValueError."""
    prompt, answers, scores = prompt_and_answers(row)
    margin = row.get("margin")
    if margin is not None and not (is_number(margin) and margin >= 0):
        raise ValueError(f"margin must be a number of at least 0, not {margin!r:.40}")
    if not isinstance(scores, list) or len(scores) != len(answers) or not all(map(is_number, scores)):
        raise ValueError("scores must be as many numbers as there are responses")
    best = {}  # answer: score, best first; of equal answers the best counts
    for answer, score in sorted(zip(answers, scores), key=lambda pair: -pair[1]):
        best.setdefault(answer, float(score))
    # What UltraFeedback's and Argilla's versions call the scores of the two answers: score_chosen, chosen-rating, …
    rated = [score == row.get(name.replace("chosen", "rejected")) for name, score in row.items()
             if re.fullmatch("(score|rating)[_-]chosen|chosen[_-](score|rating)", name) and is_number(score)]
    if row.get("tie") or row.get("status") == "tie" or margin == 0 or any(rated) or len(set(best.values())) == 1:
        return None
    return Preference(prompt, [], list(best), [], list(best.values()), float(margin or 0))


def is_number(value) -> bool:
    """Whether it is a finite number: JSON files may have NaN."""
    return isinstance(value, (int, float, np.integer, np.floating, np.bool_)) and bool(abs(value) < LARGEST)


def encode_preferences(preferences: list[Preference], tokenizer, cfg, what: str,
                       ended: bool = False) -> list[Preference]:
    """Fill in the token ids of prompts and answers, written as the template writes a conversation (`answer_form`).
    Answers are cut at --max_completion_tokens or where the context ends. Rows that then have no pair are left out.

    ended: replace the last token of a cut answer with the end token, where --reward reads a reward model's scores. (A
        policy would learn from such answers to stop in mid-sentence.)
    """
    surplus, lead, (end, *_) = answer_form(tokenizer)
    endings = "|".join(map(re.escape, tokenizer.convert_ids_to_tokens([end, tokenizer.eos_token_id])))
    endings = rf"(({endings})\s*)+$"  # some data has them already
    kept = encode_prompts(preferences, tokenizer, cfg, what, default_system_prompt="", surplus=surplus)
    for p in kept:
        # Answers to a prompt that ended with <think> have only its </think>, or neither if they were cut: add <think>.
        if p.rendered[1] and not is_begun(p.prompt) and any("</think>" in a.partition("<think>")[0] for a in p.answers):
            p.answers = [answer if "<think>" in answer.partition("</think>")[0] else thought_opening(surplus) + answer
                         for answer in p.answers]
    given = [(p.rendered, p.prompt_ids, re.sub(endings, "", a), is_begun(p.prompt)) for p in kept for a in p.answers]
    encoded, cut = iter(encode_answers(tokenizer, given, lead)), 0
    for preference in kept:
        room = min(cfg.max_completion_tokens, tokenizer.model_max_length - len(preference.prompt_ids))
        best = {}  # answers that begin alike may be equal once they are cut: as in `read_preference`, the best counts
        for answer, score in zip(preference.answers, preference.scores):
            ids = next(encoded) + [end]
            if len(ids) > room:
                cut += 1
                ids = ids[:room - 1] + [end] if ended else ids[:room]
            best.setdefault(tuple(ids), (answer, score))
        preference.answer_ids = [list(ids) for ids in best]
        preference.answers, preference.scores = map(list, zip(*best.values()))
    if cut:
        say(f"{what}: cut {cut} of {len(given)} answers, at --max_completion_tokens or where the context ends")
    differ = [preference for preference in kept if preference.pairs]
    checksum(differ, what)  # refuses other answers on another machine
    return say_left_out(what, kept, differ, "rows whose answers are equal as tokens (--max_completion_tokens?)")


def collate_preferences(preferences: list[Preference], pad_id: int, device):
    """-> (batch, a row for each answer; blocks, the rows of each preference, best first)."""
    prompts = [p.prompt_ids for p in preferences for _ in p.answer_ids]
    batch = collate(prompts, [ids for p in preferences for ids in p.answer_ids], pad_id, device)
    rows = iter(range(len(prompts)))
    return batch, [[next(rows) for _ in p.answer_ids] for p in preferences]


AT_ONCE = 1000  # preferences to collate together: a whole file, padded, may not fit into memory


def of_each_preference(compute, preferences: list[Preference], pad_id: int, device) -> list[torch.Tensor]:
    """The values [K] of each preference's answers, where `compute(batch, blocks)` gives those [N] of a batch."""
    values = []
    for start in range(0, len(preferences), AT_ONCE):
        batch, blocks = collate_preferences(preferences[start:start + AT_ONCE], pad_id, device)
        values += compute(batch, blocks).split([len(rows) for rows in blocks])
    return values


# ----------------------------------------------------------------------------------------------------- rewards

def load_reward(cfg, wrong: float = 0.0):
    """--reward -> score(problems, rollout) = (rewards [P, G] float32, correct [P, G] bool), the same on every rank.

    verifier            1 if the last answer equals the gold one and `is_worked_out`, else `wrong` ≤ 0
    FILE.py:FUNCTION    what FUNCTION(prompt, completion, row) returns: the reward (correct if it is above 0), or the
                        pair (reward, correct)
    DIRECTORY           the score of that reward model; correct by the verifier, or if above 0 for rows without answer

    --format_reward adds its weight times `format_reward`. Each rank judges its share of the completions; a UserError if
    they are not the same on every rank.
    """
    model_scores = load_reward_model(cfg) if is_reward_model(cfg.reward) else None
    function = None if model_scores or cfg.reward == "verifier" else load_reward_function(cfg.reward)

    def judge(problem: Problem, completion: str, model_score: float | None) -> tuple[float, bool]:
        if function:
            reward, right = function(problem, completion)
        elif model_scores:
            reward = model_score
            right = reward > 0 if problem.answer is None else is_right(problem, completion)
        elif problem.answer is None:
            raise UserError(f"--reward verifier: a row has no answer: {problem.row!r:.300}")
        else:
            right = is_right(problem, completion)
            reward = 1.0 if right else wrong
        return reward + cfg.format_reward * format_reward(problem.opening + completion), right

    @timed("reward")
    def score(problems: list[Problem], rollout: Rollout):
        if len(set(gather_in_order([zlib.crc32(repr(rollout.completions).encode())]))) > 1:  # `sample` was replaced
            raise UserError("the processes' completions differ: let one sample for all (common.from_main_rank)")
        G = len(rollout.completions) // len(problems)
        rows = [problem for problem in problems for _ in range(G)]  # [N]
        scores = model_scores(problems, rollout).tolist() if model_scores else [None] * len(rows)
        judged, errors = [], []
        with random_states_kept():  # or the seeds below would make the script's draws repeat, and differ between ranks
            seed = int(torch.randint(2 ** 31, (), device="cpu"))
            try:
                for i in my_share(len(rows)):
                    if function:  # it may draw random numbers: the same ones for a row on any rank
                        for set_seed in (random.seed, np.random.seed, torch.default_generator.manual_seed):
                            set_seed(seed + i)
                    judged.append(judge(rows[i], rollout.completions[i], scores[i]))
            except UserError as error:
                errors.append(error)
        for error in gather_in_order(errors):  # on every rank: raised on one alone, it would leave the others waiting
            raise error
        rewards, correct = zip(*gather_in_order(judged))
        return [torch.tensor(of_rows, dtype=dtype, device=rollout.mask.device).view(-1, G)
                for of_rows, dtype in ((rewards, torch.float32), (correct, torch.bool))]
    return score


def is_right(problem: Problem, completion: str) -> bool:
    """Whether the verifier accepts the completion's answer: equal to the gold one, and worked out."""
    answer = extract_answer(problem.begun + completion, closed_only=True)
    return is_equivalent(answer, problem.answer) and is_worked_out(answer, problem.answer, problem.prompt)


def is_reward_model(reward: str) -> bool:
    return reward != "verifier" and os.path.isdir(reward)


def load_reward_model(cfg):
    """--reward DIRECTORY -> scores(problems [P], rollout) [N], less the `reward_shift` in the model's config.

    A model with the policy's vocabulary and chat template scores the tokens that were sampled. Any other one scores the
    decoded text, through its own. Every completion gets the ending of the answers that the model has learned from,
    since it may have been cut, or have ended with another of the policy's EOS tokens. (Read at any other token, a
    reward model for SmolLM2 scored cut answers higher than good ones.) It is cut where the context ends, as those are.
    """
    try:
        own = load_tokenizer(cfg.reward, cfg.trust_remote_code)
        device = setup_device()  # again, but only to learn which it is
        model = load_model(cfg.reward, device, trainable=False, cls=AutoModelForSequenceClassification,
                           trust_remote_code=cfg.trust_remote_code)
        check_vocabulary(cfg.reward, own, model)
    except UserError as error:
        raise UserError(str(error).replace("--model", "--reward", 1)) from error
    shift = getattr(model.config, "reward_shift", 0.0)
    learned = getattr(model.config, "reward_system_prompt", None)  # of reward_model.py, where none is the default
    if learned is not None and own.chat_template and (learned or "none") != (cfg.system_prompt or "the default one"):
        say(f"--reward {cfg.reward}: has learned with --system_prompt {learned or 'none'}, and now reads prompts with "
            f"{cfg.system_prompt or 'the default one'}: pass the same, unless the rows bring their own")
    # What reward_model.py has trained is read at the end of a turn. Others, such as TRL's, have learned from the whole
    # text of a template, and are read at its last token: ChatML's and Gemma's write a newline after that end.
    whole = not hasattr(model.config, "reward_shift")
    (*_, tail), context = answer_form(own), context_length(model.config)
    tail = tail if whole else tail[:1]
    other = load_tokenizer(model_name(cfg), cfg.trust_remote_code)  # the policy's
    same_tokens = own.get_vocab() == other.get_vocab() and own.chat_template == other.chat_template and len(tail) == 1

    def scores(problems: list[Problem], rollout: Rollout) -> torch.Tensor:
        batch = rollout if same_tokens else retokenize(problems, rollout, own, cfg.system_prompt, whole)
        real, read, cut = batch.attention_mask.cpu() > 0, [], 0
        for ids, here, prompt in zip(batch.input_ids.cpu(), real, real[:, :-batch.mask.shape[1]].sum(1).tolist()):
            ids = ids[here].tolist()
            if (too_many := len(ids) - context) > 0:
                cut += 1
                # Where the prompt leaves room for no more than the tail, its beginning is cut instead, or all its
                # answers would score the same.
                unread = min(too_many, prompt - 1) if prompt + len(tail) >= context else 0
                ids = ids[unread:unread + context]
            # The tail takes the place of the last tokens: more of them might not fit into the context.
            read.append((*ids[:-len(tail)], *tail))
        if cut:
            say(f"--reward {cfg.reward}: cut {cut} of {len(read)} sequences where its context ends")
        # Copies are scored once. In different micro-batches they could round differently, but a group of copies must
        # have advantages of exactly 0, and two copies make no pair.
        number = {ids: i for i, ids in enumerate(dict.fromkeys(read))}  # of each distinct sequence
        batch = collate([ids[:-1] for ids in number], [ids[-1:] for ids in number], own.pad_token_id, device)
        values = all_scores(model, batch, range(len(number)), cfg.micro_batch_tokens) - shift
        if not values.isfinite().all():
            raise UserError(f"--reward {cfg.reward}: it gives scores that are not finite")
        return values[[number[ids] for ids in read]]
    return scores


def retokenize(problems: list[Problem], rollout: Rollout, tokenizer, system_prompt: str, whole: bool = False) -> Batch:
    """A rollout's N sequences in another model's tokens, as `encode_preferences` writes answers, all with an end; if
    whole, with the whole tail that the template writes (`answer_form`)."""
    surplus, lead, tail = answer_form(tokenizer)
    # Messages from the row: `problem.prompt` has them as the policy's template wrote them.
    prompts = [prompt if isinstance(prompt := row_prompt(p.row), list) else p.prompt for p in problems]
    if tokenizer.chat_template and not system_prompt:  # not by default, which would ask the template to think
        system_prompt = SYSTEM_PROMPT
    rendered = [render_prompt(prompt, tokenizer, system_prompt, surplus=surplus) for prompt in prompts]
    # A thought that the policy's prompt has begun is begun here too, unless the text above holds it already.
    openings = [thought_opening(surplus) if problem.opening and templated and not problem.begun else ""
                for (_, templated), problem in zip(rendered, problems)]
    G, completions = len(rollout.completions) // len(problems), iter(rollout.completions)
    given = [(text, ids, opening + next(completions), is_begun(prompt)) for prompt, text, ids, opening
             in zip(prompts, rendered, encode(tokenizer, rendered), openings) for _ in range(G)]  # [N]
    answers = [answer + (tail if whole else tail[:1]) for answer in encode_answers(tokenizer, given, lead)]
    return collate([ids for _, ids, *_ in given], answers, tokenizer.pad_token_id, rollout.mask.device)


def load_reward_function(spec: str):
    """FILE.py:FUNCTION -> function(problem, completion) -> (reward, correct). A UserError shows the row that failed."""
    path, _, name = spec.rpartition(":")
    if not os.path.isfile(path):
        missing = "no function is named" if os.path.isfile(spec) else f"no file {path or spec}"
        raise UserError(f"--reward {spec}: {missing}; want verifier, FILE.py:FUNCTION or a reward model's directory "
                        "(one from the hub: hf download it)")
    module_name = Path(path).stem
    if module_name in sys.modules:  # a file named json.py must not replace Python's json
        module_name += "_"
    try:
        sys.path.append(str(Path(path).resolve().parent))  # so that the file can import its neighbours
        source = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(source)
        sys.modules[module_name] = module  # so that pickle, and with it multiprocessing, finds what the file defines
        dtype, device = torch.get_default_dtype(), torch.get_default_device()
        # Whatever the file changes of these is undone. (Many set a seed.)
        with contextlib.chdir("."), torch.enable_grad(), random_states_kept(), ctrl_c_blocked():
            source.loader.exec_module(module)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may end in sys.exit
        raise UserError(f"--reward {spec}: {path} does not load: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"--reward {spec}: {path} has no function {name}")

    def checked(problem: Problem, completion: str) -> tuple[float, bool]:
        try:
            with contextlib.chdir("."), torch.enable_grad(), ctrl_c_blocked():
                returned = function(problem.prompt, completion, copy.deepcopy(problem.row))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, for example, or the FunctionTimedOut of func_timeout
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == source.origin]
            line = f" (line {lines[-1]})" if lines else ""
            raise UserError(f"--reward {spec} raised {type(error).__name__}: {str(error):.500}{line}, on row "
                            f"{problem.row!r:.300}, completion {completion!r:.200}") from error
        reward, correct = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not is_number(reward) or not isinstance(correct, (bool, np.bool_, types.NoneType)):
            raise UserError(f"--reward {spec} returned {returned!r:.100}, want a finite float or int, or a pair of it "
                            f"and a bool, on row {problem.row!r:.300}, completion {completion!r:.200}")
        if correct is None and reward not in (-1, 0, 1):
            say_once(f"--reward {spec} gives graded rewards: accuracy and DAPO's groups count those above 0 as correct "
                     "unless it returns pairs (reward, correct)")
        return float(reward), bool(reward > 0 if correct is None else correct)
    return checked


@contextlib.contextmanager
def random_states_kept():
    """Restore the random states of Python, numpy and torch at the end."""
    with torch.random.fork_rng(devices=[]), contextlib.ExitStack() as afterwards:
        afterwards.callback(random.setstate, random.getstate())
        afterwards.callback(np.random.set_state, np.random.get_state())
        yield


@contextlib.contextmanager
def ctrl_c_blocked():
    """Processes started inside inherit the blocked signal, so Ctrl-C in the terminal does not kill them. If it did, a
    reward that runs completions in processes would judge them wrong, and the step, which still ends, would learn that.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


# -------------------------------------------------------------------------------------------------- evaluation

def evaluate(policy, tokenizer, problems: list[Problem], score, cfg) -> dict[str, float]:
    """Greedy accuracy and mean reward and, with --eval_samples k > 1, avg@k and pass@k. Leaves torch's random state as
    it was.

    problems: from `encode_prompts`; score: from `load_reward`.
    """
    if not problems:
        return {}
    prompts = [problem.prompt_ids for problem in problems]
    rewards, correct = score(problems, sample(policy, tokenizer, prompts, 1, cfg.max_new_tokens, greedy=True))
    metrics = {"eval_accuracy": correct.float().mean().item()}
    if cfg.reward != "verifier" or cfg.format_reward > 0:  # otherwise the accuracy tells it already
        metrics["eval_reward"] = rewards.mean().item()
    if (k := cfg.eval_samples) > 1:
        with torch.random.fork_rng(devices=[]):
            _, correct = score(problems, sample(policy, tokenizer, prompts, k, cfg.max_new_tokens, cfg.temperature))
        metrics[f"eval_avg@{k}"] = correct.float().mean().item()
        # The unbiased estimate of pass@k (Chen et al. 2021, arXiv:2107.03374, eq. 1), for n = k samples: is any right?
        metrics[f"eval_pass@{k}"] = correct.any(1).float().mean().item()
    return metrics


# ----------------------------------------------------------------------------------------------------- the run

def warn_without_signal(step: int, teaches) -> None:
    """Unless the step `teaches` (its rewards differ where they are compared), say so, and what to try: it is no bug."""
    if not teaches:
        say(f"step {step} teaches nothing: the rewards are equal within every group (PPO: in the whole step, which "
            "leaves the KL penalty and noise; DAPO: no group is both right and wrong, or all is filtered)")
        say_once("if this goes on, try easier or harder problems, a larger group (PPO: more prompts), a higher "
                 "--temperature, more --max_new_tokens, or --format_reward 0.1 to begin with (DAPO: with "
                 "--no_dynamic_sampling)")


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the values where the mask is true; 0 where it never is. For metrics; losses have weights."""
    return values.detach().where(mask, 0).sum() / mask.sum().clamp(min=1)


def make_optimizer(model, cfg, betas=(0.9, 0.999)):
    """(AdamW, learning-rate schedule) for a model. Also applies --freeze_layers and --gradient_checkpointing to it.

    You can replace AdamW. Checkpoints keep the new optimizer's `state` of each parameter, but not its `param_groups`.
    (If it combines two, these must share one `state` dict; what a rank computes from its own shard must be a DTensor.)
    For a parameter without an update so far, they hold AdamW's initial state.
    """
    reshard(model)
    layers = decoder_layers(model)
    layers[:int(cfg.freeze_layers * len(layers))].requires_grad_(False)
    if cfg.gradient_checkpointing and layers:  # before transformers 5.23 it has only its second name
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        with one_line_errors("--gradient_checkpointing"):  # some architectures lack it
            enable({"use_reentrant": False})
        for module in model.modules():  # layers recompute in training mode only; all else stays in evaluation mode
            module.training = hasattr(module, "gradient_checkpointing")
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=betas, weight_decay=0.0, fused=True)
    name = "constant_with_warmup" if cfg.lr_schedule == "constant" else cfg.lr_schedule
    return optimizer, transformers.get_scheduler(name, optimizer, cfg.warmup_steps, most_updates(cfg))


def most_updates(cfg) -> int:
    """The number of updates of a whole run. (DAPO may make fewer.)"""
    return cfg.steps * getattr(cfg, "minibatches", 1) * getattr(cfg, "updates_per_batch", 1)


class Meter:
    """Weighted means over micro-batches and ranks; NaN over nothing. Kept on the device until `means` is called."""

    def __init__(self):
        self.sums = {}  # name: (Σ weight · value, Σ weight)

    def add(self, weight, /, **values) -> None:
        for name, value in values.items():
            total, weights = self.sums.get(name, (0.0, 0.0))
            value = value.detach().float() if isinstance(value, torch.Tensor) else value
            self.sums[name] = total + value * weight, weights + weight

    def means(self) -> dict[str, float]:
        """Collective. Ranks may have added other metrics, or in another order."""
        names = list(dict.fromkeys(gather_in_order(list(self.sums))))
        sums = [[*map(float, self.sums.get(name, (0, 0)))] for name in names]
        sums = torch.tensor(sums, dtype=torch.float64, device="cpu")
        return {name: s / w if w else math.nan for name, (s, w) in zip(names, sum_over_ranks(sums).tolist())}


class Run:
    """Everything around the training loop that is not the algorithm. A run

    refuses to overwrite        `check_directory`: an earlier run is continued or replaced only if a flag says so
    is alone in its directory   `lock_directory`
    skips non-finite updates    `optimizer_step`
    logs                        `end_step`: metrics.jsonl, the progress bar, --log_to
    stops after a whole step    `end_step`: on Ctrl-C, SIGTERM or too many skipped updates; it saves first
    saves atomically            `save_checkpoint`: killed at any moment, it leaves a complete checkpoint
    resumes exactly             `load_checkpoint`: its numbers are those of a run that was never stopped
    """

    # In the order in which --overwrite removes them. If it is interrupted, --resume must find no complete checkpoint,
    # and config.json must still say whose directory this is. In models/, all but step-* may be the user's own.
    WRITES = ("checkpoint", "metrics.jsonl", "samples.jsonl", "model", "models/step-*", "tensorboard", "config.json")
    # All other flags must stay the same when a run is resumed.
    MAY_CHANGE = {"steps", "resume", "overwrite", "output_dir", "log_to", "save_every", "model_every", "eval_data",
                  "eval_problems", "eval_every", "eval_samples", "max_bad_steps", "micro_batch_tokens",
                  "gradient_checkpointing"}

    catches_signals = False  # `launch` sets it. Elsewhere, as in a notebook or a thread, Ctrl-C is not this run's.

    def __init__(self, cfg):
        """Check the output directory, join the other ranks, set the seed. Nothing is written before `start`."""
        check_config(cfg)
        self.cfg, self.flags = cfg, dict(vars(cfg))  # flags: as given, even if your training loop changes cfg later
        # The file that holds Config: also where another one, or a notebook, calls its `main`.
        self.script = Path(getattr(sys.modules.get(type(cfg).__module__), "__file__", sys.argv[0])).name
        self.directory = Path(cfg.output_dir or f"runs/{Path(self.script).stem}")
        self.next_step = 0  # step 0 is the evaluation before training
        self.failing = False  # set after --max_bad_steps skipped updates in a row
        self.stop_signal = 0
        # Anything else that checkpoints shall keep, the same on every rank. Add all keys before `start`. --resume loads
        # a tensor, or a dict of nothing but tensors (such as a model's state dict), in place, so its keys, shapes and
        # dtypes must stay. Other values are replaced: always read them from here. Tensors inside those must be whole
        # (`unsharded`) and on the CPU, or they come back on the GPU of the process that saved them.
        self.extra = {}
        self.device = setup_device()  # before anything that may fail on one machine alone, so that the others notice
        restarts = gather_in_order([os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")])  # each machine counts its own
        if set(restarts) != {"0"} and self.checkpoints():
            say(f"restarted by torchrun: continuing {self.directory}, as with --resume")  # it repeats the first command
            cfg.resume = True
        flags = gather_in_order([vars(cfg) | {"output_dir": ""}])  # `start` looks whether the machines share that
        if other := [name for name in flags[0] if any(of_rank.get(name) != flags[0][name] for of_rank in flags)]:
            raise UserError(f"--{other[0]}: another value on another machine; all have to run the same command")
        self.check_directory()
        if cfg.log_to != "none" and not importlib.util.find_spec(cfg.log_to):
            raise UserError(f"--log_to {cfg.log_to}: pip install {cfg.log_to}")
        # torch.distributed.checkpoint warns that it runs in one process, and logs a traceback for a damaged file, which
        # `load_checkpoint` reports in one line.
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
        logging.getLogger().addFilter(lambda record: "torch/distributed/checkpoint" not in record.pathname)
        transformers.set_seed(cfg.seed)

    def check_directory(self):
        """Raise UserError if OUTPUT_DIR cannot be written, is inside another run's output, or holds a run that the
        flags neither continue nor replace; also if --overwrite would remove what another flag names."""
        cfg, directory = self.cfg, self.directory
        with one_line_errors(f"--output_dir {directory}: not usable, or its config.json damaged"):
            existing = next(path for path in [directory, *directory.absolute().parents] if path.exists())
            config = directory / "config.json"
            saved = json.loads(config.read_text()) if config.exists() else {}
            script, flags = saved.get("script"), saved.get("flags")  # a model's config.json has neither
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise UserError(f"--output_dir {directory}: {existing} is a file or write-protected")
        for parent in directory.absolute().parents:
            if (parent / "metrics.jsonl").exists() and self.replaces(parent, directory):
                raise UserError(f"--output_dir {directory}: is in what the run in {parent} writes, and may remove")
        held = [name for name in self.WRITES if any(directory.glob(name))]
        if held and not isinstance(flags, dict):
            raise UserError(f"--output_dir {directory}: holds {held[0]}, but no run that could have written it; "
                            "choose another --output_dir")
        if cfg.resume:
            if not self.checkpoints():
                raise UserError(f"--resume: no checkpoint in {directory / 'checkpoint'}")
            if script != self.script:
                raise UserError(f"--resume: {directory} holds a run of {script}, not of {self.script}")
            for name in flags | self.flags:
                before = flags.get(name, getattr(type(cfg), name, None))  # a flag newer than the run: its default
                if name not in self.MAY_CHANGE and before != self.flags.get(name):
                    raise UserError(f"--resume: --{name} was {before!r} and is now {self.flags.get(name)!r}; "
                                    "that would be a different run")
            if cfg.lr_schedule != "constant" and flags.get("steps") != cfg.steps:
                say_once(f"--resume: --steps was {flags.get('steps')}: from here on, --lr_schedule {cfg.lr_schedule} "
                         f"has the learning rates of a run of {cfg.steps} steps")
        elif held and not cfg.overwrite:
            resume = "--resume continues it, " if self.checkpoints() and script == self.script else ""
            raise UserError(f"--output_dir {directory}: holds a run already; {resume}--overwrite replaces it, another "
                            "--output_dir leaves it alone")
        elif held:
            reward = getattr(cfg, "reward", "")
            for needed in (cfg.model, cfg.data, cfg.eval_data, getattr(cfg, "eval_problems", ""), reward,
                           reward.rpartition(":")[0]):
                if os.path.exists(needed) and self.replaces(directory, needed):
                    raise UserError(f"--overwrite: {needed} is, or is in, the run that would be replaced")

    def replaces(self, directory: Path, path) -> bool:
        """Whether `path` is one of the `WRITES` of a run in `directory`, or is in one."""
        relative = os.path.relpath(Path(path).resolve(), directory.resolve())
        return any(fnmatch.fnmatch(f"{relative}/", f"{name}/*") for name in self.WRITES)

    def write_config(self):
        """Write config.json. With --overwrite, first remove the `WRITES` of the earlier run."""
        if self.cfg.overwrite:
            for name in self.WRITES:
                for path in self.directory.glob(name) if "*" in name else [self.directory / name]:
                    remove(path)
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
        config = {"script": self.script, "id": os.urandom(6).hex(), "flags": self.flags, "commit": commit or None,
                  "versions": {"python": sys.version.split()[0], "torch": torch.__version__,
                               "transformers": transformers.__version__, "numpy": np.__version__},
                  "processes": world_size(), "threads": torch.get_num_threads(), "device": str(self.device)}
        temporary = self.directory / "config.json.tmp"
        temporary.write_text(json.dumps(config, indent=2) + "\n")
        os.replace(temporary, self.directory / "config.json")

    def start(self, data: Shuffled, **trained) -> None:
        """Create the output directory, or continue from its checkpoint. Call it when all else is loaded and checked.

        trained: name=(model, optimizer, schedule) of each model that trains. Checkpoints hold these, the position in
        `data` and `self.extra`.
        """
        self.data, self.trained = data, trained
        self.layout, self.training = self.layout_of_extra(), self.parameters_that_train()
        self.bad_steps = dict.fromkeys(trained, 0)  # each model's skipped updates in a row
        self.catch_signals()
        with one_line_errors(f"--output_dir {self.directory}: cannot write there"):
            mark, lock = from_main_rank(on_main_rank(self.lock_directory)), self.directory / ".lock"
            # Creates one on a machine that does not share it; on NFS, refreshes what this machine knows of it.
            self.directory.mkdir(parents=True, exist_ok=True)
            # Rank 0 does not read the file: closing a second handle on it would give up the lock.
            if not all(gather_in_order([rank() == 0 or lock.exists() and lock.read_bytes() == mark])):
                raise UserError(f"--output_dir {self.directory}: want a directory that all machines share, since each "
                                "writes its part of a checkpoint there")
            if self.cfg.resume:
                self.load_checkpoint()
                on_main_rank(self.drop_later_lines)
            else:
                on_main_rank(self.write_config)
                self.save_checkpoint()
        warn_of_flags(self.cfg)
        if rank() == 0:
            with one_line_errors(f"--log_to {self.cfg.log_to}: it does not start; --resume continues once it can"):
                self.log = self.open_logger()
        self.bar = tqdm(total=self.cfg.steps, initial=max(0, self.next_step - 1), desc=self.script, unit="step",
                        disable=rank() > 0, dynamic_ncols=True, mininterval=0.1 if sys.stderr.isatty() else 30)

    def lock_directory(self) -> bytes:
        """Create OUTPUT_DIR and lock it until this process ends, however it ends. Returns a new mark, now in the lock
        file: a machine that does not share the directory may have a lock file too, but an old one."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, no forked process inherits it
        except BlockingIOError:
            raise UserError(f"--output_dir {self.directory}: another run is writing there") from None
        except OSError:  # a file system without locks
            pass
        self.check_directory()  # again: another run may have begun and ended since
        mark = os.urandom(16)
        os.pwrite(self.lock, mark, 0)
        os.fsync(self.lock)  # on NFS, before the others look
        return mark

    def open_logger(self):
        """--log_to as a function log(metrics, step); it does nothing for none."""
        if self.cfg.log_to == "none":
            return lambda metrics, step: None
        if self.cfg.log_to == "wandb":
            import wandb
            own = json.loads((self.directory / "config.json").read_text()).get("id")  # --resume continues its curves
            project, name = os.environ.get("WANDB_PROJECT", "rl"), os.environ.get("WANDB_NAME", self.directory.name)
            return wandb.init(project=project, name=name, id=own, resume="allow", config=self.flags,
                              dir=self.directory).log
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(self.directory / "tensorboard", purge_step=self.next_step)  # a resumed run repeats these

        def log(metrics, step):
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            writer.flush()  # the run may be killed before the writer would do it
        return log

    def catch_signals(self):
        """Have `note_signal` called on Ctrl-C and SIGTERM, until `close`, if `launch` has started the script.

        A process that a reward function forks gets SIGTERM's default back, so that Process.terminate() can end it.
        (Ctrl-C must not: `ctrl_c_blocked`.) Until then SIGTERM is blocked: in the child, `note_signal` would swallow
        it, and leaving a Pool would hang about one time in fifty.
        """
        if not self.catches_signals:
            return
        signal.signal(signal.SIGINT, self.note_signal)
        signal.signal(signal.SIGTERM, self.note_signal)
        block, unblock = (functools.partial(signal.pthread_sigmask, how, {signal.SIGTERM})
                          for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK))
        os.register_at_fork(before=block, after_in_parent=unblock,
                            after_in_child=functools.partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
        os.register_at_fork(after_in_child=unblock)  # they are called in this order

    def note_signal(self, number, frame):
        """Signal handler: stop after this step. A second signal ends the process at once, but not under torchrun, which
        passes on the one that it gets even where (as by SLURM) every process got it already."""
        self.stop_signal = number
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
        say(f"{signal.Signals(number).name}: stopping after this step")

    def steps(self):
        """The numbers of the steps still to do, from 1."""
        for step in range(max(1, self.next_step), self.cfg.steps + 1):
            self.began = time.perf_counter()
            PHASE_SECONDS.clear()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            yield step

    def optimizer_step(self, model, optimizer, schedule, loss: torch.Tensor) -> dict[str, float]:
        """Clip the gradient, update, advance the learning rate, clear the gradient. Collective; after `start`.

        loss: the sum of this rank's micro-batch losses, detached. A non-finite loss or gradient changes nothing and
        is counted: see `end_step`. Returns loss, grad_norm (before clipping) and lr.
        """
        loss = sum_over_ranks(loss.clone()).item()
        reshard(model)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:  # unused: zeros, as FSDP gives on several ranks; its momentum still moves it
                parameter.grad = torch.zeros_like(parameter)
            if not hasattr(parameter, "full_tensor"):  # FSDP has summed its own: this is of a module of your own
                sum_over_ranks(parameter.grad)
        norm = unsharded(torch.nn.utils.clip_grad_norm_(parameters, self.cfg.max_grad_norm)).item()
        lr = optimizer.param_groups[0]["lr"]
        name = next(name for name, (trained, *_) in self.trained.items() if trained is model)
        if math.isfinite(norm) and math.isfinite(loss):
            optimizer.step()
            schedule.step()
            self.bad_steps[name] = 0
        else:
            self.bad_steps[name] += 1
            self.failing |= self.bad_steps[name] >= self.cfg.max_bad_steps
            say(f"{name}: loss {loss}, gradient norm {norm}: update skipped ({self.bad_steps[name]} in a row)")
        optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm, "lr": lr}

    def timing(self, num_tokens: torch.Tensor) -> dict[str, float]:
        """Seconds and tokens per second of the step so far: call it before the evaluation. Also the seconds of its
        phases, and the peak memory in MB: the GPU's in this step, or on a CPU the process's so far."""
        seconds = time.perf_counter() - self.began
        if self.device.type == "cuda":
            megabytes = torch.cuda.max_memory_allocated() / 2 ** 20
        else:  # macOS counts bytes, Linux kilobytes
            units = 2 ** 20 if sys.platform == "darwin" else 2 ** 10
            megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units
        phases = {f"{phase}_seconds": duration for phase, duration in PHASE_SECONDS.items()}
        return {"seconds": seconds, **phases, "tokens_per_second": int(num_tokens) / seconds,
                "peak_memory_mb": megabytes}

    def evaluates(self, step: int) -> bool:
        return step % self.cfg.eval_every == 0 or step == self.cfg.steps

    def log_samples(self, step: int, problems, rollout: Rollout, rewards, advantages=None) -> None:
        """In the first step, and in those that evaluate, write the first two completions of each of the first four
        prompts to samples.jsonl.

        rewards: [P, G]. advantages: [N], one for each completion, or None.
        """
        if rank() == 0 and (step == 1 or self.evaluates(step)):
            G = rewards.shape[1]
            self.append("samples.jsonl", [
                {"step": step, "prompt": problem.rendered[0], "completion": rollout.completions[p * G + g],
                 "finished": rollout.finished[p * G + g].item(), "answer": problem.answer,
                 "reward": rewards[p, g].item(),
                 **({} if advantages is None else {"advantage": advantages[p * G + g].item()})}
                for p, problem in enumerate(problems[:4]) for g in range(min(2, G))])

    def append(self, name: str, rows: list[dict]) -> None:
        """Add lines to a file in OUTPUT_DIR. (--resume removes later ones only in metrics.jsonl and samples.jsonl.)"""
        path = self.directory / name
        with one_line_errors(f"cannot write {path}; --resume continues from the last checkpoint", TrainingFailed):
            with open(path, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    def end_step(self, step: int, metrics: dict[str, float]) -> None:
        """Log the step, save if it is time to, and stop the run if it has to stop. Collective. Raises TrainingFailed if
        a metric is no number, or if the processes differ or a gradient is left over, which --resume could not repeat.
        """
        metrics = {**metrics, "epoch": self.data.position / len(self.data.items)}
        for name, value in metrics.items():
            with one_line_errors(f"metric {name}: want a single number, not {value!r:.80}", TrainingFailed):
                metrics[name] = unsharded(value).item() if hasattr(value, "item") else value
                math.isfinite(metrics[name])  # else TypeError
        if rank() == 0:
            finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            self.append("metrics.jsonl", [{"step": step, **finite}])  # JSON has no NaN
            self.log(metrics, step=step)
            shown = {"reward": ".3f", "accuracy": ".3f", "pair_accuracy": ".3f", "entropy": ".3f",
                     "tokens_per_second": ".0f"}
            self.bar.set_postfix({name: format(metrics[name], spec) for name, spec in shown.items() if name in metrics},
                                 refresh=False)
            self.bar.update(step > 0)
        gap, rounding = metrics.get("sampler_gap", 0.0), 0.1 if self.device.type == "cuda" else 1e-3
        if gap > rounding and step == 1:  # such as NemotronH's in transformers 5.23
            say(f"step {step}: sampler_gap is {gap:.3f} nats, more than rounding: this model decodes differently from "
                "how it reads, so its samples are not those of the policy that trains")
        if evaluation := [f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("eval_")]:
            say(f"step {step}: {', '.join(evaluation)}")

        for name, (model, optimizer, _) in self.trained.items():
            groups = (group["params"] for group in optimizer.param_groups)
            if any(parameter.grad is not None for parameter in itertools.chain(model.parameters(), *groups)):
                raise TrainingFailed(f"step {step}: {name} has a gradient that no run.optimizer_step has used, and "
                                     "--resume would not bring back; leave out its backward pass, too (or is it of a "
                                     "parameter that its optimizer lacks?)")
        self.next_step = step + 1
        drawn = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        signals, drawn = zip(*gather_in_order([(self.stop_signal, drawn)]))
        if len(set(drawn)) > 1:  # the next samples and minibatches would differ too, and nothing would show it
            raise TrainingFailed(f"step {step}: the processes have drawn different numbers from torch's generator. All "
                                 "have to draw the same: for a whole rollout [N, T], not for their micro-batches")
        stop_signal = max(signals)
        if step and (stop_signal or self.failing or step % self.cfg.save_every == 0 or step == self.cfg.steps):
            self.save_checkpoint()
        if self.failing:
            self.close()
            raise TrainingFailed(f"--max_bad_steps {self.cfg.max_bad_steps}: so many updates in a row had a non-finite "
                                 "loss or gradient; saved. Look at the data and the reward, or start again with a "
                                 "lower --lr")
        if stop_signal:
            self.close()
            say(f"stopped after step {step}; continue with the same command and --resume")
            leave(128 + stop_signal)

    def keeps_model(self, step: int) -> bool:
        return self.cfg.model_every > 0 and step % self.cfg.model_every == 0

    def keep_model(self, step: int, model, tokenizer) -> None:
        """Every --model_every steps, write OUTPUT_DIR/models/step-N. Call it before `end_step`, which may stop the run:
        --resume does not repeat a step that has ended."""
        if self.keeps_model(step):
            save_model(model, tokenizer, self.directory / "models" / f"step-{step}")

    def finish(self, model, tokenizer) -> None:
        """Write OUTPUT_DIR/model."""
        save_model(model, tokenizer, self.directory / "model")
        self.close()
        say(f"saved {self.directory / 'model'}")

    def close(self) -> None:
        """End what `start` began. Python's exit handlers would not: with several processes, `leave` skips them."""
        if rank() == 0:
            os.close(self.lock)
        self.bar.close()
        if self.cfg.log_to == "wandb":
            import wandb
            wandb.finish()
        if self.catches_signals:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first. A directory gets such a name only when all of it is on disk."""
        found = [path for path in (self.directory / "checkpoint").glob("step-*") if path.name[5:].isdecimal()]
        return sorted(found, key=lambda path: int(path.name[5:]))

    def parameters_that_train(self) -> list[str]:
        """The names of all models' trainable parameters, whose optimizer state a checkpoint holds."""
        return [f"{name}.{key}" for name, (model, *_) in self.trained.items()
                for key, parameter in model.named_parameters() if parameter.requires_grad]

    def layout_of_extra(self) -> dict:
        """For each value in `extra`: dtype and shape of a tensor, or of each tensor in a dict of tensors, else None."""
        def layout(value):
            if isinstance(value, dict) and value and all(isinstance(x, torch.Tensor) for x in value.values()):
                return {key: layout(x) for key, x in value.items()}
            return (value.dtype, *value.shape) if isinstance(value, torch.Tensor) else None
        return {name: layout(value) for name, value in self.extra.items()}

    def state(self) -> dict:
        """All that a checkpoint holds. The tensors are the live ones: `dcp.load` fills them in place."""
        # What --resume must find the same, beside the flags (`check_directory`).
        same = {"script": self.script, "rows of --data": len(self.data.items), "checksum of --data": self.data.checksum,
                "layout of run.extra": repr(sorted(self.layout.items(), key=repr))}
        filled = {name: value for name, value in self.extra.items() if self.layout[name] is not None}
        rest = {name: value for name, value in self.extra.items() if self.layout[name] is None}
        if any(hasattr(x, "full_tensor") for x in tree_leaves(rest)):  # each rank would get the part that one has saved
            raise TrainingFailed("run.extra: a sharded tensor among other values; want a dict of nothing but tensors, "
                                 "or the whole tensor (common.unsharded)")
        # A tuple is saved as one object. Of a dict, `dcp` would save each value, with its key made a string.
        state = {"run": json.dumps(same), "position": self.data.position, "extra": filled, "rest_of_extra": (rest,),
                 "bad_steps": self.bad_steps,
                 "updates": {name: schedule.last_epoch for name, (*_, schedule) in self.trained.items()},
                 "random": torch.get_rng_state(),  # these three are the same on every rank
                 "random_of_python": random.getstate(), "random_of_numpy": np.random.get_state()}
        for name, (model, optimizer, _) in self.trained.items() if self.next_step else []:  # at 0, they are as loaded
            state[name] = model.state_dict()  # before named_parameters: FSDP puts its shards back in place here
            state[f"{name}_optimizer"] = moments = {}
            for key, parameter in model.named_parameters():
                if parameter.requires_grad:
                    moments[key] = optimizer.state[parameter] or dict(  # no gradient yet: what AdamW would begin with
                        step=torch.zeros((), device=parameter.device),
                        exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        return state

    def save_checkpoint(self) -> None:
        """Write to a temporary directory, flush, rename; only then remove the previous checkpoint. Collective."""
        if self.layout_of_extra() != self.layout:
            raise TrainingFailed("run.extra: a key, or a tensor's shape or dtype, is not as it was at run.start, where "
                                 "--resume wants to find it; such tensors may be in a list (whole: common.unsharded)")
        if self.parameters_that_train() != self.training:
            raise TrainingFailed("requires_grad has changed since run.start, but --resume wants to find it there as it "
                                 "is now; instead, set .grad to None before run.optimizer_step")
        final = self.directory / "checkpoint" / f"step-{self.next_step:06d}"
        temporary = final.with_name("unfinished")
        try:
            on_main_rank(lambda: shutil.rmtree(temporary, ignore_errors=True))  # left by a killed process
            dcp.save(self.state(), checkpoint_id=temporary)  # flushes its files to disk
            on_main_rank(lambda: os.rename(temporary, final))
            on_main_rank(lambda: [shutil.rmtree(older) for older in self.checkpoints()[:-1]])
        except (OSError, RuntimeError, dcp.CheckpointException) as error:
            shutil.rmtree(temporary, ignore_errors=True)  # it may be what fills the disk
            intact = self.checkpoints()[-1].name if self.checkpoints() else "no checkpoint"
            raise TrainingFailed(f"cannot save to {final.parent}: {innermost(error)}; {intact} is intact") from error

    def load_checkpoint(self) -> None:
        """Restore models, optimizers, schedules, data position and random state from the newest checkpoint."""
        path = self.checkpoints()[-1]
        self.next_step = int(path.name.removeprefix("step-"))
        if self.next_step > self.cfg.steps + 1:  # equal: all steps are done, but model/ may not have been written
            raise UserError(f"--resume: {self.directory} has done {self.next_step - 1} steps, more than --steps")
        with one_line_errors(f"--resume: {path} is damaged or of another model"):
            for _, optimizer, _ in self.trained.values() if self.next_step else []:
                for parameter in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
                    parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
                optimizer.step()  # makes the tensors of its state, whatever optimizer it is; `dcp.load` fills them
                optimizer.zero_grad()
            state = self.state()
            own = json.loads(state["run"])
            dcp.load(state, checkpoint_id=path)
            saved = json.loads(state["run"])
            if other := [f"{name} was {saved[name]}" for name in own if saved.get(name, own[name]) != own[name]]:
                raise UserError(f"--resume: {path} is of another run: {', '.join(other)}")
            self.extra |= state["rest_of_extra"][0]
        self.data.position, self.bad_steps = state["position"], state["bad_steps"]
        torch.set_rng_state(state["random"])
        random.setstate(state["random_of_python"])
        np.random.set_state(state["random_of_numpy"])
        for name, (*_, schedule) in self.trained.items():
            for _ in range(state["updates"][name]):  # from the start, since another --steps changes the rates
                schedule.step()

    def drop_later_lines(self) -> None:
        """Remove log lines written after the checkpoint: their steps are done again."""
        for path in filter(Path.exists, (self.directory / "metrics.jsonl", self.directory / "samples.jsonl")):
            with one_line_errors(f"--resume: {path} is damaged"), open(path) as lines:
                whole = [line for line in lines if line.endswith("}\n")]  # a killed process may have left half a line
                kept = "".join(line for line in whole if json.loads(line)["step"] < self.next_step)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(kept)
            os.replace(temporary, path)


# ------------------------------------------------------------------------------------------------------ models

# Files that transformers 5 leaves out when it saves a tokenizer; llama.cpp's converter and image servers want them
UNSAVED_FILES = ("tokenizer.model", "preprocessor_config.json", "processor_config.json")


def load_tokenizer(name: str, trust_remote_code: bool = False):
    """The tokenizer of a directory or hub id. If it has no pad token, EOS pads: no mask is made from ids."""
    if os.path.isdir(f"{name}/model") and os.path.isfile(f"{name}/metrics.jsonl"):
        raise UserError(f"--model {name}: is the output of a run; its model is {name}/model")
    with one_line_errors(f"--model {name}: no directory or hub id that has a tokenizer"):
        if not os.path.isdir(name) and not huggingface_hub.try_to_load_from_cache(name, "config.json"):
            # Without network this fails at once. The downloads below would retry for half a minute each.
            huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json"), timeout=30)
        # For some model types (Qwen2 is one) AutoTokenizer replaces the tokenizer.json by the architecture's own
        # tokenizer, which may split text differently. The one that came with the model is right.
        kind = get_tokenizer_config(name, trust_remote_code=trust_remote_code).get("tokenizer_class")
        if kind in ("TokenizersBackend", "PreTrainedTokenizerFast"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(name)
        else:  # mistral_format=False: not mistral-common's tokenizer, even where that is installed (vLLM brings it)
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, mistral_format=False)
        file = cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
        ours = type(tokenizer).__module__.startswith("transformers.")  # else a class that came with the model
        if file and ours and isinstance(tokenizer, PreTrainedTokenizerFast) and not splits_as_its_file(tokenizer, file):
            eos = tokenizer.eos_token  # which the architecture's class may know without the files
            tokenizer = PreTrainedTokenizerFast.from_pretrained(name)
            tokenizer.eos_token = tokenizer.eos_token or eos
        if not tokenizer("1")["input_ids"]:  # transformers makes up an empty one where a model has no tokenizer
            raise UserError(f"--model {name}: no tokenizer there")
        paths = [cached_file(name, file, _raise_exceptions_for_missing_entries=False,
                             _raise_exceptions_for_connection_errors=False) for file in UNSAVED_FILES]
        tokenizer.unsaved = {Path(path).name: Path(path).read_bytes() for path in paths if path}  # for `save_model`
    if tokenizer.eos_token_id is None:
        raise UserError(f"--model {name}: its tokenizer has no end-of-sequence token, so no completion could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def splits_as_its_file(tokenizer, file: str) -> bool:
    """Does the tokenizer split a text full of tricky cases in the way that its tokenizer.json does?"""
    end = tokenizer.eos_token or ""  # Llama 2's tokenizer adds a space after a special token
    text = f" In 2023, it's 1+1 =  two.\n\n\tÇa va? 你好:\n    the\n\n\nthe\n(i).x{end}x{end} x"
    own = tokenizers.Tokenizer.from_file(file)
    return tokenizer.encode(text, add_special_tokens=False) == own.encode(text, add_special_tokens=False).ids


def load_model(name: str, device: torch.device, trainable: bool = True, cls=AutoModelForCausalLM,
               trust_remote_code: bool = False, **config_changes):
    """A model to train (float32 masters) or a frozen one (bfloat16 on CUDA), sharded over the ranks.

    It stays in evaluation mode: with dropout or router noise, the policy that is scored would not be the policy that
    sampled. Dropout rates are set to 0 as well, since layers that recompute their activations have to be in training
    mode (`make_optimizer`). Only rank 0 reads the weights; the others receive their shards from it, so that no GPU ever
    holds the whole model in float32. `saved_dtype` is the checkpoint's own dtype, which `save_model` writes.
    """
    errors = f"--model {name}: not a model that transformers can load"
    with one_line_errors(errors):
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **config_changes)
        architecture = "".join(config.architectures or ())
        if cls is AutoModelForCausalLM and re.search("ForSequenceClassification|ForMaskedLM", architecture):
            raise UserError(f"--model {name}: {architecture} is a classifier (as reward models are) or an encoder, and "
                            "no causal language model")
        if trainable and getattr(config, "quantization_config", None):
            raise UserError(f"--model {name}: its weights are quantized; to train, take the checkpoint that is not")
        if cls is AutoModelForSequenceClassification:
            ensure_classifier(type(config))
        saved_dtype = config.dtype or torch.float32
        text_config = config.get_text_config()  # of a model that also reads images, its language part
        if getattr(text_config, "attn_logit_softcapping", None):  # Gemma 2
            config._attn_implementation = "eager"  # transformers 5.17 would choose sdpa, which leaves the cap out
        for key, value in text_config.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(text_config, key, 0.0)
    dtype = torch.float32 if trainable else compute_dtype(device)

    def read_weights():
        with one_line_errors(errors), torch.random.fork_rng(devices=[]):  # a new head draws random numbers
            model, report = cls.from_pretrained(name, config=config, dtype=dtype, use_safetensors=True,
                                                trust_remote_code=trust_remote_code, output_loading_info=True,
                                                ignore_mismatched_sizes=True)
            if mismatched := report["mismatched_keys"]:  # by itself, transformers would not say which
                key, found, wanted = min(mismatched)
                raise UserError(f"--model {name}: {key} is {[*found]}, but {[*wanted]} is wanted")
            # Missing weights would stay random, which only those of a head that is to be trained may be.
            if missing := set(report["missing_keys"]) - ({"score.weight"} if trainable else set()):
                hint = " (is it a reward model?)" if missing == {"score.weight"} else ""
                raise UserError(f"--model {name}: no weights for {min(missing)}{hint}")
            if trainable and cls is AutoModelForCausalLM and (unused := report["unexpected_keys"]):
                say(f"--model {name}: holds weights that its config.json has no place for, such as {min(unused)}")
            return model
    model = on_main_rank(read_weights)
    # If the head in the file differs from the embedding, transformers leaves the two untied, whatever config.json says.
    # Other programs would tie them, and so would a model on the meta device.
    ties = cls is AutoModelForCausalLM and getattr(text_config, "tie_word_embeddings", False)  # Inkling's lacks it
    head = model.get_output_embeddings() if model and ties else None
    if from_main_rank(head is not None and head.weight is not model.get_input_embeddings().weight):
        whole = model.config if model else config
        whole.tie_word_embeddings = whole.get_text_config().tie_word_embeddings = False
    if rank() > 0:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):  # DiffLlama draws some numbers all the same
            model = cls.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if cls is AutoModelForSequenceClassification and getattr(getattr(model, "score", None), "out_features", 0) != 1:
        raise UserError(f"--model {name}: want a sequence classifier with one label, whose head is a layer named score")
    model.saved_dtype = saved_dtype
    model.eval().requires_grad_(trainable)
    if text_config is not config:  # what reads images gets no gradient, and so needs no moments in the optimizer
        for parameter in set(model.base_model.parameters()) - set(model.get_decoder().parameters()):
            parameter.requires_grad_(False)
    return shard(model, device)


def ensure_classifier(config_class) -> None:
    """Some language models come without a sequence classifier (Granite, Cohere, OLMoE): put one together for them."""
    if config_class in MODEL_FOR_CAUSAL_LM_MAPPING and config_class not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        base = MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__bases__[0]  # Granite's: GranitePreTrainedModel
        name = base.__name__.replace("PreTrainedModel", "ForSequenceClassification")
        prefix = base.base_model_prefix or "model"  # Llama 4 leaves it empty
        # __module__: transformers would take a class of this module for custom code, and then neither set up
        # Falcon-H1's unsaved buffers nor rename Dory's weights.
        classifier = type(name, (GenericForSequenceClassification, base),
                          {"base_model_prefix": prefix, "__module__": base.__module__})
        # transformers 5.17's `register` does nothing for a config of its own
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING._extra_content[config_class] = classifier


def model_name(cfg) -> str:
    """--model as from_pretrained takes it."""
    return build_tiny_model(cfg.data) if cfg.model == "tiny" else cfg.model


def load_policy(cfg, device: torch.device, cls=AutoModelForCausalLM, **config_changes):
    """--model -> (model to train, tokenizer), after checking that the two fit."""
    name = model_name(cfg)
    tokenizer = load_tokenizer(name, cfg.trust_remote_code)
    policy = load_model(name, device, cls=cls, trust_remote_code=cfg.trust_remote_code, **config_changes)
    check_vocabulary(name, tokenizer, policy)
    context = context_length(policy.config)
    if getattr(cfg, "max_new_tokens", 0) >= context:
        raise UserError(f"--max_new_tokens {cfg.max_new_tokens}: the context of {cfg.model} is {context} tokens")
    if context < math.inf:  # what the tokenizer says may be less, as for R1's distilled models, and is only a default
        tokenizer.model_max_length = context
    if policy.can_generate():  # `generate` must stop where `sample` does; Qwen2.5's base models list no end of a turn
        config, file = policy.generation_config, Path(name, "generation_config.json")
        with one_line_errors(f"--model {name}: its generation_config.json is not usable"):
            if file.exists():
                json.loads(file.read_bytes())  # transformers ignores a broken one, and with it the EOS that it names
            config.eos_token_id = sorted({*eos_ids(policy, tokenizer), turn_end(tokenizer)})
            if not config.do_sample:  # then these have no effect, but transformers would refuse to save them
                for unused in ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff",
                               "eta_cutoff"):
                    setattr(config, unused, None)
            config.validate(strict=True)  # now, and not when the trained model is saved
    return policy, tokenizer


def check_vocabulary(name: str, tokenizer, model) -> None:
    """Raise UserError if a token has no row in the model's embedding. Special tokens that the chat template never uses
    may lack one: Gemma 3 1B's <image_soft_token>, Code Llama's <FILL_ME>, a <pad> (EOS replaces it)."""
    rows = model.config.get_text_config().vocab_size
    if tokenizer.pad_token_id >= rows:
        tokenizer.pad_token = tokenizer.eos_token
    unread = {token for token in special_tokens(tokenizer) if token not in f"{tokenizer.chat_template}"}
    unread -= {tokenizer.bos_token, tokenizer.eos_token}
    largest = max(i for token, i in tokenizer.get_vocab().items() if token not in unread)
    if largest >= rows:
        raise UserError(f"--model {name}: its tokenizer has ids up to {largest}, its embedding only {rows} rows")


def context_length(config) -> float:
    """How many tokens a row of the model may have; infinite for one without a limit, such as Mamba."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # Phi-3: a row beyond this would change the positions of its whole batch
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None) or math.inf


def load_reference(cfg, device: torch.device):
    """A frozen copy of the policy before its first update."""
    return load_model(model_name(cfg), device, trainable=False, trust_remote_code=cfg.trust_remote_code)


def decoder_layers(model) -> torch.nn.ModuleList:
    """The stack of transformer layers: the ModuleList with the most parameters; an empty one for a module without."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()), default=torch.nn.ModuleList())


def compute_dtype(device: torch.device) -> torch.dtype:
    """What models compute in. Parameters that train are float32 all the same."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def shard(model, device: torch.device):
    """FSDP2: each rank keeps a share of every parameter, and gathers one layer at a time to compute with it (or, if the
    model `is_small`, all at once).

    On CUDA the gathered copy is bfloat16, while shard, gradient and optimizer state stay float32. This is also how a
    single GPU gets its mixed precision. Gradients are summed over ranks, not averaged, since token weights are global.
    """
    if device.type == "cuda":
        fuse_norms(model)
    elif mkl_is_slow():
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.__class__ = OneDNNLinear
    frozen, dtype = not any(parameter.requires_grad for parameter in model.parameters()), compute_dtype(device)
    if world_size() == 1 and (frozen or dtype == torch.float32):  # there FSDP would take 15% more time for nothing
        return model.to(device)
    weights = model.state_dict() if rank() == 0 and world_size() > 1 else {}
    layers = [] if is_small(model, device) else decoder_layers(model)
    # The root takes the parameters of layers that share some (Zamba): a parameter can be in one FSDP module only.
    uses = collections.Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    own = [layer for layer in layers if all(uses[id(parameter)] == 1 for parameter in layer.parameters())]
    # Inputs keep the dtype that the model gave them (rotary angles: float32), as they would without FSDP.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [*own, model]:
        fully_shard(module, mp_policy=precision,
                    reshard_after_forward=frozen or module is not model)  # backward begins with the root: keep it
        if world_size() > 1:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.11 lacks it
                # A rank without a gradient for a parameter (an expert that no token chose) sends zeros. Else its
                # sums would be of fewer parameters than those of other ranks, and mix them up or never end.
                module.set_reduce_scatter_unused_params(True)
    if rank() > 0:  # still on the meta device
        model.to_empty(device=device)  # keeps tied parameters one
    if world_size() > 1:
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        dtypes = from_main_rank([buffer.dtype for buffer in model.buffers()])
        for buffer, dtype in zip(model.buffers(), dtypes):  # not all are in the state dict: rotary frequencies, for one
            buffer.data = buffer.to(dtype)  # before transformers 5.24, `from_config` ignores what must stay float32
            dist.broadcast(buffer, 0)
        # The generation config says which tokens end a completion, and only rank 0 has read it.
        model.generation_config = from_main_rank(getattr(model, "generation_config", None))
    return model


def is_small(model, device: torch.device) -> bool:
    """Whether the whole model is to be one FSDP module: on one GPU, if this takes less than a fifth of its memory: 12
    bytes a parameter, for weights and gradients in bfloat16 and two copies of the gradients in float32. A module per
    layer takes these for one layer at a time, but makes a short pass twice as slow (0.5B, 4,096 tokens, H200)."""
    size = sum(parameter.numel() for parameter in model.parameters())
    return device.type == "cuda" and world_size() == 1 and 12 * size < torch.cuda.mem_get_info(device)[1] / 5


def fuse_norms(model):
    """Run every RMSNorm whose code is the same as Llama's (most models' is) as one CUDA kernel instead of eight."""
    def body(cls):
        code = getattr(cls.forward, "__code__", None)
        return code and (code.co_code, code.co_names, code.co_consts)

    def forward(norm, hidden):  # [..., H] -> [..., H]
        return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
    for module in model.modules():
        if body(type(module)) == body(LlamaRMSNorm):
            module.forward = types.MethodType(forward, module)


@functools.cache
def mkl_is_slow() -> bool:
    """Is this an AMD CPU since Zen 5, with AVX-512? MKL, which multiplies PyTorch's float32 matrices, runs at half the
    possible speed there. (Older ones have not been tried.)"""
    with contextlib.suppress(OSError):  # only Linux has the file
        family = re.search(r"AuthenticAMD\ncpu family\s*: (\d+)", Path("/proc/cpuinfo").read_text())
        return (family is not None and int(family[1]) >= 26 and torch.backends.cpu.get_cpu_capability() == "AVX512"
                and torch.backends.mkldnn.is_available())
    return False


def linear(x, weight, bias=None):
    """F.linear: [..., in], [out, in], [out] -> [..., out]. Where `mkl_is_slow`, oneDNN computes large float32 products.

    PyTorch uses MKL for matrix products, but oneDNN for convolutions. So the product is computed as a convolution
    with a 1×1 kernel, in which each row of x is a pixel. That copies the weights, which is too slow for few rows. For
    these there is an operator of oneDNN's, but without gradients: it serves in decoding.
    """
    rows = math.prod(x.shape[:-1])
    gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    # oneDNN takes about a millisecond to compile code for each new shape, which does not pay in a model of few layers.
    large = weight.numel() >= 2 ** 18 or rows * weight.numel() >= 2 ** 25
    many = rows >= 256 and x.numel() > 20_480  # PyTorch convolves smaller images without oneDNN
    if (not large or gradient and not many or x.device.type != "cpu" or x.dtype != torch.float32
            or torch.is_autocast_enabled("cpu") or not mkl_is_slow()):
        return F.linear(x, weight, bias)
    if not many:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    image = x.reshape(1, 1, rows, -1).permute(0, 3, 1, 2)  # [1, in, 1, rows]: in memory, channels stay last
    # The dilation changes nothing, but without it PyTorch would not take oneDNN for a 1×1 kernel in a single thread.
    out = F.conv2d(image, weight[:, :, None, None], bias, dilation=2)  # [1, out, 1, rows]
    return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)


class OneDNNLinear(torch.nn.Linear):
    """A Linear layer that computes by `linear`."""

    def forward(self, input):
        return linear(input, self.weight, self.bias)


def reshard(model):
    """Free FSDP's gathered parameters. After a forward pass without a backward pass, the root still has them: an
    optimizer cannot update these, and the next pass would use them unchanged."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def call_gathered(function, model, *args):
    """function(model, *args), run as FSDP runs a forward pass, so that it sees gathered parameters."""
    if not isinstance(model, FSDPModule):
        return function(model, *args)
    model.work = functools.partial(function, model)  # FSDP wraps methods, by name
    register_fsdp_forward_method(model, "work")
    return model.work(*args)


@contextlib.contextmanager
def gathered(model):
    """Gather all parameters once, so that ranks may call the model a different number of times: no call is collective.

    FSDP's hooks are taken off meanwhile: they cost a decoding step 0.1 ms a layer, and they wait for other streams,
    which is not allowed while a CUDA graph is captured.
    """
    with contextlib.ExitStack() as afterwards:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                afterwards.callback(module.reshard)
                for name in ("_forward_pre_hooks", "_forward_hooks"):
                    afterwards.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, collections.OrderedDict())
        yield


def save_model(model, tokenizer, directory: str | Path) -> None:
    """Write what from_pretrained, vLLM and TGI load, in the dtype the model came in. Collective; all or nothing:
    `directory` is replaced, with whatever it holds."""
    directory = Path(directory)
    # gathered one at a time into rank 0's CPU memory: no GPU ever holds the whole model
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    distinct = dict(model.named_parameters()) | dict(model.named_buffers())  # a tied weight has one name here
    exact = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())  # such as an expert router's biases
    weights = {name: tensor for name, tensor in weights.items() if name in distinct}
    dtype = getattr(model, "saved_dtype", model.dtype)  # if `load_model` has loaded it, that of the file
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not any(part in name for part in exact):
            weights[name] = tensor.to(dtype)

    def fill(folder):
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")  # save_pretrained wrote the masters'
        if type(model.config).__module__.startswith("transformers."):  # then no code of the model's own lies beside it
            config.pop("auto_map", None)
        config.get("text_config", config).update(rotary_settings_4(model.config))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        path = folder / "tokenizer_config.json"  # transformers 4 refuses the newer names; 5 reads both
        text = path.read_text("utf-8").replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
        settings = json.loads(text.replace('"extra_special_tokens": [', '"additional_special_tokens": ['))
        for name, content in getattr(tokenizer, "unsaved", {}).items():
            (folder / name).write_bytes(content)
            if name == "tokenizer.model":  # without these, llama.cpp would split added tokens and add a BOS
                settings["added_tokens_decoder"] = {
                    i: token.__getstate__() for i, token in tokenizer.added_tokens_decoder.items()}
                settings["add_bos_token"] = tokenizer("1")["input_ids"][0] == tokenizer.bos_token_id
        path.write_text(json.dumps(settings, indent=2) + "\n")
    on_main_rank(lambda: write_directory(directory, fill))


def rotary_settings_4(config) -> dict:
    """A model's rotary settings under the names of transformers 4, on which some engines build. Without them such an
    engine takes defaults, such as a base of 10,000, and says nothing."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma 3 has others for its sliding windows
    settings = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if rope.get("rope_type") == "longrope":  # Phi-3, which refuses any other field here
        settings["rope_scaling"] = {"type": "longrope", "long_factor": rope["long_factor"],
                                    "short_factor": rope["short_factor"]}
    elif rope.get("rope_type", "default") != "default":
        settings["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return settings


def write_directory(directory: Path, fill, replace: bool = True) -> None:
    """Fill a temporary directory with `fill(path)`, flush it to disk, and rename it to `directory`.

    replace=False is for processes that may build the same thing at once: the first to finish wins.
    """
    old = directory.with_name(f".{directory.name}.old")  # hidden, because a user's own copy may be called model.old
    temporary = directory.with_name(f".{directory.name}.tmp" if replace else f".{directory.name}.tmp-{os.getpid()}")
    try:
        remove(temporary)  # left by a process that was killed, as `old` may be
        temporary.mkdir(parents=True)
        fill(temporary)
        for file in filter(Path.is_file, temporary.rglob("*")):
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        remove(old)
        if replace and directory.exists():
            os.rename(directory, old)
        os.rename(temporary, directory)
        with contextlib.suppress(OSError):  # NFS keeps a file that another process has open
            remove(old)
    except (OSError, SafetensorError) as error:
        if replace or not directory.exists():  # else another process was first
            raise TrainingFailed(f"cannot write {directory}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a file or directory, if it is there; of a link, not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------ command line

class UserError(Exception):
    """Something the user can fix: `launch` prints it as one line and exits with code 2."""
    exit_code = 2


class TrainingFailed(UserError):
    """The run cannot continue, and the command line is not to blame: exit code 1."""
    exit_code = 1


@contextlib.contextmanager
def one_line_errors(what: str, kind: type[UserError] = UserError):
    """Turn whatever libraries raise for a wrong name or file into an error of this kind."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except dcp.CheckpointException as error:  # it is not a subclass of Exception
        raise kind(f"{what} ({innermost(error)})") from error
    except Exception as error:
        reason = getattr(error, "strerror", None) or textwrap.shorten(str(error), 200) or type(error).__name__
        raise kind(f"{what} ({reason})") from error


def innermost(error: BaseException) -> str:
    """The first line of an error's root cause, for a message of one line."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    if isinstance(error, dcp.CheckpointException):  # it holds an error of each rank that failed
        return innermost(next(iter(error.failures.values()))[0])
    # An error that comes from another rank has lost its cause. This is what torch.save says of a full disk.
    hint = " (is the disk full?)" if "unexpected pos" in str(error) else ""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}{hint}"


def flag(default, help: str):
    """A dataclass field that HfArgumentParser turns into `--name`, with its help text. Bounds of numbers: LIMITS."""
    return field(default=default, metadata={"help": help})


@dataclass
class RunConfig:
    """The flags of every script."""
    model: str = flag("tiny", "tiny (built in), a directory, or a hub id")
    data: str = flag("arithmetic", "arithmetic[:DIGITS] (built in; tiny learns up to 3), FILE.jsonl[.gz], or a hub "
                                   "id[:CONFIG[:SPLIT]]")
    eval_data: str = flag("", "held-out data, in the same forms; arithmetic brings its own")
    system_prompt: str = flag("", "system message for prompts that have none (text before the prompt, if there is no "
                                  "chat template); none: no message; empty: one that asks for <think> and <answer>, "
                                  "but no message for preferences or where a plain prompt meets no template")
    thinking: Literal["auto", "on", "off"] = flag(
        "auto", "whether the model is to think about problems, if its chat template has a switch for it (Qwen3's); "
                "auto: on, or with --system_prompt the template's default")
    max_prompt_tokens: int = flag(1024, "longer prompts are left out, and the script says how many")
    trust_remote_code: bool = flag(False, "run model code that comes with the checkpoint")
    output_dir: str = flag("", "metrics.jsonl, model/, checkpoint/ and the rest go here; empty: runs/SCRIPT")
    overwrite: bool = flag(False, "replace the run that OUTPUT_DIR holds")
    resume: bool = flag(False, "continue from OUTPUT_DIR/checkpoint")
    seed: int = flag(0, "seed of data order, sampling and new heads")
    log_to: Literal["none", "tensorboard", "wandb"] = flag("none", "a second log, beside metrics.jsonl")
    save_every: int = flag(50, "steps between checkpoints")
    model_every: int = flag(0, "steps between models that are kept in OUTPUT_DIR/models; 0: only the last, in model/")
    eval_every: int = flag(20, "steps between evaluations; there is one before the first step and one after the last")
    eval_samples: int = flag(1, "k: if above 1, also sample k completions per problem, for avg@k and pass@k")
    micro_batch_tokens: int = flag(4096, "padded tokens per forward and backward pass: lower it when memory runs out")
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass: less memory, 1/3 more time")
    freeze_layers: float = flag(0.0, "this share of the layers, from the first, does not train (which saves "
                                     "memory, but little time)")
    lr_schedule: Literal["constant", "linear", "cosine"] = flag(
        "constant", "after the warm-up: constant, or falling to 0 by the last update, if all steps make theirs")
    warmup_steps: int = flag(0, "optimizer steps of linear warm-up, the first with a learning rate of 0")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm (PPO: policy and critic each on its own)")
    max_bad_steps: int = flag(5, "updates in a row with a non-finite loss or gradient before the run gives up")


LARGEST = 1e30  # rules out infinity
# The lowest and highest values of number flags. The lowest of one that is not listed is 1 (int) or 0 (float), or its
# default if that is lower.
LIMITS = {
    "max_grad_norm": (1e-8, LARGEST), "temperature": (1e-8, LARGEST), "beta": (1e-8, LARGEST),
    "clip_eps": (0, 1), "clip_low": (0, 1), "clip_high": (0, 10), "label_smoothing": (0, 0.5),
    "freeze_layers": (0, 1), "gamma": (0, 1), "lam": (0, 1), "seed": (0, 2 ** 32 - 1),
    "warmup_steps": (0, LARGEST), "overlong_buffer": (0, LARGEST), "group_size": (2, 10 ** 6),
    "prompts_per_step": (1, 10 ** 6), "pairs_per_step": (1, 10 ** 6), "eval_samples": (1, 10 ** 6),
    "updates_per_batch": (1, 10 ** 6), "missing_eos_score": (-LARGEST, LARGEST),
}


def parse_config(Config, args: list[str]):
    """Flags, or a YAML/JSON file followed by further flags -> Config. Raises UserError."""
    parser = HfArgumentParser(Config, allow_abbrev=False, exit_on_error=False)
    if args and re.fullmatch(r"[^-].*\.(ya?ml|json)", args[0]):
        with one_line_errors(f"{args[0]}: want a YAML or JSON mapping from flag names to values"):
            import yaml
            text = Path(args[0]).read_bytes()
            if args[0].endswith(".json"):
                settings = typed = json.loads(text)
            else:
                settings, typed = yaml.safe_load(text), yaml.load(text, yaml.BaseLoader)
            if not isinstance(settings, dict | None):
                raise UserError(f"{args[0]}: want a mapping from flag names to values, not a {type(settings).__name__}")
            settings = settings or {}
            if several := [name for name, value in settings.items() if isinstance(value, (list, dict))]:
                raise UserError(f"{args[0]}: {several[0]}: want a single value")
            for setting in fields(Config):  # by YAML's rules `off` and `no` are False, but here --thinking may be off
                if setting.type is not bool and settings.get(setting.name) is not None:
                    settings[setting.name] = typed[setting.name]
            args = [f"--{name}" if value is True and re.match("no[_-]", str(name))  # such a flag takes no value
                    else f"--{name}={value}" for name, value in settings.items() if value is not None] + args[1:]
    try:
        cfg, unknown = parser.parse_args_into_dataclasses(args, return_remaining_strings=True, look_for_args_file=False)
    except argparse.ArgumentError as error:  # its argument_name: --save_every/--save-every
        raise UserError(f"{error.argument_name.split('/')[0]}: {error.message}") from None
    if unknown:
        if re.fullmatch(r"[^-].*\.(ya?ml|json)", unknown[0]):
            raise UserError(f"{unknown[0]}: a file of flags has to come first")
        nearest = difflib.get_close_matches(unknown[0].split("=")[0].lstrip("-"), vars(cfg), n=1)
        advice = f", did you mean --{nearest[0]}?" if nearest else "; see --help"
        raise UserError(f"unknown flag {unknown[0]}{advice}")
    return cfg


def check_config(cfg) -> None:
    """Raise UserError for impossible values, whether they come from flags or from Python."""
    for setting in fields(cfg):
        name, kind, value = setting.name, setting.type, getattr(cfg, setting.name)
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise UserError(f"--{name} {value}: must be one of {', '.join(get_args(kind))}")
        if get_origin(kind) is None and not isinstance(value, (int, float) if kind is float else kind):
            raise UserError(f"--{name} {value!r}: must be of type {kind.__name__}")
        if kind is str and re.search("[\ud800-\udfff]", value):
            raise UserError(f"--{name} {value!r}: is not UTF-8")
        if kind in (int, float):
            low, high = LIMITS.get(name, (min(getattr(type(cfg), name, 1), 1 if kind is int else 0), LARGEST))
            if not low <= value <= high:  # NaN fails this too
                wanted = f"between {low} and {high}" if high < 10 ** 6 or value > high else f"at least {low}"
                raise UserError(f"--{name} {value}: must be {'above 0' if low == 1e-8 and not value > 0 else wanted}")
    if getattr(cfg, "minibatches", 1) > getattr(cfg, "prompts_per_step", 1) * getattr(cfg, "group_size", 1):
        raise UserError(f"--minibatches {cfg.minibatches}: more than the completions of a step")
    # A buffer longer than --max_new_tokens would penalize even an empty completion. Only the default may.
    if hasattr(cfg, "overlong_buffer") and cfg.overlong_buffer > max(cfg.max_new_tokens, type(cfg).overlong_buffer):
        raise UserError(f"--overlong_buffer {cfg.overlong_buffer}: more than --max_new_tokens {cfg.max_new_tokens}")


def warn_of_flags(cfg) -> None:
    """Warn if nothing is evaluated, if no update has the full --lr, or if a real model trains with defaults that are
    meant for the tiny one."""
    if not (cfg.eval_data or is_built_in(cfg.data) or getattr(cfg, "eval_problems", "")):
        say("no --eval_data: nothing is evaluated")
    if cfg.warmup_steps >= (updates := most_updates(cfg)):
        say(f"--warmup_steps {cfg.warmup_steps}: the run has at most {updates} updates, so none has the full --lr")
    sizes = ["lr", "value_lr", "overlong_buffer", "lam", *(["kl_coef"] if hasattr(cfg, "lam") else [])]  # PPO's β
    if getattr(cfg, "on_policy", True) or cfg.eval_problems or is_built_in(cfg.data):  # else dpo.py samples nothing
        sizes.append("max_new_tokens")
    defaults = [f"--{size} {value}" for size, value in vars(cfg).items()
                if size in sizes and value == getattr(type(cfg), size, None)]
    if defaults and cfg.model != "tiny":
        say(f"{', '.join(defaults)}: these values suit the tiny model; README.md has a real model's")


def launch(main, Config) -> None:
    """Run a script: parse its flags and call `main(cfg)`. A UserError becomes one line on stderr and an exit code."""
    Run.catches_signals = True
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS:
        huggingface_hub.utils.enable_progress_bars()  # downloads take long: show their progress
    huggingface_hub.utils.logging.set_verbosity_error()
    if "RANK" in os.environ:  # tqdm's own lock has a semaphore, of which Python 3.14 would warn after os._exit
        tqdm.set_lock(threading.RLock())
    sys.stderr.write, sys.stderr.flush = outliving_reader(sys.stderr.write), outliving_reader(sys.stderr.flush)
    try:
        main(parse_config(Config, sys.argv[1:]))
        leave()
    except KeyboardInterrupt:  # before `Run.start`, which leaves signals to `Run.note_signal`: nothing to save yet
        leave(130, together=False)
    except Exception as error:
        text = str(error) if isinstance(error, (UserError, RuntimeError)) else ""
        text = re.sub("^--reward .*", "", text, flags=re.S)  # it quotes a row, which may hold the words below
        if deserted := re.search("gloo.* by peer", text):  # "Connection closed by peer"
            error = TrainingFailed("another process of this run has ended (the last checkpoint, if any, is intact)")
        elif re.search("out of memory|can't allocate memory", text):  # a GPU's, also to NCCL; the CPU's
            error = TrainingFailed(f"out of memory {memory_advice(error)} (the last checkpoint, if any, is intact): "
                                   f"{text.splitlines()[0]}")
        elif not isinstance(error, UserError):  # a bug
            if world_size() == 1:
                raise
            traceback.print_exc()
            leave(1, together=False)
        if deserted or os.environ.get("LOCAL_RANK", "0") != "0":
            # Most errors reach all ranks. Rank 0 reports them and exits, and torchrun then ends this process. If it is
            # still alive after this wait, the error is its own.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(15)
        tqdm.write(f"{Path(sys.argv[0]).name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        leave(error.exit_code, together=False)


def leave(code: int = 0, together: bool = True) -> None:
    """End the process; with `together`, only when every rank has got here and has thus saved everything."""
    if world_size() > 1:
        if together:
            dist.barrier()
        for child in multiprocessing.active_children():  # a reward function's workers, which an exit handler would end
            child.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a rank that shuts gloo down while others still do is sometimes aborted
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)


def outliving_reader(method):
    """A stream's method, made to fail silently: Ctrl-C also ends the `tee` that a run is piped into, but the run, which
    nobody reads then, still has to save."""
    def call(*args):
        with contextlib.suppress(OSError):
            return method(*args)
    return call


def memory_advice(error: BaseException) -> str:
    """Which phase ran out of memory and which flag helps, judged by the functions in the error's traceback."""
    functions = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    phases = {"load_model": "while loading the model: use more GPUs",
              "answer_logprobs": "in a forward pass: lower --micro_batch_tokens (--resume if there is a checkpoint)",
              "sample": "while sampling: lower --eval_samples, if this was an evaluation, or start again with a lower "
                        "--prompts_per_step (dpo.py: --pairs_per_step) or --max_new_tokens",
              "optimizer_step": "in the optimizer step: use more GPUs, or start again with --freeze_layers"}
    return next((advice for name, advice in phases.items() if name in functions),
                "in a forward or backward pass: --resume with a lower --micro_batch_tokens or --gradient_checkpointing")


# --------------------------------------------------------------- the built-in model, its problems and rankings

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
TINY_CONTEXT = 1024
TINY_VOCABULARY = ["<pad>", "<eos>", "<unk>", *TAGS, *"0123456789+-*=(),? "]


def arithmetic_rows(digits: int, split: str) -> list[dict]:
    """Additions of two numbers of `digits` digits, the same in every run: {"prompt": "12+34=?", "answer": "46"}.

    Train and eval share no problem, where a+b and b+a count as one. Up to two digits they hold all problems there are;
    from three digits on, 8,000 of them.
    """
    low, high = (10 ** (digits - 1) if digits > 1 else 0), 10 ** digits
    draw = random.Random(digits)
    if digits <= 2:
        pairs = list(itertools.combinations_with_replacement(range(low, high), 2))
        draw.shuffle(pairs)
    else:
        drawn = (tuple(sorted((draw.randrange(low, high), draw.randrange(low, high)))) for _ in range(16_000))
        pairs = list(dict.fromkeys(drawn))[:8_000]
    held_out = min(200, len(pairs) // 5)
    if split == "eval":
        chosen = [pair if draw.random() < 0.5 else pair[::-1] for pair in pairs[:held_out]]
    else:
        chosen = list(dict.fromkeys(order for a, b in pairs[held_out:] for order in ((a, b), (b, a))))
    return [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a, b in chosen]


def worked_answer(prompt: str, draw: random.Random, carry_forgotten: float, answer_slipped: float) -> str:
    """Column addition with mistakes: "57+68=?" -> "<think>7+8=15,5+6+1=12</think><answer>125</answer>"."""
    a, b = prompt.removesuffix("=?").split("+")
    columns, digits, carry = [], "", 0
    for x, y in zip(reversed(a), reversed(b)):
        if carry and draw.random() < carry_forgotten:
            carry = 0
        total = int(x) + int(y) + carry
        columns.append(f"{x}+{y}={total}" if not columns else f"{x}+{y}+{carry}={total}")
        digits, carry = f"{total % 10}{digits}", total // 10
    answer = f"{carry or ''}{digits}"
    if draw.random() < answer_slipped:
        place = draw.randrange(len(answer))
        wrong = draw.choice("0123456789".replace(answer[place], ""))
        answer = answer[:place] + wrong + answer[place + 1:]
    return f"<think>{','.join(columns)}</think><answer>{answer}</answer>"


def tiny_tokenizer():
    """One token per character, tag, pad and EOS."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TINY_VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])  # or they would be split
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                                   clean_up_tokenization_spaces=False)


def train_tiny_model(digits: int):
    """A 0.6M-parameter Qwen2, trained on worked answers with mistakes in them: it knows the right way and wrong ones.

    So reinforcement learning has something to choose from. About two in five sampled answers are right, and half of
    the greedy ones.
    """
    tokenizer, draw, rows = tiny_tokenizer(), random.Random(0), arithmetic_rows(digits, "train")
    steps, threads = 300, torch.get_num_threads()
    torch.set_num_threads(1)  # how sums round depends on the number of threads; the weights must not
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random state alone
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
            max_position_embeddings=TINY_CONTEXT, pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id, bos_token_id=None))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0, fused=True)
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 10, steps)
        for _ in tqdm(range(steps), desc="building the tiny model (once)", leave=False, disable=None):
            prompts = [row["prompt"] for row in draw.choices(rows, k=64)]
            answers = [worked_answer(prompt, draw, carry_forgotten=0.6, answer_slipped=0.4) for prompt in prompts]
            batch = tokenizer([prompt + answer + "<eos>" for prompt, answer in zip(prompts, answers)], padding=True,
                              return_tensors="pt")
            labels = batch.input_ids.where(batch.attention_mask.bool(), -100)
            labels[:, :len(prompts[0])] = -100  # the prompts: one token a character, all equally long
            model(input_ids=batch.input_ids, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    torch.set_num_threads(threads)
    return model, tokenizer


def build_tiny_model(data: str) -> str:
    """The directory of the warm-started tiny model: trained on the first call (half a minute of one core), then kept.

    Its name holds a hash of everything that determines the weights, but for how the CPU rounds. If several processes
    start at once, each may train a model; the first to finish is kept.
    """
    digits = arithmetic_digits(data) if is_built_in(data) else 2
    recipe = [*map(inspect.getsource, (arithmetic_rows, worked_answer, tiny_tokenizer, train_tiny_model)), digits,
              TINY_VOCABULARY, TINY_CONTEXT, torch.__version__, transformers.__version__]
    directory = Path("runs") / f"tiny-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]}"

    def fill(folder):
        say("building the tiny model (once, for about half a minute)")
        for part in train_tiny_model(digits):  # model, tokenizer
            part.save_pretrained(folder)
    on_main_rank(lambda: directory.exists() or write_directory(directory, fill, replace=False))
    return str(directory)


def build_tiny_preferences(data: str, split: str) -> Path:
    """The built-in rankings, kept beside the tiny model: four of its samples a problem, right ones first.

    The verifier stands in for the human or the language model who would judge. Problems whose samples are all right or
    all wrong give no row.
    """
    tiny = build_tiny_model(data)
    recipe = [inspect.getsource(part) for part in (build_tiny_preferences, sample, decode, pick_tokens)]
    path = Path(f"{tiny}-ranked-{split}-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:6]}", "ranked.jsonl")
    if from_main_rank(path.exists()):
        return path
    tokenizer, model = load_tokenizer(tiny), AutoModelForCausalLM.from_pretrained(tiny)
    problems, completions, lines = read_problems(data, split)[:8000], [], []
    say(f"sampling answers to {len(problems)} problems from the tiny model (once)")
    prompts = [problem.prompt for problem in problems]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for first in range(0, len(prompts), 1000):  # all at once would take 3 GB
            completions += sample(model, tokenizer, prompts[first:first + 1000], 4, 60).completions
    for problem, texts in zip(problems, np.reshape(completions, (-1, 4)).tolist()):
        scores = {text: float(is_equivalent(extract_answer(text, closed_only=True), problem.answer)) for text in texts}
        if len(set(scores.values())) == 2:
            ranked = sorted(scores, key=scores.get, reverse=True)
            lines.append(json.dumps({"prompt": problem.prompt, "responses": ranked,
                                     "scores": [scores[text] for text in ranked], "answer": problem.answer}) + "\n")
    if not lines:
        raise UserError(f"{data}: the tiny model answers none of these right, so there is nothing to rank")
    on_main_rank(lambda: write_directory(
        path.parent, lambda folder: (folder / path.name).write_text("".join(lines)), replace=False))
    return path


# --------------------------------------------------------------------------------------------------- verifiers
#
# How "So $\boxed{\dfrac12\text{ cm}}$." is found to agree with the answer "0.5":
#
#     extract_answer   \dfrac12\text{ cm}      what the text marks as its answer (the last one, if there are several)
#     _clean           \frac{1}{2} cm          one spelling for whatever can be typed in several ways
#     _same            one value               lists, intervals and relations are compared part by part
#     _same_value      \frac{1}{2} and "cm"    units are compared only if both answers have one
#     _values          1/2, 1/2, 1/2           the formula's value at three points, the same three as for 0.5
#
# Model output is data: a small recursive-descent parser reads it, and none of it is executed. What the parser cannot
# read is compared as text, so no input raises. Limits on the size of texts and numbers bound the work on any input.

LONGEST_COMPLETION, LONGEST_ANSWER = 20_000, 400  # in characters; of a longer completion, only the end is read
LONGEST_LIST, MOST_BITS = 20, 8_000  # the longest list compared in any order; the size of the largest exact number

_MATRIX = re.compile(r"\\begin\{(\w*matrix|cases|array)\}[^$]{,400}?\\end\{\1\}")  # one answer on several lines
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*)</answer>", re.S | re.I)
# _NEXT is what may stand before the next equation of a list, such as the "- " of "\n- x = 3"; _LINES is all such lines,
# if they have no words. They are part of an answer only if it is itself an equation, such as x = 2.
_NEXT = r"(?:[-*•][ ]|[$\s])*+(?:(?:and|or)\b[$\s]*+)?(?:\\[\[(]\s*)?(?=(?:\\[a-zA-Z]+|[a-zA-Z])(?:_\{?\w\}?)?[ ]?=)"
_LINES = rf"(?:[ ]*(?:\$\$?|\\[\])])?[,;]?[ ]*\n{_NEXT}(?!.*(?<![\\a-zA-Z])[a-z]{{2,}}(?![a-zA-Z])).+)*"
_HEADING = re.compile(r"""
    ^[ \t]* (?:
      # "**Answer:** 18", or "# Answer" with 18 on a line below it, but not with a sentence there
      (?: \#+[ ](?:✅[ ]*)?\** | \*\* ) (?: A (?= \**: ) | (?i:(?:final[ ])?answer) (?= \**[ \t]* (?: : | $ ) ) )
      (?: [\s*:]* (?<=\n)-[ ] )? (?: [\s*:$] | \\\[ | --- )* (?= [^\s*:$\#-] | -[^-] )
      (?! (?! (?: All[ ]real | No | None | [A-H][ ]and )[ ] ) [A-Z][\w']*[ ][a-z] )
    |
      # "Answer: 18", "A: 18", "#### 18"; not "#### Step 1" or "#### 1. Read it", nor "#### Part 1" above more text
      (?: A(?:ns)?: | (?i:(?:final[ ])?answer[ ]?:)
        | \#{4,}+ (?! [ ]*\** (?: [A-Z][a-z] (?: [^\n\d]*:\** | [a-z]*[ ][a-z][^\n\d]* )
            | (?: Final | Part | Method | Alternative | Analysis | Setup | Calculation | Given | Summary | Result | Key
                | Additional | Example | Problem | Question )s?\b [^\n:=]* ) \n\s*[^\s<`] ) )
      [ \t]* (?: (?: \\\[ | \$\$ ) \s* )?
      (?! \**(?: (?: Step | Case | Note | Check | Solution | Explanation | Verification | Conclusion )\b
               | \d+[.):][ ]+[A-Za-z] ) )
    ) (?= \**[^\s*])
    ( (?! [^\w\n]*[a-zA-Z]\w*[ ]?= ) (?: (?! </?answer> ) . )+
    | (?: (?! </?answer> ) . )+""" + _LINES + ")", re.X | re.M)
_LAST_MARK = re.compile(r"(?<=[.!?])[ *]*(?=####[ ]*[^\s#<]{1,30}\s*\Z)"  # So each gets 2 bars. #### 2
                        r"|(?<=[.!?$]) (?=Final Answer: The final answer is )")  # as Minerva's prompt has it
# balanced braces, up to ten levels
_BRACED = functools.reduce(lambda inner, _: rf"(?:[^{{}}\\]++|\\[{{}}]?|\{{{inner}\}})*+", range(10), "")
_BOX = re.compile(rf"\\f?box(?:ed)?\s*\{{({_BRACED})\}}")
_BETWEEN_BOXES = re.compile(r"\\[()\[\],;]|\\text|[\s${}*]")  # markup that may surround "and", a comma or "y ="
# An answer ends with its sentence or before a reason, "18 because ..."; not within "$5! = 120$" or "5 sq. ft."
_STOP = r"""(?= $ | (?: (?<!\bRs)[.!] | \.\$ ) (?: \* | \s* $ | \s+ (?-i: [^a-z\s=<>+*/^)$-] ) )
    | ,?[ ] \(? (?: because | since | so | as | which | i\.e\.,? | obtained ) [ ] | (?: ,[ ] | [ ]\( ) not[ ] )"""
_PHRASE = re.compile(r"""
    # "The final answer is: 18", "The answer to the question (in dollars) is 18"; not "The answer is correct"
    ^.* (?: answers? | correct[ ](?:option|choice) )
    (?: ,?[ ](?: \( | (?: to | in | as | expressed | rounded )[ ] ) [^\n:=]{,50} )?
    (?: [ ](?: is | are | (?:should|must|would|will)[ ]be )
        (?: [ ](?: simply | just | indeed | actually | only | then | thus | therefore | still | also
              | again | always(?=[ ]\W*\d) | now | clearly | equal[ ]to | given[ ]by | found[ ]to[ ]be ) \b ,? )?
        | [ ]equals | \**: | [ ]= )
    :? \** \s* (?: \}\s* | (?<=\n)[-•][ ]+ )?
    (?: (?: \\\[ | \$\$ | \\begin\{(?:align|equation|gather)\*?\} ) \s* )? (?=\S) (?! (?:in)?correct\b | an[ ]integer )
    ( (?! \W*\\?[a-zA-Z]\w*[ ]?= ) .*?""" + _STOP + " | .*?" + _STOP + _LINES + ")", re.X | re.I | re.M)
# Below "# Answer": "The total is:\n$$x = 5$$" or "She makes $18 a day."
_UNDER_HEADING = re.compile(r"^[#* ]+(?:Final )?Answer[:* ]*\n\s*"
                            r"(?:[A-Z].*:\s*(?:\\\[|\$\$)\s*(?=\S)|(?=[A-Z].*\d))(.+)", re.M)
_WORD = r"[^\s=]*[^\s=*.,:;!?]"  # a word without its trailing punctuation
_VALUE = re.compile(rf"""
    # a formula: \[x = 5\], $x = 5$ (but not the "$5 or $" of "$5 or $6"), or $ x = 5 $ if punctuation follows
    \$\$ (.+?) \$\$ | \\\[ (.+?) \\\] | \\\( (.+?) \\\)
    | (?<!\\)\$ (?: (?![\s$]) ((?:\\.|[^$\\])+?) (?<!\s)\$ (?!\d) | [ ] ((?:\\.|[^$\\])+?) [ ]\$ (?![\s\d]) )
    # in plain text: (2, 5), 18, $1,234.50, 3 1/2 or 2x + 3 (never only the 3 of it), but not t-shirt
    | (?<![^\s*=]) (?<![-−+/^×÷][ ])
      (?P<plain> [(\[{{] [^][(){{}}\s,=]{{1,20}} (?: ,[ ]?[^][(){{}}\s,=]{{1,20}} )+ [)\]}}]
        | [-−(\\$€£√]* (?: \.?\d | (?:[dt]?frac|sqrt)\{{ | [a-z](?=[ ]?[-−+/^](?![a-z]{{2}})) ) (?:{_WORD})?
          (?: [ ][-−+*/^×÷x][ ]{_WORD} | (?<=\d)[ ]\d(?:{_WORD})? )* (?: [ ][mb]illion )? )""", re.X | re.S)
_FAREWELL = re.compile(  # Let me know if you have questions!
    r"\s*\b(?:Let me know|I hope|(?:Please )?[Ff]eel free|If you (?:have|need)|Is there anything)\b.*", re.S)
_ALONE = re.compile(  # a text that is nothing but a number: 18, **$1,234.50**
    r"(?:[\s*$]|\\[([$])*(-?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+|/\d+)?|\.\d+)(?:\\?%)?)(?:[\s*$.]|\\[)\]])*")
_MARKS = re.compile(  # **18**</s> ✅; not x**2
    r"(?<![\w)}\]|!])\*\*(?=\S)|(?<=\S)\*\*(?![\w(\\{-])|<(?:/s|eos|end_of_turn|[|｜][\w▁]+[|｜])>"
    r"|\.?\s?I hope (?:it|this) is correct.*| ?(?:[✅✓✔\U0001f300-\U0001faff]\ufe0f?|\\checkmark)")


def extract_answer(text, closed_only: bool = False) -> str | None:
    """The final answer of a completion, or None. The text after </think> is searched first; if it has no answer, the
    whole text is. In order of precedence:

    1. <answer>18</answer>, \\boxed{18}, `#### 18` (on its own line or after the last sentence), `# Answer` (18 may be
       below it), `Answer: 18` or `A: 18` (without a `B:` below): whichever ends last. They may be nested:
       <answer>\\boxed{18}</answer>. Boxes joined by "and", and equations on the lines that follow, form a list.
    2. What follows the last <answer>, even if it is never closed: samplers that stop at </answer> cut the tag off.
    3. "The answer is 18." or "the answer: 18" within a line. This is also searched for inside 1 and 2, and after a 1
       that may only be the start of the reasoning (`A: There are 15 trees.`), where it must be a number.
    4. Below `# Answer`, a displayed formula that a sentence introduces, or a sentence with a number in it.
    5. The last formula or number of the last sentence, or that sentence's bold part: So, she makes **$18** a day. Or
       the whole text, if it is nothing but a number.

    With `closed_only`, which training uses, 2 and 5 do not count: a policy should learn to mark its answer.
    """
    text, answer, after = str(text)[-LONGEST_COMPLETION:], None, ""
    if "</think>" in text and (answer := extract_answer(text.rpartition("</think>")[2], closed_only)):
        return answer
    text = re.sub(r"\\boxed(?: +|(?=\d))([^\s\\${}]+)", r"\\boxed{\1}", text)  # \boxed 5, \boxed5
    text = _LAST_MARK.sub("\n", _MATRIX.sub(lambda matrix: matrix[0].replace("\n", " "), text))
    # With B: below, A: is an option, a point or a person.
    text = re.sub(r"^([* ]*)A(?=\**:.*\n\s*+\**B\**:)", r"\1(A)", text, flags=re.M)
    for _ in range(3):  # marks within marks
        boxes, marks = _in_boxes(text), [mark for pattern in (_HEADING, _TAGGED) for mark in pattern.finditer(text)]
        if boxes:  # then "#### Remark" with text below it is a heading, not an answer
            marks = [mark for mark in marks if mark[0][:4] != "####" or re.search(r"[\d\\$]|nswer", mark[0])
                     or not text[mark.end():].strip()]
        if not (marks := [(mark.end(1), mark[1]) for mark in marks] + boxes):
            break
        end, answer = max(marks)
        if re.match(r"[A-Z][\w'’.]*,? \w", answer):  # may only begin the reasoning
            after = text[end:]
        text = answer = answer.strip()
    if answer is None and "<answer>" in text and not closed_only:
        text = answer = text.rpartition("<answer>")[2].strip()
    if phrases := _PHRASE.findall(text) or [value for value in _PHRASE.findall(after) if re.match(r"\W*\d", value)]:
        answer = phrases[-1].strip()
    elif answer is None and (sentences := _UNDER_HEADING.findall(text)):
        answer = sentences[-1]
    elif answer is None and not closed_only:
        answer = alone[1] if (alone := _ALONE.fullmatch(text)) else _last_value(text)
    if answer and answer.count("}") > answer.count("{"):  # \text{The answer is 12.}
        answer = re.sub(r"\.?(?<=[^\\ ])\}(?:[.\s$*]|\\[\])])*$", "", answer)
    return _MARKS.sub("", answer or "") or None


def _last_value(text: str) -> str | None:
    """"So $x = 2$ or $x = 3$." -> "x = 2, x = 3": the last values in the last sentence, or in its only bold part."""
    text = text[-LONGEST_ANSWER:]
    if text.count("$$") % 2:  # it begins within a display
        text = text.partition("$$")[2]
    text = _FAREWELL.sub("", text).rstrip()
    bold = re.findall(r"\*\*([^*\n]+)(?<!:)\*\*(?!:)", re.split(r"(?<=[.!?])\s|\n", text)[-1])
    if len(bold) == 1 and _VALUE.search(bold[0]):
        text = bold[0].rstrip(".") + "."
    text = re.sub("<<[^<>]*>>", "", _MARKS.sub("", text))  # GSM8K's <<9*2=18>>
    values = [value for value in _VALUE.finditer(text) if not _LETTER.fullmatch(value[value.lastindex])]  # for all $x$
    if not values:
        return None
    # The sentence must end in a full stop or in a formula, so one that was cut off does not count.
    end = r"[^.!?\n]*[.!]\W*" if values[-1]["plain"] else r"(?:[^.!?\n]*[.!])?\W*"
    if not re.fullmatch(end, text[values[-1].end():]):
        return None
    said, between = values[-1:], r",?\s*(?:and|or)\s*(?:[a-z] = )?"
    for value in values[-2::-1]:  # 1, 2 and 3
        if not re.fullmatch(between, text[value.end():said[0].start()]):
            break
        said.insert(0, value)
        between = r",\s*"
    return ", ".join(value[value.lastindex].strip() for value in said)


def _in_boxes(text: str) -> list[tuple[int, str]]:
    """"\\boxed{1} and \\boxed{\\frac12}" -> [(8, "1"), (28, "1, \\frac12")]: where each ends, and the list so far."""
    found = []
    for box in _BOX.finditer(text):
        if answer := box[1].strip():
            between = _BETWEEN_BOXES.sub("", text[found[-1][0] + 1:box.start()]) if found else ""
            # x_1 = \boxed{1} and x_2 = \boxed{2}
            if re.fullmatch(r"(?:[,;&、或和]|\\q?quad|and|or)++"
                            r"(?:(?:\\[a-zA-Z]++|[a-z])(?:_\w)?(?:\(\w\))?=)?", between) and answer != found[-1][1]:
                answer = f"{found[-1][1]}, {answer}"
            found.append((box.end(1), answer))
    return found


def format_reward(text) -> float:
    """1 where the completion is one <think>…</think> and then one <answer>…</answer> and nothing else, else 0."""
    text = str(text).strip()
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return float(once and bool(re.fullmatch(r"<think>.*</think>\s*<answer>.*</answer>", text, re.S)))


_DECIMAL = re.compile(r"-?(?:\d+|\d*\.\d+)", re.ASCII)
# A choice together with what it stands for: (D) 5, D. Vitamin D, 12 (C), C (12); not (A) B, (A) or B, nor (A) 5, (B) 6
_OPTION = re.compile(r"""
    [(\[]? [ ]? ([A-J]) [ ]? [)\].:]+ (?: [ ] | (?=[\d\\] | (?<=\)) [A-Z]?[a-z]{2}) ) (?: (?= (?i: both | neither )\b )
        | (?! , | (?: (?:.*\W)? , \W* )? [A-J]\W*$ | (?:.*\W)? [A-J][).:\]] ) ) (.+)
    | (?! (?: not | maybe | either | all | none )[ ] ) (?= .*(?: \d | [a-z]{4} ) ) ([^(),]+)[ ]\(([A-J])\)
    | ([A-J])[ ]\( (?=.*\d) ([^(),]+) \)""", re.X)
_VERDICT = re.compile(  # Yes, it converges; not "Yes, if n is odd"
    r"(yes|no|true|false)[,.] (?!.*\b(?:but|or|if|unless|yes|no|true|false)\b).+", re.I)
_SENTENCE = re.compile(r"""  # Janet makes 18 every day, The area is 20 feet^2; but without words that change the number
    (?! All[ ] | .*[ ][-/][ ] | .*n't[ ] | .*(?<![\w'])(?: [bB]ut | minus | negative
        | than(?=[ ]-?\d) | most | least | half | twice | double | triple | none | dozen | pi | sqrt | log | mod
        | [b-zB-HJ-Z] )\b )
    (?: (?:[A-Z][\w'.-]*|the)[ ]?,?[ ] )+ [a-z']+,?[ ] (?: [\w ',.:/-] | (?<=[a-z]{2})\^ )*
    """, re.X)
# The area is 12\pi; The remainder when 10 is divided by 3 is 1
_STATEMENT = re.compile(r"(?!(?:.* (?:is(?! divided)|are|equals) ){2})[A-Z][^=]* (?:is|are|equals) (.+)")
# The 18 of "He pays 9 eggs x $2/egg = $18 a day", if no letter in it stands for a number, no other result comes first
# (Minimum = 1, maximum = 3), and no word after it changes its value (18 dozen)
_ENDING = re.compile(r"""
    (?! .* (?: [\\≠<>] | [a-z][ ]?=[^=]*\d,[ ](?:\d\w*[ ])?[a-z]+[ ]?=
             | (?<![a-zA-Z']) (?: [b-wyz] | (?<![a-z]{4}[ ]) [B-HJ-WYZ] | [xX](?![ ]?[\d(.]) ) (?![a-zA-Z']) .*= ) )
    (?: [A-Z] (?= .*[a-z]{2} ) | \d (?= .*[ ](?! sin | cos | tan | log | sqrt )[a-z]{3} ) )
    .* (?: [\d)] | [a-z]{3} ) [ ]?=[ ]? ( -?\d[\d.]*(?:/\d+)? )
    (?: [ ]? (?! (?: [b-zB-HJ-Z] | pi | squared | cubed | half | dozen | [a-z]*illion )\b )
        [a-zA-Z'] (?: \^[23] | [^\d=] )* )?
    """, re.X)
_NUMBER = re.compile(r"(?<!\S)-?\.?\d(?:\S*\w)?")  # a word that begins with a number: 18, .5, 1/2, 18/day


def is_equivalent(prediction, answer) -> bool:
    """Whether two answers mean the same. Numbers are compared by exact value, sets and lists of up to 20 items in any
    order, tuples and intervals in order, formulas by their values at three points, text by its characters, ignoring
    case. Decimals have no tolerance (only roots, π and the like may differ by 1e-11 of their value), and percentages no
    factor of 100: 50% is 50, not 0.5. Of a longer text, the answer that it marks is compared, or else its concluding
    sentence: So she has 7.
    """
    if prediction is None or answer is None:
        return False
    a, b = (side if _DECIMAL.fullmatch(side) else _answer_in(side) for side in map(str, (prediction, answer)))
    if max(len(a), len(b)) > LONGEST_ANSWER:
        return a.strip() == b.strip() != ""
    if _DECIMAL.fullmatch(a) and _DECIMAL.fullmatch(b):  # a shortcut for most pairs, ten times as fast
        return Fraction(a) == Fraction(b)
    return any(_same(x, y) for x, y in _pairs(_clean(a), _clean(b)))


def _answer_in(text: str) -> str:
    """The part of a text to compare: the answer that it marks, or all of it; of "9*2 = 18. So she has 18", the end."""
    answer = (extract_answer(text, closed_only=True) or text[-LONGEST_COMPLETION:]).rpartition("<answer>")[2]
    conclusion = re.split(r"[.!?]\s+(?=(?:So|Thus|Therefore|Hence|In total|Altogether)\b)", answer)[-1]
    return conclusion if re.search(r"\d", conclusion) else answer


def _pairs(a: str, b: str):
    """The ways to compare two answers: both as they are, or one as it is with each of the other's `_readings`."""
    yield a, b
    yield from ((x, b) for x in _readings(a))
    yield from ((a, x) for x in _readings(b))


_CONDITION = re.compile(  # 2n+1 for n ≥ 1, a_n = 2n (n ≥ 1), 5 at x = 2
    r"(?:(?<=[\d)}])|(?<=[-+*\d^]n))(?:,? for | \( ?)[nk] ?[≥>] ?\d ?\)?$"
    r"|(?<=[\d})]),? ?\(?\b(?:at|when|since) [a-z] ?[=<>≤≥] ?[-+\w./\\{}^]+\)?$")


def _readings(text: str) -> list[str]:
    """What else a cleaned answer may be taken to say: "(D) 5" says D or 5, "7/2, 3.5" either of the two, "The area is
    20" says 20, and "So, 36 - 15 = 21" says 21."""
    if option := _OPTION.fullmatch(text):
        return [_clean(part) for part in option.groups() if part]
    if len(twice := _split(text)[::2]) == 2 and _same(*twice):  # 7/2 or 3.5
        return twice
    if condition := _CONDITION.search(text):
        return [text[:condition.start()]]
    said = [verdict[1]] if (verdict := _VERDICT.fullmatch(text)) else []
    if re.search(r"(?i)\b(?:not|never|cannot|I don't)\b", text):
        return said
    if _SENTENCE.fullmatch(text) and len(numbers := _NUMBER.findall(text)) == 1:  # a sentence, with its only number
        said += numbers
    elif conclusion := _ENDING.fullmatch(text) or _STATEMENT.fullmatch(text):
        said.append(_clean(conclusion[1]))
    return said


_SPACES = re.compile(r"(?<!\d) | (?!\d)")  # all but those between two numbers
_FORMULA = re.compile(r"[\w)}][-+*/^][-.\w({\\]|\\[a-z]")  # 1/2, x+1, x^-1, \sqrt2; `_bare` leaves out spaces and \text
_FRACTION = re.compile(r"\\frac(?:\{(\w+)\}|(\w))(?:\{(\w+)\}|(\w))")  # \frac{1}{2}, \frac12
_PLAIN = re.compile(r"""  # a number as `_clean` leaves it, with nothing left to work out but a power
    [-+({\[]* (?: \\?inf(?:ty|inity)?
    | (?: \d*\. )? \d+ (?: [eE][+-]?\d+ | (?: \*\{?10 )? \}?\^[({]*[-+]?\d+ | :00 )?                # 5, 2^5, 3*10^6
    | (?P<fraction> (?: [\d.]+∔ )? (?: \\frac\{[-+({]*\d+[)}]+\{[-+({]* | \d+[)}]?/[({]?-? ) \d+ )  # 1/2, (2∔1/2)
    ) [)}\]]*""", re.X)


def is_worked_out(answer: str, gold: str, prompt: str) -> bool:
    """Whether an answer that `is_equivalent` to the gold one does more than repeat the question, unlike 57+68 for
    "57+68=?" or (x+1)^2 for "Expand (x+1)^2". A policy that is rewarded for repeating the question learns nothing else.

    If the gold answer consists of plain numbers (`_is_plain`), this one must, too. And a formula that the prompt
    contains does not count, unless the gold answer is that same formula.
    """
    def copied(formula):
        question = _bare(f"?{prompt}?")  # the question marks keep _bare from stripping brackets at its ends
        formal = _FORMULA.search(_split_unit(formula)[0])  # not so for 5 m/s
        return formal and re.search(rf"(?<![\d.]){re.escape(formula)}(?!\d)", question)

    def worked_out(said, meant):
        short, long = sorted((_bare(said), _bare(meant)), key=len)
        if short == long or long.endswith("=" + short) and _is_name(long[:-len(short) - 1]):  # y = x+1 is x+1
            return True
        line = re.match(r"[^=]*[a-zA-Z] ?[-+][^=]*=", meant) and all(  # x + y = 3
            re.search("[a-z]", side) or side.strip() == "0" for side in said.split("="))
        # a matrix may have a factor in front, which `_clean` has left to work out in its entries
        if re.search(r"\d", meant) and "[[" not in meant and not line and _is_plain(meant) and not _is_plain(said):
            return False
        if not _FORMULA.search(_bare(answer)):  # only `_clean` has made it a formula: 2 million is 2*10^6
            return True
        for formula in (said, answer) if said == value else (said,):  # if it is the whole answer, also as it was typed
            sides = [_bare(formula)] if "=" in meant else _bare(formula).split("=")
            if copied(sides[-1]) and (_is_name(said.split("=")[0]) or copied(sides[0])):
                return False
        return True

    if answer == gold:  # most right answers
        return True
    answer, gold = (_answer_in(side)[:LONGEST_ANSWER] for side in (answer, gold))
    value = _clean(answer)
    return any(_same(said, meant) and worked_out(said, meant) for said, meant in _pairs(value, _clean(gold)))


def _is_plain(text: str) -> bool:
    """Whether every part of a cleaned answer is a fully evaluated number, such as 125, 5/2 or 2∔1/2, or an equation
    with such a number at either end, such as 57+68 = 125. Not 57+68, 250/2 or 1∔3/2."""
    kind, parts = _parts(text)
    if set(kind) == {"="}:  # x = 125, 57+68 = 125, 125 = x; not 2x = 250
        sides = parts[0], parts[-1]
        return any(_is_plain(number) and (_is_name(name) or _same(name, number))
                   for name, number in (sides, sides[::-1]))
    if kind or len(parts) > 1:  # a letter is the x of x > 5; but \pi is a number
        return all(_LETTER.fullmatch(part) and part != "\\pi" or _is_plain(part) for part in parts)
    number = _PLAIN.fullmatch(_SPACES.sub("", _split_unit(text)[0]))
    if not number or not number["fraction"]:
        return bool(number)
    above, below = map(int, re.findall(r"\d+", number["fraction"])[-2:])
    return below > 0 and above % below > 0 and (above < below or "∔" not in text)


def _bare(text: str) -> str:
    """A formula without what is a matter of typing, to be compared as text: "$57\\,+\\,68^\\circ$" -> "57+68",
    "x^{2}" -> "x^2", "\\sin(x)" -> "\\sinx", and "(1/2)", "\\frac12" and "1/2 hour" -> "1/2"."""
    text = re.sub(*_SUPERSCRIPTS, re.sub(*_SYMBOLS, text[-LONGEST_COMPLETION:]))
    text = unicodedata.normalize("NFKC", text)[-LONGEST_COMPLETION:]  # （ is (
    text = re.sub(r"\s|\\text|\^\s*\{?\s*\\circ\s*\}?|°", "", text)
    text = re.sub("[{}]", "", _FRACTION.sub(r"\1\2/\3\4", text)).rstrip(".")
    text = re.sub(r"(?<=[a-z])(\()?\((\w+)\)(?(1)\))", r"\2", text)  # `_clean` has written \sin((x))
    return re.sub(r"(?<=\d)[a-zA-Z]+$", "", text.strip("+()[]"))


_TYPED = {  # our spelling -> the spellings that it replaces; signs of size, currency and percent are dropped
    "": r"\left. \right. \left \right \big \bigl \bigr \Big \Bigl \Bigr \bigg \Bigg \displaystyle \large \Large \LARGE "
        r"\huge \! \( \) \[ \] \$ $ € £ ₹ ¥ \% % ¢" " \u200b \u2060 \ufeff",
    " ": r"\, \: \; \quad \qquad ~ \rm \bf \ ", ",": "; & 、", "-": "− – — ‑ ‐", "*": r"\times \cdot × ⋅ ·",
    "/": r"\div ÷ ⁄", "^": "**", "≈": r"\approx", "≤": r"\le \leq \leqslant <=", "≥": r"\ge \geq \geqslant >=",
    "<": r"\lt", ">": r"\gt", "=": r"\equiv ≡", "≠": r"\ne \neq !=", "∈": r"\in", "±": r"\pm", "∓": r"\mp",
    "‹": r"\{ \lbrace", "›": r"\} \rbrace", ":": r"\colon", "∪": r"\cup \bigcup",
    "|": r"\vert \lvert \rvert \mid", " or ": r"\lor \vee ∨ 或", "(": r"\langle", ")": r"\rangle", "'": "’",
    "\\frac": r"\dfrac \tfrac \cfrac \nicefrac \sfrac", "\\binom": r"\dbinom \tbinom",
    "\\text": r"\mathrm \mathbf \mathbb \Bbb \textbf \textit \textrm \textnormal \mbox \operatorname \mathcal"
              r" \boldsymbol \bm \mathit \mathsf \textsf \texttt \emph \underline",
    "\\ldots ": r"... \dots \cdots", "\\overline": r"\bar", "\\epsilon": r"\varepsilon", "\\phi": r"\varphi",
    "\\log": r"\lg", "\\vec": r"\overrightarrow", "\\beta ": "β", "\\lambda ": "λ", "°": r"\degree \degrees",
    "\\emptyset": r"\varnothing ∅", "\\infty ": "∞", "\\sqrt ": "√", "\\pi ": "π", "\\theta ": "θ", "\\alpha ": "α"}
_SPELLINGS = {typed: ours for ours, ways in _TYPED.items() for typed in ways.split()}
_SYMBOLS = (  # matches whatever may be a key of _SPELLINGS, the != of x_1!=2 included, but not that of 4!=24
    re.compile(r"\\(?:left|right)\.|\\[a-zA-Z]+|\\!\s*|\\.|\*\*|(?<=,) ?\.{3}|[<>]="
               r"|(?:(?<!\d)|(?<=[_^]\d)|(?<=\b[a-z]\d))!=|[$%~;&]|[^\x00-\x7f]"),
    lambda typed: _SPELLINGS.get(typed[0].strip(), typed[0]))
_SUPERSCRIPTS = re.compile("([⁰¹²³ⁱ⁴-⁻ⁿʰʳˢˣʸᵃ-ᵛ]+)"), r"^{\1}"  # x² is x^{2}
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}([, ])\d{3}(?:\1\d{3})*(?!,?\d|(?<= \d{3})/\d)")
_ENTRY = r"(?:_\{?\d\}?)? ?= ?([^=,]+)"  # what x or x_1 is
_NUMBER_WORDS = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
                 " seventeen eighteen nineteen twenty").split()
_REWRITES = [(re.compile(pattern), ours) for pattern, ours in [  # the order matters: each relies on those above it
    # symbols: ①③ is ①,③, x₁ is x_{1}; NFKC turns ① into 1, ½ into 1/2, and some into 18 characters, hence the cut
    (r"[①-⑳](?=[①-⑳])", r"\g<0>,"),
    (r"(?:^|(?<=\n))(\\?[a-zA-Z]+) ?=[^\n=,]*(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])[^\n=,]*(?:\n|\\\\)\s*+(?=\1 ?=)",
     ""),  # A = \pi r^2 above A = 4\pi
    (r"[,.;]? ?(?:\n|\\(?:q?quad|\\|implies|Rightarrow|iff))" + _NEXT, ","),  # x = 2 \quad x = 3
    _SUPERSCRIPTS, (r"([₀-₋ₐ-ₜᵢ-ᵥⱼ]+)", r"_{\1}"), (r"([¼½¾⅐-⅞])", r" \1"), (r"[º˚]", "°"),
    (r"(?s).+", lambda text: unicodedata.normalize("NFKC", text[0])[:LONGEST_ANSWER]),
    (_MARKS, ""),
    _SYMBOLS,
    (r"\\(?:text ?\{ ?)?(arc)?(c?)tg(?: ?\})? ?",  # \tg x
     lambda name: rf"\{name[1] or ''}{'cot' if name[2] else 'tan'} "),
    # degrees are left out, but not in \sin 30^\circ
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\bdegrees? (?=[CFK])", "°"),
    (r"(?<!arc)((?:sin|cos|tan|cot|sec|csc)(?: ?\^ ?\{?\d\}?)? ?)(\([^()]*\)|\{[^{}]*\}|\d+(?:\.\d+)? ?°)",
     lambda angle: f"{angle[1]}({angle[2]})".replace("°", r"*\pi/180")),
    (r"°", " "),
    # \mathbf{5\text{ cm}}, \mathbb R
    *[(rf"\\text\s*(?:\{{({_BRACED})\}}|([a-zA-Z])(?![a-zA-Z]))", r" \1\2 ")] * 2,
    (r"(?<![a-zA-Z^}_])\{(log|[a-zA-Z](?:_\d)?)\}(?= ?[_=])", r"\1"),  # {x}_{1}, {x_1} = 2
    (r"\{ ?([-+:]) ?\}|(?<=.)\{ ?\}|\\(?:(?:text)?color|tag|[hv]space) ?\{\w+\}", r"\1"),
    (r"\s+", " "), (r"^ |[ .\\]+$", ""), (r"^([A-J]) ?\)$", r"\1"),  # A) is A
    (r"\{([^{}]*)\\(over|choose)(?![a-z])([^{}]*)\}",
     lambda pair: rf"\{'frac' if pair[2] == 'over' else 'binom'}{{{pair[1].strip()}}}{{{pair[3].strip()}}}"),
    (r"\bC\((\d+), ?(\d+)\)", r"\\binom{\1}{\2}"),  # ways to choose
    # 44 \pmod{83}, 44 (mod 83) and 44 \mod 83 are 44 mod83, 07 : 30 is 7:30, 5 to 2 is 5:2
    (r" ?(?:\\p?mod ?\{? ?|\( ?\\?b?mod )(\d+) ?[})]?", r" mod\1"),
    (r"(?<=\d) (?::|(?i:to)) (?=\d)", ":"), (r"\b0(?=\d:\d\d)", ""),
    # no solutions and S = {} are \emptyset, five and x = five 5, minus 5 is -5
    (r"(?i)^(?:there (?:is|are) )?no (?:real )?solutions?$|(?:(?:the )?empty set|‹ ?›)$", r"\\emptyset"),
    (rf"(?ia)(?:^|(?<==) ?)({'|'.join(_NUMBER_WORDS)})$", lambda word: str(_NUMBER_WORDS.index(word[1].lower()))),
    (r"(?i)^(?:minus|negative) (?=[.\d])", "-"),
    # words: 12^{th} is 12, 2 million is 2*10^6, 8 square feet is 8 feet^2; about 45 and so, 45 are 45; an ellipse
    (r"(?<=\d) ?\^? ?\{? ?(?:st|nd|rd|th)\b ?\}?", " "),
    (r"(?:(?<=\d)|(?<=undred)) ?([Hh]undred|[Tt]housand|(?:[Mm]|[Bb]|[Tt]r)illion)s?\b",
     lambda times: "*10^" + {"hu": "2", "th": "3", "mi": "6", "bi": "9", "tr": "12"}[times[1][:2].lower()]),
    (r"\\frac\{ ?([a-z]{4,}|km) ?\}\{ ?([a-z]{4,}|h) ?\}", r"\1/\2"),
    (r"\b(square|sq\.?|cubic|cu\.?) (\w+)", lambda unit: unit[2] + ("^2" if unit[1][0] == "s" else "^3")),
    (r"(?i)^(?:(?:so|hence|therefore|thus),? (?![a-z']{2,},? .*\d|[ai] \w)|(?:about|approximately"
     r"|exactly|roughly|given by|option|choice|letter|(?:an?|the)(?= [a-z-]{5,}(?: [a-z]{4,})*$)) "
     r"|(?:USD?|Rs(?: ?\.(?= )|\.)?) ?(?=-?\.?\d))", ""),
    # n\pi, where n is an integer; f(x) = 1 for all x; 2k\pi, k ∈ Z; but not a clause with the result in it
    (r"(?<=[\w)}\] ])(?:,? |,)(?:(?:for (?:all|any|every|some|integers?)|where)\b[^,=]*(?=,|$)|\w ?∈ ?[NRZ]\b)", ""),
    (r"(?<=[\w)}\]]) ?\( ?\w ?∈ ?[NRZ](?: ?[_^] ?\{? ?[*+] ?\}?)? ?\)", ""),
    (r"_\{1, ?2\} ?(?==)", ""),  # x_{1,2} = 1 ± \sqrt2
    # 1, 2, and 3; 14{,}916; (1010)_2 or 1010 in base 2
    (r"(?:, ?)?\b(?:and|or)\b(?: ?,)?| ?\{, ?\}", ","),
    (r"[({]([\dA-F]\w*)[)}] ?(?=_[\d{])| ?\(? ?\b(?:in )?base (\d+) ?\)?", lambda base: base[1] or f"_{base[2]}"),
    # \begin{cases} x = 1 \\ y = 2 \end{cases} is x = 1, y = 2; of 1 & n = 1 \\ n & n > 1 each row is a pair
    (r"(?:‹ ?|(?=\\begin\{(?:aligned|gathered)))\\begin\{(array|aligned|gathered|\w?matrix)\}(?:\{[clr|]*\})?"
     r"((?:(?!\\end|‹).)*)\\end\{\1\}(?![^‹]*›)", r"\\begin{cases}\2\\end{cases}"),
    (r"\\begin\{cases\}((?:(?!\\end\{cases).)*)\\end\{cases\}", lambda system: ",".join(
        re.sub(r"^([^,=]*),(?:[ ,]|(?:if|when|for)\b)*(?:\(([^()]*)\)|(.+))$", r"(\1,\2\3)", row.strip(" ,."))
        for row in re.sub(", ?(?==)", "", system[1]).split("\\\\") if row.strip())),
    # y = 2, x = 1 is x = 1, y = 2; but of m and b, or n and k, either may come first
    (r"^([a-z]) ?= ?([^,=]+), ?([a-z]) ?= ?([^,=]+)$", lambda pair: f"{pair[3]} = {pair[4]}, {pair[1]} = {pair[2]}"
     if ord(pair[1]) - ord(pair[3]) in (1, 2) else pair[0]),
    # x=1, y=2, x=2, y=1 is (1,2), (2,1)
    (rf"^([a-z]){_ENTRY}, ?(?!\1)([a-z]){_ENTRY}(?:, ?\1{_ENTRY}, ?\3{_ENTRY})+$",
     lambda pairs: re.sub(rf"\w{_ENTRY}, ?\w{_ENTRY}", r"(\1,\2)", pairs[0])),
    # matrices: \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} is [[1,2],[3,4]]; a factor before one goes to each entry
    (r"[(\[]?\s*\\begin\{\w*\}(?:\{[clr|]*\})?", "[["),
    (r"(?:\\\\\s*)?\\end\{\w*\}\s*[)\]]?", "]]"),
    (r"\\\\(?:\[[\d.]+\w+\])?", "],["),
    (r"(?<![^=,])([^=,\[\]]{1,24})(\[\[(?:(?!\[\[).)*\]\])$",
     lambda product: re.sub(r"[^\[\],]+", lambda entry: f"{product[1]}({entry[0]})", product[2])),
    (r"(?i)(?<=[\w)}!\]›'|]) ?\( ?,? ?(?:≈|=|about|approx|roughly|i\.e\.)[^()]*\)", ""),  # 5/36 (or about 0.139)
    # relations: x = \sqrt2 ≈ 1.41 is x = \sqrt2, but x_1 ≈ 1.5 is x_1 = 1.5, like Area: 12
    (r"((?:^|=) ?[-+(.]*(?:\d|\\(?:frac|pi|ln|log|arc)|\\?sqrt|e\^)[^=≈,]*)≈[^,]*$", r"\1"),
    (r"≈|(?<=[a-z]{3}) ?: ", "="),
    # x ∈ [1,2] is [1,2], and (x,y) ∈ {(1,2)} is {(1,2)}, which is (1,2)
    (r"(^|[,∪]) ?(?:\\?[^\W\d]+|\([^()]*\)) ?∈ ?", r"\1"),
    (r"^‹ ?([(\[][^‹›]*[)\]]) ?›$", r"\1"),
    # {x | x > 1}, {x ∈ R : x > 1} and (x > 1) are x > 1
    (r"^[^=<>‹]*= ?(?=‹[^‹›]*[|:][^‹›]*›$)|^[A-Z] ?∪ ?[A-Z] ?= ?(?=[^=]*$)", ""),  # A = {x | x > 1}
    (r"^(?:[‹{] ?\\?\w+ ?(?:∈ ?R ?)?[|:] ?(.*[<>≤≥≠].*)[›}]|\(([^(),]*[=<>≤≥≠][^(),]*)\))$", r"\1\2"),
    # x ≠ 2, x ≠ 3 is R \setminus {2,3}, which is (-\infty,2)∪(2,3)∪(3,\infty)
    (r"^([a-z]) ?≠([^=<>≤≥]*,[^=<>≤≥]*)$", lambda out: f"R\\setminus ‹{re.sub(f' ?{out[1]} ?≠', '', out[2])}›"),
    # x ≠ 0, x ≥ -1 is x ≥ -1, x ≠ 0, which is x > 0, 0 > x ≥ -1
    (r"^(([a-z]) ?≠[^=<>≤≥≠,]+), ?(\2 ?[<>≤≥][^=<>≤≥≠,]+)$", r"\3, \1"),
    (r"^([a-z]) ?([<≤][^=<>≤≥≠,]+), ?\1 ?≠([^=<>≤≥≠,]+)$", r"\1 < \3, \3 < \1 \2"),
    (r"^([a-z]) ?([>≥][^=<>≤≥≠,]+), ?\1 ?≠([^=<>≤≥≠,]+)$", r"\1 > \3, \3 > \1 \2"),
    (r"^(?:R|[Aa]ll real numbers) ?(?:\\setminus|\\backslash|-|except) ?‹([^‹›]*)›$",
     lambda out: "∪".join(f"({a},{b})" for a, b in itertools.pairwise(["-\\infty ", *out[1].split(","), "\\infty "]))),
    (r"^(?:R|(?:[Tt]he set of )?[Aa]ll real numbers)$", r"(-\\infty ,\\infty )"),
    (r"(?<=[)\]]) ?U ?(?=[(\[])", "∪"),
    # formulas: |x| is \abs (x), \frac12 is \frac{1}{2}
    (r"\|([^|]+)\|", r"(\\abs (\1))"),
    (r"(\^(?:\w|\{[^{}]*\}))(_(?:\w|\{[^{}]*\}))", r"\2\1"),  # v^2_0 is v_0^2
    (r"\\(frac|binom|log_|overline) ?(\w)", r"\\\1{\2}"), (r"(\\(?:frac|binom)\{[^{}]*\}) ?(\w)", r"\1{\2}"),
    # 2 1/2 and 2\frac{1}{2} are (2∔1/2), 0.1\overline{6} is (0.10∔6/90), 1.5 x 10^3 is 1.5*10^3
    # and 4 x 10 = 40 is 4*10 = 40; but 3 x 4 inches is a size
    (r"(?<![\w.^)}])(\d+)(?: (\d+/\d+)| ?(\\frac\{\d+\}\{\d+\}))", r"(\1∔\2\3)"),
    (r"(\d*)\.(\d*)(?: ?\\(?:overline|dot)\{|(?<=\.)\()(\d+)[})]",  # 0.(3), too
     lambda d: f"({d[1]}.{d[2]}0∔{d[3]}/{'9' * len(d[3])}{'0' * len(d[2])})"),
    (r"(?<=\d) ?x ?(?=10\^)|(?<=\d) x (?=\.?\d[^,]*=)", "*"),
    # 1,234 is a number, but (1,234) is a pair, so this stops at the first bracket
    (r"^[^(\[‹]*", lambda head: _THOUSANDS.sub(lambda number: number[0].replace(number[1], ""), head[0]))]]


@functools.lru_cache(4096)
def _clean(text: str) -> str:
    """The same answer in the one spelling that the functions below expect:

    "\\$1{,}234.50"            -> "1234.50"          no currency, no percent sign
    "\\dfrac12 \\text{ cm}"    -> "\\frac{1}{2} cm"  units are plain words
    "\\{1 \\text{ or } 2\\}"   -> "‹1 , 2›"          a set stands in ‹…›, since braces only group
    "x \\in [1, 2)"            -> "[1, 2)"           only the set that the letter lies in
    "x \\geq 1"                -> "x ≥ 1"            a relation is one character
    """
    for pattern, ours in _REWRITES:
        text = pattern.sub(ours, text)
    return text.strip(" *_^\"`").rstrip(" .,:。\\")


_LETTER = re.compile(r"\\?[^\W\d_]+(?:_\{?\w+\}?)? ?")  # a name alone: x, \lambda, x_1
_RELATIONS = set("=<≤≠")  # `_parts` turns > and ≥ around


def _same(a: str, b: str, depth: int = 0) -> bool:
    """Whether two cleaned answers agree. What is compared depends on their kinds (`_parts`):

    "x = 5" and "5"             a relation and something else: `_is_value_of`
    "y = 2x" and "2x - y = 0"   two relations: `_same_relations`
    "2x + 3" and "3 + 2x"       two single values: `_same_value`
    "1, 2" and "‹2, 1›"         lists and sets: the same items, in any order (in the given one if nested in others)
    "(1, 2]" and "(1, 4/2]"     tuples, intervals, matrices: the same brackets, and the same items in order
    """
    if not a or not b or depth > 4:
        return False
    if _SPACES.sub("", a) == _SPACES.sub("", b):
        return True
    (a_kind, a_parts), (b_kind, b_parts) = _parts(a), _parts(b)
    try:
        if a_kind[:1] in _RELATIONS and b_kind[:1] in _RELATIONS:
            return a_kind == b_kind and _same_relations(a_kind, a_parts, b_parts, depth)
        if a_kind[:1] in _RELATIONS:
            return _is_value_of(a_kind, a_parts, b, depth)
        if b_kind[:1] in _RELATIONS:
            return _is_value_of(b_kind, b_parts, a, depth)
        if a_kind == b_kind == "" and len(a_parts) == len(b_parts) == 1:
            return _same_value(a_parts[0], b_parts[0])
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):  # what `_values` cannot read
        return False
    if len(a_parts) != len(b_parts):
        return False
    if depth or len(a_parts) > LONGEST_LIST or not {a_kind, b_kind} <= {"", "‹›"}:
        names = [part.split("=")[0] for part in a_parts + b_parts if "=" in part]
        bare = a_kind + b_kind in ("()", "[]", "‹›") and len(set(names)) == len(names)  # 1, 2 for (1, 2); not x=1, x=2
        return (a_kind == b_kind or bare) and all(_same(x, y, depth + 1) for x, y in zip(a_parts, b_parts))
    for x in a_parts:  # in any order
        match = next((y for y in b_parts if _same(x, y, depth + 1)), None)
        if match is None:
            return False
        b_parts.remove(match)
    return True


def _split(text: str, separators: str = ",∪") -> list[str]:
    """"(1,2), x ∪ y" -> ["(1,2)", ",", "x", "∪", "y"]: at each separator outside of all brackets."""
    depths = itertools.accumulate((character in "([{‹") - (character in ")]}›") for character in text)
    marked = (f"\0{c}\0" if c in separators and depth == 0 else c for c, depth in zip(text, depths))
    return [part.strip() for part in "".join(marked).split("\0")]


def _parts(text: str) -> tuple[str, list[str]]:
    """The kind of an answer, and its parts:

    "(1, 2]"      -> ("(]", ["1", "2"])         brackets around several items; a matrix has "[]", a set "‹›"
    "3 ≥ x > -2"  -> ("<≤", ["-2", "x", "3"])   relations, read from the smaller side
    "1, 2"        -> ("", ["1", "2"])           a list, like "1.5 ± 0.5"
    "2x + 3"      -> ("", ["2x + 3"])           anything else
    """
    kind, parts = "", _split(text)[::2]
    if len(parts) == 1:
        sides = _split(text, "=<>≤≥≠")
        if ">" in sides or "≥" in sides:
            sides = [side.translate(str.maketrans("<>≤≥", "><≥≤")) for side in reversed(sides)]
        if len(sides) > 1:
            return "".join(sides[1::2]), sides[::2]
        if "\\" in text and len(sides := _split(text, ":")) > 1:  # 1:\sqrt3
            return ":", sides[::2]
        brackets, inner = text[:1] + text[-1:], _split(text[1:-1])[::2]
        if text.startswith("[["):  # a matrix is a tuple of rows
            kind, parts = "()", inner
        elif brackets == "‹›" or len(inner) > 1 and brackets in ("()", "(]", "[)", "[]", "{}"):
            kind, parts = brackets.replace("{}", "‹›"), inner
    if kind not in ("", "‹›") and re.search("[±∓]", text):  # (0, ±3) is two tuples
        kind, parts = "", [text]
    return kind, [way for part in parts for way in dict.fromkeys(
        part.replace("±", sign).replace("∓", other) for sign, other in ("+-", "-+"))]


def _is_name(side: str) -> bool:
    """Whether one side of an equation is only a name for the value on the other: x, x_1, f(-2), f(g(3)) or x_1 + x_2,
    with digits only in indices and arguments; 5 \\star 1, an operation that the question defines; a sum, an integral, a
    limit or a floor that stands alone; or 100m + n."""
    if re.match(r"\\(?:sum|prod|int|lim)|\\l(?:floor|ceil)[^\\]*\\r\w+ ?$", side):
        return len(_split(side, "+-")) == 1
    rest = re.sub(r"(?<!log)_\{?[\d/,]+\}?|\^\{-1\}(?=\()"
                  r"|\d+ ?(?:[@#]|\\(?:\#|star|ast|o(?:plus|times|dot)|diamond|bowtie|nabla|\w+suit)) ?\d+"
                  r"|(?<=[a-zA-Z})']) ?\(-?[^()+\d-]*\d[^()+-]*\)++(?! ?[\w(\\])", "", side)
    sum_of_letters = r"(?!.*([a-z]).*\1)(?:10+)?[a-hj-z](?: ?\+ ?(?:10+)?[a-hj-z])+ ?"
    return not re.search(r"^-|\d", rest) or bool(re.fullmatch(sum_of_letters, side))


_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{1,2}(?![a-zA-Z])")
_CLAUSE = re.compile(r"""  # 2 when y, 2 \to y; not 2 sin x cos x
    \d.* (?: (?<![\\a-zA-Z]) (?! (?: sin | cos | tan | cot | sec | csc | log | ln | pi | sqrt | exp | of | times )\b )
        [a-z]{2,}[ ] | \\(?: to | \w+arrow | implies | iff | land | wedge )[ ]? ) [a-zA-Z] (?: _\{?\w\}? )?$""", re.X)


def _is_value_of(kind: str, sides: list[str], plain: str, depth: int) -> bool:
    """x = 5, f(2) = 5 and 2 + 3 = 5 agree with the plain 5, but x^2 = 5 does not; x ≥ 5 agrees with [5, \\infty)."""
    if set(kind) == {"="}:  # not 57+68 > x = 5
        for side in sides[1:-1]:  # not x = 2 when y = 5, nor x = 2 / x = 5, whose middle is "2 / x"
            value = side.removesuffix(sides[0]).strip(" /],[")
            x_again = value != side and re.match(r"[\\a-zA-Z]", sides[0])
            if _CLAUSE.search(side) or x_again and not _VARIABLE.search(value) and not _same(value, plain):
                return False
        if len(sides) == 2 and _DECIMAL.fullmatch(sides[0]) and re.fullmatch("[a-zA-Z]", sides[-1]):  # 5 = x
            sides = sides[::-1]
        is_name = _is_name(sides[0]) or sides[-1].startswith("[[")  # A^{-1} before a matrix
        return _same(sides[-1], plain, depth) and (is_name or _same_value(sides[0], plain))
    if kind == "≠" and _LETTER.fullmatch(sides[0]):
        return _same(f"(-\\infty,{sides[1]})∪({sides[1]},\\infty)", plain, depth)
    if len(sides) == 2:  # x < 3 is -\infty < x < 3
        at_left = _LETTER.fullmatch(sides[0])
        kind, sides = ("<" + kind, ["-\\infty", *sides]) if at_left else (kind + "<", [*sides, "\\infty"])
    if len(sides) != 3 or not _LETTER.fullmatch(sides[1]) or not set(kind) <= {"<", "≤"} or plain[0] not in "([":
        return False
    left, right = "[" if kind[0] == "≤" else "(", "]" if kind[1] == "≤" else ")"
    return _same(f"{left}{sides[0]},{sides[2]}{right}", plain, depth)


def _same_relations(kind: str, a: list[str], b: list[str], depth: int) -> bool:
    """Whether both sides agree, or their difference is the same up to a factor: 2x = 6y and x - 3y = 0."""
    if all(_same(x, y, depth) for x, y in zip(a, b)):
        return True
    names = {a[0], b[0]}
    if depth and kind == "=" and {re.sub(r"_\{?\d\}?$", "", name) for name in names} < names:
        return _same(a[1], b[1], depth)  # of x_1 = 2, x_2 = 3 the first is x = 2
    if a[0] == b[0] != "0":  # or x = e^{-40} would round to x = e^{-50}; but 0 = x is 0 = 2x
        return False
    gaps, others = (_values(f"({sides[0]})-({sides[1]})") for sides in (a, b))
    if len(a) > 2 or gaps[0] in (0, gaps[1]) or others[0] in (0, others[1]):  # no letter: 1 = 2, 3 = 5
        return False
    return (math.inf not in map(abs, gaps + others)  # which is close to any multiple of itself
            and all(_close(gap * others[0], other * gaps[0]) for gap, other in zip(gaps, others))
            and (kind not in "<≤" or gaps[0] * others[0] > 0))


# The unit after a number: words of four or more letters, or of three after a space, short units, and what goes with
# them, as in "5 miles per hour" and "9.8 m s^{-2}". For "4210_5" it is the base, which the question names.
_UNIT = re.compile(r"""
    (?<=[\d)}\]\s]) \s* \(? ( mod\d+ | (?:
        (?! /?[ ]? (?: (?:arc)?(?: sin | cos | tan )h? | log | exp | sqrt | squared | cubed | plus | minus
           | halves | factorial | (?: half | (?: thir | four | fif | six | seven | eigh | nin | ten | eleven | twelf
                | [a-z]+teen | [a-z]+tie | hundred | thousand )(?:d|th) )
             (?: s | (?! -[a-z] | [ ](?!of\b)[a-z] ) ) ) (?![a-z]) )  # 1 third, but 2 third-graders
        (?: (?: /[ ]? | (?<=\s) a[ ] )?
            (?: [A-Za-zÀ-ɏ]{4,} | (?<=[\s/]) (?:day|hr|wk|lb|kg) ) | (?<=[\s(]) [A-Za-z]{3} )
        | [ckm]?m | [km]?g | gm | m?[lL] | ft | in | mi | yd | (?: lb | hr | min | sec | yr | wk | qt | pt )s?
        | oz | mph | [KMGT]B | USD | of | [APap]\.?[Mm]
        | (?<=\s) k? (?: [NJVAWCFsh] | Hz | eV | Pa ) ) (?![A-Za-z])
      (?: [\s.]* \^ \{? -?[23] \}? | [23]
        | [\s./()'-]+ (?: [A-Za-z]{2,} | [ahmsA-Z] ) (?![A-Za-z]) )* [\s.)]*
    | (?<=\d) _ \{?[ ]?\d+[ ]?\}? )$""", re.X)
_INTEGER = re.compile(r"(?<![a-zA-Z\\])[kn](?![a-zA-Z])")  # what most often stands for any integer
_UNITS = {"m": "meter", "mi": "mile", "g": "gram", "lb": "pound", "lbs": "pound", "oz": "ounce", "per": "/",
          "mph": "mile/hour", "foot": "feet"}


def _same_value(a: str, b: str) -> bool:
    """Compare two numbers, formulas or texts, and units where both have one: 5 km is 5 and 5 kilometers, not 5 cm."""
    (a, a_unit), (b, b_unit) = _split_unit(a), _split_unit(b)
    if {"am", "pm"} & {a_unit, b_unit}:
        a, b = a.removesuffix(":00"), b.removesuffix(":00")
    short, long = sorted((a_unit, b_unit), key=len)
    if short:  # most abbreviations keep some letters of the word, in order, and all of its signs and digits
        letters = iter(long)
        abbreviates = (short[0] == long[0] and all(letter in letters for letter in short)
                       and not (short.startswith(("meter", "mile")) and re.match("milli|micro|mega", long)))
        if not abbreviates or re.findall("[^a-z]", short) != re.findall("[^a-z]", long):
            return False
    if a == b or a.lower() == b.lower() and re.match(r"(?!.*[\\^_+*/=]).*\b[a-zA-Z]{2}", a):  # words; x is not X
        return True
    if all(re.fullmatch(r"[A-Z ]{2,}|\(?[ivx]{2,}\)?", side) for side in (a, b)):  # no products: ABC, CAB; iv, vi
        return a.strip("()") == b.strip("()")
    letters = [set(_INTEGER.findall(side)) for side in (a, b)]
    if "\\pi" in a and letters in ([{"n"}, {"k"}], [{"k"}, {"n"}]):  # x = n\pi is x = k\pi
        a, b = (_INTEGER.sub("k", side) for side in (a, b))
    values, others = _values(a), _values(b)
    constant = len({*values}) == len({*others}) == 1  # no letter counts
    return all(_close(x, y, constant) for x, y in zip(values, others))


def _split_unit(text: str) -> tuple[str, str]:
    """"18 apples" -> ("18", "apples"), "5 ft/s^2" -> ("5", "ft/s2"), "12m" -> ("12", "meter"); "x + 3m" has none."""
    found = _UNIT.search(text)
    number = text[:found.start()].strip() if found else ""
    if not re.search(r"\d|\\pi", number) or number.count("(") > number.count(")"):  # no number; 2(1+3m)
        return text, ""
    one = r"[a-zA-Z](\s?\^?\{?[23]\}?)?"
    if re.fullmatch(one, found[1]):  # one letter: 5 m^2 and 16\pi m, but 1+3m, 1 + 3 m and x+3 m
        spaced = found[1][0] in "mgL" and text[found.start(1) - 1] == " "
        numeric = r"(?!.*(?<!t)(?<!t )\d ?[-+] ?[\d.]+$)(?:[^a-zA-Z\\]|\\[a-z]+)*" if spaced else r"[-\d./*^{} ]+"
        if not re.fullmatch(numeric, number):
            return text, ""
    elif re.fullmatch(rf"{one}( {one})+", found[1]) and not re.fullmatch(
            r"[AJNVW] [hms](\s?\^?\{?2\}?)?|V A|C m|m K", found[1]):  # a product, like m R^2, but not N m
        return text, ""
    unit = found[1].lower().replace(".", "").replace("tre", "ter")  # 2 metres
    unit = re.sub("[a-z]+", lambda word: _UNITS.get(word[0], word[0]), unit)
    return number, re.sub(r"[\s(){}^]", "", unit)


def _close(a, b, constant: bool = False) -> bool:
    """Equal, or apart only by the rounding of floats: \\sin(\\pi) is not quite 0. `constant`: neither has letters."""
    if _bits(a) and _bits(b):
        return a == b
    # \sin(\pi) is meant to be 0, and so is its square if neither has letters: e^{-x^2} at x = 8 is as small as that.
    nearly_zero = 0 in (a, b) and (constant or abs(a + b) > 1e-20)
    return cmath.isclose(a, b, rel_tol=1e-11, abs_tol=1e-13 if nearly_zero else 0)


def _bits(value) -> int:
    """The size of an exact number, and 0 for a float."""
    return value.numerator.bit_length() + value.denominator.bit_length() if isinstance(value, Fraction) else 0


def _power(base, exponent):
    if _bits(exponent) and _bits(base) * abs(exponent) > MOST_BITS:
        raise ValueError
    # The real root: (-8)^{1/3} and \sqrt[3]{-8} are -2. (A letter, as in (-1)^n, is a fraction of denominator 307.)
    if not isinstance(base, complex) and _bits(exponent) and base < 0 and exponent.denominator in range(3, 97, 2):
        return (-1) ** exponent.numerator * (-base) ** exponent
    return base ** exponent


def _factorial(n):
    return Fraction(math.factorial(int(n))) if n == int(n) and 0 <= n < 200 else math.gamma(n + 1)  # n may be a letter


_OF_TWO = {"frac": operator.truediv, "binom": lambda n, k: _factorial(n) / _factorial(k) / _factorial(n - k)}
_OPERATORS = {  # precedence and function
    "+": (1, operator.add), "∔": (1, operator.add), "-": (1, operator.sub), "*": (2, operator.mul),
    "·": (2, operator.mul), "/": (2, operator.truediv), "^": (3, _power), "!": (4, _factorial)}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CONSTANTS = {"pi": math.pi, "e": math.e, "i": 1j, "infty": math.inf, "infinity": math.inf, "inf": math.inf}
_FUNCTIONS = {name: getattr(cmath, name) for name in "sin cos tan sinh cosh tanh exp".split()} | {
    "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan, "ln": cmath.log, "log": cmath.log10,
    "arccot": lambda x: cmath.pi / 2 - cmath.atan(x), "arcsec": lambda x: cmath.acos(1 / x),
    "arccsc": lambda x: cmath.asin(1 / x), "arcsinh": cmath.asinh, "arccosh": cmath.acosh, "arctanh": cmath.atanh,
    "sec": lambda x: 1 / cmath.cos(x), "csc": lambda x: 1 / cmath.sin(x), "cot": lambda x: 1 / cmath.tan(x)}
_KNOWN = {*_FUNCTIONS, *_CONSTANTS, *_OF_TWO, "sqrt"}
# Relations and operators, not to be read as letters: a product of letters is the same in any order.
_SIGNS = re.compile(r"\\(?:to|(?:[Ll]ong)?(?:[Ll]eft|[Rr]ight)arrow|mapsto|implies|setminus|backslash|su[bp]set(?:eq)?"
                    r"|circ|bmod|neg|lnot|ll|gg)")
_INDEX = r"_(?:\w|\\[a-z]+|\{[^{}]*\})"
_TOKEN = re.compile(rf"""
    \d+ (?:\.\d*)? (?: [eE][+-]?\d{{1,2}} )? | \.\d+            # 12, 1.5, 1.5e3, .5
    | [a-zA-Z]{_INDEX}                                          # x_1, v_{{max}}
    | \\(?:overline|hat|vec|dot)[ ]?(?:\{{[^{{}}]*\}}|\w) (?:{_INDEX})?        # \overline{{A}}, \vec v
    | \\?(?:{"|".join(sorted(_KNOWN))}) (?![a-zA-Z])             # sin or \sin
    | \\[a-zA-Z]+ (?:{_INDEX})? | [a-zA-Z]{{4,}} | \S            # \theta; a word, which is no formula; else xy is x·y
    """, re.X)


@functools.lru_cache(4096)
def _values(text: str) -> tuple:
    """The values of a formula at three points. At each, a letter stands for a number that follows from its name.

    So "(x+1)^2" and "x^2+2x+1" have the same exact fractions, "\\sqrt{12}" and "2\\sqrt3" floats that agree to eleven
    digits. Formulas that differ agree at one point with a chance of about 1 in 1,000, and hardly ever at all three.
    Where the text is no formula, this raises one of the errors that `_same` catches.
    """
    # n2^n, (n-1)2^n, 2^6 3^5, 3!7! and the i2 of e^{i2\pi/3} are products, but x2 is not 2x.
    text = re.sub(r"(?<!\\ln)(?<!\\log)(?<=[a-zA-Z)}]) ?(?=\d+\^)|(?<=\^\d) (?=\d)"
                  r"|(?<=[!i])(?<!\\frac\\pi) ?(?=\d)", "*", text)
    text = re.sub(r"(?<![a-zA-Z\\])([a-zA-Z])\(0\)", r"\1_0", text)  # I(0) is not 0
    words = [word.lstrip("\\") if word.lstrip("\\") in _KNOWN else word for word in _TOKEN.findall(text)]
    return tuple(_value(words, modulus) for modulus in (1009, 1013, 1019))


def _value(words: list[str], modulus: int):
    """The value of a formula where its letters stand for numbers that depend on `modulus`. A recursive-descent parser
    that computes as it reads."""
    tokens = [";", *reversed(words)]  # a stack with the first one on top
    letters = []  # read so far

    def accept(token):  # take the next token if it is this one
        return tokens[-1] == token and tokens.pop()

    def read(strength):  # an atom and those operators after it that bind more strongly than this
        value = atom()
        while True:
            if tokens[-1] in _CLOSING or tokens[-1].lstrip("\\")[:1].isalpha():
                tokens.append("·")  # 2x, 2(x + 1) and x\sin x are products
            binds, apply = _OPERATORS.get(tokens[-1], (0, None))
            if binds <= strength:
                return value
            sign = tokens.pop()
            value = apply(value) if sign == "!" else apply(value, read(binds - (sign == "^")))  # 2^3^2 is 2^9
            if _bits(value) > MOST_BITS:
                raise ValueError

    def atom():  # a number, a letter, (…), -atom, \frac atom atom, \sqrt[…] atom, \sin^atom atom and the like
        token = tokens.pop()
        if token[0].isdigit() or token[0] == ".":
            return Fraction(token)
        if token in ("+", "-"):
            return read(2) if token == "+" else -read(2)
        if token in _CLOSING:
            value = read(0)
            if not accept(_CLOSING[token]):
                raise ValueError
            return value
        if token in _OF_TWO:
            return _OF_TWO[token](atom(), atom())
        if token == "\\abs":  # |-5| is 5. Letters stand for positive numbers, but |x| is not x, nor |x| + |y| |x + y|.
            before = len(letters)
            value = abs(atom())
            return value if len(letters) == before else (98 * value + 1) / 97  # so |2x| is not 2|x| either: rare
        if token == "sqrt":
            index = atom() if tokens[-1] == "[" else 2
            return _power(atom(), 1 / index)
        if token in _FUNCTIONS:  # \log_2 8, \sin^2 x
            base = atom() if accept("_") else 10
            exponent = atom() if accept("^") else 1
            if exponent == -1 and f"arc{token}" in _FUNCTIONS:  # \tan^{-1} 2 is \arctan 2, not \cot 2
                token, exponent = f"arc{token}", 1
            bracketed = tokens[-1] in _CLOSING
            value = atom() if tokens[-1] in ("(", "[") else read(2)  # \sin(x)^2 is the square of a sine
            while not bracketed and tokens[-1] == "·" and tokens[-2] not in {*_CLOSING, *_FUNCTIONS}:  # \cos 2x
                tokens.pop()
                value = value * read(2)
            return (_FUNCTIONS[token](complex(value)) / cmath.log10(base)) ** exponent  # log10(10) is 1
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if re.match(r"[a-zA-Zα-ωΑ-Ω](?:_|$)", token) or token[0] == "\\" and not _SIGNS.fullmatch(token):
            letters.append(token)
            name = re.sub(r"[\\{} ]", "", token).encode()
            # The fifth power, since a + d is not b + c. From 1 to 4.3, so rounding hides no constant beside e^{5x},
            # and few x - 2 are negative, where roots and logarithms take another branch.
            return Fraction(pow(int.from_bytes(name, "big"), 5, modulus) + 308, 307)
        raise ValueError

    value = read(0)
    if tokens != [";"]:
        raise ValueError
    return value
