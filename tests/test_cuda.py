"""The CUDA code paths. They need a GPU: `TEST_CUDA=1 python -m pytest -q tests/test_cuda.py`.

Otherwise they are skipped: conftest.py hides the GPUs, since the other tests expect a CPU's numbers.
"""
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import common
from helpers import few_pairs, on_few_problems, random_model, run_script

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(not GPUS, reason="want TEST_CUDA=1 and a GPU")
PROMPTS = ["1+2=?", "45+67=?", "8+99=?"]


def read_metrics(run) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.filterwarnings("error::UserWarning:common")  # a fallback: no CUDA graph, or all logits at once
@pytest.mark.parametrize("script, flags", [
    ("grpo.py", ["--minibatches", 2, "--eval_samples", 4]), ("dapo.py", ["--overlong_filtering"]),
    ("dr_grpo.py", ["--gradient_checkpointing", "--freeze_layers", 0.4]), ("ppo.py", []), ("dpo.py", []),
    ("dpo.py", ["--on_policy"]), ("reward_model.py", [])])
def test_a_run_trains_saves_and_resumes(script, flags, tmp_path, monkeypatch):
    if "--gradient_checkpointing" in flags:  # and as a large model, with an FSDP module for each layer
        monkeypatch.setattr(common, "is_small", lambda *_: False)
    pairs = script == "reward_model.py" or script == "dpo.py" and not flags
    data = ["--data", few_pairs(tmp_path), "--pairs_per_step", 6] if pairs else on_few_problems(tmp_path)
    for more in (["--steps", 2], ["--steps", 4, "--resume"]):
        run_script(script, *data, *flags, "--output_dir", tmp_path / "run", *more)
    metrics = read_metrics(tmp_path / "run")
    assert [step["step"] for step in metrics] == [0, 1, 2, 3, 4]
    assert all(math.isfinite(value) for step in metrics for value in step.values()) and metrics[1]["grad_norm"] > 0
    assert all(step.get("sampler_gap", 0) < 0.05 for step in metrics)  # bfloat16 rounds, kernel by kernel
    cls = AutoModelForSequenceClassification if script == "reward_model.py" else AutoModelForCausalLM
    trained = cls.from_pretrained(tmp_path / "run" / "model")
    assert all(parameter.isfinite().all() for parameter in trained.parameters())


def load_on_gpu(architecture, folder):
    """(the model on the CPU in float32, the same model as a script loads it on a GPU, its tokenizer)."""
    model, tokenizer = random_model(architecture)
    model.save_pretrained(folder)
    on_gpu = common.load_model(str(folder), common.setup_device())
    model.set_attn_implementation(on_gpu.config._attn_implementation)  # Gemma 2: with its soft cap
    return model, on_gpu, tokenizer


@pytest.mark.filterwarnings("error::UserWarning:common")
@pytest.mark.parametrize("architecture", ["Qwen2", "Llama", "Gemma2", "GPT2", "Mistral"])
def test_logprobs_and_gradients_are_those_of_a_cpu(architecture, tmp_path, monkeypatch):
    """Up to bfloat16 rounding, though here prefixes are shared, and the vocabulary is read in slices."""
    monkeypatch.setitem(common.SHARED_TOKENS, "cuda", 1)
    monkeypatch.setitem(common.HEAD_SLICE, "cuda", 512)
    model, on_gpu, tokenizer = load_on_gpu(architecture, tmp_path)
    rollout = common.sample(on_gpu, tokenizer, PROMPTS, 4, 12)
    assert rollout.input_ids.is_cuda
    results = []  # for each device: log-probs, entropy, gradient
    for m, device in ((model, "cpu"), (on_gpu, "cuda")):
        logprobs, entropy = common.token_logprobs(m, rollout.input_ids.to(device), rollout.attention_mask.to(device),
                                                  rollout.mask.shape[1], 1.3)
        (logprobs.sum() + entropy.sum()).backward()
        gradient = m.get_input_embeddings().weight.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        results.append([x.detach().float().cpu() for x in (logprobs, entropy, gradient)])
    for expected, ours, tolerance in zip(*results, (0.02, 0.02, 0.3)):
        assert (ours - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("architecture", ["Qwen2", "Llama", "GPT2", "Mistral"])
def test_captured_steps_sample_what_plain_ones_do(architecture, monkeypatch):
    monkeypatch.setattr(common, "LEAST_COLUMNS", 64)  # lower limits, because these rows are short and few
    monkeypatch.setattr(common, "LEAST_ROWS", 4)
    model, tokenizer = random_model(architecture)
    model.cuda()  # float32: bfloat16 kernels round differently for each shape, and many rows would diverge
    captured, capture_step = [], common.capture_step
    monkeypatch.setattr(common, "capture_step", lambda *args: captured.append(capture_step(*args)) or captured[-1])

    def draw(temperature):
        torch.manual_seed(5)
        return common.sample(model, tokenizer, PROMPTS, 16, 90, temperature).completions
    with_graphs = [draw(temperature) for temperature in (0, 1.3)]
    assert len(captured) > 2 and all(step is not None for step in captured)
    assert len({len(step.ids) for step in captured}) > 1 and len({step.width for step in captured}) > 1
    model.no_graph = True
    for texts, expected in zip(with_graphs, (draw(temperature) for temperature in (0, 1.3))):
        assert sum(map(str.__eq__, texts, expected)) > 0.9 * len(texts)  # a row may diverge at a near tie


@pytest.mark.skipif(GPUS < 2, reason="want two GPUs")
@pytest.mark.parametrize("script, flags", [
    ("grpo.py", []), ("dr_grpo.py", ["--gradient_checkpointing", "--freeze_layers", 0.4]), ("ppo.py", []),
    ("dpo.py", ["--on_policy"]), ("reward_model.py", [])])
def test_two_gpus_begin_as_one_does_and_resume_on_two_or_one(script, flags, tmp_path):
    """Evaluation before training, and reward, loss and gradient of the first step, agree up to bfloat16 rounding."""
    for name, processes, steps, *resume in (("one", 0, 2), ("two", 2, 2), ("two", 2, 3, "--resume"),
                                            ("two", 0, 4, "--resume")):
        run_script(script, *flags, "--steps", steps, *resume, "--output_dir", tmp_path / name, processes=processes)
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert [step["step"] for step in two] == [0, 1, 2, 3, 4]
    for step, key, tolerance in ((0, "eval_accuracy", 0.06), (0, "eval_pair_accuracy", 0.06), (1, "reward", 0.1),
                                 (1, "loss", 0.1), (1, "grad_norm", 0.3 * one[1]["grad_norm"])):
        assert two[step].get(key) == pytest.approx(one[step].get(key), abs=tolerance)
    assert all(math.isfinite(value) for step in two for value in step.values())
