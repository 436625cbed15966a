"""What the six training scripts share, in the order in which a script meets it:

    command line    flag, RunConfig, launch, UserError
    processes       setup_device, rank, world_size, sum_over_ranks, gather_in_order
    models          load_tokenizer, load_model, shard, save_model; the built-in model and its problems
    data            read_problems, encode_prompts, Shuffled; read_preferences, collate_preferences
    sampling        sample -> Rollout
    log-probs       token_logprobs, token_values, micro_batches
    rewards         load_reward
    verifiers       extract_answer, is_equivalent, format_reward
    evaluation      evaluate
    the run         make_optimizer, Meter, Run (updates, metrics, checkpoints, signals)

Shapes:  P prompts, G completions of each, N = P·G rows, L padded prompt length, T padded completion length,
         V vocabulary, H hidden size, B rows of a micro-batch.

Every process of a torchrun job holds the whole rollout (token ids are small), and so computes the same rewards,
advantages and weights as a single process would. Only the expensive work is divided: `sample` decodes this rank's
rows, `micro_batches` deals this rank's share of the update, and gradients are summed.
"""
import cmath
import collections
import contextlib
import copy
import ctypes
import dataclasses
import datetime
import difflib
import fcntl
import functools
import gzip
import hashlib
import importlib.util
import inspect
import itertools
import json
import logging
import math
import operator
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import unicodedata
import warnings
import zlib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import huggingface_hub
import jinja2
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from tqdm import tqdm
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers import (AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification,
                          AutoTokenizer, DynamicCache, HfArgumentParser, PreTrainedTokenizerFast, Qwen2Config,
                          Qwen2ForCausalLM)

SYSTEM_PROMPT = ("Think about the problem step by step, then give the answer. Write your reasoning and your answer as "
                 "<think> reasoning here </think><answer> answer here </answer>.")


# ------------------------------------------------------------------------------------------------ command line

class UserError(Exception):
    """Something the user can fix: `launch` prints it as one line and exits with code 2."""
    exit_code = 2


class TrainingFailed(UserError):
    """The run cannot continue, and the command line is not to blame."""
    exit_code = 1


def flag(default, help: str):
    """A dataclass field that HfArgumentParser turns into `--name`, with its help text."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass
class RunConfig:
    """The flags of every script."""
    model: str = flag("tiny", "tiny (built in), a directory, or a hub id")
    data: str = flag("arithmetic", "arithmetic[:DIGITS] (built in), FILE.jsonl[.gz], or a hub id[:CONFIG[:SPLIT]]")
    eval_data: str = flag("", "held-out data, same forms; arithmetic brings its own")
    system_prompt: str = flag("", "system message of a chat template; none: add none; empty: one that asks for "
                                  "<think> and <answer>, but none for preferences")
    max_prompt_tokens: int = flag(1024, "longer prompts are left out, and the script says how many")
    trust_remote_code: bool = flag(False, "run model code that comes with the checkpoint")
    output_dir: str = flag("", "metrics.jsonl, model/, checkpoint/ and the rest go here; empty: runs/SCRIPT")
    overwrite: bool = flag(False, "replace the run that OUTPUT_DIR holds")
    resume: bool = flag(False, "continue from OUTPUT_DIR/checkpoint")
    seed: int = flag(0, "seed of data order, sampling and fresh heads")
    log_to: Literal["none", "tensorboard", "wandb"] = flag("none", "a second log, beside metrics.jsonl")
    save_every: int = flag(50, "steps between checkpoints")
    eval_every: int = flag(20, "steps between evaluations; there is one before the first step and one after the last")
    eval_samples: int = flag(1, "k: beside greedy decoding, sample k completions a problem for avg@k and pass@k")
    micro_batch_tokens: int = flag(4096, "padded tokens per forward and backward pass: lower it when memory runs out")
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass: less memory, 1/3 more time")
    freeze_layers: float = flag(0.0, "this share of the layers, from the first, does not train")
    lr_schedule: Literal["constant", "linear", "cosine"] = flag("constant", "after the warm-up: constant, or down to 0")
    max_bad_steps: int = flag(5, "updates in a row with a non-finite loss or gradient before the run gives up")


LARGEST = 1e30  # short of infinity
# name: (lowest, highest) allowed value of a number. If it is not here, an int is at least 1, a float at least 0.
LIMITS = {
    **dict.fromkeys(["max_grad_norm", "temperature", "beta"], (1e-8, LARGEST)),
    **dict.fromkeys(["clip_eps", "clip_low", "freeze_layers", "gamma", "lam"], (0, 1)),
    **dict.fromkeys(["warmup_steps", "overlong_buffer"], (0, LARGEST)),
    "seed": (0, 2 ** 32 - 1), "group_size": (2, LARGEST), "clip_high": (0, 10), "label_smoothing": (0, 0.5),
}


def parse_config(Config, args: list[str]):
    """Command line (or one YAML/JSON file, then flags) -> a checked Config. Raises UserError."""
    parser = HfArgumentParser(Config, allow_abbrev=False)

    def error(message):
        raise UserError(re.sub(r"^argument (--\w+)(/--[\w-]+)?", r"\1", message))
    parser.error = error
    if args and args[0].endswith((".yaml", ".yml", ".json")) and not args[0].startswith("-"):  # --data=x.json
        try:
            import yaml  # JSON is YAML
            settings = yaml.safe_load(Path(args[0]).read_bytes())
        except (OSError, yaml.YAMLError, ValueError, RecursionError) as problem:
            raise UserError(f"{args[0]}: {problem}")
        if not isinstance(settings, dict):
            raise UserError(f"{args[0]}: want a mapping from flag names to values")
        # left empty: the default; no_x: true is --no_x
        args = [f"--{name}" if value is True and str(name).startswith("no_") else f"--{name}={value}"
                for name, value in settings.items() if value is not None] + args[1:]
    cfg, unknown = parser.parse_args_into_dataclasses(args, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        names = [field.name for field in dataclasses.fields(Config)]
        nearest = difflib.get_close_matches(unknown[0].split("=")[0].lstrip("-"), names, n=1)
        advice = f", did you mean --{nearest[0]}?" if nearest else "; see --help"
        raise UserError(f"unknown flag {unknown[0]}{advice}")
    for field in dataclasses.fields(cfg):
        name, value = field.name, getattr(cfg, field.name)
        if isinstance(value, str) and value.startswith("~/"):  # a shell expands neither YAML nor --model=~/x
            setattr(cfg, name, os.path.expanduser(value))
        low, high = LIMITS.get(name, (1 if field.type is int else 0, LARGEST))
        if field.type in (int, float) and not low <= value <= high:  # also catches NaN
            wanted = f"between {low} and {high}" if high < LARGEST or value > high else f"at least {low}"
            raise UserError(f"--{name} {value}: must be {wanted}")
    if getattr(cfg, "minibatches", 1) > getattr(cfg, "prompts_per_step", 1) * getattr(cfg, "group_size", 1):
        raise UserError(f"--minibatches {cfg.minibatches}: more than the completions of a step")
    if hasattr(cfg, "overlong_buffer") and cfg.overlong_buffer > max(cfg.max_new_tokens, Config.overlong_buffer):
        raise UserError(f"--overlong_buffer {cfg.overlong_buffer}: more than --max_new_tokens {cfg.max_new_tokens}")
    return cfg


def launch(main, Config) -> None:
    """Run a script: flags, then `main(cfg)`. An error that the user can fix is one line on stderr and exit code 2."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.utils.logging.set_verbosity_error()
    sys.stderr.write, sys.stderr.flush = outliving_reader(sys.stderr.write), outliving_reader(sys.stderr.flush)
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        main(parse_config(Config, sys.argv[1:]))
    except KeyboardInterrupt:  # before the first step; later `Run.note_signal` has it
        if speaks:
            tqdm.write(f"{Path(sys.argv[0]).name}: interrupted before the first step", file=sys.stderr)
        sys.exit(130)
    except (UserError, torch.OutOfMemoryError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            error = TrainingFailed(f"out of GPU memory {memory_advice(error)} (the last checkpoint is intact): "
                                   f"{str(error).splitlines()[0]}")
        if not speaks:  # most errors come to all ranks: rank 0 speaks, and when it leaves, torchrun ends the others
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(15)
        message = " ".join(str(error).split())
        tqdm.write(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)  # on a line of its own
        sys.exit(error.exit_code)
    leave_together()


def leave_together(code: int = 0) -> None:
    """Exit when every rank has got here. All is saved."""
    if world_size() > 1:
        dist.barrier()
        with contextlib.suppress(OSError):
            sys.stdout.flush()  # what a reward function has printed
        sys.stderr.flush()
        os._exit(code)  # a rank that tears gloo down while others still do is sometimes aborted
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)


def outliving_reader(method):
    """A stream's method that minds no lost reader (closed terminal, `tee` that Ctrl-C ended): the run has to save."""
    def call(*args):
        with contextlib.suppress(OSError):
            return method(*args)
    return call


def memory_advice(error: BaseException) -> str:
    """Which phase ran out of memory and which flag helps, from the function names in the error's traceback."""
    functions = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    phases = {"load_model": "while loading the model: use more GPUs",
              "sample": "while sampling: start again with a lower --prompts_per_step (dpo.py: --pairs_per_step) or "
                        "--max_new_tokens",
              "optimizer_step": "in the optimizer step: use more GPUs, or start again with --freeze_layers"}
    return next((advice for name, advice in phases.items() if name in functions),
                "in a forward or backward pass: --resume with a lower --micro_batch_tokens or --gradient_checkpointing")


# --------------------------------------------------------------------------------------------------- processes

def setup_device() -> torch.device:
    """Join the torchrun job, if there is one; return this process's device."""
    cuda, torchrun = torch.cuda.is_available(), "RANK" in os.environ
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # replans for each shape; NaN with some masks (pytorch #196678)
    else:
        # Some gradients (of a mixture of experts, of repeated indices) would add up in the order that threads happen to
        # run in: a run would not repeat itself.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # else empty tensors are filled, which takes time
    with contextlib.suppress(AttributeError):  # another libc than Linux's
        libc = ctypes.CDLL(None)
        PR_SET_PDEATHSIG, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = 1, -1, -3  # as its headers have them
        if "TORCHELASTIC_RUN_ID" in os.environ:  # when torchrun itself is killed, its processes end too
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if not cuda:  # keep the memory that tensors free: the system would zero its pages again for the next tensor
            libc.mallopt(M_MMAP_THRESHOLD, 2 ** 25)  # but keeping blocks above 32 MB fragments: 5 GB, not 1, at large V
            libc.mallopt(M_TRIM_THRESHOLD, 2 ** 31 - 1)  # an eighth of the tiny model's step
    if (cuda or torchrun) and not dist.is_initialized():  # on one GPU, FSDP2 still does the mixed precision
        job = {} if torchrun else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        # The default of half an hour is less than ranks may differ by in sampling, or rank 0 may take to download.
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=datetime.timedelta(hours=6), **job)
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


def on_all_ranks(mine: bool) -> bool:
    return int(sum_over_ranks(torch.tensor(int(mine)))) == world_size()


def gather_in_order(mine: list) -> list:
    """Concatenate every rank's list, in rank order: undoes `my_share`."""
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


def on_main_rank_first(work):
    """Run `work()` on rank 0 while the others wait. Its error is raised on every rank."""
    problem = None
    if rank() == 0:
        try:
            work()
        except (UserError, OSError) as error:
            problem = error
    if problem := from_main_rank(problem):
        raise problem


# ------------------------------------------------------------------------------------------------------ models

def load_tokenizer(name: str, trust_remote_code: bool = False):
    """The tokenizer of a directory or hub id, with a pad token (EOS where it has none: masks come from positions)."""
    if (name.startswith(("/", ".")) or name.count("/") > 1) and not os.path.isdir(name):  # a hub id has one /
        raise UserError(f"--model {name}: no such directory")
    with one_line_errors(f"--model {name}: no tokenizer can be read there"):
        # A model's own generic tokenizer is the one to use. For some model types (Qwen2's among them) AutoTokenizer
        # would load that of the architecture instead, which splits text differently.
        kind = get_tokenizer_config(name, trust_remote_code=trust_remote_code).get("tokenizer_class")
        cls = PreTrainedTokenizerFast if kind in ("TokenizersBackend", "PreTrainedTokenizerFast") else AutoTokenizer
        tokenizer = cls.from_pretrained(name, trust_remote_code=trust_remote_code)
    if not tokenizer("1")["input_ids"]:  # transformers makes an empty one where a model lies without a tokenizer
        raise UserError(f"--model {name}: no tokenizer there")
    if tokenizer.eos_token_id is None:
        raise UserError(f"--model {name}: its tokenizer has no end-of-sequence token, so no completion could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextlib.contextmanager
def one_line_errors(what: str):
    """A wrong name or path raises many kinds of exception, in the libraries above all: each becomes one clear line."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{what} ({reason})") from error


def load_model(name: str, device: torch.device, trainable: bool = True, cls=AutoModelForCausalLM,
               trust_remote_code: bool = False, **config_changes):
    """A model for training (float32 masters) or a frozen one (on CUDA in bfloat16), sharded over the ranks.

    In evaluation mode: with dropout or router noise, the policy that is scored would not be the policy that sampled.
    Dropout is 0 as well, for layers that recompute their activations must be in training mode (`make_optimizer`).
    With several ranks only rank 0 reads the weights; the others start on the meta device and receive their shards, so
    that no GPU ever holds the whole model in float32. `saved_dtype` is the checkpoint's own dtype, for `save_model`.
    """
    with one_line_errors(f"--model {name}: not a model that transformers can load"):
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **config_changes)
        if cls is AutoModelForCausalLM and "ForSequenceClassification" in "".join(config.architectures or ()):
            raise UserError(f"--model {name}: a classifier, as reward models are, and not a language model")
        saved_dtype = config.dtype or torch.float32
        for part in (config, config.get_text_config()):  # one object, unless the model reads more than text
            for key, value in part.to_dict().items():
                if re.search("drop$|dropout", key) and isinstance(value, float):
                    setattr(part, key, 0.0)
        dtype = torch.bfloat16 if device.type == "cuda" and not trainable else torch.float32
        missing = set()
        with torch.random.fork_rng(devices=[]):  # only rank 0 draws, where a head is new
            if rank() == 0:
                model, report = cls.from_pretrained(name, config=config, dtype=dtype, use_safetensors=True,
                                                    trust_remote_code=trust_remote_code, output_loading_info=True)
                missing = set(report["missing_keys"]) - ({"score.weight"} if trainable else set())  # a fresh head
            else:
                with torch.device("meta"):
                    model = cls.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if cls is AutoModelForSequenceClassification and not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise UserError(f"--model {name}: {type(model).__name__} has no scalar head named score")
    if missing:  # transformers would draw them at random
        raise UserError(f"--model {name}: no weights for {', '.join(sorted(missing)[:3])}{', …' * (len(missing) > 3)}")
    model.saved_dtype = saved_dtype
    model.eval().requires_grad_(trainable)
    return shard(model, device)


def model_name(cfg) -> str:
    """--model as from_pretrained takes it."""
    return build_tiny_model(cfg.data) if cfg.model == "tiny" else cfg.model


def load_policy(cfg, device: torch.device, cls=AutoModelForCausalLM, **config_changes):
    """--model -> (model to train, tokenizer), after checking that the two fit."""
    name = model_name(cfg)
    tokenizer = load_tokenizer(name, cfg.trust_remote_code)
    policy = load_model(name, device, cls=cls, trust_remote_code=cfg.trust_remote_code, **config_changes)
    vocabulary, context = policy.config.get_text_config().vocab_size, context_length(policy)
    if len(tokenizer) > vocabulary:
        raise UserError(f"--model {name}: its tokenizer has {len(tokenizer)} tokens, its embedding {vocabulary}")
    if getattr(cfg, "max_new_tokens", 0) >= context:
        raise UserError(f"--max_new_tokens {cfg.max_new_tokens}: the context of {name} is {context} tokens")
    tokenizer.model_max_length = min(tokenizer.model_max_length, context)
    sizes = ["lr", "value_lr", "overlong_buffer"]
    sizes += ["max_new_tokens"] * getattr(cfg, "on_policy", True)  # without it dpo.py reads pairs
    toy = [f"--{size} {getattr(cfg, size)}" for size in sizes
           if getattr(cfg, size, None) == getattr(type(cfg), size, math.nan)]
    if toy and cfg.model != "tiny":
        say(f"{', '.join(toy)}: these defaults suit the tiny model; README.md has a real model's")
    return policy, tokenizer


def context_length(model) -> float:
    """How many positions a row may have. With "longrope" (Phi-3), those of the short factors: a single row beyond them
    would change the positions of its whole batch."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None) or math.inf


def load_reference(cfg, device: torch.device):
    """A frozen copy of the policy before its first update."""
    return load_model(model_name(cfg), device, trainable=False, trust_remote_code=cfg.trust_remote_code)


def decoder_layers(model) -> torch.nn.ModuleList:
    """The stack of transformer layers: the ModuleList with the most parameters, of the base model or its text part."""
    part = getattr(model.base_model, "language_model", model.base_model)
    lists = [module for module in part.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()), default=torch.nn.ModuleList())


def shard(model, device: torch.device):
    """FSDP2: each rank keeps a share of every parameter, and gathers one layer at a time to compute with it.

    On CUDA the gathered copy is bfloat16, while shard, gradient and optimizer stay float32: this is also how a single
    GPU gets its mixed precision. Gradients are summed over ranks, not averaged: token weights are global.
    """
    frozen = not any(parameter.requires_grad for parameter in model.parameters())
    if world_size() == 1 and (device.type == "cpu" or frozen):  # FSDP would cost a CPU 15%, and save nothing
        return model.to(device)
    weights = model.state_dict() if rank() == 0 and world_size() > 1 else {}
    compute_dtype = torch.bfloat16 if device.type == "cuda" else None  # None: that of the shard
    layers = decoder_layers(model)
    # by id: a reference would keep the whole parameter in memory beside its shard
    uses = collections.Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    own = [layer for layer in layers if all(uses[id(parameter)] == 1 for parameter in layer.parameters())]
    # Inputs stay as the model makes them (OLMo's rotary angles: float32), as they do without FSDP's hooks.
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [*own, model]:  # the root keeps layers that share parameters (Zamba)
        fully_shard(module, mp_policy=precision,
                    reshard_after_forward=frozen or module is not model)  # the backward pass begins with the root
        if world_size() > 1:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if rank() > 0:  # still on the meta device
        model.to_empty(device=device)
        model.tie_weights()
    if world_size() > 1:
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        for buffer in model.buffers():  # not in the state dict: rotary frequencies and the like
            dist.broadcast(buffer, 0)
        # Rank 0 read it with the weights. It says what ends a completion.
        model.generation_config = from_main_rank(getattr(model, "generation_config", None))
    return model


def call_gathered(function, model, *args):
    """function(model, *args) with FSDP's forward hooks around it, so that it sees gathered parameters."""
    if not isinstance(model, FSDPModule):
        return function(model, *args)
    model.work = functools.partial(function, model)  # FSDP wraps methods, by name
    register_fsdp_forward_method(model, "work")
    return model.work(*args)


@contextlib.contextmanager
def gathered(model):
    """Gather all parameters once, so that ranks may call the model a different number of times: no collectives.

    FSDP's hooks are off meanwhile: they cost a decoding step 0.1 ms a layer, and wait for other streams, which the
    capture of a CUDA graph cannot hold.
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


def save_model(model, tokenizer, directory: Path) -> None:
    """Write what from_pretrained, vLLM and TGI load, in the dtype that the model came in. Collective; atomic."""
    # gathered one at a time into rank 0's CPU memory: no GPU ever holds the whole model
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    own = dict(model.named_parameters()) | dict(model.named_buffers())  # each tied weight once
    weights = {name: tensor.to(model.saved_dtype) if tensor.is_floating_point() else tensor
               for name, tensor in weights.items() if name in own}

    def fill(folder):
        model.save_pretrained(folder, state_dict=weights)
        model.config.dtype = model.saved_dtype  # save_pretrained wrote that of the masters
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    on_main_rank_first(lambda: write_directory(directory, fill))


def write_directory(directory: Path, fill, replace: bool = True) -> None:
    """Fill a temporary directory with `fill(path)`, flush it to disk, and rename it to `directory`."""
    temporary, old = (directory.with_name(f"{directory.name}.{kind}-{os.getpid()}") for kind in ("tmp", "old"))
    try:
        for kind in ("tmp", "old") if replace else ():  # what a killed process has left
            for left in directory.parent.glob(f"{directory.name}.{kind}-*"):
                shutil.rmtree(left)
        temporary.mkdir(parents=True)
        fill(temporary)
        for file in filter(Path.is_file, temporary.rglob("*")):
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        if replace and directory.exists():
            os.rename(directory, old)
        os.rename(temporary, directory)  # fails where `directory` still is
    except (OSError, SafetensorError) as error:
        if replace or not directory.exists():  # else another process was first
            raise TrainingFailed(f"cannot write {directory}: {getattr(error, 'strerror', None) or error}"
                                 + "; --resume does it again" * replace) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


# ---------------------------------------------------------------------------- the built-in model, and its problems

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
TINY_VOCABULARY = ["<pad>", "<eos>", "<unk>", *TAGS, *"0123456789+-*=(),? "]


def arithmetic_rows(digits: int, split: str) -> list[dict]:
    """Additions of two numbers of `digits` digits, always the same: {"prompt": "12+34=?", "answer": "46"}.

    a+b and b+a are the same problem, and train and eval share none. Up to two digits the splits hold every problem
    there is, from three on 8,000 of them.
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
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])  # one token each, anywhere
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                                   clean_up_tokenization_spaces=False)


def train_tiny_model(digits: int):
    """A 0.6M-parameter Qwen2, taught by imperfect examples: it knows the right way and the wrong ones.

    That is the state from which reinforcement learning has something to do: sampled answers are right about two
    times in five, and greedy ones about half of the time.
    """
    tokenizer, draw, rows = tiny_tokenizer(), random.Random(0), arithmetic_rows(digits, "train")
    steps, threads = 300, torch.get_num_threads()
    torch.set_num_threads(1)  # sums round by the number of threads: the weights must not depend on it
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random state alone
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None))
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
    """The directory of the warm-started tiny model: trained on the first call (40 s of one core), then kept.

    Its name holds a hash of all that determines the weights. Processes that start together may each train one; that of
    the first to finish is kept.
    """
    digits = arithmetic_digits(data) if is_built_in(data) else 2
    parts = (arithmetic_rows, worked_answer, tiny_tokenizer, train_tiny_model)
    recipe = [*map(inspect.getsource, parts), digits, TINY_VOCABULARY, torch.__version__, transformers.__version__]
    directory = Path("runs") / f"tiny-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]}"

    def fill(folder):
        for part in train_tiny_model(digits):  # model, tokenizer
            part.save_pretrained(folder)
    on_main_rank_first(lambda: directory.exists() or write_directory(directory, fill, replace=False))
    return str(directory)


# -------------------------------------------------------------------------------------------------------- data

@dataclass
class Problem:
    prompt: str              # as the row has it; chat messages as rendered for the model
    prompt_ids: list[int]    # what the model reads
    answer: str | None       # the gold answer, for the verifier
    row: dict                # the whole row, for a reward function
    opening: str = ""        # "<think>" where the prompt ends with it: `format_reward` wants it in the completion


def is_built_in(data: str) -> bool:
    return data.split(":")[0] == "arithmetic"


def arithmetic_digits(data: str) -> int:
    digits = data.partition(":")[2] or "2"
    if not digits.isdecimal() or not 1 <= int(digits) <= 12:
        raise UserError(f"{data}: the built-in data is arithmetic or arithmetic:DIGITS, with 1 to 12 digits")
    return int(digits)


def read_rows(data: str, split: str) -> list[tuple[dict, str]]:
    """The rows of the built-in data, a JSON-lines file or a hub dataset, each with its place for error messages."""
    if is_built_in(data):
        rows = arithmetic_rows(arithmetic_digits(data), split)
    elif re.search(r"\.jsonl?(\.gz)?$", data) or os.path.isfile(data):
        return read_json_lines(data)
    else:
        name, config, own_split = (data.split(":") + [None, None])[:3]
        with one_line_errors(f"{data}: no such file, and no dataset that loads; datasets need pip install datasets"):
            import datasets
            rows = list(datasets.load_dataset(name, config, split=own_split or ("test" if split == "eval" else split)))
    return [(row, f"{data} row {i}") for i, row in enumerate(rows, 1)]


def read_json_lines(path: str) -> list[tuple[dict, str]]:
    """One JSON object a line, gzipped or not. Empty lines are skipped; a broken one is named."""
    rows, number = [], 0
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row, place = json.loads(line), f"{path} line {number}"
                    if not isinstance(row, dict):
                        raise UserError(f"{place}: want a JSON object, not {type(row).__name__}")
                    rows.append((row, place))
    except json.JSONDecodeError as error:
        reason = f"not JSON, one object a line ({error.msg} at column {error.colno})"
        raise UserError(f"{path} line {number}: {reason}") from None
    except (OSError, EOFError, ValueError, zlib.error, RecursionError) as error:
        place = f"{path} after line {number}" if number else path
        raise UserError(f"{place}: {getattr(error, 'strerror', None) or error}") from None
    if not rows:
        raise UserError(f"{path}: no rows")
    return rows


def read_problems(data: str, split: str = "train", need_answer: bool = True) -> list[Problem]:
    """Rows with a prompt (`prompt`, `question` or `problem`) and an answer (`answer`, `solution`, or `ground_truth`
    inside `reward_model`, which is verl's form), not yet encoded.

    A gold answer inside a worked solution (GSM8K's `#### 18`, MATH's `\\boxed{18}`) is taken out of it.
    """
    problems = []
    for row, place in read_rows(data, split):
        prompt, verl = row_prompt(row), row.get("reward_model")
        if not is_prompt(prompt):
            raise UserError(f"{place}: want a prompt (string or chat messages) under prompt, question or problem")
        found = row.get("answer"), row.get("solution"), verl.get("ground_truth") if isinstance(verl, dict) else None
        answer = next((one for one in found if one not in (None, "")), None)
        if type(answer) in (str, int, float):  # a bool is none of them
            answer = extract_answer(answer) or str(answer)
        elif not need_answer:
            answer = None  # a reward function has the row
        elif answer is not None:
            raise UserError(f"{place}: the answer must be a string or a number, not {type(answer).__name__}")
        else:
            raise UserError(f"{place}: no answer under answer or solution, which --reward verifier needs")
        problems.append(Problem(prompt, [], answer, row))
    return problems


def row_prompt(row: dict):
    return row.get("prompt") or row.get("question") or row.get("problem") or None


def is_prompt(prompt) -> bool:
    """A string, or chat messages."""
    return isinstance(prompt, str) or isinstance(prompt, list) and prompt != [] and all(
        isinstance(m, dict) and all(isinstance(m.get(key), str) for key in ("role", "content")) for m in prompt)


def read_train_and_eval(cfg, read=None) -> tuple[list, list]:
    """--data and --eval_data, as problems or by another `read(data, split)`. A file has no held-out part: without
    --eval_data there is no evaluation."""
    read = read or functools.partial(read_problems, need_answer=cfg.reward == "verifier")
    held_out = cfg.eval_data or (cfg.data if is_built_in(cfg.data) else "")
    return read(cfg.data, "train"), read(held_out, "eval") if held_out else []


def tokenize(tokenizer, texts: list[str], special: bool) -> list[list[int]]:
    """Token ids of texts, with or without the tokenizer's special tokens around them; a thousand texts at once, which
    takes half the time of one by one, and little memory."""
    return [ids for first in range(0, len(texts), 1000)
            for ids in tokenizer(texts[first:first + 1000], add_special_tokens=special)["input_ids"]]


def encode(tokenizer, prompts: list[tuple[str, bool]]) -> list[list[int]]:
    """Token ids of prompts, each (text, whether a chat template wrote it): one BOS where the tokenizer wants one, no
    EOS at the end. Templates bring their own."""
    rows, bos, eos = [], tokenizer.bos_token_id, tokenizer.eos_token_id
    for templated, alike in itertools.groupby(prompts, operator.itemgetter(1)):
        texts = [text for text, _ in alike]
        for text, ids in zip(texts, tokenize(tokenizer, texts, special=not templated)):
            if not templated and ids[:2] == [bos] * 2:  # the text had its own
                ids = ids[1:]
            if not templated and ids[-1:] == [eos] and (ids[-2:-1] == [eos] or not text.endswith(tokenizer.eos_token)):
                ids = ids[:-1]
            rows.append(ids)
    return rows


def render_prompt(prompt, tokenizer, system_prompt: str, default: str = SYSTEM_PROMPT) -> tuple[str, bool]:
    """(text for the model, whether a chat template wrote it: then it has all its special tokens already)."""
    if system_prompt == "none":
        system_prompt = default = ""
    if isinstance(prompt, str) and prompt.lstrip().startswith(tuple(tokenizer.all_special_tokens)):
        return prompt, False  # the data is templated already, perhaps without its BOS
    if isinstance(prompt, str) and not tokenizer.chat_template:
        return f"{system_prompt}\n\n{prompt}" if system_prompt else prompt, False
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if messages[0]["role"] != "system" and (system_prompt or default):
        messages = [{"role": "system", "content": system_prompt or default}, *messages]
    if not tokenizer.chat_template:
        return "\n\n".join(f"{m['role'].capitalize()}: {m['content']}" for m in messages) + "\n\nAssistant:", False
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False,
                                             enable_thinking=True), True  # without it some close <think> at once
    except jinja2.TemplateError as error:
        if messages[0]["role"] != "system" or len(messages) == 1:
            raise UserError(f"the chat template refuses a prompt: {error}") from error
        first = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
        # Some templates have no system role: let the first message begin with it.
        return render_prompt([first, *messages[2:]], tokenizer, "", default="")


def encode_prompts(problems: list, tokenizer, cfg, what: str, default_system_prompt: str = SYSTEM_PROMPT) -> list:
    """Fill in `prompt_ids`; leave out prompts that are longer than --max_prompt_tokens, and say how many."""
    texts = [render_prompt(problem.prompt, tokenizer, cfg.system_prompt, default_system_prompt) for problem in problems]
    with one_line_errors(f"{what}: the tokenizer cannot read a prompt"):
        encoded = encode(tokenizer, texts)
    for problem, (text, _), ids in zip(problems, texts, encoded):
        problem.prompt_ids = ids
        if cfg.model == "tiny" and tokenizer.unk_token_id in problem.prompt_ids:
            raise UserError(f"{what}: the tiny model reads digits and +-*=(),? alone, not {text[:40]!r}")
        if isinstance(problem.prompt, list):
            problem.prompt = text
        if isinstance(problem, Problem) and text.rstrip().endswith("<think>"):  # as reasoning models' templates do
            problem.opening = "<think>"
    limit = min(cfg.max_prompt_tokens, tokenizer.model_max_length - getattr(cfg, "max_new_tokens", 1))
    kept = [problem for problem in problems if 0 < len(problem.prompt_ids) <= limit]
    if problems and not kept:
        raise UserError(f"{what}: no rows left: all prompts are empty or longer than {limit} tokens")
    if len(kept) < len(problems):
        say(f"{what}: left out {len(problems) - len(kept)} of {len(problems)} prompts that are empty or longer than "
            f"{limit} tokens (--max_prompt_tokens, and what the context leaves)")
    return kept


class Shuffled:
    """Endless passes over `items`, each in its own seeded order. `position` is all that --resume needs."""

    def __init__(self, items: list, seed: int):
        self.items, self.seed, self.position = items, seed, 0

    def next(self, count: int) -> list:
        """The next `count` items; the same on every rank."""
        places = [divmod(p, len(self.items)) for p in range(self.position, self.position + count)]
        self.position += count
        orders = {epoch: self.order(epoch) for epoch in {epoch for epoch, _ in places}}
        return [self.items[orders[epoch][i]] for epoch, i in places]

    def first(self, count: int) -> list:
        """The distinct ones among the first `count` items, without moving."""
        return self.items if count >= len(self.items) else [self.items[i] for i in self.order(0)[:count]]

    def order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.items))


def collate(prompts: list[list[int]], completions: list[list[int]], pad_id: int, device="cpu"):
    """Left-pad prompts, right-pad completions -> input_ids [N, L+T], attention_mask [N, L+T], mask [N, T] (bool)."""
    L, T = max(map(len, prompts)), max(map(len, completions))
    rows = [[pad_id] * (L - len(p)) + p + c + [pad_id] * (T - len(c)) for p, c in zip(prompts, completions)]
    real = [[0] * (L - len(p)) + [1] * (len(p) + len(c)) + [0] * (T - len(c)) for p, c in zip(prompts, completions)]
    input_ids, attention_mask = (torch.tensor(np.array(x), device=device) for x in (rows, real))  # numpy reads faster
    return input_ids, attention_mask, attention_mask[:, L:].bool()


# --------------------------------------------------------------------------------------------- preference data

@dataclass
class Preference:
    """A prompt and K ≥ 2 answers to it, best first. Rows with `chosen` and `rejected` have K = 2."""
    prompt: str
    prompt_ids: list[int]
    answers: list[str]
    answer_ids: list[list[int]]   # each ends with EOS, unless it was cut
    scores: list[float]           # falling; equal ones are a tie and make no pair
    margin: float = 0.0           # how much better the better answer is (`margin` of a row, optional)
    ref_logprobs: tuple = ()      # of each answer under the reference, once dpo.py has computed them

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(better, worse) answer numbers: K(K − 1)/2 of them, less the ties."""
        both = itertools.combinations(range(len(self.scores)), 2)
        return [(i, j) for i, j in both if self.scores[i] > self.scores[j]]

    def split(self) -> list["Preference"]:
        """One preference of two answers for each pair."""
        return [Preference(self.prompt, self.prompt_ids, [self.answers[i], self.answers[j]],
                           [self.answer_ids[i], self.answer_ids[j]], [1.0, 0.0], self.margin) for i, j in self.pairs]


def read_preferences(data: str, split: str = "train") -> list[Preference]:
    """Rows `prompt`, `chosen`, `rejected`; or whole dialogues without `prompt`; or `prompt`, `responses` (best first).

    `scores` beside `responses` put them in order, and may tie. Not yet encoded. Rows whose answers are all equal or all
    tie (also by `tie`, or a `margin` of 0) teach nothing: they are left out, with a line that says how many.
    """
    source = str(build_tiny_preferences(data, split)) if is_built_in(data) else data
    preferences = []
    for row, place in read_rows(source, split):
        try:
            preferences.append(read_preference(row))
        except KeyError as missing:
            raise UserError(f"{place}: no {missing.args[0]}; want prompt, chosen and rejected, or responses") from None
        except ValueError as error:
            raise UserError(f"{place}: {error}") from None
    kept = [preference for preference in preferences if preference]
    if not kept:
        raise UserError(f"{data}: no rows left")
    if left_out := len(preferences) - len(kept):
        say(f"{data}: left out {left_out} of {len(preferences)} rows whose answers are equal or tie")
    return kept


def read_preference(row: dict) -> Preference | None:
    """One row; None if it prefers nothing. A malformed one raises KeyError or ValueError."""
    prompt = row_prompt(row)
    answers = [row["chosen"], row["rejected"]] if row.get("responses") is None else row["responses"]
    if not isinstance(answers, list) or len(answers) < 2:
        raise ValueError("responses must be a list of at least two answers, best first")
    if not all(map(is_prompt, answers)):
        raise ValueError("an answer must be a string or chat messages")
    if prompt is None and all(isinstance(answer, list) for answer in answers):
        prompt = answers[0][:-1]
        if any(answer[:-1] != prompt for answer in answers):
            raise ValueError("want a prompt that the conversations share: all but their last turns")
    answers = [answer if isinstance(answer, str) else answer[-1]["content"] for answer in answers]
    if prompt is None:  # "Human: hi Assistant: hello", "Human: hi Assistant: go away": "Human: hi Assistant:"
        shared = re.match(".*[Aa]ssistant:", os.path.commonprefix(answers), re.S)
        if not shared:
            raise ValueError("no prompt, and the answers are not dialogues that share a turn up to 'Assistant:'")
        prompt, answers = shared[0], [answer[shared.end():] for answer in answers]
    if not is_prompt(prompt):
        raise ValueError("want a prompt (string or chat messages)")
    margin, scores = row.get("margin"), row.get("scores")
    if scores is None:
        scores = list(range(len(answers), 0, -1))
    if margin is not None and not is_number(margin):
        raise ValueError(f"margin must be a number, not {margin!r:.40}")
    if not isinstance(scores, list) or len(scores) != len(answers) or not all(map(is_number, scores)):
        raise ValueError("scores must be as many numbers as there are responses")
    best = {}  # of equal answers the first counts
    for answer, score in sorted(zip(answers, scores), key=lambda pair: -pair[1]):
        best.setdefault(answer, float(score))
    if row.get("tie") or margin == 0 or len(set(best.values())) == 1:
        return None
    return Preference(prompt, [], list(best), [], list(best.values()), float(margin or 0))


def is_number(value) -> bool:
    """Finite, that is: JSON files may have NaN."""
    return isinstance(value, (int, float, np.integer, np.floating, np.bool_)) and bool(abs(value) < LARGEST)


def encode_preferences(preferences: list[Preference], tokenizer, cfg, what: str) -> list[Preference]:
    """Fill in the token ids. Answers end with EOS, or are cut at --max_completion_tokens or the end of the context."""
    kept = encode_prompts(preferences, tokenizer, cfg, what, default_system_prompt="")
    answers = [answer for preference in kept for answer in preference.answers]
    with one_line_errors(f"{what}: the tokenizer cannot read an answer"):
        ids = iter(tokenize(tokenizer, answers, special=False))
    cut, eos = 0, tokenizer.eos_token_id
    for preference in kept:
        room = min(cfg.max_completion_tokens, tokenizer.model_max_length - len(preference.prompt_ids))
        whole = [next(ids) for _ in preference.answers]
        whole = [answer + [eos] * (answer[-1:] != [eos]) for answer in whole]  # some data has it already
        preference.answer_ids = [answer[:room] for answer in whole]
        cut += sum(len(answer) > room for answer in whole)
    if cut:
        say(f"{what}: cut {cut} of {len(answers)} answers, at --max_completion_tokens or where the context ends")
    return kept


def build_tiny_preferences(data: str, split: str) -> Path:
    """The built-in rankings, kept beside the tiny model: four of its samples a problem, right ones first.

    The verifier stands for the human or the language model who would judge. Problems whose samples are all right or
    all wrong give no row.
    """
    tiny = build_tiny_model(data)
    recipe = [inspect.getsource(part) for part in (build_tiny_preferences, sample, decode, pick_tokens)]
    path = Path(f"{tiny}-ranked-{split}-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:6]}", "ranked.jsonl")
    if on_all_ranks(path.exists()):
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
    on_main_rank_first(lambda: write_directory(
        path.parent, lambda folder: (folder / path.name).write_text("".join(lines)), replace=False))
    return path


Batch = collections.namedtuple("Batch", "input_ids attention_mask mask")  # what `micro_batches` deals: see Rollout


def collate_preferences(preferences: list[Preference], pad_id: int, device):
    """-> (batch, a row for each answer; blocks, the rows of each preference, best first; pairs of rows [pairs, 2])."""
    prompts = [p.prompt_ids for p in preferences for _ in p.answer_ids]
    batch = Batch(*collate(prompts, [ids for p in preferences for ids in p.answer_ids], pad_id, device))
    rows = iter(range(len(prompts)))
    blocks = [[next(rows) for _ in p.answer_ids] for p in preferences]
    pairs = [(block[i], block[j]) for p, block in zip(preferences, blocks) for i, j in p.pairs]
    return batch, blocks, torch.tensor(pairs, device=device)


# ---------------------------------------------------------------------------------------------------- sampling

@dataclass
class Rollout:
    """N = P·G sampled completions, rows of one prompt adjacent; the same on every rank."""
    input_ids: torch.Tensor        # [N, L+T]  left-padded prompts, right-padded completions
    attention_mask: torch.Tensor   # [N, L+T]  1 on real tokens
    mask: torch.Tensor             # [N, T]    bool: completion tokens, the EOS included
    completions: list[str]         # decoded, without special tokens
    finished: torch.Tensor         # [N]       bool: ended with EOS, not cut at max_new_tokens

    @property
    def lengths(self) -> torch.Tensor:  # [N] completion tokens
        return self.mask.sum(1)


def eos_ids(model, tokenizer) -> list[int]:
    """Every id that ends a completion: the tokenizer's, and those of the generation config (chat models have two)."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    configured = configured if isinstance(configured, (list, tuple)) else [configured]
    return sorted({tokenizer.eos_token_id, *configured} - {None})


def join_drawn(drawn, pad_id: int):
    """[(problems, rollout, rewards, correct), ...] -> one of each, padded to the longest prompt and completion."""
    batches, rollouts, rewards, correct = zip(*drawn)
    L = max(r.input_ids.shape[1] - r.mask.shape[1] for r in rollouts)
    T = max(r.mask.shape[1] for r in rollouts)

    def pad(name, value):
        return torch.cat([F.pad(getattr(r, name), (L + r.mask.shape[1] - r.input_ids.shape[1], T - r.mask.shape[1]),
                                value=value) for r in rollouts])
    attention_mask = pad("attention_mask", 0)
    rollout = Rollout(
        input_ids=pad("input_ids", pad_id), attention_mask=attention_mask, mask=attention_mask[:, L:].bool(),
        completions=[text for r in rollouts for text in r.completions],
        finished=torch.cat([r.finished for r in rollouts]))
    return sum(batches, []), rollout, torch.cat(rewards), torch.cat(correct)


@contextlib.contextmanager
def evaluating(model):
    """All modules in evaluation mode: gradient checkpointing would switch the KV cache off."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def sample(model, tokenizer, prompts, group_size: int, max_new_tokens: int, temperature: float = 1.0,
           greedy: bool = False) -> Rollout:
    """Sample `group_size` completions of each prompt from the model's whole softmax at `temperature`.

    prompts: strings (or a single one), which no chat template is put around (`tokenizer.apply_chat_template(messages,
    add_generation_prompt=True, tokenize=False)` makes one), or lists of token ids. Temperature 0 is greedy. Collective:
    every rank passes the same prompts (else ValueError), decodes its share of the rows and gets the whole rollout. No
    top-k, top-p or penalty, whatever the model's generation config says: the policy that is scored must be the policy
    that sampled.

    A token is drawn by inverting the cumulative distribution at a uniform number, and every (row, position) has its
    own number, drawn up front. So which rows share a batch, when rows leave it and how many ranks there are does not
    change what is sampled, up to rounding in the model.
    """
    device, pad = model.device, tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    prompts, temperature = [prompts] if isinstance(prompts, str) else prompts, 0 if greedy else temperature
    prompts = [encode(tokenizer, [(p, False)])[0] if isinstance(p, str) else [*map(int, p)] for p in prompts]
    if len(set(gather_in_order([zlib.crc32(repr(prompts).encode())]))) > 1:  # prompts of different ranks would mix
        raise ValueError("sample is collective: every rank must pass the same prompts")
    if not all(prompts):
        raise ValueError("a prompt without tokens: there is nothing to condition on")
    prompt_ids, prompt_mask, _ = collate(prompts, [[]] * len(prompts), pad, device)  # [P, L]
    N = len(prompts) * group_size
    uniforms = (torch.rand if temperature else torch.zeros)(N, max_new_tokens, dtype=torch.float64).to(device)
    ends = torch.tensor(eos_ids(model, tokenizer), device=device)
    tokens = torch.zeros(N, max_new_tokens, dtype=torch.long, device=device)  # [N, T]

    with evaluating(model), gathered(model):
        mine = torch.tensor(my_share(N), dtype=torch.long, device=device)
        turns = mine.split(rows_that_fit(model, prompt_ids.shape[1], max_new_tokens, group_size)) if len(mine) else ()
        for rows in turns:
            tokens[rows] = decode(
                model, prompt_ids, prompt_mask, rows // group_size, ends, max_new_tokens, uniforms[rows], temperature)

    is_end = torch.isin(sum_over_ranks(tokens), ends)  # rows of other ranks are zero here
    finished = is_end.any(1)
    lengths = torch.where(finished, is_end.int().argmax(1) + 1, max_new_tokens)  # what stands after the first end goes
    tokens = tokens[:, :lengths.max()]
    mask = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
    tokens = tokens.where(mask, pad)
    texts = [row[:n].tolist() for row, n in zip(tokens.cpu().numpy(), (lengths - finished.long()).tolist())]
    return Rollout(
        input_ids=torch.cat([prompt_ids.repeat_interleave(group_size, 0), tokens], 1),
        attention_mask=torch.cat([prompt_mask.repeat_interleave(group_size, 0), mask.long()], 1),
        mask=mask, completions=tokenizer.batch_decode(texts, skip_special_tokens=True), finished=finished)


def rows_that_fit(model, prompt_length: int, max_new_tokens: int, group_size: int) -> int:
    """How many rows may be decoded at once. Half of the free memory is for their KV cache, what one layer's MLP and
    attention hold while the prompts are read, and what is made of a row's logits to pick a token."""
    config = model.config.get_text_config()

    def size(name):  # None where the architecture has no such thing (Mamba), or it differs by layer (Gemma 4)
        with contextlib.suppress(AttributeError, RuntimeError):
            return getattr(config, name)
    heads = size("num_attention_heads") or 1
    cache_width = (size("num_key_value_heads") or heads) * (size("head_dim") or config.hidden_size // heads)
    if model.device.type == "cuda":  # what the allocator has reserved and does not use is free too
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        element = 2
    else:
        free, element = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4, 4  # a quarter of all there is
    # in numbers, not bytes, for each row; a prompt is read once for its whole group
    cache = 2 * config.num_hidden_layers * cache_width * (prompt_length + max_new_tokens)
    width = np.max(size("intermediate_size") or 4 * config.hidden_size)  # Gemma 3n has a list
    # the mask; with eager attention (Gemma 2) the scores of all heads, before, in and after the softmax
    attention = 3 * heads if model.config._attn_implementation == "eager" else 1
    activations = (3 * width + attention * prompt_length) * prompt_length / group_size
    logits = (2 + 4 * 4) * config.vocab_size  # bytes: bfloat16, then float32 four times
    return max(1, int(free / 2 / ((cache + activations) * element + logits)))


def decode(model, prompt_ids, prompt_mask, prompt_of, ends, max_new_tokens, uniforms, temperature):
    """One turn of `sample`: rows [n] of the prompts `prompt_of` -> tokens [n, max_new_tokens], anything after an end.

    Each prompt is read once, and its KV cache copied to the rows of its group. A row that has ended leaves the
    batch, so that a long completion does not keep the short ones running: the last rows move into the places that
    fell free. On CUDA, a step is the replay of a captured graph where the model allows that (`GraphStep`).
    """
    n, device = len(prompt_of), prompt_ids.device
    first, last = prompt_of[0].item(), prompt_of[-1].item() + 1
    mask, rows = prompt_mask[first:last], prompt_of - first
    masked = not mask.all()
    cache = DynamicCache(config=model.config)
    cache_name = next((name for name in ("past_key_values", "cache_params") if takes(model, name)), None)
    if cache_name is None or not model._supports_default_dynamic_cache():  # **kwargs would swallow it; MiniMax, xLSTM
        raise UserError(f"{type(model).__name__} takes no DynamicCache, so it cannot be sampled from")
    has_positions = takes(model, "position_ids")

    def forward(ids, mask, positions):
        extra = {"position_ids": positions} if has_positions else {}
        return model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1,
                     **extra, **{cache_name: cache}).logits[:, -1].float()

    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = forward(prompt_ids[first:last], mask if masked else None, positions)[rows]  # [n, V]
    cache.reorder_cache(rows)
    L = prompt_ids.shape[1]
    room = max_new_tokens + -(L + max_new_tokens) % 8  # CUDA's attention likes multiples of 8
    for i in range(len(cache.layers)):  # one at a time: no second cache in memory
        if type(cache.layers[i]) is DynamicLayer:
            cache.layers[i] = RoomyLayer(cache.layers[i], room)
    prompt_length = mask.sum(1)[rows]  # [n]
    mask = F.pad(mask, (0, room), value=1)[rows]  # [n, L+room]
    masked = masked and cache_name == "past_key_values"  # Mamba's state has no columns
    graph = None
    look_every = 1 if device.type == "cpu" else 8  # to see which rows have ended, the CPU must wait for the GPU

    tokens = torch.zeros(n, max_new_tokens, dtype=torch.long, device=device)
    alive = torch.arange(n, device=device)  # [m] the rows that are still in the batch
    ended = torch.zeros(n, dtype=torch.bool, device=device)  # [m]
    for t in range(max_new_tokens):
        chosen = pick_tokens(logits, uniforms[alive, t], temperature)  # [m]
        tokens[alive, t] = chosen
        ended |= torch.isin(chosen, ends)
        if t + 1 == max_new_tokens:
            break
        if (t + 1) % look_every == 0:
            m = int((~ended).sum())
            if m == 0:
                break
            many_ended = m <= len(ended) // 2 and len(ended) > LEAST_ROWS  # each graph has its number of rows
            if m < len(ended) and (graph is None or many_ended):
                # The m rows that still run get the first m places: a place whose row has ended takes one from behind.
                # Of five rows, of which 1 and 3 have ended: stay = [0, 4, 2].
                stay = torch.arange(m, device=device)
                stay[ended[:m]] = m + (~ended[m:]).nonzero()[:, 0]
                alive, chosen, mask, ended = (x[stay] for x in (alive, chosen, mask, ended))
                cache.reorder_cache(stay)
                graph = None
        if graph is None or L + t >= graph.width:
            graph = None  # its memory goes before the next one is made
            graph = capture_step(model, forward, cache, mask, L + t)
        ids, position = chosen[:, None], (prompt_length[alive] + t)[:, None]  # [m, 1]
        seen = mask[:, :L + t + 1] if masked else None
        logits = graph(ids, position, L + t) if graph else forward(ids, seen, position)
    return tokens


class RoomyLayer(DynamicLayer):
    """A layer of DynamicCache with room for the tokens to come.

    DynamicLayer copies all its keys and values to append a token, and again to drop a row. Here a token is written
    into its column, and only the rows that change place are copied.
    """
    column = None  # set by GraphStep: a tensor, the column to write; attention then reads `width` columns

    def __init__(self, layer: DynamicLayer, room: int):
        super().__init__()
        n, heads, self.length, _ = layer.keys.shape
        # A graph reads columns that were never written, with weight 0: they must not hold NaN. On CPU none is read,
        # and memory that nobody touches costs nothing.
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
        """Row i becomes what row stay[i] was; stay[i] >= i, and none is read after it was written."""
        i = (stay != torch.arange(len(stay), device=stay.device)).nonzero()[:, 0]
        for x in (self.keys, self.values):
            x[i, :, :self.length] = x[stay[i], :, :self.length]
        self.keys, self.values = self.keys[:len(stay)], self.values[:len(stay)]


# Of a captured graph. Smaller ones would save less than the 0.1 s (an estimate) that another capture takes.
LEAST_COLUMNS, LEAST_ROWS = 256, 16


class GraphStep:
    """One decoding step of a batch of m rows as a CUDA graph: one launch, not one for each of the model's kernels.

    A replay repeats what was captured, at the same addresses. So what changes from step to step is in tensors that
    `__call__` fills, and attention reads a fixed `width` of the cache, with the columns to come masked. When those are
    full, or half of the rows have ended, `decode` captures another graph.
    """

    def __init__(self, forward, cache, mask, column: int):
        self.forward, self.cache = forward, cache
        self.width = min(mask.shape[1], max(LEAST_COLUMNS, -(-2 * (column + 1) // 64) * 64))
        self.mask, self.columns = mask[:, :self.width].bool(), torch.arange(self.width, device=mask.device)
        self.ids, self.position = torch.zeros(2, len(mask), 1, dtype=torch.long, device=mask.device)
        self.column = torch.tensor([column], device=mask.device)
        for layer in cache.layers:
            layer.column, layer.width = self.column, self.width  # not self: a cycle would keep the cache in memory
        self.graph = torch.cuda.CUDAGraph() if mask.is_cuda else None
        if self.graph is not None:  # on a CPU, for tests, each call runs the same kernels one by one
            capture = torch.cuda.graph(self.graph, capture_error_mode="thread_local")  # NCCL's own thread may call CUDA
            here, stream = torch.cuda.current_stream(), capture.capture_stream  # the latter is one for all graphs
            stream.wait_stream(here)
            with warnings.catch_warnings(action="ignore"):  # that this mode is a prototype
                torch.cuda.set_sync_debug_mode("error")  # what waits for the GPU would break the allocator in a capture
            try:
                with torch.cuda.stream(stream):  # a first run, not captured: libraries set up
                    self.run()
            finally:  # also where it failed half-way: what it queued writes into the cache
                torch.cuda.set_sync_debug_mode("default")
                here.wait_stream(stream)
            with torch.cuda.stream(here), capture:  # a capture that fails leaves its stream set
                self.logits = self.run()

    def run(self):
        seen = self.mask & (self.columns <= self.column)  # [m, width]
        AttentionInterface.register("sdpa", one_token_attention)  # under that name, which models compare with (Falcon)
        try:
            return self.forward(self.ids, seen[:, None, None], self.position)
        finally:
            AttentionInterface.register("sdpa", sdpa_attention_forward)

    def __call__(self, ids, position, column: int):
        """Tokens and their positions [m, 1], into this column of the cache -> logits [m, V], until the next call."""
        self.ids.copy_(ids)
        self.position.copy_(position)
        self.column.fill_(column)
        for layer in self.cache.layers:
            layer.length = column + 1
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.logits


def one_token_attention(module, query, key, value, attention_mask, **kwargs):
    """transformers' sdpa for one token a row: query [m, heads, 1, width], key and value [m, KV heads, columns, width]
    -> [m, 1, heads, width]. With a mask, that of 5.17 copies each key and value to all heads that share it, at every
    step; here those heads stand as the queries of their KV head, as in 5.23.
    """
    m, heads, _, width = query.shape
    one_mask = attention_mask is not None and attention_mask.shape[1] == 1  # Doge has one for each head
    if heads == key.shape[1] or not one_mask or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    query = query.reshape(m, key.shape[1], heads // key.shape[1], width)
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=kwargs.get("scaling"))
    return out.reshape(m, 1, heads, value.shape[3]), None


def can_use_graph(model, cache) -> bool:
    """Only "sdpa" takes a 4D mask of booleans; sliding windows and the like have caches of other kinds."""
    return (model.device.type == "cuda" and not hasattr(model, "no_graph")
            and model.config._attn_implementation == "sdpa"
            and all(isinstance(layer, RoomyLayer) for layer in cache.layers) and takes(model, "position_ids"))


def capture_step(model, forward, cache, mask, column: int) -> GraphStep | None:
    """None, with one warning, if the model does something that a graph cannot hold: then steps run without one."""
    try:
        return GraphStep(forward, cache, mask, column) if can_use_graph(model, cache) else None
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:  # ValueError: ALiBi made from a mask of two dimensions
        warnings.warn(f"{type(model).__name__}: sampling without a CUDA graph, which is slower: {innermost(error)}")
        model.no_graph = True
        for layer in cache.layers:
            layer.column = None


def pick_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> torch.Tensor:
    """[n, V] logits -> [n] token ids: draws from softmax(logits / temperature), the likeliest where that is 0.

    The draw is the first token whose cumulative probability exceeds the uniform number. Cumulative sums are float64, so
    that tokens rarer than float32 can count keep their share. One over the whole vocabulary would be slow and large:
    first the draw's block of 512 tokens is found by the blocks' sums, then the token by the place within the block.
    """
    if temperature == 0:
        return logits.argmax(-1)
    n, V = logits.shape
    size = min(V, 512)
    if temperature != 1.0:
        logits = logits / temperature
    weights = logits.new_zeros(n, -(-V // size) * size)
    torch.exp(logits - logits.amax(-1, keepdim=True), out=weights[:, :V])
    weights = weights.view(n, -1, size)
    sums = weights.sum(-1).double()  # [n, blocks]
    below = sums.cumsum(-1)
    threshold = just_below(uniforms[:, None] * below[:, -1:], below[:, -1:])  # [n, 1]
    block = torch.searchsorted(below, threshold, right=True).clamp(max=below.shape[1] - 1)  # beyond: NaN logits
    place = (threshold - F.pad(below, (1, 0)).gather(1, block)) / sums.gather(1, block)  # in the block, 0 to 1
    below = weights[torch.arange(n, device=block.device), block[:, 0]].cumsum(-1, dtype=torch.float64)  # [n, size]
    token = torch.searchsorted(below, just_below(place * below[:, -1:], below[:, -1:]), right=True)
    return (block * size + token)[:, 0].clamp(max=V - 1)


def just_below(threshold: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Rounding may lift a threshold to the total, which no cumulative sum exceeds."""
    return threshold.minimum(torch.nextafter(total, torch.zeros_like(total)))


# --------------------------------------------------------------------------------------------------- log-probs
#
# What each function saves, from the outermost to the innermost:
#   once_each            rows that are copies of another
#   completion_logprobs  logits of prompts and padding: the head gets only the hidden states before completion tokens
#   hidden_states        left padding, and (`read_prefixes_once`) prefixes that several rows share
#   SlicedLogprobs       memory: of the logits only some columns exist at a time

HEAD_SLICE = {"cpu": 2 ** 21, "cuda": 2 ** 27}  # logits (tokens × vocabulary) at a time: 8 MB, 512 MB in float32
SHARED_TOKENS = 400  # prefixes are read once if that saves so many, and a fifth: else a second pass costs more


def token_logprobs(model, input_ids, attention_mask, num_completion_tokens: int, temperature: float = 1.0):
    """Log-probability of each of the last T = num_completion_tokens tokens, and the entropy of the distribution it was
    drawn from.

    input_ids, attention_mask: [B, L+T], padded on the left before the prompt, which has a token at least, and on the
    right after the completion. The model is used in the mode it is in: `model.eval()` first, unless it has no dropout.
    Returns (logprobs, entropy), float32 [B, T], both of softmax(logits / temperature), 0 on padding, with gradients.

    [B, T, V] never exists: the logits of the real completion tokens are worked out by slices of the vocabulary, again
    in the backward pass. Where they are not what `head_logits` makes of hidden states, all are held at once, with one
    warning.
    """
    if num_completion_tokens >= input_ids.shape[1]:
        raise ValueError("no prompt: nothing comes before the first token, so it has no log-prob")
    return once_each(completion_logprobs, model, input_ids, attention_mask, num_completion_tokens, temperature,
                     head_is_sliceable(model))


def once_each(function, model, input_ids, attention_mask, *args):
    """The tensors [B, …] that `function(model, input_ids, attention_mask, *args)` returns.

    Rows that are the same, as short completions of a prompt often are, are computed once; their gradients add up.
    """
    distinct, copy_of = distinct_rows(input_ids.where(attention_mask > 0, -1))
    if len(distinct) == len(input_ids):
        return call_gathered(function, model, input_ids, attention_mask.long(), *args)
    out = call_gathered(function, model, distinct.clamp(min=0), (distinct >= 0).long(), *args)
    return tuple(values.index_select(0, copy_of) for values in out)


def distinct_rows(ids):
    """[B, L] -> (the distinct rows, sorted; the number [B] of the one that each row is)."""
    return [x.to(ids.device) for x in ids.cpu().unique(dim=0, return_inverse=True)]  # few rows: no work for a GPU


def completion_tokens(attention_mask, T: int):
    """The cells (row [n], column [n]) of the real tokens in the last T columns; the token [n] before each, as counted
    from 0 in its row."""
    L = attention_mask.shape[1] - T
    row, column = attention_mask[:, L:].nonzero(as_tuple=True)
    return (row, column), attention_mask[:, :L].sum(1)[row] + column - 1


def hidden_states(model, input_ids, attention_mask, row, last):
    """The hidden state [n, H] after token last[i] of row row[i], where a row's first real token is number 0.

    Each row is shifted left by its padding, so that it begins at column 0 with position 0. In a causal model what
    follows a token cannot change it, so no attention mask is needed and the fast causal kernels run.
    """
    ids = shift_left(input_ids, attention_mask, int(last.max()) + 1 if len(row) else 1)
    shared = prefix_to_share(ids) if can_share_prefixes(model) else 0
    if shared:
        hidden = read_prefixes_once(model, ids, shared)
    else:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return cells_of(hidden, row, last)


def cells_of(x, row, column):
    """x[row, column] of x [B, width, …]. By index_select, as in `once_each` and `read_prefixes_once`: the gradient of
    indexing takes seven times as long on a CPU, and adds up repeats in any order (unless `setup_device` was called)."""
    return x.flatten(0, 1).index_select(0, row * x.shape[1] + column)


def shift_left(input_ids, attention_mask, width: int):
    """The first `width` columns of the rows without their left padding."""
    start = attention_mask.to(torch.int32).argmax(1)  # [B] the first real column
    columns = torch.arange(width, device=input_ids.device) + start[:, None]
    return input_ids.gather(1, columns.clamp(max=input_ids.shape[1] - 1))


def can_share_prefixes(model) -> bool:
    """Can the KV cache of one row go to others? Recomputing activations switches it off; sliding windows and the like
    have caches of other kinds. Several ranks would gather each layer twice, and hold all its gradients unsharded."""
    return (world_size() == 1 and model.config._attn_implementation in ("sdpa", "eager")
            and takes(model, "position_ids") and takes(model, "past_key_values")  # GPT-1 would ignore a cache
            and not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
            and all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers))


def prefix_to_share(ids) -> int:
    """How long a prefix of ids [B, width] (the prompt, for example) to read once for all rows that share it: the length
    that saves most tokens. 0 if those are not a fifth of all, or not SHARED_TOKENS."""
    rows = ids.cpu().unique(dim=0)  # sorted: those that share a prefix are neighbours
    differs = (rows[1:] != rows[:-1]).cumsum(1) > 0  # from the row above, in this column or before
    repeated = (~differs).sum(0)[:-1] + len(ids) - len(rows)  # prefixes, of 1, 2, … columns
    saved = repeated * torch.arange(1, ids.shape[1])  # tokens
    return int(saved.argmax()) + 1 if len(saved) and saved.max() > max(ids.numel() / 5, SHARED_TOKENS) else 0


def read_prefixes_once(model, ids, shared: int):
    """Hidden states [B, width, H] of ids [B, width]. Each distinct prefix, of `shared` columns, is read once; its KV
    cache is copied to its rows, which continue from there, and gradients flow back through the copies."""
    prefixes, which = distinct_rows(ids[:, :shared])
    cache, positions = DynamicCache(config=model.config), torch.arange(ids.shape[1], device=ids.device)[None]
    hidden = model.base_model(input_ids=prefixes, position_ids=positions[:, :shared], past_key_values=cache,
                              use_cache=True).last_hidden_state
    cache.reorder_cache(which)
    rest = model.base_model(input_ids=ids[:, shared:], position_ids=positions[:, shared:], past_key_values=cache,
                            use_cache=True).last_hidden_state
    return torch.cat([hidden.index_select(0, which), rest], 1)


def head_logits(config, hidden, weight, bias=None):
    """[n, H] -> [n, V], float32, with the bias, scale or soft cap that some architectures have.

    With rows of the weight and the bias: the logits of this slice of the vocabulary.
    """
    config = config.get_text_config()
    logits = F.linear(hidden.to(weight.dtype), weight, bias).float()  # Mamba's hidden states are float32, always
    if scale := getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None):
        logits = logits * scale  # Cohere; Falcon-H1
    if scale := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None):
        logits = cap * torch.tanh(logits / cap)  # Gemma 2; RecurrentGemma
    return logits


def completion_logprobs(model, input_ids, attention_mask, T, temperature, sliced: bool):
    """`token_logprobs` of rows [B, L+T], by slices of the vocabulary or from the model's own logits [B, L+T, V]."""
    cells, before = completion_tokens(attention_mask, T)
    targets = input_ids[:, input_ids.shape[1] - T:][cells]
    if sliced:
        hidden = hidden_states(model, input_ids, attention_mask, cells[0], before)  # what predicts the tokens
        size = max(1, HEAD_SLICE[hidden.device.type] // max(1, len(hidden)))
        size -= size % min(size, 128)  # tensor cores want aligned rows
        head = model.get_output_embeddings().parameters()
        values = SlicedLogprobs.apply(model.config, targets, temperature, size, hidden, *head)
    else:
        ids = shift_left(input_ids, attention_mask, int(attention_mask.sum(1).max()))  # as in hidden_states
        logits = cells_of(model(input_ids=ids, use_cache=False).logits, cells[0], before)  # [n, V]
        logp = (logits.float() / temperature).log_softmax(-1)
        values = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)  # entropy: −Σ p log p
    empty = torch.zeros(len(input_ids), T, device=targets.device)
    return tuple(empty.index_put(cells, value) for value in values)


def logits_gradient(logp, targets, entropy, temperature, grad, grad_entropy):
    """The gradient [n, V] of logits, from those of the log-probs and entropies [n]. Overwrites `logp`, log p_v.

    ∂ log p_y / ∂ logit_v = (1[v = y] − p_v) / τ  and  ∂H / ∂ logit_v = −p_v (log p_v + H) / τ,  with the targets y (may
    lie outside the V columns), the entropy H and the temperature τ.
    """
    grad = (torch.zeros_like(entropy) if grad is None else grad)[:, None] / temperature
    out, factor = logp.exp(), -grad
    if grad_entropy is not None:  # logp is not needed again
        factor = logp.add_(entropy[:, None]).mul_(-grad_entropy[:, None] / temperature).sub_(grad)
    column = targets.clamp(0, logp.shape[1] - 1)
    return out.mul_(factor).scatter_add_(1, column[:, None], grad * (column == targets)[:, None])


class SlicedLogprobs(torch.autograd.Function):
    """Log-probability of the targets [n], and entropy [n] of the distributions, from hidden states [n, H].

    Of `head_logits(config, hidden, *weights)`, [n, V], only `size` columns exist at a time.

    With z_v = logit_v / τ less the largest of its row,  log p_v = z_v − log Σ exp z  and  H = log Σ exp z − Σ p z. The
    forward pass keeps the sums Σ exp z and Σ z exp z of each slice, with z less the largest of that slice, and then
    shifts them to the largest of all (as in arXiv:1805.02867). The backward pass works the logits out again.
    """

    @staticmethod
    def forward(ctx, config, targets, temperature, size, hidden, *weights):
        ctx.set_materialize_grads(False)
        starts = range(0, len(weights[0]), size)
        largest, sums, sums_of_z, of_target = hidden.new_empty(4, len(hidden), len(starts), dtype=torch.float32)
        for i, start in enumerate(starts):
            logits = head_logits(config, hidden, *(w[start:start + size] for w in weights))
            largest[:, i] = logits.amax(1) / temperature
            z = torch.add(-largest[:, i, None], logits, alpha=1 / temperature)
            column = (targets - start).clamp(0, logits.shape[1] - 1)  # the target's, if it is in this slice
            of_target[:, i] = z.gather(1, column[:, None])[:, 0]
            exp_z = z.exp()
            sums[:, i], sums_of_z[:, i] = exp_z.sum(1), torch.bmm(exp_z[:, None], z[:, :, None])[:, 0, 0]
        top = largest.amax(1, keepdim=True)
        shift = largest - top
        total = (shift.exp() * sums).sum(1)
        entropy = total.log() - (shift.exp() * (sums_of_z + shift * sums)).sum(1) / total
        ctx.arguments = config, temperature, size
        ctx.save_for_backward(targets, top, total.log(), entropy, hidden, *weights)
        return (of_target + shift).gather(1, targets[:, None] // size)[:, 0] - total.log(), entropy

    @staticmethod
    def backward(ctx, *grads):
        config, temperature, size = ctx.arguments
        targets, top, log_total, entropy, hidden, *weights = ctx.saved_tensors
        hidden = hidden.detach().float().requires_grad_()  # float32, for its gradient is a sum over the slices
        grad_weights = [torch.empty_like(w) for w in weights]
        for start in range(0, len(weights[0]), size):
            part = [w[start:start + size].detach().requires_grad_() for w in weights]
            with torch.enable_grad():
                logits = head_logits(config, hidden, *part)
            logp = torch.add(-top, logits.detach(), alpha=1 / temperature).sub_(log_total[:, None])
            logits.backward(logits_gradient(logp, targets - start, entropy, temperature, *grads))
            for whole, w in zip(grad_weights, part):
                whole[start:start + size] = w.grad
        return None, None, None, None, hidden.grad, *grad_weights


def takes(model, name: str) -> bool:
    return name in inspect.signature(type(model).forward).parameters


@torch.no_grad()
def head_is_sliceable(model) -> bool:
    """Are its logits what `head_logits` makes of hidden states, and those blind to what follows? Warns if not.

    Compared once, on eight tokens.
    """
    if hasattr(model, "head_is_sliceable"):
        return model.head_is_sliceable
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size

    def compare(model, ids):  # on CUDA, FSDP of torch up to 2.11 cannot wrap a call without arguments
        whole, without_last = (model.base_model(input_ids=x, use_cache=False).last_hidden_state
                               for x in (ids, ids[:, :-1]))
        logits = head_logits(model.config, whole, *model.get_output_embeddings().parameters())
        own_logits = model(input_ids=ids, use_cache=False).logits
        tolerance = 1e-4 if own_logits.dtype == torch.float32 else 0.01  # a cap or a scale in bfloat16
        moved = (whole[:, :-1] - without_last).norm() / whole.norm()  # 0, but for kernels that round by shape
        return torch.allclose(logits, own_logits.float(), tolerance, tolerance) and bool(moved < 20 * tolerance)
    try:
        with evaluating(model):
            sliceable = call_gathered(compare, model, ids)
        # FSDP gathers layer by layer, so all ranks must make the same passes.
        model.head_is_sliceable = on_all_ranks(sliceable) if isinstance(model, FSDPModule) else sliceable
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, TypeError, RuntimeError):  # RuntimeError: hidden states of another width
        model.head_is_sliceable = False
    if not model.head_is_sliceable:
        warnings.warn(f"{type(model).__name__}: its logits are not a plain head on the last hidden states, so "
                      "log-probs hold all logits at once; lower --micro_batch_tokens if memory runs out")
    return model.head_is_sliceable


def token_values(model, input_ids, attention_mask, T: int):
    """Value [B, T], float32, of the state before each of the last T tokens, 0 on padding.

    `model` is a sequence classifier with one label, whose head is `score`.
    """
    def compute(model, input_ids, attention_mask):
        cells, before = completion_tokens(attention_mask, T)
        values = scores_at(model, input_ids, attention_mask, cells[0], before)
        return (torch.zeros(len(input_ids), T, device=values.device).index_put(cells, values),)
    return once_each(compute, model, input_ids, attention_mask)[0]


def sequence_scores(model, input_ids, attention_mask):
    """A sequence classifier's score [B], float32, at the last real token of each row, EOS included.

    By position, not by `ids != pad`: the pad token may be the EOS.
    """
    def compute(model, input_ids, attention_mask):
        row = torch.arange(len(input_ids), device=input_ids.device)
        scores = scores_at(model, input_ids, attention_mask, row, attention_mask.sum(1) - 1)
        return (scores.clone(),)  # FSDP warns of outputs that are views
    return once_each(compute, model, input_ids, attention_mask)[0]


def scores_at(model, *where):
    """The head's scores [n] of `hidden_states(model, *where)`, in float32: bfloat16 would tie close ones."""
    return F.linear(hidden_states(model, *where).float(), *(p.float() for p in model.score.parameters()))[:, 0]


@torch.no_grad()
def rollout_values(model, rollout: Rollout, minibatches, max_tokens: int, compute=token_values) -> torch.Tensor:
    """Values [N, T] of the rows of `minibatches`, on every rank, without gradient; 0 elsewhere, and without a model.

    Computed in the micro-batches of the update, so that in bfloat16 both round alike.
    """
    out = torch.zeros(rollout.mask.shape, device=rollout.mask.device)
    for minibatch in minibatches if model is not None else []:
        for rows, input_ids, attention_mask, T in micro_batches(rollout, minibatch, max_tokens):
            out[rows, :T] = compute(model, input_ids, attention_mask, T)
    return sum_over_ranks(out)


def rollout_logprobs(model, rollout: Rollout, minibatches, max_tokens: int, temperature: float) -> torch.Tensor:
    """Log-probs [N, T], as `rollout_values`."""
    return rollout_values(model, rollout, minibatches, max_tokens, lambda *args: token_logprobs(*args, temperature)[0])


def all_scores(model, batch, blocks, max_tokens: int) -> torch.Tensor:
    """The `sequence_scores` [N] of all rows of the batch, on every rank."""
    def compute(model, input_ids, attention_mask, T):
        return sequence_scores(model, input_ids, attention_mask)[:, None]  # in all T columns, none where T is 0
    return rollout_values(model, batch, [blocks], max_tokens, compute)[:, 0]


MAX_PADDING = 0.08  # of a micro-batch, unless it is below a quarter of --micro_batch_tokens


def micro_batches(batch, blocks: list, max_tokens: int):
    """Deal the sequences of one optimizer step into micro-batches; yield this rank's.

    batch: a Rollout, Batch or the like. blocks: row numbers, or lists of those that must stay together (answers to a
    prompt). Yields (rows [B], input_ids [B, L+T], attention_mask [B, L+T], T), trimmed to the longest prompt and
    completion among them, at most `max_tokens` tokens, with padding and without copies of the same row, unless a single
    block has more. Sorted, the longest first (and then by row: so copies meet), and not filled up where the next block
    would make too much of it padding.

    Every rank yields the same number: FSDP's gradient reduction waits for all. A rank that has none of its own, since
    there are fewer blocks than ranks, yields the first block again, with T = 0: that must get no weight.
    """
    total, completion = batch.attention_mask.sum(1).tolist(), batch.mask.sum(1).tolist()
    prompt = [t - c for t, c in zip(total, completion)]
    blocks = [block if isinstance(block, list) else [int(block)] for block in blocks]
    rows = [row for block in blocks for row in block]
    ids = batch.input_ids[rows].where(batch.attention_mask[rows] > 0, -1).cpu()
    copy_of = dict(zip(rows, distinct_rows(ids)[1].tolist()))  # row: a number that equal rows share

    waiting = collections.deque(sorted(blocks, key=lambda block: (-max(total[row] for row in block), block)))
    dealt = []  # the micro-batches, each a list of blocks
    while waiting:
        group, held, tokens, L, T = [], set(), 0, 0, 0
        longest = max(total[row] for row in waiting[0])
        while waiting:
            new = {copy_of[row]: total[row] for row in waiting[0] if copy_of[row] not in held}  # copies take room once
            held |= new.keys()
            tokens += sum(new.values())
            L, T = max(L, *(prompt[row] for row in waiting[0])), max(T, *(completion[row] for row in waiting[0]))
            size = len(held) * (L + T)  # prompts and completions padded apart
            padding = 1 - tokens / len(held) / longest  # shifted left, as wide as the longest
            if group and size > max_tokens / 4 and (size > max_tokens or padding > MAX_PADDING):
                break
            group.append(waiting.popleft())
        dealt.append(group)
    while len(dealt) % world_size():  # halve the micro-batch with most blocks until there is one for each rank
        i = dealt.index(max(dealt, key=len))
        half = (len(dealt[i]) + 1) // 2
        dealt[i:i + 1] = dealt[i][:half], dealt[i][half:]
    end = batch.input_ids.shape[1] - batch.mask.shape[1]  # of the prompts
    for group in dealt[rank()::world_size()]:  # empty where there are fewer blocks than ranks
        rows = [row for block in group or blocks[:1] for row in block]
        T = max(completion[row] for row in rows) if group else 0
        columns = slice(end - max(prompt[row] for row in rows), end + T)
        rows = torch.tensor(rows, device=batch.mask.device)
        yield rows, batch.input_ids[rows, columns], batch.attention_mask[rows, columns], T


# ----------------------------------------------------------------------------------------------------- rewards

def load_reward(cfg, wrong: float = 0.0):
    """--reward -> score(problems, rollout) = (rewards [P, G] float32, correct [P, G] bool), the same on every rank.

    verifier            1 where the last answer equals the gold one, else `wrong` ≤ 0
    FILE.py:FUNCTION    whatever FUNCTION(prompt, completion, row) returns; correct where it is above 0
    DIRECTORY           the score of that reward model; correct by the verifier, or above 0 if the row has no answer

    --format_reward adds its weight times `format_reward`. Each completion is judged once, by the rank that has it in
    its share, and the random numbers that FUNCTION may draw are seeded for it.
    """
    model_scores = load_reward_model(cfg) if is_reward_model(cfg.reward) else None
    by_function = None if model_scores or cfg.reward == "verifier" else load_reward_function(cfg.reward)

    def score(problems: list[Problem], rollout: Rollout):
        G, judged, failed = len(rollout.completions) // len(problems), [], []
        rows = [problem for problem in problems for _ in range(G)]  # [N]
        scores = model_scores(rows, rollout).tolist() if model_scores else None
        with torch.random.fork_rng(devices=[]):
            seed = int(torch.randint(2 ** 31, ()))
            try:
                for i in my_share(len(rows)):
                    problem, completion = rows[i], rollout.completions[i]
                    if by_function:
                        for set_seed in (random.seed, np.random.seed, torch.default_generator.manual_seed):
                            set_seed(seed + i)  # it may draw numbers: the same ones for a row on any rank
                        verdict = by_function(problem, completion)
                    elif scores and problem.answer is None:
                        verdict = scores[i]
                    else:
                        answer = extract_answer(completion, closed_only=True)
                        verdict = 1.0 if is_equivalent(answer, problem.answer) else wrong
                    reward = scores[i] if scores else verdict
                    bonus = cfg.format_reward * format_reward(problem.opening + completion)
                    judged.append((reward + bonus, verdict > 0))
            except UserError as error:
                failed.append(error)
        for error in gather_in_order(failed):  # raised alone, it would leave the other ranks waiting
            raise error
        judged = list(zip(*gather_in_order(judged)))  # all the rewards; which are right
        rewards, correct = torch.tensor(judged, device=rollout.mask.device).view(2, len(problems), G)
        return rewards, correct.bool()
    return score


def is_reward_model(reward: str) -> bool:
    return reward != "verifier" and os.path.isdir(reward)


def load_reward_model(cfg):
    """--reward DIRECTORY -> scores(problems [N], rollout) [N]: the model's, minus its config's `reward_shift`.

    A model with the policy's vocabulary reads the tokens as they were sampled; another one reads the decoded text, in
    its own tokens and its own chat template, and with its own EOS where the completion ended.
    """
    try:
        own = load_tokenizer(cfg.reward, cfg.trust_remote_code)
        model = load_model(cfg.reward, setup_device(), trainable=False, cls=AutoModelForSequenceClassification,
                           trust_remote_code=cfg.trust_remote_code)
    except UserError as error:
        raise UserError(str(error).replace("--model", "--reward", 1)) from error
    if model.config.num_labels != 1:
        raise UserError(f"--reward {cfg.reward}: want a sequence classifier with one label, as reward_model.py saves")
    same_tokens = own.get_vocab() == load_tokenizer(model_name(cfg), cfg.trust_remote_code).get_vocab()

    def scores(problems: list[Problem], rollout: Rollout) -> torch.Tensor:
        batch = rollout if same_tokens else retokenize(problems, rollout, own, cfg.system_prompt)
        if (longest := int(batch.attention_mask.sum(1).max())) > (context := context_length(model)):
            raise UserError(f"--reward {cfg.reward}: its context is {context} tokens, a sequence has {longest}")
        rewards = all_scores(model, batch, range(len(problems)), cfg.micro_batch_tokens)
        return rewards - getattr(model.config, "reward_shift", 0.0)
    return scores


def retokenize(problems: list[Problem], rollout: Rollout, tokenizer, system_prompt: str) -> Batch:
    """The N sequences of a rollout in the tokens of another model.

    The prompt's last token counts as the completion's first, so that no completion is empty.
    """
    prompts = encode(tokenizer, [render_prompt(row_prompt(p.row), tokenizer, system_prompt) for p in problems])
    texts = tokenize(tokenizer, rollout.completions, special=False)
    completions = [prompt[-1:] + text + [tokenizer.eos_token_id] * finished
                   for prompt, text, finished in zip(prompts, texts, rollout.finished.tolist())]
    prompts = [prompt[:-1] for prompt in prompts]
    return Batch(*collate(prompts, completions, tokenizer.pad_token_id, rollout.mask.device))


def load_reward_function(spec: str):
    """FILE.py:FUNCTION -> judge(problem, completion) -> float; a failure names the row and shows the error."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        raise UserError(f"--reward {spec}: want verifier, FILE.py:FUNCTION or the directory of a reward model")
    if not os.path.isfile(path):
        raise UserError(f"--reward {spec}: no file {path}")
    try:
        sys.path.append(str(Path(path).resolve().parent))  # for what it imports
        stem = Path(path).stem
        source = importlib.util.spec_from_file_location(stem + "_" * (stem in sys.modules), path)
        module = sys.modules[source.name] = importlib.util.module_from_spec(source)  # there pickle looks
        source.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's own code: anything can come out of it
        raise UserError(f"--reward {spec}: {path} does not load: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"--reward {spec}: {path} has no function {name}")

    def judge(problem, completion):
        try:
            reward = function(problem.prompt, completion, copy.deepcopy(problem.row))
        except (Exception, SystemExit) as error:
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == source.origin]
            line = f" (line {lines[-1]})" if lines else ""
            raise UserError(f"--reward {spec} raised {type(error).__name__}: {error}{line}, on row "
                            f"{problem.row!r:.300}, completion {completion!r:.200}") from error
        if not is_number(reward):
            raise UserError(f"--reward {spec} returned {reward!r:.100}, want a finite float or int, on row "
                            f"{problem.row!r:.300}")
        return float(reward)
    return judge


# --------------------------------------------------------------------------------------------------- verifiers
#
# How "So $\boxed{\dfrac12\text{ cm}}$." is found to agree with the answer "0.5":
#
#     extract_answer   \dfrac12\text{ cm}      what the text marks as its answer; of several, the last
#     _clean           \frac{1}{2} cm          one spelling for all that can be typed in several ways
#     _same            one value               lists, intervals and relations are compared part by part
#     _same_value      \frac{1}{2} and "cm"    a unit counts only where both answers have one
#     _values          1/2, 1/2, 1/2           the formula at three points: those of 0.5 are the same
#
# What a model writes is data: a small recursive-descent parser reads it, and nothing is run as code. What the parser
# cannot read is compared as text, so nothing raises. Limits on lengths and on numbers keep the work small on any text.

LONGEST_COMPLETION, LONGEST_ANSWER = 20_000, 400  # characters; of a completion, the last ones
LONGEST_LIST, DEEPEST, MOST_BITS = 20, 30, 8_000  # items in any order; braces around a box; size of an exact number

_BARE_BOX = re.compile(r"\\boxed +([^\s\\${}]+)")  # \boxed 5
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*)</answer>", re.S | re.I)
_HEADING = re.compile(r"""
    ^[ \t]* (?:
      # "**Answer:** 18", or "# Answer" with 18 on a line below, unless a sentence begins there
      (?: \#+[ ]\** | \*\* ) (?: A (?= \**: ) | (?i:(?:final[ ])?answer) (?= \**[ \t]* (?: : | $ ) ) )
      (?: [\s*:$] | \\\[ | --- )* (?= [^\s*:$\#-] | -[^-] ) (?! [A-Z][\w']*[ ][a-z] )
    |
      # "Answer: 18", "A: 18" or "#### 18"; neither "#### Step 1" nor "#### 1. Read the question"
      (?: A(?:ns)?: | (?i:(?:final[ ])?answer[ ]?:) | \#\#\#\# ) [ \t]* (?: (?: \\\[ | \$\$ ) \s* )?
      (?! \**(?: Step | Solution | Explanation | Verification | Conclusion | \d+[.):][ ]+[A-Za-z] ) )
    ) (\**[^\s*].*)""", re.X | re.M)
_BRACE = re.compile(r"(?P<box>\\f?box(?:ed)?\s*\{)|(?P<open>\{)|(?P<close>\})|\\[{}]")
_BETWEEN_BOXES = re.compile(r"\\[()\[\]]|\\q?quad|\\text|[\s${}]")  # what may stand there beside "and" or a comma
_PHRASE = re.compile(r"""
    # "The final answer is: 18", "The answer to the question (in dollars) is 18"; not "The answer is correct"
    ^.* (?: answers? | correct[ ](?:option|choice) ) (?: [ ](?: \( | to[ ] | in[ ] ) [^\n:=]{,50} )?
    (?: [ ]is | [ ]are | [ ](?:should|must|would)[ ]be | : | [ ]= ) :? \** \s* (?: \}\s* )?
    (?: (?: \\\[ | \$\$ | \\begin\{(?:align|equation|gather)\*?\} ) \s* )? (?=\S) (?! (?:in)?correct\b | an[ ]integer )
    # up to the end of the sentence or a reason: "18 dollars because ..."; whole: "$5! = 120$", "5 sq. ft."
    (.*?) (?= $ | [.!] (?: \* | \s* $ | \s+ (?-i: [^a-z\s=<>+*/^)$-] ) )
            | ,?[ ] (?: because | since | so | as | which ) [ ] )
    """, re.X | re.I | re.M)
_MARKS = re.compile(r"(?<![\w)}\]|!])\*\*(?=\S)|(?<=\S)\*\*(?![\w(\\{-])|</s>|<\|\w+\|>")  # **18**</s>; not x**2


def extract_answer(text, closed_only: bool = False) -> str | None:
    """The final answer of a completion, or None where it marks none. In order of precedence:

    1. <answer>18</answer>, \\boxed{18}, or a line such as `#### 18`, `# Answer` (18 may follow below), `Answer: 18` or
       `A: 18`: whichever ends last. Such marks may stand in one another: <answer>\\boxed{18}</answer>.
    2. What follows the last <answer>, though it is never closed: samplers that stop at </answer> cut the tag off.
       `sample` does not, so there such an answer was broken off; with `closed_only` it does not count.
    3. "The answer is 18." This is also looked for within 1 and 2: `Answer: The final answer is 18. I hope so.`
    """
    text, answer = _BARE_BOX.sub(r"\\boxed{\1}", str(text)[-LONGEST_COMPLETION:]), None
    for _ in range(3):  # marks within marks
        marked = [(mark.end(1), mark[1]) for kind in (_TAGGED, _HEADING) for mark in kind.finditer(text)]
        marked += _in_boxes(text)
        if not marked:
            break
        text = answer = max(marked)[1].strip()
    if answer is None and "<answer>" in text and not closed_only:
        text = answer = text.rpartition("<answer>")[2].strip()
    if phrases := _PHRASE.findall(text):
        answer = phrases[-1].strip()
    return _MARKS.sub("", answer or "") or None


def _in_boxes(text: str) -> list[tuple[int, str]]:
    """"\\boxed{1} and \\boxed{\\frac12}" -> [(8, "1"), (28, "1, \\frac12")]: where each ends, and the list so far."""
    opened = collections.deque(maxlen=DEEPEST)  # the innermost braces
    found = []
    for brace in _BRACE.finditer(text):
        if brace["box"] or brace["open"]:
            opened.append(brace)
        elif brace["close"] and opened and (box := opened.pop())["box"]:
            if answer := text[box.end():brace.start()].strip():
                between = _BETWEEN_BOXES.sub("", text[found[-1][0] + 1:box.start()]) if found else ""
                if between in (",", "and", "or", ",and"):
                    answer = f"{found[-1][1]}, {answer}"
                found.append((brace.start(), answer))
    return found


def format_reward(text) -> float:
    """1 where the completion is one <think>…</think> and then one <answer>…</answer> and nothing else, else 0."""
    text = str(text).strip()
    once = all(text.count(tag) == 1 for tag in TAGS)
    return float(once and bool(re.fullmatch(r"<think>.*</think>\s*<answer>.*</answer>", text, re.S)))


_DECIMAL = re.compile(r"-?\d*\.?\d+", re.ASCII)
# A choice together with what it stands for: (D) 5, D. 5; not (A) B, nor (A) 5, (B) 6
_OPTION = re.compile(r"[(\[]?([A-E])[)\].:]+ (?!.?[A-E]\W*$)(?!.*[^a-zA-Z][A-E][).:\]])(.+)")


def is_equivalent(prediction, answer) -> bool:
    """Whether two answers mean the same: numbers by exact value, sets and lists of solutions in any order, tuples and
    intervals in theirs, formulas by their value at three points, text by its letters. Never a tolerance for decimals,
    never a factor of 100: 50% is 50, not 0.5.
    """
    if prediction is None or answer is None:
        return False
    a, b = (extract_answer(side) or str(side) for side in (prediction, answer))
    if max(len(a), len(b)) > LONGEST_ANSWER:
        return a.strip() == b.strip() != ""
    if _DECIMAL.fullmatch(a) and _DECIMAL.fullmatch(b):  # most pairs: a tenth of the time
        return Fraction(a) == Fraction(b)
    a, b = _clean(a), _clean(b)
    if _same(a, b):
        return True
    for side, other in ((a, b), (b, a)):
        if option := _OPTION.fullmatch(side):  # (D) 5 agrees with D and with 5
            return option[1] == other.strip("()[]") or _same(_clean(option[2]), other)
    return False


_SPELLINGS = {  # what we write -> the ways in which it is typed; sizes, currency and percent are left out
    "": r"\left \right \big \bigl \bigr \Big \Bigl \Bigr \bigg \Bigg \displaystyle \! \( \) \[ \] \$ $ € £ ₹ ¥ \% % ¢",
    " ": r"\, \: \; \quad \qquad ~ \rm \bf \ ", ",": "; &", "-": "− – —", "*": r"\times \cdot × ⋅ ·", "/": r"\div ÷ ⁄",
    "^": "**", "≈": r"\approx", "≤": r"\le \leq \leqslant <=", "≥": r"\ge \geq \geqslant >=", "<": r"\lt", ">": r"\gt",
    "≠": r"\ne \neq !=", "∈": r"\in", "±": r"\pm \mp", "‹": r"\{ \lbrace", "›": r"\} \rbrace", ":": r"\colon",
    "∪": r"\cup \bigcup", "|": r"\vert \lvert \rvert \mid", " or ": r"\lor \vee", "(": r"\langle",
    ")": r"\rangle \rfloor \rceil ⌋ ⌉", "\\floor (": r"\lfloor ⌊", "\\ceil (": r"\lceil ⌈",
    "\\frac": r"\dfrac \tfrac \cfrac", "\\binom": r"\dbinom \tbinom", "\\ldots ": r"... \dots \cdots",
    "\\text": r"\mathrm \mathbf \mathbb \textbf \textit \textrm \textnormal \mbox \operatorname \mathcal"
              r" \boldsymbol \bm \mathit \mathsf \textsf \texttt \emph \underline", "\\overline": r"\bar",
    "\\epsilon": r"\varepsilon", "\\phi": r"\varphi", "\\emptyset": r"\varnothing ∅", "\\infty ": "∞", "\\sqrt ": "√",
    "\\pi ": "π", "\\theta ": "θ", "\\alpha ": "α", "\\beta ": "β", "\\lambda ": "λ"}
_SPELLINGS = {typed: ours for ours, ways in _SPELLINGS.items() for typed in ways.split()}
_SYMBOL = r"\\[a-zA-Z]+|\\!\s*|\\.|\*\*|(?<=,) ?\.{3}|[<>!]=|[$%~;&]|[^\x00-\x7f]"  # whatever may be such a key
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}([, ])\d{3}(?:\1\d{3})*(?![\d,/])")
_REWRITES = [(re.compile(pattern), ours) for pattern, ours in [  # in this order: each counts on those above it
    # symbols: x² is x^{2}, x₁ is x_{1}; NFKC makes 1/2 of ½, and up to eighteen characters of others, hence the cut
    (r"([⁻⁰¹²³⁴-⁹]+)", r"^{\1}"), (r"([₀-₉]+)", r"_{\1}"), (r"([¼½¾⅐-⅞])", r" \1"),
    (r"(?s)^.+", lambda text: unicodedata.normalize("NFKC", text[0])[:LONGEST_ANSWER]),
    (_MARKS, ""),
    (_SYMBOL, lambda typed: _SPELLINGS.get(typed[0].strip(), typed[0])),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degrees?|°", " "),
    (r"\\text\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r" \1 "),
    (r"\s+", " "),
    # words: 12^{th} is 12, 2 million is 2*10^6, 8 square feet is 8 feet^2, about 45 is 45
    (r"(?<=\d) ?\^? ?(?:\{ ?(?:st|nd|rd|th) ?\}|(?:st|nd|rd|th)\b)", " "),
    (r"(?<=\d) ?[Tt]housand\b", "*10^3"), (r"(?<=\d) ?[Mm]illion\b", "*10^6"), (r"(?<=\d) ?[Bb]illion\b", "*10^9"),
    (r"\b(square|sq\.?|cubic|cu\.?) (\w+)", lambda unit: unit[2] + ("^2" if unit[1][0] == "s" else "^3")),
    (r"(?i)^ ?(?:about|approximately|exactly|roughly|therefore|thus|given by|option) (?=\S)", ""),
    # n\pi, where n is an integer; f(x) = 1 for all x; 2k\pi, k ∈ Z
    (r"(?<=\w|[)}])(?:,? |,)(?:(?:for (?:all|any|every|some)|where)\b[^,]*|\w ?∈ ?[NRZ]\b)", ""),
    # 1, 2, and 3; 14{,}916; (1010)_2 or 1010 base 2
    (r"(?:, ?)?\b(?:and|or)\b| ?\{, ?\}", ","),
    (r"[({](\d\w*)[)}] ?(?=_[\d{])| ?\(?\bbase (\d+)\)?", lambda base: base[1] or f"_{base[2]}"),
    # matrices: \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} is [[1,2],[3,4]]; a factor before one goes to each entry
    (r"[(\[]?\s*\\begin\{\w*\}(?:\{[clr|]*\})?", "[["),
    (r"(?:\\\\\s*)?\\end\{\w*\}\s*[)\]]?", "]]"),
    (r"\\\\(?:\[\d+\w+\])?", "],["),
    (r"(?<![^=,])([^=,\[\]]{1,24})(\[\[(?:(?!\[\[).)*\]\])$",
     lambda product: re.sub(r"[^\[\],]+", lambda entry: f"{product[1]}({entry[0]})", product[2])),
    # relations: x = \sqrt2 ≈ 1.41 is x = \sqrt2, but x_1 ≈ 1.5 is x_1 = 1.5, like Area: 12
    (r"((?:^|=) ?[-+(.]*(?:\d|\\frac|\\?sqrt|\\pi)[^=≈,]*)≈[^,]*$", r"\1"),
    (r"≈|(?<=[a-z]{3}) ?: ", "="),
    # x ∈ [1,2] is [1,2], and (x,y) ∈ {(1,2)} is {(1,2)}, which is (1,2)
    (r"(^|[,∪]) ?(?:\\?[^\W\d]+|\([^()]*\)) ?∈", r"\1"),
    (r"^ ?‹ ?([(\[][^‹›]*[)\]]) ?›[ .]*$", r"\1"),
    # {x | x > 1}, {x ∈ R : x > 1} and (x > 1) are x > 1
    (r"^ ?(?:‹ ?\\?\w+ ?(?:∈ ?R ?)?[|:](.*[<>≤≥≠].*)›[ .]*|\(([^(),]*[=<>≤≥≠][^(),]*)\))$", r"\1\2"),
    (r"^ ?(?:R|[Aa]ll real numbers)[ .]*$", r"(-\\infty ,\\infty )"), (r"(?<=[)\]]) ?U ?(?=[(\[])", "∪"),
    # formulas: |x| is a product with a letter of its own, \abs, like \floor and \ceil above; \frac12 is \frac{1}{2}
    (r"\|([^|]+)\|", r"(\\abs (\1))"),
    (r"\\(frac|binom|log_) ?(\w)", r"\\\1{\2}"), (r"(\\(?:frac|binom)\{[^{}]*\}) ?(\w)", r"\1{\2}"),
    # 2 1/2 and 2\frac{1}{2} are (2+1/2), 0.1\overline{6} is (0.10+6/90), 1.5 x 10^3 is 1.5*10^3
    (r"(?<![\w.^)}])(\d+)(?: (\d+/\d+)| ?(\\frac\{\d+\}\{\d+\}))", r"(\1+\2\3)"),
    (r"(\d+)\.(\d*)\\overline\{(\d+)\}", lambda d: f"({d[1]}.{d[2]}0+{d[3]}/{'9' * len(d[3])}{'0' * len(d[2])})"),
    (r"(?<=\d) ?x ?(?=10\^)", "*"),
    # 1,234 is a number, but (1,234) is a pair: only before the first bracket
    (r"^[^(\[‹]*", lambda head: _THOUSANDS.sub(lambda number: number[0].replace(number[1], ""), head[0]))]]


@functools.lru_cache(4096)
def _clean(text: str) -> str:
    """The same answer in the one spelling that the functions below expect:

    "\\$1{,}234.50"            -> "1234.50"          no currency, no percent sign
    "\\dfrac12 \\text{ cm}"    -> "\\frac{1}{2} cm"  units are plain words
    "\\{1 \\text{ or } 2\\}"   -> "‹1 , 2›"          a set stands in ‹…›, since braces only group
    "x \\in [1, 2)"            -> "[1, 2)"           what a letter lies in
    "x \\geq 1"                -> "x ≥ 1"            a relation is one character
    """
    for pattern, ours in _REWRITES:
        text = pattern.sub(ours, text)
    return text.strip(" *_^\"`").rstrip(" .,:\\")


_SPACES = re.compile(r"(?<!\d) | (?!\d)")  # all but those between two numbers
_LETTER = re.compile(r"\\?[^\W\d_]+(?:_\{?\w+\}?)? ?")  # a name alone: x, \lambda, x_1
_RELATIONS = set("=<≤≠")  # `_parts` turns > and ≥ around


def _same(a: str, b: str, depth: int = 0) -> bool:
    """Whether two cleaned answers agree. What is compared depends on their kinds (`_parts`):

    "x = 5" and "5"             a relation and something else: `_is_value_of`
    "y = 2x" and "2x - y = 0"   two relations: `_same_relations`
    "2x + 3" and "3 + 2x"       two single values: `_same_value`
    "1, 2" and "‹2, 1›"         lists and sets: the same items in any order, each pair by `_same`
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
        alike = a_kind == b_kind or a_kind + b_kind in ("()", "[]", "‹›")  # 1, 2 for (1, 2)
        return alike and all(_same(x, y, depth + 1) for x, y in zip(a_parts, b_parts))
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
        brackets, inner = text[0] + text[-1], _split(text[1:-1])[::2]
        is_matrix = text.startswith("[[")
        if brackets == "‹›" or is_matrix or len(inner) > 1 and brackets in ("()", "(]", "[)", "[]", "{}"):
            kind, parts = brackets.replace("{}", "‹›"), inner
        if is_matrix and "," not in "".join(inner):  # a column is a tuple
            kind = "()"
    if "±" in text:
        if kind not in ("", "‹›"):  # (0, ±3) is two tuples
            kind, parts = "", [text]
        parts = [way for part in parts for way in dict.fromkeys(part.replace("±", sign) for sign in "+-")]
    return kind, parts


def _is_value_of(kind: str, sides: list[str], plain: str, depth: int) -> bool:
    """x = 5, f(2) = 5 and 2 + 3 = 5 agree with the plain 5, but x^2 = 5 does not; x ≥ 5 agrees with [5, \\infty)."""
    if kind[-1] == "=":
        is_name = re.fullmatch(r"(?!-)\D*(?:_\{?[\d/]+\}?|(?:\^\{-1\})?\(-?[^()+-]*\))?\s*", sides[0])  # x, x_1, f(-2)
        return _same(sides[-1], plain, depth) and (bool(is_name) or _same_value(sides[0], plain))
    if len(sides) == 2:  # x < 3 is -\infty < x < 3
        at_left = _LETTER.fullmatch(sides[0])
        kind, sides = ("<" + kind, ["-\\infty", *sides]) if at_left else (kind + "<", [*sides, "\\infty"])
    if len(sides) != 3 or not _LETTER.fullmatch(sides[1]) or not set(kind) <= {"<", "≤"} or plain[0] not in "([":
        return False
    return _same(f"{'[' if kind[0] == '≤' else '('}{sides[0]},{sides[2]}{']' if kind[1] == '≤' else ')'}", plain, depth)


def _same_relations(kind: str, a: list[str], b: list[str], depth: int) -> bool:
    """Whether both sides agree, or their difference is the same up to a factor: 2x = 6y and x - 3y = 0."""
    if all(_same(x, y, depth) for x, y in zip(a, b)):
        return True
    if a[0] == b[0] and _LETTER.fullmatch(a[0]):  # x - e^{-40} and x - e^{-50} are equal after rounding
        return False
    gaps, others = (_values(f"({sides[0]})-({sides[1]})") for sides in (a, b))
    if len(a) > 2 or 0 in (gaps[0], others[0]):
        return False
    constant = all(_close(gap * others[0], other * gaps[0]) for gap, other in zip(gaps, others))
    return constant and (kind not in "<≤" or gaps[0] * others[0] > 0)


# The unit after a number: words of four letters, or of three after a space, short units, and what goes with them, as in
# "5 miles per hour" and "9.8 m s^{-2}". For "4210_5" it is the base, which the question names.
_UNIT = re.compile(r"""
    (?<=[\d)}\]\s]) \s* \(? (
      (?: (?! (?: sin | cos | tan | log | exp | sqrt ) (?![a-z]) ) (?: [A-Za-z]{4,} | (?<=[\s(]) [A-Za-z]{3} )
        | [ckm]?m | [km]?g | gm | m?[lL] | ft | in | mi | yd | lbs? | oz | mph | hrs? | of | [APap]\.?[Mm]
        | (?<=\s) k? (?: [NJVAWCFsh] | Hz | eV | Pa ) ) (?![A-Za-z])
      (?: \s? \^-?[23] | [23] | \s? \^? \{-?[23]\} | [\s./()-]+ (?: [A-Za-z]{2,} | [ahmsA-Z] ) (?![A-Za-z]) )* [\s.)]*
    | (?<=\d) _ \{?\d+\}? )$""", re.X)
_UNITS = {"m": "meter", "mi": "mile", "g": "gram", "lb": "pound", "lbs": "pound", "oz": "ounce", "per": "/",
          "mph": "mile/hour", "foot": "feet"}


def _same_value(a: str, b: str) -> bool:
    """Compare two numbers, formulas or texts, and units where both have one: 5 km is 5 and 5 kilometers, not 5 cm."""
    (a, a_unit), (b, b_unit) = _split_unit(a), _split_unit(b)
    short, long = sorted((a_unit, b_unit), key=len)
    if short:  # most abbreviations are letters of the word, in their order; signs and digits are not left out
        letters = iter(long)
        abbreviates = short[0] == long[0] and all(letter in letters for letter in short)
        if not abbreviates or re.findall("[^a-z]", short) != re.findall("[^a-z]", long):
            return False
    if a == b or a.lower() == b.lower() and re.search(r"(?<!\\)\b[a-zA-Z]{2}", a):  # words in any case, but x is not X
        return True
    if re.fullmatch("[A-Z ]{2,}", a) and re.fullmatch("[A-Z ]{2,}", b):  # capitals are no product: ABC is not CAB
        return False
    return all(map(_close, _values(a), _values(b)))


def _split_unit(text: str) -> tuple[str, str]:
    """"18 apples" -> ("18", "apples"), "5 ft/s^2" -> ("5", "ft/s2"), "12m" -> ("12", "meter"); "x + 3m" has none."""
    found = _UNIT.search(text)
    number = text[:found.start()].strip() if found else ""
    if not re.search(r"\d|\\pi", number) or number.count("(") > number.count(")"):  # no number; 2(1+3m)
        return text, ""
    if re.fullmatch(r"[a-zA-Z](\s?\^?\{?[23]\}?)?", found[1]):  # one letter: 5 m^2 and 16\pi m, but 1+3m and x+3 m
        numeric = r"(?:[^a-zA-Z\\]|\\[a-z]+)*" if re.match(" [mgL]", found[0]) else r"[-\d./*^{} ]+"
        if not re.fullmatch(numeric, number):
            return text, ""
    unit = re.sub("[a-z]+", lambda word: _UNITS.get(word[0], word[0]), found[1].lower().replace(".", ""))
    return number, re.sub(r"[\s(){}^]", "", unit)


def _close(a, b) -> bool:
    """Equal, or apart only by the rounding of floats: \\sin(\\pi) is not quite 0."""
    if _bits(a) and _bits(b):
        return a == b
    return cmath.isclose(a, b, rel_tol=1e-12, abs_tol=1e-13 if 0 in (a, b) else 0)


def _bits(value) -> int:
    """The size of an exact number, and 0 for a float."""
    return value.numerator.bit_length() + value.denominator.bit_length() if isinstance(value, Fraction) else 0


def _power(base, exponent):
    if _bits(exponent) and _bits(base) * abs(exponent) > MOST_BITS:
        raise ValueError
    return base ** exponent


def _factorial(n):
    return Fraction(math.factorial(int(n))) if n == int(n) and 0 <= n < 200 else math.gamma(n + 1)  # n may be a letter


_OF_TWO = {"frac": operator.truediv, "binom": lambda n, k: _factorial(n) / _factorial(k) / _factorial(n - k)}
_OPERATORS = {  # how strongly it binds, what it does
    "+": (1, operator.add), "-": (1, operator.sub), "*": (2, operator.mul), "/": (2, operator.truediv),
    "^": (3, _power), "!": (4, _factorial)}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CONSTANTS = {"pi": math.pi, "e": math.e, "i": 1j, "infty": math.inf, "infinity": math.inf, "inf": math.inf}
_FUNCTIONS = {name: getattr(cmath, name) for name in "sin cos tan sinh cosh tanh exp".split()} | {
    "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan, "ln": cmath.log, "log": cmath.log10,
    "sec": lambda x: 1 / cmath.cos(x), "csc": lambda x: 1 / cmath.sin(x), "cot": lambda x: 1 / cmath.tan(x)}
_KNOWN = {*_FUNCTIONS, *_CONSTANTS, *_OF_TWO, "sqrt"}
_INDEX = r"_(?:\w|\\[a-z]+|\{[^{}]*\})"
_TOKEN = re.compile(rf"""
    \d+ (?:\.\d*)? (?: [eE][+-]?\d{{1,2}}(?!\d) )? | \.\d+      # 12, 1.5, 1.5e3, .5
    | [a-zA-Z]{_INDEX}                                          # x_1, v_{{max}}
    | \\?(?:{"|".join(sorted(_KNOWN))}) (?![a-zA-Z])             # sin or \sin
    | \\[a-zA-Z]+ (?:{_INDEX})? | [a-zA-Z]{{4,}} | \S            # \theta; a word, which is no formula; else xy is x·y
    """, re.X)


@functools.lru_cache(4096)
def _values(text: str) -> list:
    """The values of a formula at three points; equal formulas have equal values.

    At each point a letter stands for a number that follows from its name. There "(x+1)^2" and "x^2+2x+1" have the same
    exact fractions, "\\sqrt{12}" and "2\\sqrt3" floats that agree to twelve digits. Formulas that differ agree at one
    point with a chance of about 1 in 1,000, and hardly ever at all three. Nothing is drawn at random, so the verdict
    on a pair never changes. Where the text is no formula, this raises one of the errors that `_same` catches.
    """
    text = re.sub(r"(?<=[a-zA-Z)}])(?=\d+\^)|(?<=!)(?=\d)", "*", text)  # n2^n, (n-1)2^n, 3!7!; but x2 is not 2x
    words = [word.lstrip("\\") if word.lstrip("\\") in _KNOWN else word for word in _TOKEN.findall(text)]
    tokens, values = [], []  # a stack with the first token on top, and ";" at the bottom

    def accept(token):  # take the next token if it is this one
        return tokens[-1] == token and tokens.pop()

    def begins_factor():  # 2x, 2(x + 1) and x\sin x are products
        token = tokens[-1]
        return token in _CLOSING or token.lstrip("\\")[:1].isalpha()

    def read(strength):  # an atom and those operators after it that bind more strongly than this
        value = atom()
        while True:
            implicit = begins_factor()
            binds, apply = _OPERATORS.get("*" if implicit else tokens[-1], (0, None))
            if binds <= strength:
                return value
            token = "*" if implicit else tokens.pop()
            value = apply(value) if token == "!" else apply(value, read(binds))
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
            while not bracketed and begins_factor() and tokens[-1] not in {*_CLOSING, *_FUNCTIONS}:
                value = value * read(2)  # \cos 2x
            return (_FUNCTIONS[token](complex(value)) / cmath.log10(base)) ** exponent  # log10(10) is 1
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token[0].isalpha() and (len(token) == 1 or token[1] == "_") or token[0] == "\\":
            name = re.sub(r"[\\{} ]", "", token).encode()
            return Fraction(pow(int.from_bytes(name, "big"), 5, modulus) + 1, 97)  # a power, for a + d is not b + c
        raise ValueError

    for modulus in (1009, 1013, 1019):
        tokens = [";", *reversed(words)]
        values.append(read(0))
        if tokens != [";"]:
            raise ValueError
    return values


# -------------------------------------------------------------------------------------------------- evaluation

def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def evaluate(policy, tokenizer, problems: list[Problem], score, cfg) -> dict[str, float]:
    """Greedy accuracy and, with --eval_samples k > 1, avg@k and pass@k. Leaves the random state as it was.

    problems: from `encode_prompts`; score: from `load_reward`.
    """
    if not problems:
        return {}
    prompts = [problem.prompt_ids for problem in problems]
    _, correct = score(problems, sample(policy, tokenizer, prompts, 1, cfg.max_new_tokens, greedy=True))
    metrics = {"eval_accuracy": correct.float().mean().item()}
    if cfg.eval_samples > 1:
        k = cfg.eval_samples
        with torch.random.fork_rng(devices=[]):
            _, correct = score(problems, sample(policy, tokenizer, prompts, k, cfg.max_new_tokens, cfg.temperature))
        metrics[f"eval_avg@{k}"] = correct.float().mean().item()
        metrics[f"eval_pass@{k}"] = float(np.mean([pass_at_k(k, c, k) for c in correct.sum(1).tolist()]))
    return metrics


# ----------------------------------------------------------------------------------------------------- the run

def say(message: str) -> None:
    """One line for the user, from rank 0, that does not break the progress bar."""
    if rank() == 0:
        tqdm.write(message, file=sys.stderr)


def warn_without_signal(step: int, advantages: torch.Tensor) -> None:
    """A step whose advantages are all 0 is no bug, but no progress either: say what it means and what to try."""
    if not advantages.any():
        say(f"step {step}: the rewards of every group are equal, so all advantages are 0 and nothing is learned. If "
            "this goes on: easier or harder problems, a larger --group_size, a higher --temperature, more "
            "--max_new_tokens, or --format_reward 0.1 to begin with")


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the values where the mask is true; 0 where it never is. For metrics; losses have weights."""
    return values.detach().where(mask, 0).sum() / mask.sum().clamp(min=1)


def make_optimizer(model, cfg, betas=(0.9, 0.999)):
    """(AdamW, schedule) of a model from `load_model`. Sets up --freeze_layers and --gradient_checkpointing as well."""
    layers = decoder_layers(model)
    for layer in layers[:int(cfg.freeze_layers * len(layers))]:
        layer.requires_grad_(False)
    if cfg.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        with one_line_errors("--gradient_checkpointing"):  # which a few old architectures lack
            enable({"use_reentrant": False})
        for module in model.modules():  # layers recompute in training mode only
            module.training = hasattr(module, "gradient_checkpointing")
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=betas, weight_decay=0.0, fused=True)
    updates = cfg.steps * getattr(cfg, "minibatches", 1) * getattr(cfg, "updates_per_batch", 1)
    name = "constant_with_warmup" if cfg.lr_schedule == "constant" else cfg.lr_schedule
    return optimizer, transformers.get_scheduler(name, optimizer, cfg.warmup_steps, updates)


class Meter:
    """Weighted means over micro-batches and ranks, kept on the device until `means` asks for them."""

    def __init__(self):
        self.sums = {}  # name: (Σ weight · value, Σ weight)

    def add(self, weight, /, **values) -> None:
        for name, value in values.items():
            total, weights = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = total + value * weight, weights + weight

    def means(self) -> dict[str, float]:
        """Collective."""
        sums = torch.tensor([[float(s), float(w)] for s, w in self.sums.values()], dtype=torch.float64)
        return {name: s / w if w else 0.0 for name, (s, w) in zip(self.sums, sum_over_ranks(sums).tolist())}


class Run:
    """One run's directory, log, checkpoints and signals: everything around the loop that is not the algorithm."""

    WRITES = ("metrics.jsonl", "samples.jsonl", "checkpoint", "model", "tensorboard", "config.json")
    # flags that may differ between a run and its continuation
    MAY_CHANGE = {"steps", "resume", "overwrite", "output_dir", "log_to", "save_every", "eval_every", "eval_samples",
                  "max_bad_steps", "micro_batch_tokens", "gradient_checkpointing"}

    extra = {}  # numbers that a script keeps across --resume: assigned before `start`
    lock = None  # process 0's file

    def __init__(self, cfg):
        """Check the output directory, join the other ranks, seed. Writes nothing yet."""
        self.script = Path(sys.argv[0]).name
        self.cfg, self.directory = cfg, Path(cfg.output_dir or f"runs/{Path(self.script).stem}")
        self.next_step = 0  # the first that is not done, by which a checkpoint is named; 0: evaluation before training
        self.bad_steps = collections.Counter()  # by the model's name: PPO has two
        self.stop_signal = 0
        self.check_directory()
        if cfg.log_to != "none" and not importlib.util.find_spec(cfg.log_to):
            raise UserError(f"--log_to {cfg.log_to}: pip install {cfg.log_to}")
        self.device = setup_device()
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # that there is one process
        # Of a damaged checkpoint it logs tracebacks, by the root logger; `load_checkpoint` says it in a line.
        logging.getLogger().addFilter(lambda record: "torch/distributed/checkpoint" not in record.pathname)
        transformers.set_seed(cfg.seed)

    def check_directory(self):
        """Nothing that is there may be lost: --resume continues this very run, --overwrite replaces only a run."""
        cfg, directory, config = self.cfg, self.directory, self.directory / "config.json"
        with one_line_errors(f"--output_dir {directory}: not usable, or its config.json damaged"):  # too long
            ancestor = next(path for path in [directory, *directory.absolute().parents] if path.exists())
            saved = json.loads(config.read_text()) if config.exists() else {}
            script, flags = saved.get("script"), saved.get("flags")  # a model's config.json has neither
        if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
            raise UserError(f"--output_dir {directory}: {ancestor} is a file or write-protected")
        held = [name for name in self.WRITES if (directory / name).exists()]
        if held and flags is None:
            raise UserError(f"--output_dir {directory}: holds {held[0]}, but no run that could have written it")
        if cfg.resume and cfg.overwrite:
            raise UserError("--resume and --overwrite cannot be combined")
        if cfg.resume:
            if not self.checkpoints():
                raise UserError(f"--resume: no checkpoint in {directory / 'checkpoint'}")
            if script != self.script:
                raise UserError(f"--resume: {directory} holds a run of {script}, not of {self.script}")
            for name, value in vars(cfg).items():
                if name not in self.MAY_CHANGE and flags.get(name) != value:
                    raise UserError(f"--resume: --{name} was {flags.get(name)!r} and is now {value!r}; "
                                    "that would be a different run")
        elif held:
            if not cfg.overwrite:
                raise UserError(f"--output_dir {directory}: holds a run already; --resume continues it, --overwrite "
                                "replaces it, another --output_dir leaves it alone")
            for needed in (cfg.model, getattr(cfg, "reward", "")):
                if os.path.isdir(needed) and Path(needed).resolve().is_relative_to(directory.resolve()):
                    raise UserError(f"--overwrite: {needed} is, or is in, the run that would be replaced")

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first: a directory gets such a name only when all of it is on disk."""
        found = [path for path in (self.directory / "checkpoint").glob("step-*") if path.name[5:].isdigit()]
        return sorted(found, key=lambda path: int(path.name[5:]))

    def start(self, data: Shuffled, **trained) -> None:
        """Everything is loaded and checked: create the directory, or continue from its checkpoint.

        trained: name=(model, optimizer, schedule) for each model that trains. `data.position` is saved with them.
        """
        self.data, self.trained = data, trained
        with one_line_errors(f"--output_dir {self.directory}: cannot write there"):
            on_main_rank_first(self.lock_directory)
            if self.cfg.resume:
                self.load_checkpoint()
            on_main_rank_first(self.drop_later_lines if self.cfg.resume else self.write_config)
        if not self.cfg.resume:
            self.save_checkpoint()
        if rank() == 0:
            try:
                self.log = self.open_logger() if self.cfg.log_to != "none" else None
            except Exception as error:  # W&B's are of no built-in kind
                raise UserError(f"--log_to {self.cfg.log_to}: it does not start ({error}); --resume continues once "
                                "it can") from error
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the last when the terminal goes, but for nohup
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.note_signal)
        # What a reward function forks: Process.terminate() ends it; Ctrl-C, which goes to all, does not end the step.
        os.register_at_fork(after_in_child=functools.partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
        os.register_at_fork(after_in_child=functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN))
        self.bar = tqdm(total=self.cfg.steps, initial=max(0, self.next_step - 1), desc=self.script, unit="step",
                        disable=rank() > 0, dynamic_ncols=True, mininterval=0.1 if sys.stderr.isatty() else 30)

    def open_logger(self):
        """--log_to's log(metrics, step=step)."""
        if self.cfg.log_to == "wandb":
            import wandb
            earlier = sorted((self.directory / "wandb").glob("*run-*-*")) if self.cfg.resume else []  # run-DATE-ID
            return wandb.init(project="rl", name=self.directory.name, config=vars(self.cfg), dir=self.directory,
                              id=earlier[-1].name.split("-")[-1] if earlier else None, resume="allow").log
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(self.directory / "tensorboard", purge_step=self.next_step)  # later ones are done again

        def log(metrics, step):
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            writer.flush()  # the run may be killed, or `launch` skip the interpreter's exit
        return log

    def lock_directory(self):
        """Until `close`, or the end of the process, however it comes. The run's last process may still be ending."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.directory / ".lock", "a")
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not inherited by what is forked
        except BlockingIOError as error:
            raise UserError(f"--output_dir {self.directory}: another process is still at work on its run") from error
        except OSError:  # a file system without locks
            pass

    def write_config(self):
        if self.cfg.overwrite:
            for path in (self.directory / name for name in self.WRITES):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True,
                                cwd=Path(__file__).parent).stdout.strip() if shutil.which("git") else ""
        with open(self.directory / "config.json", "x") as file:  # fails where another run began a moment ago
            file.write(json.dumps({
                "script": self.script, "flags": vars(self.cfg), "commit": commit or None,
                "versions": {"python": sys.version.split()[0], "torch": torch.__version__,
                             "transformers": transformers.__version__, "numpy": np.__version__},
                "processes": world_size(), "threads": torch.get_num_threads(), "device": str(self.device)},
                indent=2) + "\n")

    def note_signal(self, number, frame):
        """Finish the step first; a second signal ends at once."""
        self.stop_signal = number
        signal.signal(number, signal.SIG_DFL)
        say(f"{signal.Signals(number).name}: stopping after this step")

    def steps(self):
        """The numbers of the steps still to do, from 1."""
        for step in range(max(1, self.next_step), self.cfg.steps + 1):
            self.began, self.began_with = time.perf_counter(), (self.data.position, torch.get_rng_state())
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            yield step

    def timing(self, num_tokens: int) -> dict[str, float]:
        """Metrics of the step so far: call it before the evaluation."""
        seconds = time.perf_counter() - self.began
        memory = torch.cuda.max_memory_allocated() / 2 ** 20 if self.device.type == "cuda" else \
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2 ** 20 if sys.platform == "darwin" else 2 ** 10)
        return {"seconds": seconds, "tokens_per_second": int(num_tokens) / seconds, "peak_memory_mb": memory}

    def optimizer_step(self, model, optimizer, schedule, loss: torch.Tensor) -> dict[str, float]:
        """Clip, step, advance the rate, clear the gradient. Collective.

        loss: the sum of this rank's micro-batch losses, detached. A non-finite loss or gradient changes nothing and
        is counted; --max_bad_steps of them in a row, of one model, end the run. Returns loss, grad_norm (before
        clipping) and lr.
        """
        loss = sum_over_ranks(loss.clone()).item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.cfg.max_grad_norm)
        norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
        lr = schedule.get_last_lr()[0]
        name = next(name for name, (trained, *_) in self.trained.items() if trained is model)
        if math.isfinite(norm) and math.isfinite(loss):
            optimizer.step()
            schedule.step()
            self.bad_steps[name] = 0
        else:
            self.bad_steps[name] += 1
            say(f"{name}: loss {loss}, gradient norm {norm}: update skipped ({self.bad_steps[name]} in a row)")
            if self.bad_steps[name] >= self.cfg.max_bad_steps:
                self.data.position, state = self.began_with  # --resume does the step again, with these weights
                torch.set_rng_state(state)
                self.save_checkpoint()
                raise TrainingFailed(
                    f"{name}: {self.bad_steps[name]} updates in a row had a non-finite loss or gradient; saved. "
                    "Look at the data and the reward, or start again with a lower --lr")
        optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm, "lr": lr}

    def evaluates(self, step: int) -> bool:
        return step % self.cfg.eval_every == 0 or step == self.cfg.steps

    def log_samples(self, step: int, problems, rollout: Rollout, rewards, advantages) -> None:
        """A few completions of the step for samples.jsonl: the first two of each of the first four prompts."""
        if rank() == 0:
            G = rewards.shape[1]
            self.append("samples.jsonl", [
                {"step": step, "prompt": problem.prompt, "completion": rollout.completions[p * G + g],
                 "answer": problem.answer, "reward": rewards[p, g].item(), "advantage": advantages[p * G + g].item()}
                for p, problem in enumerate(problems[:4]) for g in range(min(2, G))])

    def append(self, name: str, rows: list[dict]) -> None:
        """Add lines to metrics.jsonl or samples.jsonl."""
        try:
            with open(self.directory / name, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:
            raise TrainingFailed(f"cannot write {self.directory / name}: {error.strerror}; --resume continues from the "
                                 "last checkpoint") from error

    def end_step(self, step: int, metrics: dict[str, float]) -> None:
        """Write the step's line, show it, save where it is time to, and stop where a signal asked for it."""
        if rank() == 0:
            self.append("metrics.jsonl", [{"step": step, **metrics}])
            if self.log:
                self.log(metrics, step=step)
            shown = {"reward": ".3f", "accuracy": ".3f", "pair_accuracy": ".3f", "entropy": ".3f",
                     "tokens_per_second": ".0f"}
            self.bar.set_postfix({name: format(metrics[name], spec) for name, spec in shown.items() if name in metrics},
                                 refresh=False)
            self.bar.update(step > 0)
        evaluation = [f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("eval_")]
        if evaluation:
            say(f"step {step}: {', '.join(evaluation)}")
        self.next_step = step + 1
        stop_signal = max(gather_in_order([self.stop_signal]))
        if step and (stop_signal or step % self.cfg.save_every == 0 or step == self.cfg.steps):
            self.save_checkpoint()
        if stop_signal:
            self.close()
            say(f"stopped after step {step}; continue with the same command and --resume")
            leave_together(128 + stop_signal)

    def finish(self, model, tokenizer) -> None:
        """Write OUTPUT_DIR/model."""
        save_model(model, tokenizer, self.directory / "model")
        self.close()
        say(f"saved {self.directory / 'model'}")

    def close(self) -> None:
        """End the progress bar and the second log: with several processes `launch` skips the interpreter's exit."""
        self.bar.close()
        if self.lock:
            self.lock.close()
        if self.cfg.log_to == "wandb":
            import wandb
            wandb.finish()

    # checkpoint/step-000020/ holds the sharded tensors (torch.distributed.checkpoint) and state.pt (all the rest)

    def tensors(self) -> dict:
        """Weights and AdamW states by name: torch.distributed.checkpoint saves these very tensors, and fills them."""
        tensors = {}
        for name, (model, optimizer, _) in self.trained.items():
            weights, states = model.state_dict(), {}  # first, since FSDP then puts its shards in place again
            for key, parameter in model.named_parameters():
                if parameter.requires_grad:
                    states[key] = optimizer.state[parameter]
                    if not states[key]:  # no gradient has reached it yet: what AdamW will begin with
                        states[key].update(step=torch.zeros((), device=parameter.device),
                                           exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
            tensors[name] = {"model": weights, "optimizer": {"state": states}}
        return tensors

    def save_checkpoint(self) -> None:
        """Write to a temporary name, flush, rename; only then remove the previous one. Collective."""
        final = self.directory / "checkpoint" / f"step-{self.next_step:06d}"
        if from_main_rank(final.exists()):  # a run that gives up in mid-step has it: --resume repeats the step
            return
        temporary = final.with_name("unfinished")
        state = {"next_step": self.next_step, "position": self.data.position, "bad_steps": dict(self.bad_steps),
                 "extra": self.extra,
                 "schedules": {name: schedule.state_dict() for name, (_, _, schedule) in self.trained.items()},
                 "random": torch.get_rng_state()}  # alike on all ranks; rewards have seeds of their own

        def prepare():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

        def publish():
            with open(temporary / "state.pt", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, final)
            for older in self.checkpoints()[:-1]:
                shutil.rmtree(older)
        try:
            on_main_rank_first(prepare)
            if self.next_step:  # before step 0 the models are as they were loaded
                dcp.save(self.tensors(), checkpoint_id=temporary)
            on_main_rank_first(publish)
        except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
            shutil.rmtree(temporary, ignore_errors=True)  # it may be what fills the disk
            intact = self.checkpoints()[-1].name if self.checkpoints() else "no checkpoint"
            raise TrainingFailed(f"cannot save to {final.parent}: {innermost(error)}; {intact} is intact") from error

    def load_checkpoint(self) -> None:
        """Fill models, optimizers, schedules, data position and random state from the newest checkpoint."""
        path = self.checkpoints()[-1]
        try:
            state = torch.load(path / "state.pt", weights_only=True)
            if state["next_step"]:
                dcp.load(self.tensors(), checkpoint_id=path)
            for name, (_, optimizer, schedule) in self.trained.items():
                schedule.load_state_dict(state["schedules"][name])
                for factor in getattr(schedule, "lr_lambdas", ()):  # --steps may be another now
                    schedule._last_lr = [schedule.base_lrs[0] * factor(schedule.last_epoch)]
                optimizer.param_groups[0]["lr"] = schedule.get_last_lr()[0]
            self.next_step, self.data.position = state["next_step"], state["position"]
            self.bad_steps, self.extra = collections.Counter(state["bad_steps"]), state["extra"]
            torch.set_rng_state(state["random"])
        # damaged files raise anything, from EOFError to UnpicklingError; and CheckpointException is no Exception
        except (Exception, dcp.api.CheckpointException) as error:
            raise UserError(f"--resume: {path} is damaged or of another model: {innermost(error)}") from error
        if self.next_step > self.cfg.steps + 1:  # at + 1 it may have been killed while it wrote model/
            raise UserError(f"--resume: {self.directory} has done {self.next_step - 1} steps, more than --steps")

    def drop_later_lines(self) -> None:
        """Drop the log lines written after the checkpoint: their steps are done again."""
        for path in (self.directory / "metrics.jsonl", self.directory / "samples.jsonl"):
            if path.exists():
                lines = re.finditer(r'(?m)^{"step": *(\d+).*}\n', path.read_text(errors="replace"))  # whole ones
                kept = [line[0] for line in lines if int(line[1]) < self.next_step]
                temporary = path.with_suffix(".tmp")
                temporary.write_text("".join(kept))
                os.replace(temporary, path)


def innermost(error: BaseException) -> str:
    """The first line of the error at the root of a chain, for a one-line message."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    if isinstance(error, dcp.api.CheckpointException):  # of several ranks: the first one's
        return innermost(next(iter(error.failures.values()))[0])
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
