"""Small random models of many architectures, and a way to run a script as a user does."""
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import transformers

import common

ROOT = Path(__file__).parent.parent
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256)


def random_model(architecture: str, seed: int = 0, **changes):
    """A two-layer model of random weights with the tiny model's vocabulary: Qwen2, Llama, Gemma2, GPT2, Mistral, …"""
    tokenizer = common.tiny_tokenizer()
    sizes = dict(SIZES)
    if architecture == "GPT2":
        sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=256)
    if architecture == "Gemma2":
        sizes["head_dim"] = 8
    if architecture == "GPTNeoX":
        sizes.pop("num_key_value_heads")
    if architecture == "GPTNeo":
        sizes = dict(hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]])
    if architecture == "Lfm2":
        sizes["layer_types"] = ["conv", "full_attention"]
    if architecture == "Qwen3_5Text":
        sizes.update(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, head_dim=8,
                     linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
    if architecture == "Mamba":
        sizes = dict(hidden_size=32, num_hidden_layers=2, time_step_rank=2)
    if architecture == "Gemma4Text":
        sizes.update(head_dim=8, global_head_dim=16, layer_types=["sliding_attention", "full_attention"],
                     hidden_size_per_layer_input=8, vocab_size_per_layer_input=len(tokenizer))
    if architecture == "RecurrentGemma":
        sizes.update(num_key_value_heads=1, block_types=("recurrent", "attention"))
    config_class = getattr(transformers, architecture + "Config")
    config = config_class(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
                          eos_token_id=tokenizer.eos_token_id, **{**sizes, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # larger than the usual initialisation, so that greedy choices are not ties
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    return model.eval(), tokenizer


def run_script(script: str, *flags, processes: int = 0, timeout: float = 240) -> subprocess.CompletedProcess:
    """`python SCRIPT flags`, its output captured: in this process, or with `processes` under torchrun."""
    command = [str(ROOT / script), *map(str, flags)]
    if processes:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        return subprocess.run(launcher + command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    module, argv, code, errors = importlib.import_module(script.removesuffix(".py")), sys.argv, 0, io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    sys.argv = command
    try:
        with contextlib.redirect_stderr(errors):
            common.launch(module.main, module.Config)
    except SystemExit as stopped:
        code = stopped.code
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(command, code, "", errors.getvalue())


def fork_script(errors, script: str, *flags):
    """A process that runs `python SCRIPT flags`, its stderr in the file `errors`. It is forked off one that has
    imported torch and transformers already, which saves four seconds each time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["common"])
    process = context.Process(target=run_forked, args=(str(errors), script, *map(str, flags)))
    process.start()
    return process


def run_forked(errors, script, *flags):
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = [script, *flags]
    module = importlib.import_module(script.removesuffix(".py"))
    common.launch(module.main, module.Config)


def read_metrics(directory) -> list[dict]:
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
