"""Measure speed and memory of the scripts and their parts, and of TRL on the same work. Weights are random.

    python tests/bench.py [--device cuda] [--model tiny|smollm-135m|qwen-0.5b|qwen-1.5b|qwen-3b|qwen-7b]
                          [--only rollout,logprobs,step] [--against trl] [--threads 2] [--repeats 5] [--rounds 3]
                          [--prompts N] [--group N] [--tokens N] [--micro_batch_tokens N] [--flags="…"]
                          [--out FILE.json]

    rollout   `sample` against `model.generate`, with completions of one length and of random lengths
    logprobs  forward and backward of `token_logprobs` against all logits at once (and TRL's fused head)
    step      a step of grpo.py, split into its parts
    trl       steps of grpo.py, dpo.py, reward_model.py and ppo.py against TRL's trainers (PPO: up to TRL 1.12)
    race      sampled accuracy after 20 seconds of training from the same start, against TRL's
    memory    GB that each script needs on a GPU, calculated without one (only with --only memory)

Prints a line for each case, then all results as one line of JSON. Cases run one after another, each in its own process,
so that peak memory is that of one case: on CPU the largest resident size (VmHWM, reset after loading), on CUDA
max_memory_allocated. Figures are medians over repeats without the warm-up (parts of a step, and tokens: means).
limit_share is the least possible time divided by the measured one. It is that of the matrix products, at a large one's
rate in the same process; for a rollout on CUDA, that of reading the weights and the KV cache.
"""
import argparse
import collections
import contextlib
import ctypes
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
sys.path.insert(0, str(Path(__file__).parent.parent))

SHAPES = {  # hidden, intermediate, layers, heads, KV heads, vocabulary, tied embeddings
    "tiny": (128, 384, 3, 4, 2, 23, True), "logprobs": (256, 768, 4, 4, 2, None, True),
    "smollm-135m": (576, 1536, 30, 9, 3, 49_152, True), "qwen-0.5b": (896, 4864, 24, 14, 2, 151_936, True),
    "qwen-1.5b": (1536, 8960, 28, 12, 2, 151_936, True), "qwen-3b": (2048, 11_008, 36, 16, 2, 151_936, True),
    "qwen-7b": (3584, 18_944, 28, 28, 4, 152_064, False)}


# ------------------------------------------------------------------------------------------------------- measuring

class Enough(Exception):
    """Raised by a Clock inside a training loop when it has seen enough steps."""


class Clock:
    """Median seconds between calls of `tick`, and peak memory, both without the warm-up."""

    def __init__(self, device, warmup: int, repeats: int, seconds: float = float("inf")):
        self.device, self.warmup, self.repeats, self.seconds = device, warmup, repeats, seconds
        self.times, self.peak = [], 0.0

    def tick(self) -> None:
        synchronize(self.device)
        self.times.append(time.perf_counter())
        if len(self.times) <= self.warmup + 1:
            reset_peak(self.device)
        self.peak = max(self.peak, peak_memory(self.device))
        if len(self.times) > self.warmup + self.repeats or self.times[-1] - self.times[0] > self.seconds:
            raise Enough

    def result(self) -> dict:
        lasted = [b - a for a, b in zip(self.times, self.times[1:])][self.warmup:]
        return {"seconds": statistics.median(lasted), "peak_mb": self.peak}


def synchronize(device) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def status_mb(field: str) -> float:
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) / 2 ** 10


def reset_peak(device) -> float:
    """Reset the peak, and return the MB in use now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2 ** 20
    ctypes.CDLL(None).malloc_trim(0)  # give back what is free: `setup_device` lets the process keep it
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (man proc)
    return status_mb("VmRSS")


def peak_memory(device) -> float:
    return torch.cuda.max_memory_allocated() / 2 ** 20 if device == "cuda" else status_mb("VmHWM")


def timed(work, device, repeats: int, warmup: int = 1, summary=statistics.median) -> float:
    """Median (or least) seconds of work()."""
    seconds = []
    for _ in range(warmup + repeats):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return summary(seconds[warmup:])


def matmul_rate(device) -> float:
    """FLOP/s of a large matrix product, in the precision that training computes in."""
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (2048, torch.float32)
    a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n ** 3 / timed(lambda: common.linear(a, b), device, 5, 2, min)


def copy_bandwidth(device) -> float:
    """Bytes/s read and written by a large copy."""
    a = torch.empty(2 ** 30, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * a.numel() / timed(lambda: b.copy_(a), device, 5, 2, min)


def linear_weights(model) -> int:
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))


def forward_flops(model, tokens: float, context: float) -> float:
    """FLOPs for `tokens` tokens that attend to `context` tokens each, on average.

    Each token takes 2 per weight of a linear layer. In each layer's attention it takes 2 per attended token and hidden
    unit for its scores, and 2 for the weighted sum of values.
    """
    config = model.config
    return tokens * (2 * linear_weights(model) + 4 * config.num_hidden_layers * config.hidden_size * context)


# ---------------------------------------------------------------------------------------------------------- models

def random_model(name: str, device: str, vocab: int | None = None, dtype=None, layers: int | None = None):
    hidden, intermediate, own_layers, heads, kv_heads, own_vocab, tied = SHAPES[name]
    config = transformers.Qwen2Config(
        vocab_size=vocab or own_vocab, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers or own_layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=8192, pad_token_id=0, eos_token_id=1, bos_token_id=None, tie_word_embeddings=tied,
        dtype=dtype or torch.float32)
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)


def model_directory(name: str) -> str:
    """A directory for --model: the built-in tiny model, or random weights of another shape with its tokenizer."""
    if name == "tiny":
        return common.build_tiny_model("arithmetic")
    directory = Path("runs") / f"bench-{name}"
    if not directory.exists():
        where = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU core takes minutes to draw 7B numbers
        model, tokenizer = random_model(name, where, dtype=torch.bfloat16), common.tiny_tokenizer()
        common.write_directory(directory, lambda path: (model.save_pretrained(path), tokenizer.save_pretrained(path)))
    return str(directory)


# ----------------------------------------------------------------------------------------------------------- cases

def rollout(args, lengths: str, greedy_check: int = 32) -> dict:
    """Sample a group of completions for each prompt, by default 16 of 16.

    lengths: "fixed", where no token ends a row, or "ragged", where some tokens of the vocabulary end one, so that
    lengths have a geometric distribution.
    """
    P, G, device = args.prompts, args.group, args.device
    T = args.tokens or (512 if args.model != "tiny" else 40 if lengths == "fixed" else 256)
    mean = T if lengths == "fixed" else T / 8
    torch_device = common.setup_device()
    model = random_model(args.model, device, dtype=torch.bfloat16 if device == "cuda" else None)
    model.eval().requires_grad_(False)
    V = model.config.vocab_size
    ends = [] if lengths == "fixed" else list(range(V - min(V // 2, max(1, round(V / mean))), V))
    model.generation_config.eos_token_id = ends or None
    tokenizer = types.SimpleNamespace(pad_token_id=0, eos_token_id=None if not ends else ends[0],
                                      decode=lambda ids, **_: "")
    prompts = [torch.randint(2, V // 2, (8 + i % 8,)).tolist() for i in range(P)]
    prompt_ids, prompt_mask, _ = common.collate(prompts, [[]] * P, 0, device)
    L = prompt_ids.shape[1]
    counts = {"ours": [], "generate": []}

    def generate(rows_each, tokens, **how):
        return model.generate(
            input_ids=prompt_ids.repeat_interleave(rows_each, 0), use_cache=True, max_new_tokens=tokens,
            attention_mask=prompt_mask.repeat_interleave(rows_each, 0), pad_token_id=0, **how)[:, L:]

    def sample_theirs():
        out = generate(G, T, do_sample=True, top_k=0, top_p=1.0)
        ended = torch.isin(out, torch.tensor(ends or [-1], device=device)).int()
        drawn = torch.where(ended.any(1), ended.argmax(1) + 1, out.shape[1])
        counts["generate"].append((drawn.sum().item(), drawn.max().item()))

    def sample_ours():
        drawn = common.sample(model, tokenizer, prompts, G, T).lengths
        counts["ours"].append((drawn.sum().item(), drawn.max().item()))

    theirs = generate(1, greedy_check, do_sample=False)
    reset_peak(device)
    generate_seconds = timed(sample_theirs, device, args.repeats)
    generate_peak = peak_memory(device)
    model = common.shard(model, torch_device)  # as the scripts load one that does not train
    ours = common.sample(model, tokenizer, prompts, 1, greedy_check, greedy=True).input_ids[:, L:]
    width = min(ours.shape[1], theirs.shape[1])
    # On CUDA some rows may differ: bfloat16 kernels round differently for different shapes, fused norms once less.
    same = (ours[:, :width] == theirs[:, :width]).all(1).float().mean().item()
    if same < (1 if device == "cpu" else 0.5) or device == "cpu" and ours.shape != theirs.shape:
        raise SystemExit("greedy tokens differ from generate's")
    reset_peak(device)
    seconds = timed(sample_ours, device, args.repeats)
    peak = peak_memory(device)
    tokens, longest = (statistics.mean(column) for column in zip(*counts["ours"][1:]))
    rate, generate_rate = tokens / seconds, statistics.mean(c[0] for c in counts["generate"][1:]) / generate_seconds
    # Averaged over tokens: long rows have more of them, so for geometric lengths it is the mean length, not half.
    context = L + tokens / P / G / (2 if lengths == "fixed" else 1)
    if device == "cuda":  # in bytes; an untied embedding is left out, since a step reads few of its rows
        weights = 2 * linear_weights(model)
        cached = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * 2 * \
            model.config.hidden_size // model.config.num_attention_heads
        limit = (longest * weights + tokens * context * cached) / copy_bandwidth(device)
    else:
        limit = forward_flops(model, tokens, context) / matmul_rate(device)
    return {"seconds": seconds, "tokens_per_second": rate, "generate_tokens_per_second": generate_rate,
            "ratio": rate / generate_rate, "limit_share": limit / seconds, "peak_mb": peak,
            "generate_peak_mb": generate_peak, "greedy_same": same, "mean_length": tokens / P / G, "longest": longest}


def logprobs_inputs(args, vocab: int):
    """A model, 16 rows of 32 + 256 tokens and their mask, and random coefficients [16, 256] for the log-probs."""
    device = common.setup_device()
    model = common.shard(random_model("logprobs" if args.model == "tiny" else args.model, args.device, vocab), device)
    ids = torch.randint(2, vocab, (16, 32 + 256), device=args.device)
    return model, ids, torch.ones_like(ids), torch.randn(16, 256, device=args.device)


def logprobs_path(path: str, model, ids, mask, T: int):
    """Log-probs [B, T], computed in one of three ways. (All logits at once: no entropies, which the others have.)"""
    if path == "ours":
        return common.token_logprobs(model, ids, mask, T)[0]
    if path == "all logits":
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=T + 1).logits[:, :-1]
        return logits.float().log_softmax(-1).gather(2, ids[:, -T:, None])[..., 0]
    labels = ids.clone()
    labels[:, :-T] = -100
    return model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[:, -T:]


def logprobs(args, path: str, vocab: int) -> dict:
    model, ids, mask, coefficients = logprobs_inputs(args, vocab)
    if path == "trl":
        from trl.trainer.utils import add_fused_lm_head
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    common.head_is_sliceable(model)

    def work():
        model.zero_grad()
        (logprobs_path(path, model, ids, mask, 256) * coefficients).sum().backward()
    rate = matmul_rate(args.device)
    base = reset_peak(args.device)
    seconds = timed(work, args.device, args.repeats if vocab < 10_000 or args.device == "cuda" else 2)
    # `forward_flops` counts the head at every token, but only the log-probs of completions need it.
    flops = forward_flops(model, 16 * 288, 144) - 2 * 16 * 32 * vocab * model.config.hidden_size
    return {"seconds": seconds, "peak_above_model_mb": peak_memory(args.device) - base,
            "limit_share": 3 * flops / rate / seconds}


def logprobs_difference(args, vocab: int) -> dict:
    model, ids, mask, coefficients = logprobs_inputs(args, vocab)
    values, gradients = [], []
    for path in ("ours", "all logits"):
        model.zero_grad()
        values.append(logprobs_path(path, model, ids, mask, 256))
        (values[-1] * coefficients).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    scale = max(g.abs().max().item() for g in gradients[1])
    return {"value_difference": (values[0] - values[1]).abs().max().item(),
            "gradient_difference": max((a - b).abs().max().item() for a, b in zip(*gradients)) / scale}


def run_script(name: str, flags: list, tick) -> None:
    """Run the script's main, and call `tick()` after every step until it raises Enough."""
    script, end_step = importlib.import_module(name), common.Run.end_step

    def hooked(run, step, metrics):
        end_step(run, step, metrics)
        tick()
    common.Run.end_step = hooked
    with tempfile.TemporaryDirectory() as folder:
        forever = [text for flag in ("--steps", "--save_every", "--eval_every") for text in (flag, "100000")]
        with contextlib.suppress(Enough):
            script.main(common.parse_config(script.Config, [*flags, "--output_dir", folder, *forever]))


def script_flags(args, group: bool = True) -> list[str]:
    flags = ["--model", model_directory(args.model), "--lr", "1e-4"]
    if group:
        flags += ["--prompts_per_step", str(args.prompts), "--group_size", str(args.group),
                  "--max_new_tokens", str(args.tokens or (40 if args.model == "tiny" else 512))]
    return flags + (["--micro_batch_tokens", str(args.micro_batch_tokens)] if args.micro_batch_tokens else [])


def warmup_and_repeats(args) -> tuple[int, int]:
    return (3, max(args.repeats, 10)) if args.model == "tiny" else (2, max(args.repeats, 3))


def ours(args, script: str, flags: list[str]) -> dict:
    clock = Clock(args.device, *warmup_and_repeats(args))
    run_script(script, script_flags(args, script == "grpo") + flags, clock.tick)
    return clock.result()


def step(args, flags: list[str]) -> dict:
    """Split the time of a step of grpo.py into its parts, by timing the functions that it calls."""
    import grpo
    spent, marks = {}, {}

    def spy(module, name, part):
        function = getattr(module, name)

        def wrapped(*a, **k):
            synchronize(args.device)
            began = time.perf_counter()
            out = function(*a, **k)
            synchronize(args.device)
            marks["last"] = time.perf_counter()
            spent[part] = spent.get(part, 0.0) + marks["last"] - began
            if part == "update":  # from the last `rollout_logprobs` to `timing`, which itself takes no time
                spent["update"] = spent.get("update", 0.0) + began - marks["logprobs"]
            marks[part] = marks["last"]
            return out
        setattr(module, name, wrapped)
    spy(grpo, "sample", "rollout")
    spy(common, "rollout_logprobs", "logprobs")
    spy(common.Run, "timing", "update")
    load_reward = common.load_reward

    def load_and_spy(cfg):
        holder = types.SimpleNamespace(score=load_reward(cfg))
        spy(holder, "score", "reward")
        return holder.score
    common.load_reward = load_and_spy
    token_logprobs, real, models = grpo.token_logprobs, collections.Counter(), []

    def count_computed(module, _, given):  # with padding, but a prefix that is read once counts once
        real["computed"] += given["input_ids"].numel() if torch.is_grad_enabled() else 0

    def count(model, input_ids, attention_mask, *a):
        if not models:
            models.append(model)
            model.base_model.register_forward_pre_hook(count_computed, with_kwargs=True)
        rows, _ = common.distinct_rows(input_ids.where(attention_mask > 0, -1))
        # Rows are shifted left before they are computed.
        lengths = (rows >= 0).sum(1)
        real.update(rows=len(input_ids), distinct=len(rows), padded=len(rows) * int(lengths.max()),
                    tokens=int(lengths.sum()), attended=int(lengths.square().sum()) / 2)  # summed over tokens; causal
        return token_logprobs(model, input_ids, attention_mask, *a)
    grpo.token_logprobs = count
    clock = Clock(args.device, *warmup_and_repeats(args))

    def tick():
        if len(clock.times) == clock.warmup:
            for table in (spent, real):
                table.clear()
        clock.tick()
    run_script("grpo", script_flags(args) + flags, tick)
    result, steps = clock.result(), len(clock.times) - 1 - clock.warmup
    parts = {part: seconds / steps for part, seconds in spent.items()}
    total = (clock.times[-1] - clock.times[clock.warmup]) / steps
    tokens = min(real["tokens"], real["computed"]) / steps  # (the head at prompts included)
    flops = 3 * forward_flops(models[0], tokens, real["attended"] / real["tokens"])
    return {**result, **{f"{part}_seconds": seconds for part, seconds in parts.items()},
            "other_seconds": total - sum(parts.values()),
            "distinct_share": real["distinct"] / real["rows"], "padding_share": 1 - real["tokens"] / real["padded"],
            "update_flops_share": flops / parts["update"] / matmul_rate(args.device)}


def kept_for_backward(name: str, layers: int, tokens: int = 64) -> float:
    """Bytes of activations per token that autograd keeps for the backward pass of `layers` layers in bfloat16."""
    model, kept = random_model(name, "meta", vocab=1000, dtype=torch.bfloat16, layers=layers).to_empty(device="cpu"), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # kept alive, so that no other one gets its address
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.base_model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values()) / tokens


def memory(args) -> dict:
    """GB that a step with --gradient_checkpointing needs on one GPU, and on each of eight.

    The parameters, and the bytes that autograd keeps per token and layer, are counted on a model. The peak follows from
    them. It is the larger of two:

    sampling  the shards (float32 masters, AdamW's moments; frozen models in bfloat16), and the policy gathered in
              bfloat16. The KV cache, which takes half of what is left, does not count.
    update    the shards and their gradients, and the larger of
              (a) recomputed activations; embedding and head in bfloat16, and their gradient; and the larger of the
                  slices of logits and of two layers in bfloat16 with a gradient that FSDP2 copies to float32 to reduce
              (b) embedding and head while FSDP2 reduces their gradient

    Two things differ on a GPU: a model that is one FSDP module (`is_small`) takes up to 12 bytes a parameter more, and
    fused RMSNorms keep less for the backward pass.
    """
    tokens = args.micro_batch_tokens or 4096
    hidden, _, layers, *_ = SHAPES[args.model]
    model = random_model(args.model, "meta")
    total, layer = (sum(p.numel() for p in part.parameters()) for part in (model, model.base_model.layers[0]))
    root = total - layers * layer
    one_layer = tokens * (kept_for_backward(args.model, 2) - kept_for_backward(args.model, 1))
    recomputed = one_layer + layers * tokens * hidden * 2  # the layer being recomputed, and every layer's input
    slices = 5 * 4 * common.HEAD_SLICE["cuda"]  # at most: logits, their log-softmax, its gradients, the slice before
    result = {"parameters_b": total / 1e9, "activations": layers * one_layer / 1e9, "recomputed": recomputed / 1e9}
    for script, trained, frozen, samples in (("grpo", 1, 1, True), ("grpo without KL, dapo, dr_grpo", 1, 0, True),
                                             ("ppo", 2, 1, True), ("dpo, reward_model", 1, 0, False)):
        for gpus in (1, 8):
            sampling = (12 * trained + 2 * frozen) * total / gpus + samples * 2 * total
            update = (16 * trained + 2 * frozen) * total / gpus + max(
                recomputed + 4 * root + max(slices, (10 + 4 / gpus) * layer), (8 + 4 / gpus) * root)
            result[f"{script}, {gpus} GPU{'s' * (gpus > 1)}"] = max(sampling, update) / 1e9
    return result


# ------------------------------------------------------------------------------------------------------------- TRL

def trl_arguments(args, **more) -> dict:
    return dict(output_dir="runs/bench-trl", max_steps=100_000, learning_rate=1e-4, lr_scheduler_type="constant",
                max_grad_norm=1.0, optim="adamw_torch_fused", gradient_checkpointing=False, bf16=args.device == "cuda",
                report_to="none", use_cpu=args.device == "cpu", logging_strategy="no", save_strategy="no",
                disable_tqdm=True, dataloader_pin_memory=args.device == "cuda", **more)


def pairs_file(tokens: int) -> Path:
    """A file that both dpo.py and TRL can read, with the first and last answer of each built-in ranking as a pair.

    tokens: if not 0, 1,024 pairs of random digits instead, each answer of half as many tokens to so many.
    """
    path, draw = Path("runs") / f"bench-pairs{tokens or ''}.jsonl", random.Random(0)
    with open(common.build_tiny_preferences("arithmetic", "train")) as rankings:
        rows = [json.loads(line) for line in rankings]
    with open(path, "w") as pairs:
        for row in rows[:1024] if tokens else rows:
            answers = [row["responses"][0], row["responses"][-1]] if not tokens else \
                ["".join(draw.choices("0123456789", k=draw.randint(tokens // 2, tokens))) for _ in range(2)]
            print(json.dumps({"prompt": row["prompt"], "chosen": answers[0], "rejected": answers[1]}), file=pairs)
    return path


def reward_model_directory(model: str) -> str:
    """A reward model of the same shape with an untrained head: PPO's speed does not depend on its scores."""
    path = Path("runs") / "bench-reward_model"
    cls = transformers.AutoModelForSequenceClassification
    cls.from_pretrained(model, dtype=torch.float32, num_labels=1).save_pretrained(path)
    common.load_tokenizer(model).save_pretrained(path)
    return str(path)


def trl(args, script: str, minibatches: int = 1, updates: int = 1, kl: float = 0.0, tick=None, **more) -> dict:
    """The same step in TRL's trainer. All its optimizer steps on one batch of rollouts count as one step here."""
    from datasets import Dataset
    import trl as library
    clock, directory, trainer = Clock(args.device, *warmup_and_repeats(args)), model_directory(args.model), None
    # On the tiny model, by default, in one micro-batch, as TRL would by itself.
    budget = args.micro_batch_tokens or (10 ** 9 if args.model == "tiny" else 4096)

    class Ticks(transformers.TrainerCallback):
        def on_train_begin(self, _, state, control, **__):
            if tick:  # the race begins
                tick(trainer.model)

        def on_step_end(self, _, state, control, **__):
            if state.global_step % (minibatches * updates) == 0:
                tick(trainer.model) if tick else clock.tick()
    tokenizer = common.load_tokenizer(directory)
    if script == "grpo":
        rows, tokens = args.prompts * args.group // minibatches, args.tokens or (40 if args.model == "tiny" else 512)
        wanted = max(1, rows * tokens // budget)
        micro_batches = next(n for n in range(min(wanted, rows), rows + 1) if rows % n == 0)  # all of one size

        def reward(completions, answer, **_):
            said = [common.extract_answer(completion, closed_only=True) for completion in completions]  # as ours has it
            return list(map(float, map(common.is_equivalent, said, answer)))
        kind, extra, data = library.GRPOTrainer, {"reward_funcs": reward}, common.arithmetic_rows(2, "train")
        config = library.GRPOConfig(**trl_arguments(
            args, per_device_train_batch_size=rows // micro_batches,
            gradient_accumulation_steps=micro_batches, steps_per_generation=minibatches * micro_batches,
            num_iterations=updates, num_generations=args.group, temperature=1.0, loss_type="grpo",
            beta=kl, use_bias_correction_kl=False,  # k3 as in DeepSeekMath, not multiplied by the ratio
            max_completion_length=tokens))
    elif script == "ppo":  # the data are prompts; reward model, critic and reference are those of ppo.py
        from trl.experimental.ppo import PPOConfig, PPOTrainer
        kind, data = PPOTrainer, [{"input_ids": tokenizer(row["prompt"])["input_ids"]}
                                  for row in common.arithmetic_rows(2, "train")]
        config = PPOConfig(**trl_arguments(
            args, per_device_train_batch_size=256, num_mini_batches=1, num_ppo_epochs=4,
            total_episodes=10 ** 6, local_rollout_forward_batch_size=256, num_sample_generations=0, temperature=1.0,
            response_length=40, stop_token="eos"))
        classifier, names = transformers.AutoModelForSequenceClassification, ("value_model", "reward_model")
        scorer = reward_model_directory(directory)
        extra = {name: classifier.from_pretrained(scorer, dtype=torch.float32) for name in names}
        extra |= {"ref_model": transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
                  "eval_dataset": Dataset.from_list(data)}
    else:
        data, extra = [json.loads(line) for line in open(pairs_file(args.tokens))], {}
        fit = budget // (2 * (args.tokens or 44))  # pairs in a micro-batch; an addition takes up to 44 tokens
        rows = max(n for n in (1, 2, 4, 8, 16, 32, 64) if n <= max(1, fit))
        kind = {"dpo": library.DPOTrainer, "reward_model": library.RewardTrainer}[script]
        config = {"dpo": library.DPOConfig, "reward_model": library.RewardConfig}[script](
            **trl_arguments(args, per_device_train_batch_size=rows,
                            gradient_accumulation_steps=64 // rows, max_length=None, **more))
    cls = transformers.AutoModelForSequenceClassification if script == "reward_model" else \
        transformers.AutoModelForCausalLM
    head = {"num_labels": 1} if script == "reward_model" else {}
    model = cls.from_pretrained(directory, dtype=torch.float32, **head)
    trainer = kind(model=model, args=config, train_dataset=Dataset.from_list(data), processing_class=tokenizer,
                   callbacks=[Ticks()], **extra)
    with contextlib.suppress(Enough):
        trainer.train()
    return clock.result() if tick is None else {}


def race(args, who: str, seconds: float = 20.0, samples: int = 4) -> dict:
    """Sampled accuracy on held-out problems after training by GRPO without KL for so many seconds."""
    clock, kept = Clock(args.device, 0, 10 ** 9, seconds), []
    if who == "ours":
        start = common.Run.start
        common.Run.start = lambda run, data, **trained: (kept.append(trained["policy"][0]), start(run, data, **trained))
        run_script("grpo", script_flags(args) + ["--kl_coef", "0"], clock.tick)
    else:
        trl(args, "grpo", tick=lambda model: (kept.append(model), clock.tick()))
    tokenizer = common.load_tokenizer(model_directory(args.model))
    rows = common.arithmetic_rows(2, "eval")
    torch.manual_seed(0)
    drawn = common.sample(kept[-1], tokenizer, [row["prompt"] for row in rows], samples, 40)
    right = [common.is_equivalent(common.extract_answer(text, closed_only=True), rows[i // samples]["answer"])
             for i, text in enumerate(drawn.completions)]
    return {"sampled_accuracy": sum(right) / len(right), "steps": len(clock.times) - 1}


# ------------------------------------------------------------------------------------------------------------ table

def measure(args, case: str, **settings) -> dict:
    """Run one case in its own process."""
    print(f"  {case} {settings}", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--case", json.dumps([case, settings, vars(args)])]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    sys.stderr.writelines(line + "\n" for line in done.stderr.splitlines() if "UserWarning" in line)
    if done.returncode:
        print(done.stderr[-1500:], file=sys.stderr)
        return {"failed": (done.stderr.strip().splitlines() or ["?"])[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def medians(results) -> dict:
    """The median of each figure over several measurements, or the first one that failed."""
    failed = [result for result in results if "failed" in result]
    return failed[0] if failed else {key: statistics.median(result[key] for result in results) for key in results[0]}


def show(name: str, result: dict) -> None:
    cells = [f"{key} {value:,.3g}" if isinstance(value, float) and abs(value) < 999.5 else
             f"{key} {value:,.0f}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()]
    print(f"{name:34s} " + "  ".join(cells), flush=True)


def against_trl(args, scripts: list[str]):
    """Yield (name, result) for each comparison: our figures, TRL's as trl_…, and the ratios of ours to TRL's."""
    grpo = {"": ([], {}), ", 4 minibatches": (["--minibatches", "4"], {"minibatches": 4}),
            ", μ = 2": (["--updates_per_batch", "2"], {"updates": 2}), ", KL": (["--kl_coef", "0.04"], {"kl": 0.04})}
    pairs = [("grpo", name, [*("--kl_coef 0".split() if name != ", KL" else []), *flags], settings)
             for name, (flags, settings) in grpo.items()]
    own = ["--pairs_per_step", "64", "--data", str(pairs_file(args.tokens))]
    pairs += [("dpo", "", own, {}), ("dpo", ", reference precomputed", own, {"precompute_ref_log_probs": True}),
              ("reward_model", "", [*own, "--center_coef", "0"], {})]
    if "ppo" in scripts and args.model == "tiny" and importlib.util.find_spec("trl.experimental.ppo"):
        pairs.append(("ppo", "", ["--reward", reward_model_directory(model_directory(args.model))], {}))
    for script, name, flags, settings in pairs:
        if script not in scripts:
            continue
        rounds = [(measure(args, "ours", script=script, flags=flags), measure(args, "trl", script=script, **settings))
                  for _ in range(args.rounds)]  # in turn, so that a slow minute slows both
        mine, other = (medians(side) for side in zip(*rounds))
        result = {**mine, **{f"trl_{key}": value for key, value in other.items()}}
        if "seconds" in mine and "seconds" in other:
            result["time_ratio"] = mine["seconds"] / other["seconds"]
            result["memory_ratio"] = mine["peak_mb"] / other["peak_mb"]
        yield f"{script}{name}", result


COMPARED = {"trl", "race", "grpo", "dpo", "reward_model", "ppo"}  # the cases that need TRL


def main() -> None:
    parser = argparse.ArgumentParser(usage="bench.py [flags]; see --help", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="tiny", choices=[name for name in SHAPES if name != "logprobs"])
    parser.add_argument("--only", default="",
                        help="rollout,logprobs,step,memory; if TRL is there: trl (or grpo,dpo,reward_model,ppo),race")
    parser.add_argument("--against", choices=["trl"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats (steps of tiny: at least 10, of others "
                        "3; log-probs of 151,936 on a CPU: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs, ours and then TRL's")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=0,
                        help="new tokens per row (default: 40 for tiny, else 512); in pairs, at most so many an answer")
    parser.add_argument("--micro_batch_tokens", type=int, default=0)
    parser.add_argument("--flags", default="", help="further flags of grpo.py, for the case step")
    parser.add_argument("--out", default="")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ("threads", "repeats", "rounds", "prompts", "group"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: want at least 1")
    if min(args.tokens, args.micro_batch_tokens) < 0:
        parser.error("--tokens, --micro_batch_tokens: want 0 (the default) or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU")
    if args.out and not Path(args.out).absolute().parent.is_dir():
        parser.error(f"--out {args.out}: no such directory")
    if (args.against or COMPARED & set(args.only.split(","))) and not importlib.util.find_spec("trl"):
        parser.error("the comparison with TRL needs pip install trl==1.16.0 datasets")
    if args.device == "cpu" and not args.case:  # the process of a case inherits this, but is not given --device
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise the scripts would use a GPU
    if args.case:
        case, settings, arguments = json.loads(args.case)
        torch.set_num_threads(arguments["threads"])
        transformers.logging.set_verbosity_error()
        print(json.dumps(globals()[case](argparse.Namespace(**arguments), **settings)))
        return
    everything = ["rollout", "logprobs", "step"] + (["trl", "race"] if args.against else [])
    wanted = args.only.split(",") if args.only else everything
    if unknown := set(wanted) - {"rollout", "logprobs", "step", "memory", *COMPARED}:
        known = ", ".join(["rollout, logprobs, step, memory", *sorted(COMPARED)])
        parser.error(f"--only {min(unknown)!r}: want some of {known}")
    if "ppo" in wanted and not (args.model == "tiny" and importlib.util.find_spec("trl.experimental.ppo")):
        parser.error("--only ppo: wants --model tiny and TRL 1.12, in an environment of its own")
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"{cpu_name()}, {args.threads} threads"
    results = {"machine": machine, "model": args.model, "torch": torch.__version__,
               "transformers": transformers.__version__, "arguments": vars(args)}
    print(f"{machine}; {args.model}; torch {torch.__version__}, transformers {transformers.__version__}")

    def add(name, result):
        results[name] = result
        show(name, result)
    if "rollout" in wanted:
        for lengths in ("fixed", "ragged"):
            add(f"rollout, {lengths}", measure(args, "rollout", lengths=lengths))
    if "logprobs" in wanted:
        for vocab in (6_400, 151_936):
            for path in ("ours", "all logits") + (("trl",) if args.against else ()):
                add(f"logprobs, {vocab:,}, {path}", measure(args, "logprobs", path=path, vocab=vocab))
            add(f"logprobs, {vocab:,}, difference", measure(args, "logprobs_difference", vocab=vocab))
    if "step" in wanted:
        flags = ["--kl_coef", "0.04"]
        if args.model == "qwen-7b":  # with KL it takes 150 GB, by `memory`: more than an H200 has
            flags = ["--kl_coef", "0", "--gradient_checkpointing"]
        add("step", measure(args, "step", flags=[*flags, *args.flags.split()]))
    scripts = ["grpo", "dpo", "reward_model", "ppo"]
    if chosen := scripts if "trl" in wanted else [script for script in scripts if script in wanted]:
        for name, result in against_trl(args, chosen):
            add(name, result)
    if "memory" in wanted:
        add("memory", measure(args, "memory"))
    if "race" in wanted:
        for who in ("ours", "trl"):
            add(f"20 s of GRPO, {who}", measure(args, "race", who=who))
    line = json.dumps(results, ensure_ascii=False)
    print(line)
    if args.out:
        Path(args.out).write_text(line + "\n")
    sys.exit(any({"failed", "trl_failed"} & result.keys() for result in results.values() if isinstance(result, dict)))


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


if __name__ == "__main__":
    import torch
    import transformers
    import common
    main()
