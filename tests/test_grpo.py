"""GRPO: its equations on hand-worked numbers, its gradient against the definition, invariances, and whole runs."""
import json
import math
import re
import sys
import textwrap
import types

import pytest
import torch

import common
import grpo
from helpers import (ROOT, assert_metrics, assert_same_gradient, assert_same_weights, begin_with, beside, ended_well,
                     fork, is_right, launch_script, load_tiny_model, plain_entropies, plain_finished, plain_logprobs,
                     plain_update, random_model, read_metrics, record_run, run_script)


# ---------------------------------------------------------------------------------------------------- advantages

def test_advantages_by_hand():
    """Rewards 1 0 0 0: mean .25, squared deviations .75² + 3·.25² = .75, sample variance .75 / 3 = .25, std .5."""
    advantages = grpo.group_advantages(torch.tensor([[1.0, 0, 0, 0]]))
    torch.testing.assert_close(advantages[0], torch.tensor([1.5, -0.5, -0.5, -0.5]), rtol=1e-5, atol=1e-5)
    # 3.8, 5.2, 6.1: mean 5.0333, deviations −1.2333, .1667, 1.0667, sample variance 1.3433, std 1.1590
    torch.testing.assert_close(grpo.group_advantages(torch.tensor([[3.8, 5.2, 6.1]]))[0],
                               torch.tensor([-1.0641, 0.1438, 0.9203]), rtol=1e-3, atol=1e-3)
    # Deviations ±4, std √32: ∓1/√2. float32 would round the mean of such large rewards, but not that of differences.
    torch.testing.assert_close(grpo.group_advantages(torch.tensor([[1e8, 1e8 + 8]])),
                               torch.tensor([[-1.0, 1]]) / 2 ** .5)


def test_each_group_is_its_own_scale():
    """Other groups do not matter, and neither does adding a constant to all rewards or scaling them."""
    rewards = torch.rand(5, 8)
    expected = torch.stack([grpo.group_advantages(row[None])[0] for row in rewards])
    torch.testing.assert_close(grpo.group_advantages(rewards), expected)
    torch.testing.assert_close(grpo.group_advantages(rewards * 7 - 3), expected, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ weights and loss

def test_weights_are_a_mean_over_tokens_then_over_completions():
    """Three completions of 1, 2 and 0 tokens: 1/3 for the first's token, 1/6 for each of the second's; no NaN."""
    mask = torch.tensor([[1, 0], [1, 1], [0, 0]]).bool()
    torch.testing.assert_close(grpo.token_weights(mask, 3), torch.tensor([[1 / 3, 0], [1 / 6, 1 / 6], [0, 0]]))


@pytest.mark.parametrize("ref_logprob, value, slope", [
    (math.log(0.25), 0.5 + math.log(2) - 1, 0.5),
    (math.log(0.5) - 50, 49.0, 1.0)])  # e⁻⁵⁰ + 50 − 1 = 49; however far the reference is, the slope 1 − e⁻⁵⁰ stays
def test_k3_by_hand_and_its_direction(ref_logprob, value, slope):
    """π = .5, π_ref = .25: .25/.5 − ln(.25/.5) − 1 = .5 + .6931 − 1 = .1931. Derivative in log π: 1 − π_ref/π = .5."""
    logprobs = torch.tensor([[math.log(0.5)]], requires_grad=True)
    loss, stats = grpo.grpo_loss(logprobs, logprobs.detach(), torch.tensor([[ref_logprob]]), torch.zeros(1),
                                 torch.ones(1, 1), 0.2, kl_coef=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(value) and stats["kl"].item() == pytest.approx(value)
    assert logprobs.grad.item() == pytest.approx(slope)


def test_k3_estimates_the_kl_from_the_policy_to_the_reference():
    """Summed over a vocabulary of five: Σ π (π_ref/π − ln(π_ref/π) − 1) = Σ π ln(π/π_ref) = KL(π‖π_ref), exactly."""
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 1, 5).log_softmax(-1)
    loss, _ = grpo.grpo_loss(policy, policy, reference, torch.zeros(1), policy.exp(), 0.2, kl_coef=1.0)
    assert loss.item() == pytest.approx((policy.exp() * (policy - reference)).sum().item(), rel=1e-5)


def test_on_policy_the_gradient_is_the_policy_gradient():
    """At ρ = 1 and without KL: the loss is −Σ w Â, its gradient −Σ w Â ∇log π, and the clip fraction is 0."""
    torch.manual_seed(0)
    logprobs = torch.randn(4, 6, requires_grad=True)
    mask = torch.arange(6) < torch.tensor([6, 3, 1, 0])[:, None]
    weights, advantages = grpo.token_weights(mask, 4), torch.randn(4)
    loss, stats = grpo.grpo_loss(logprobs, logprobs.detach(), None, advantages, weights, 0.2, 0.0)
    loss.backward()
    torch.testing.assert_close(loss, -(weights * advantages[:, None]).sum())
    torch.testing.assert_close(logprobs.grad, -weights * advantages[:, None])
    assert stats["clip_fraction"] == 0


def test_the_logged_kl_is_a_mean_over_tokens_without_padding():
    """π_ref/π = 2 at the only token: 2 − ln 2 − 1 = .3069."""
    logprobs, ref_logprobs = torch.zeros(1, 2), torch.full((1, 2), math.log(2))
    _, stats = grpo.grpo_loss(logprobs, logprobs, ref_logprobs, torch.zeros(1), torch.tensor([[1.0, 0.0]]), 0.2, 0.04)
    assert stats["kl"].item() == pytest.approx(1 - math.log(2))


@pytest.mark.parametrize("max_tokens", [1, 60, 200, 100_000])
def test_any_micro_batch_size_gives_the_same_gradient(max_tokens):
    """Compared with the definition: each completion on its own, a mean over its tokens, then over completions."""
    model, tokenizer = random_model("Qwen2")
    torch.manual_seed(0)
    rollout = common.sample(model, tokenizer, ["1+1=?", "12+34=?"], 6, 20)
    advantages, T = torch.randn(12), rollout.mask.shape[1]
    ref_logprobs = torch.randn(12, T) - 3
    weights = grpo.token_weights(rollout.mask, 12)

    def in_micro_batches():
        for rows, input_ids, attention_mask, T in common.micro_batches(rollout, list(range(12)), max_tokens):
            logprobs, _ = common.token_logprobs(model, input_ids, attention_mask, T)
            grpo.grpo_loss(logprobs, logprobs.detach(), ref_logprobs[rows, :T], advantages[rows], weights[rows, :T],
                           0.2, 0.04)[0].backward()

    def by_definition():
        for i in range(12):
            logprobs = plain_logprobs(model, rollout, i)
            log_ref = ref_logprobs[i, :len(logprobs)] - logprobs
            objective = (logprobs - logprobs.detach()).exp() * advantages[i] - 0.04 * (log_ref.exp() - log_ref - 1)
            (-objective.mean() / 12).backward()

    assert_same_gradient([model], in_micro_batches, by_definition)


# ---------------------------------------------------------------------------------------------------- whole runs

@pytest.mark.parametrize("divide, beta, longest", [(True, 0.1, 21), (False, 0.0, 25)])  # 21 tokens truncate some
def test_every_update_is_that_of_the_plain_algorithm(divide, beta, longest, tmp_path, monkeypatch):
    """Algorithm 1 of DeepSeekMath, written out one completion at a time.

    Two steps, each with P = 4 prompts of G = 4 completions, minibatches of 6, 5 and 5 and two passes (μ = 2). ε = .05.
    """
    if not beta:
        monkeypatch.setattr(common, "load_reference", None)  # without KL, loading a reference would be an error
    steps = record_run(
        monkeypatch, "grpo.py", tmp_path / "run", "--steps", 2, "--prompts_per_step", 4, "--group_size", 4,
        "--minibatches", 3, "--updates_per_batch", 2, "--max_new_tokens", longest, "--temperature", 0.8,
        "--format_reward", 0.25, "--clip_eps", 0.05, "--kl_coef", beta, "--lr", 2e-4, "--warmup_steps", 2,
        "--max_grad_norm", 0.5, "--micro_batch_tokens", 80, *["--no_divide_by_std"] * (not divide))
    policy, reference = load_tiny_model(), load_tiny_model()
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    rates = iter([0, 1e-4] + [2e-4] * 10)  # twelve updates, of which two are warm-up
    for step in steps:
        begin_with(step, 0, (policy, optimizer))
        [rollout], [order] = step.rollouts, step.orders
        right = torch.tensor([float(is_right(rollout, i)) for i in range(16)])
        well_formed = torch.tensor([float(bool(re.fullmatch(
            "<think>[^<]*</think><answer>[^<]*</answer>", text))) for text in rollout.completions])
        rewards = right + 0.25 * well_formed
        groups = rewards.view(4, 4)  # one row per prompt
        advantages = groups - groups.mean(1, keepdim=True)
        if divide:
            advantages = advantages / (groups.std(1, keepdim=True) + 1e-6)  # section 4.1.2, sample std
        advantages = advantages.flatten()
        with torch.no_grad():  # log π_old and log π_ref of every token
            old = [plain_logprobs(policy, rollout, i, 0.8) for i in range(16)]
            ref = [plain_logprobs(reference, rollout, i, 0.8) for i in range(16)]
        updates, clipped, kl, entropies = [], [], [], []
        for update, minibatch in enumerate(order.tensor_split(3) * 2):
            begin_with(step, update, (policy, optimizer))
            loss = 0
            for i in minibatch.tolist():
                logprobs = plain_logprobs(policy, rollout, i, 0.8)
                ratio = (logprobs - old[i]).exp()
                unclipped, bounded = ratio * advantages[i], ratio.clamp(0.95, 1.05) * advantages[i]
                ref_ratio = (ref[i] - logprobs).exp()  # π_ref/π
                k3 = ref_ratio - ref_ratio.log() - 1  # eq. 4
                objective = (torch.min(unclipped, bounded) - beta * k3).mean()  # eq. 3: 1/|o_i| Σ_t
                loss = loss - objective / len(minibatch)
                clipped.append(bounded < unclipped)
                kl.append(k3.detach())
                entropies.append(plain_entropies(policy, rollout, i, 0.8).detach())
            updates.append(plain_update(optimizer, loss, next(rates), 0.5))
        assert step.updates == [pytest.approx(update, rel=2e-3, abs=1e-5) for update in updates]
        assert_metrics(step, updates, {
            "reward": rewards.mean(), "accuracy": right.mean(), "clip_fraction": torch.cat(clipped).float().mean(),
            "completion_length": rollout.lengths.float().mean(),
            "wrong_length": rollout.lengths[right == 0].float().mean(),
            "truncated_fraction": (~plain_finished(rollout)).float().mean(), "entropy": torch.cat(entropies).mean(),
            **({"kl": torch.cat(kl).mean()} if beta else {})})
        assert ("kl" in step.metrics) == (beta > 0)
    assert_same_weights(tmp_path / "run", policy)
    assert any(step.metrics["clip_fraction"] > 0 for step in steps)  # ε was small enough to clip


def run_six_steps(folder, _):
    output = folder / "output"
    ended_well(fork(output, launch_script, "grpo.py", "--steps", 6, "--eval_every", 3, "--eval_samples", 2,
                    "--save_every", 5, "--output_dir", folder / "run", COLUMNS="200"), output)
    return folder / "run", output.read_text()


@beside(run_six_steps)
def test_a_whole_run_learns_and_its_model_loads(job):
    """Six steps: the first is on-policy, accuracy rises, and the log, samples and model are written."""
    out, said = job
    metrics = read_metrics(out)
    assert [m["step"] for m in metrics] == list(range(7))
    first = metrics[1]
    assert first["kl"] == first["clip_fraction"] == first["approx_kl"] == 0 and abs(first["loss"]) < 1e-6
    assert first["rollout_seconds"] > 0 < first["reward_seconds"]
    assert first["rollout_seconds"] + first["reward_seconds"] < first["seconds"]
    assert first["lr"] == 1e-4
    assert {"reward", "accuracy", "entropy", "grad_norm", "completion_length", "truncated_fraction", "seconds",
            "tokens_per_second", "peak_memory_mb"} <= first.keys()
    assert {"eval_accuracy", "eval_avg@2", "eval_pass@2"} <= metrics[0].keys() & metrics[3].keys() & metrics[6].keys()
    assert metrics[0]["eval_accuracy"] <= 0.65 and metrics[6]["eval_accuracy"] >= metrics[0]["eval_accuracy"] + 0.2
    assert f"step 0: eval_accuracy {metrics[0]['eval_accuracy']:.3f}" in said and f"saved {out / 'model'}" in said
    last = metrics[6]
    assert (f"reward={last['reward']:.3f}, accuracy={last['accuracy']:.3f}, entropy={last['entropy']:.3f}, "
            f"tokens_per_second={last['tokens_per_second']:.0f}]") in said  # the progress bar
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in samples] == [1] * 8 + [3] * 8 + [6] * 8 and (out / "config.json").exists()

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out / "model"), AutoTokenizer.from_pretrained(out / "model")
    rollout = common.sample(model, tokenizer, ["12+34=?"], 1, 40, greedy=True)
    assert rollout.completions[0].startswith("<think>") and rollout.finished.all()


def test_another_sampler_may_take_the_place_of_sample(tmp_path, monkeypatch):
    """Here transformers' `generate`. `sampler_gap` shows that its log-probs are those of the policy."""
    def generate(policy, tokenizer, prompts, group_size, max_new_tokens, temperature):
        rows = [prompt for prompt in prompts for _ in range(group_size)]
        batch = common.collate(rows, [[]] * len(rows), tokenizer.pad_token_id)
        out = policy.generate(input_ids=batch.input_ids, attention_mask=batch.attention_mask, do_sample=True, top_k=0,
                              max_new_tokens=max_new_tokens, temperature=temperature, return_dict_in_generate=True,
                              output_logits=True)
        tokens = out.sequences[:, batch.input_ids.shape[1]:]
        logprobs = (torch.stack(out.logits, 1) / temperature).log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
        is_end = tokens == tokenizer.eos_token_id
        mask = is_end.cumsum(1) - is_end.int() == 0  # up to the first end
        return common.Rollout(
            out.sequences, torch.cat([batch.attention_mask, mask.long()], 1), mask,
            tokenizer.batch_decode(tokens, skip_special_tokens=True), is_end.any(1), logprobs.where(mask, 0))
    monkeypatch.setattr(grpo, "sample", generate)
    run_script("grpo.py", "--steps", 2, "--temperature", 0.9, "--eval_every", 100, "--output_dir", tmp_path / "run")
    first = read_metrics(tmp_path / "run")[1]
    assert 0.2 < first["accuracy"] < 0.8 and first["sampler_gap"] < 1e-5


def test_the_reward_function_of_the_readme(tmp_path):
    """reward.py as printed there: correct + 0.5·(share of sound steps) − 0.3·len/100, for text of any form."""
    code = (ROOT / "README.md").read_text().split("```python\n# reward.py")[1].split("```")[0]
    (tmp_path / "reward.py").write_text("# reward.py" + code)
    judge = common.load_reward_function(f"{tmp_path / 'reward.py'}:composite")
    problem = common.Problem("5+7=?", [], "12", {"answer": "12"})
    for text, correct, sound in (
            ("<think>5+7=12</think><answer>12</answer>", 1, 1),
            ("1+1=2,5+7=13 #### 13", 0, 0.5),    # 5+7=13 is wrong
            ("7++8=15,+=3,8=8,==,1+7+8=16", 0, 1),  # a single step: nothing is added in the others
            ("<answer>5+7</answer>", 0, 0),         # the question again
            ("", 0, 0)):
        reward = pytest.approx(correct + 0.5 * sound - 0.3 * len(text) / 100)
        assert judge(problem, text) == (reward, bool(correct)), text
    run_script("grpo.py", "--steps", 1, "--prompts_per_step", 4, "--group_size", 4, "--output_dir",
               tmp_path / "run", "--reward", f"{tmp_path / 'reward.py'}:composite")
    start, step = read_metrics(tmp_path / "run")
    assert start["eval_accuracy"] < 0.65  # of the pairs: most rewards are above 0
    assert step["reward"] not in (0, 1)   # the run uses this reward, not the verifier's


def test_the_lines_of_the_readme_that_log_the_parts_of_a_reward(tmp_path, monkeypatch):
    lines = (ROOT / "README.md").read_text().split("To log its parts too")[1].split("```python\n")[1].split("```")[0]
    source, below = (ROOT / "grpo.py").read_text(), "\n        # 6. Evaluate and save.\n"
    assert source.count(below) == 1
    module = types.ModuleType("grpo")
    monkeypatch.setitem(sys.modules, "grpo", module)
    exec(source.replace(below, "\n" + textwrap.indent(textwrap.dedent(lines), " " * 8) + below), module.__dict__)

    def parts(row, completion):
        return {"right": float(f"<answer>{row['answer']}</answer>" in completion), "length": len(completion)}
    module.reward = types.SimpleNamespace(parts=parts)
    run_script("grpo.py", "--steps", 1, "--prompts_per_step", 4, "--group_size", 4, "--output_dir", tmp_path / "run")
    step = read_metrics(tmp_path / "run")[1]
    assert step["reward_right"] == step["accuracy"] > 0 and step["reward_length"] > 10
