"""What the scripts have in common: the clip, advantages, weights, finite losses, temperature, log, final evaluation."""
import importlib
import json
import math
import re
import sys

import pytest
import torch

import common
import dapo
import dr_grpo
import grpo
import ppo
import summarize
from helpers import (ROOT, assert_metrics, few_pairs, few_problems, is_right, load_tiny_model, on_few_problems,
                     plain_entropies, plain_finished, read_metrics, record_run, run_script)

GROUP_SCRIPTS = ["grpo", "dapo", "dr_grpo"]
SCRIPTS = [*GROUP_SCRIPTS, "ppo", "dpo", "reward_model"]
LOSSES = {  # of (logprobs, old_logprobs, advantages [N], weights); with KL, the old log-probs are the reference's too
    "grpo": lambda *a: grpo.grpo_loss(*a[:2], None, *a[2:], 0.2, 0.0),
    "grpo with KL": lambda *a: grpo.grpo_loss(*a[:2], a[1], *a[2:], 0.2, 0.04),
    "dapo": lambda *a: dapo.dapo_loss(*a, 0.2, 0.28),
    "dr_grpo": lambda *a: dr_grpo.dr_grpo_loss(*a, 0.2),
    "ppo": lambda *a: ppo.ppo_loss(*a[:2], a[2][:, None], a[3], 0.2)}


def small(script, folder, size: int) -> list:
    """Flags for a run of one step, with `size` prompts or pairs."""
    if script in ("dpo", "reward_model"):
        pairs = few_pairs(folder)
        return ["--steps", 1, "--pairs_per_step", size, "--data", pairs, "--eval_data", pairs]
    return ["--steps", 1, "--prompts_per_step", size, *on_few_problems(folder),
            *["--max_generation_batches", 1] * (script == "dapo")]


@pytest.mark.parametrize("weights, total", [
    (lambda mask: grpo.token_weights(mask, 3), 1), (lambda mask: dr_grpo.token_weights(mask, 3, 4), 6 / 12),
    (lambda mask: dapo.token_weights(mask, 6), 1), (lambda mask: ppo.token_weights(mask, 6), 1)])
def test_the_weights_of_a_part_are_that_part_of_the_weights(weights, total):
    """A rank or micro-batch weights its rows relative to the whole step (here 3 completions, 6 tokens)."""
    mask = torch.arange(4) < torch.tensor([1, 4, 1])[:, None]
    torch.testing.assert_close(torch.cat([weights(mask[:1]), weights(mask[1:])]), weights(mask))
    assert weights(mask).sum() == pytest.approx(total)


@pytest.mark.parametrize("ratio, advantage, value, slope", [
    (1.00, 1.0, 1.00, 1.00),
    (1.10, 1.0, 1.10, 1.10),
    (1.35, 1.0, 1.20, 0.00),     # clipped: counts as 1.2·Â, and is pushed up no further
    (0.50, 1.0, 0.50, 0.50),     # a good token that became rarer is pushed back up
    (0.50, -1.0, -0.80, 0.00),   # clipped: a bad token that became rarer is pushed down no further
    (1.35, -1.0, -1.35, -1.35),  # a bad token that became more likely is pushed back down,
    (5.00, -1.0, -5.00, -5.00),  # however far it went: there is no dual clip
    (1e6, -1.0, -1e6, -1e6)])
@pytest.mark.parametrize("script", ["grpo", "dr_grpo", "ppo"])
def test_the_clipped_surrogate_by_hand(script, ratio, advantage, value, slope):
    """ε = .2: min(ρÂ, clip(ρ, .8, 1.2)Â). Its derivative in log π is ρÂ, or 0 where the clipped term is the smaller.

    approx_kl is ρ − 1 − log ρ: 0 at ratio 1, .35 − .3001 = .0499 at 1.35.
    """
    logprobs = torch.tensor([[math.log(ratio) - 2.0]], requires_grad=True)
    loss, stats = LOSSES[script](logprobs, torch.tensor([[-2.0]]), torch.tensor([advantage]), torch.ones(1, 1))
    loss.backward()
    assert loss.item() == pytest.approx(-value, rel=1e-5)
    assert logprobs.grad.item() == pytest.approx(-slope, rel=1e-5)
    assert stats["clip_fraction"] == (slope == 0)
    assert stats["approx_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("difference", [-5000.0, 5000.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_huge_log_ratios_stay_finite(loss, difference, advantage):
    logprobs = torch.tensor([[difference]], requires_grad=True)
    value, _ = loss(logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1))
    value.backward()
    assert value.isfinite() and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_nothing_under_the_mask_matters(loss, garbage):
    weights = torch.tensor([[0.5, 0.0], [0.0, 0.0]])
    results = []
    for fill in (0.0, garbage):
        logprobs = torch.tensor([[-1.0, fill], [fill, fill]], requires_grad=True)
        old_logprobs = torch.tensor([[-1.1, fill], [fill, fill]])
        value, stats = loss(logprobs, old_logprobs, torch.tensor([2.0, fill]), weights)  # the second has no tokens
        value.backward()
        results.append((value.detach(), logprobs.grad, *stats.values()))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradients_flow_into_the_log_probs_alone(loss):
    logprobs, *others = (torch.randn(*size, requires_grad=True) for size in ((3, 5), (3, 5), (3,)))
    loss(logprobs, *others, torch.rand(3, 5))[0].backward()
    assert logprobs.grad.any() and all(x.grad is None for x in others)


@pytest.mark.parametrize("script", GROUP_SCRIPTS)
@pytest.mark.parametrize("rows", [1, 2])
def test_each_token_may_have_an_advantage_of_its_own(script, rows):
    """As process rewards give. At ratio 1, a token's gradient is −w Â."""
    logprobs, weights = torch.zeros(rows, 3, requires_grad=True), torch.full((rows, 3), 1 / 6)
    advantages = torch.tensor([[1.0, -2.0, 3.0], [4.0, 0.0, -5.0]])[:rows]
    LOSSES[script](logprobs, logprobs.detach(), advantages, weights)[0].backward()
    torch.testing.assert_close(logprobs.grad, -advantages / 6)


@pytest.mark.parametrize("loss, flags", [
    (grpo.grpo_loss, (0.2, 0.1)), (dapo.dapo_loss, (0.2, 0.28)), (dr_grpo.dr_grpo_loss, (0.2,)),
    (ppo.ppo_loss, (0.2,)), (ppo.value_loss, (0.2,))])
def test_weights_may_be_negative(loss, flags):
    """As where a change weighs some tokens against others. Each loss is linear in its weights."""
    logprobs, old, ref, advantages, weights = torch.randn(5, 2, 3)
    tensors = (logprobs, old, ref, advantages) if loss is grpo.grpo_loss else (logprobs, old, advantages)
    torch.testing.assert_close(loss(*tensors, -weights.abs(), *flags)[0], -loss(*tensors, weights.abs(), *flags)[0])
    assert loss(*tensors, weights.abs(), *flags)[0] != 0


@pytest.mark.parametrize("script", GROUP_SCRIPTS)
def test_a_column_of_advantages_is_read_as_one_per_row(script):
    """[N, 1] would otherwise broadcast to [N, N, T], whose advantages sum to 0: nothing would be learned."""
    logprobs, weights = torch.zeros(2, 3, requires_grad=True), torch.full((2, 3), 1 / 6)
    for advantages in (torch.tensor([1.0, -1.0]), torch.tensor([[1.0], [-1.0]])):
        loss, _ = LOSSES[script](logprobs, logprobs.detach(), advantages, weights)
        gradient, = torch.autograd.grad(loss, logprobs)
        torch.testing.assert_close(gradient, torch.tensor([[-1 / 6] * 3, [1 / 6] * 3]))


@pytest.mark.parametrize("script", GROUP_SCRIPTS)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.3333333, 1e6])
def test_equal_rewards_give_exactly_zero(script, reward):
    group_advantages = importlib.import_module(script).group_advantages
    assert (group_advantages(torch.full((3, 7), reward)) == 0).all()
    assert (group_advantages(torch.full((3, 1), reward)) == 0).all()  # a group of one


@pytest.mark.parametrize("script", GROUP_SCRIPTS)
def test_rewards_may_be_verdicts_or_counts(script):
    group_advantages = importlib.import_module(script).group_advantages
    expected = group_advantages(torch.tensor([[1.0, 0, 0, 1], [1, 1, 1, 1]]))
    assert expected[0].any()
    for rewards in (torch.tensor([[True, False, False, True], [True] * 4]), torch.tensor([[1, 0, 0, 1], [1] * 4])):
        torch.testing.assert_close(group_advantages(rewards), expected)


@pytest.mark.parametrize("script", GROUP_SCRIPTS)
def test_equal_rewards_beside_another_group_give_exactly_zero(script):
    """Seven rewards of 0.1, whose mean rounds; so does that of 0.1 − 1, where 1 is the first reward of all."""
    rewards = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0], [0.1] * 7])
    assert (importlib.import_module(script).group_advantages(rewards)[1] == 0).all()


@pytest.mark.parametrize("script", ["grpo", "dapo"])
def test_the_epsilon_beside_the_std_is_added(script):
    """Rewards 0 and 2e-6: mean 1e-6, std √2·1e-6, advantages ∓1e-6 / (√2·1e-6 + 1e-6) = ∓1 / 2.4142 = ∓.41421."""
    advantages = importlib.import_module(script).group_advantages(torch.tensor([[0.0, 2e-6]]))
    torch.testing.assert_close(advantages, torch.tensor([[-0.41421, 0.41421]]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("script", [*GROUP_SCRIPTS, "ppo"])
def test_the_samplers_logprobs_are_compared_and_not_trained_on(script, tmp_path, monkeypatch):
    """A sampler whose log-probs are too high by n/10 in completions of n tokens: `sampler_gap` is Σ n·n/10 / Σ n.

    The old log-probs are the policy's own all the same: in the only update all ratios are 1, and nothing is clipped.
    """
    sample, said = common.sample, []
    monkeypatch.setattr(common, "say", said.append)

    def inexact(*args):
        rollout = sample(*args)
        rollout.logprobs += rollout.lengths[:, None] / 10
        return rollout

    def token_rewards(scores, logprobs, ref_logprobs, *args, original=ppo.token_rewards):
        torch.testing.assert_close(logprobs, ref_logprobs)  # PPO's KL: before the first update there is none
        return original(scores, logprobs, ref_logprobs, *args)
    monkeypatch.setattr(ppo, "token_rewards", token_rewards)
    monkeypatch.setattr(importlib.import_module(script), "sample", inexact)
    [step] = record_run(monkeypatch, f"{script}.py", tmp_path / "run", "--steps", 1, "--prompts_per_step", 8,
                        "--micro_batch_tokens", 200, "--temperature", 1.3,
                        *["--updates_per_batch", 1] * (script == "ppo"),
                        *["--no_dynamic_sampling"] * (script == "dapo"), *["--group_size", 3] * (script != "ppo"))
    n = step.rollouts[0].lengths.float()
    assert step.metrics["sampler_gap"] == pytest.approx((n * n / 10).sum().item() / n.sum().item(), rel=1e-4)
    assert step.metrics["clip_fraction"] == 0
    assert f"sampler_gap is {step.metrics['sampler_gap']:.3f} nats, more than rounding" in str(said)


@pytest.mark.parametrize("script", ["grpo", "dapo", "dr_grpo", "ppo", "dpo --on_policy"])
def test_the_rollout_is_drawn_at_the_temperature_of_the_run(script, tmp_path, monkeypatch):
    """At a temperature near 0, all completions of a prompt are the greedy one."""
    name, *switches = script.split()
    pairs = ["--pairs_per_step", 4] if switches else ["--prompts_per_step", 4]
    [step] = record_run(monkeypatch, f"{name}.py", tmp_path / "run", *switches, "--steps", 1, *pairs,
                        "--temperature", 1e-3, *["--max_generation_batches", 1] * (name == "dapo"))
    [rollout], [problems] = step.rollouts, step.batches
    prompts = [problem.prompt_ids for problem in problems]
    greedy = common.sample(load_tiny_model(), common.tiny_tokenizer(), prompts, 1, 40, greedy=True)
    size = len(rollout.completions) // 4
    assert rollout.completions == [text for text in greedy.completions for _ in range(size)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_seed_orders_the_data(script, tmp_path, monkeypatch):
    """Runs of one seed draw the same rows, runs of two seeds other ones."""
    data = few_pairs(tmp_path) if script in ("dpo", "reward_model") else few_problems(tmp_path)
    drawn = []

    def start(run, data, **trained):  # instead of a run
        drawn.append([item.prompt for item in data.next(10)])
        raise common.UserError("enough")

    monkeypatch.setattr(common.Run, "start", start)
    for seed in (1, 2, 1):
        run_script(f"{script}.py", "--seed", seed, "--data", data, "--output_dir", tmp_path / "run", code=2)
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_log_is_the_same_for_any_micro_batch_and_ends_with_an_evaluation(script, tmp_path):
    """Logged means are over the step's tokens or pairs, not over micro-batches, which are of unequal size.

    The last step is evaluated although it is no multiple of --eval_every.
    """
    flags = [*small(script, tmp_path, 5), "--eval_every", 5]
    if script == "dpo":
        # Otherwise all margins of the first step are 0 up to rounding, and accuracy depends on their signs.
        flags += ["--reference_free"]
    if script not in ("dpo", "reward_model"):
        flags += ["--minibatches", 2, "--temperature", 1.3, "--lr", 1e-3,
                  *["--no_dynamic_sampling"] * (script == "dapo"), *["--group_size", 3] * (script != "ppo")]
    lines = []
    for tokens in (70, 4096):
        run_script(f"{script}.py", *flags, "--micro_batch_tokens", tokens, "--output_dir", tmp_path / str(tokens))
        lines.append({name: value for name, value in read_metrics(tmp_path / str(tokens))[1].items()
                      if not name.endswith("seconds") and name not in ("tokens_per_second", "peak_memory_mb")})
    assert lines[0] == pytest.approx(lines[1], rel=1e-3, abs=1e-5)
    assert ("eval_pair_accuracy" if script in ("dpo", "reward_model") else "eval_accuracy") in lines[0]


@pytest.mark.parametrize("script", GROUP_SCRIPTS)
def test_what_the_log_and_the_samples_say_of_completions(script, tmp_path, monkeypatch):
    """Metrics are over all sampled completions, and `accuracy` is not the share of positive rewards.

    The two differ because of the format reward and the overlong penalty. samples.jsonl holds two completions of a
    prompt, here the whole group, so the advantages must follow from the rewards beside them.
    """
    [step] = record_run(monkeypatch, f"{script}.py", tmp_path / "run", "--steps", 1, "--prompts_per_step", 12,
                        "--group_size", 2, "--max_new_tokens", 22, "--format_reward", 1.5,
                        "--micro_batch_tokens", 200, *["--no_dynamic_sampling"] * (script == "dapo"))
    [rollout], policy = step.rollouts, load_tiny_model()
    right = torch.tensor([is_right(rollout, i) for i in range(24)])
    with torch.no_grad():
        entropies = torch.cat([plain_entropies(policy, rollout, i) for i in range(24)])
    assert_metrics(step, step.updates, {
        "accuracy": right.float().mean(), "completion_length": rollout.lengths.float().mean(),
        "wrong_length": rollout.lengths[~right].float().mean(), "entropy": entropies.mean(),
        "truncated_fraction": (~plain_finished(rollout)).float().mean(),
        **({"kept_fraction": (right.view(12, 2).sum(1) == 1).float().mean()} if script == "dapo" else {})})
    if script != "dapo":  # whose length penalty counts too
        earned = torch.tensor([float(is_right(rollout, i)) + 1.5 * common.format_reward(text)
                               for i, text in enumerate(rollout.completions)]).view(12, 2)
        equal = (earned.std(1) == 0).float().mean().item()
        assert step.metrics["zero_std_fraction"] == pytest.approx(equal) and 0 < equal < 1
    assert step.metrics["tokens_per_second"] * step.metrics["seconds"] == pytest.approx(int(rollout.lengths.sum()))

    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    rewards, advantages = (torch.tensor([row[name] for row in rows]).view(4, 2) for name in ("reward", "advantage"))
    assert advantages.any() and rewards.max() > 1  # right, with the bonus
    torch.testing.assert_close(advantages, importlib.import_module(script).group_advantages(rewards))


@pytest.mark.parametrize("script", ["dpo", "reward_model"])
def test_the_tokens_of_a_step_on_pairs_are_those_read_without_padding(script, tmp_path):
    """Twice a prompt of 5, and answers of 2 and 4, EOS included."""
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=?", "chosen": "2", "rejected": "333"}\n')
    run_script(f"{script}.py", "--steps", 1, "--pairs_per_step", 1, "--data", tmp_path / "pairs.jsonl",
               "--output_dir", tmp_path / "run")
    step = read_metrics(tmp_path / "run")[1]
    assert step["tokens_per_second"] * step["seconds"] == pytest.approx(16)


@pytest.mark.parametrize("script", ["dpo", "reward_model"])
def test_a_cut_answer_gets_its_end_where_a_score_is_read(script, tmp_path, monkeypatch):
    encode, read = common.encode_preferences, []
    monkeypatch.setattr(common, "encode_preferences", lambda *a, **k: read.append(encode(*a, **k)) or read[-1])
    run_script(f"{script}.py", *small(script, tmp_path, 2), "--max_completion_tokens", 20, "--output_dir",
               tmp_path / "run")
    end = common.tiny_tokenizer().eos_token_id
    ended = [{ids[-1] == end for row in rows for ids in row.answer_ids} for rows in read]  # of --eval_data, --data
    assert ended == [{True} if script == "reward_model" else {True, False}] * 2


@pytest.mark.parametrize("script", [*GROUP_SCRIPTS, "ppo", "dpo"])
def test_a_step_without_signal_says_so(script, tmp_path):
    (tmp_path / "reward.py").write_text("def same(prompt, completion, row):\n    return 1.0\n")
    flags = {"dapo": ["--group_size", 2, "--overlong_buffer", 0], "dpo": ["--on_policy"],
             "ppo": ["--missing_eos_score", 1e9]}
    errors = run_script(f"{script}.py", *small(script, tmp_path, 2), *flags.get(script, ["--group_size", 2]),
                        "--output_dir", tmp_path / "run", "--reward", f"{tmp_path / 'reward.py'}:same")
    assert "step 1 teaches nothing" in errors


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_imports_no_other(script):
    """So that common.py and one script are a complete thing to copy."""
    imported = re.findall(r"^\s*(?:import|from) (\w+)", (ROOT / f"{script}.py").read_text(), re.M)
    assert set(imported) <= {"common", "torch", "transformers", "numpy", *sys.stdlib_module_names}


@pytest.mark.parametrize("script, defaults", [
    ("grpo", dict(clip_eps=0.2, kl_coef=0.04, divide_by_std=True, lr=1e-4)),
    ("dapo", dict(clip_low=0.2, clip_high=0.28, dynamic_sampling=True, loss_average="token", overlong_buffer=8,
                  overlong_filtering=False, lr=1e-4)),
    ("dpo", dict(beta=0.1, label_smoothing=0.0, lr=1e-5)), ("reward_model", dict(center_coef=0.01, lr=5e-4)),
    ("ppo", dict(lam=0.95, kl_coef=0.2, missing_eos_score=-1.0, lr=1e-4, value_lr=1e-3))])
def test_the_defaults_behind_the_numbers_of_the_readme(script, defaults):
    Config = importlib.import_module(script).Config
    assert {name: getattr(Config, name) for name in defaults} == defaults


@pytest.mark.parametrize("script", GROUP_SCRIPTS)
def test_the_first_update_needs_no_pass_for_old_log_probs(script, tmp_path, monkeypatch):
    """Of two minibatches, only the second's rows are read before the first update."""
    read, compute = [], common.rollout_logprobs

    def rollout_logprobs(model, batch, minibatches, *rest):
        read.append(sum(map(len, minibatches)))
        return compute(model, batch, minibatches, *rest)
    monkeypatch.setattr(common, "rollout_logprobs", rollout_logprobs)
    run_script(f"{script}.py", "--steps", 1, "--prompts_per_step", 4, "--group_size", 4, "--minibatches", 2,
               *["--no_dynamic_sampling"] * (script == "dapo"), "--output_dir", tmp_path / "run",
               *on_few_problems(tmp_path))
    assert read[0] == 8


@pytest.mark.parametrize("script", [*GROUP_SCRIPTS, "ppo"])
def test_a_row_is_in_the_same_micro_batch_whenever_it_is_read(script, tmp_path, monkeypatch):
    """By the policy, the reference or the critic, before the update and in it. In bfloat16 a row's log-probs round as
    the rows beside it make them, so that otherwise even a policy that has not changed would have ratios other than 1.
    And no micro-batch is larger than the flag says."""
    read, deal = [], common.micro_batches

    def micro_batches(batch, blocks, max_tokens):
        for rows, *rest in deal(batch, blocks, max_tokens):
            read.append((*rows.tolist(), max_tokens))
            yield rows, *rest
    monkeypatch.setattr(common, "micro_batches", micro_batches)
    run_script(f"{script}.py", "--steps", 1, "--prompts_per_step", 16 if script == "ppo" else 4, "--minibatches", 2,
               "--updates_per_batch", 2, "--micro_batch_tokens", 70, "--output_dir", tmp_path / "run",
               *on_few_problems(tmp_path), *["--group_size", 4] * (script != "ppo"),
               *["--no_dynamic_sampling"] * (script == "dapo"))
    distinct = set(read)
    assert sorted(row for *rows, _ in distinct for row in rows) == list(range(16))  # each row in one of them
    assert {tokens for *_, tokens in read} == {70} and len(distinct) > 2 and len(read) >= 2 * len(distinct)


@pytest.mark.parametrize("script", ["dpo", "reward_model"])
def test_no_micro_batch_of_pairs_is_larger_than_the_flag_says(script, tmp_path, monkeypatch):
    asked, deal = set(), common.micro_batches
    monkeypatch.setattr(common, "micro_batches", lambda batch, blocks, max_tokens: (
        asked.add(max_tokens) or deal(batch, blocks, max_tokens)))
    run_script(f"{script}.py", "--data", few_pairs(tmp_path), "--pairs_per_step", 6, "--steps", 1,
               "--micro_batch_tokens", 70, "--output_dir", tmp_path / "run")
    assert asked == {70}


@pytest.mark.parametrize("script", [*GROUP_SCRIPTS, "ppo"])
def test_the_seconds_of_a_step_are_without_its_evaluation(script, tmp_path, monkeypatch):
    order, timing = [], common.Run.timing
    monkeypatch.setattr(common.Run, "timing", lambda *args: order.append("timing") or timing(*args))
    monkeypatch.setattr(common, "evaluate", lambda *args: order.append("evaluation") or {})
    run_script(f"{script}.py", "--steps", 1, "--prompts_per_step", 2, "--output_dir", tmp_path / "run",
               *["--max_generation_batches", 1] * (script == "dapo"), *on_few_problems(tmp_path))
    assert order == ["evaluation", "timing", "evaluation"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_model_is_kept_before_the_end_of_its_step(script):
    """Which may stop the run: one that is resumed does not do this step again."""
    source = (ROOT / f"{script}.py").read_text()
    assert 0 < source.index("run.keep_model(step") < source.index("run.end_step(step")


def test_the_table_of_runs(tmp_path, monkeypatch, capsys):
    """Two seeds sample .3 and .6 right: .45 ± .15, as .212/√2 is .15. At each step they are .141 and .283 apart (sample
    std), on average .212."""
    for name, seed, accuracies in (("name-0", 0, [0.2, 0.4]), ("name-1", 1, [0.4, 0.8]), ("rate1e-5", 0, [0.4, 0.8])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"flags": {"seed": seed}}))
        steps = [{"step": 0, "eval_accuracy": 0.5}] + [
            {"step": step, "accuracy": accuracy, "completion_length": 8, "seconds": 2, "tokens_per_second": 500,
             "peak_memory_mb": 100 * step} for step, accuracy in enumerate(accuracies, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    monkeypatch.setattr(sys, "argv", ["summarize.py", *map(str, sorted(tmp_path.iterdir()))])
    summarize.main()
    titles, _, row, other = capsys.readouterr().out.splitlines()
    assert titles == "| run | seeds | before | after | sampled | length | seconds | 1,000 tokens | peak MB | spread |"
    assert row == ("| name | 2 | 0.500 ± 0.000 | 0.500 ± 0.000 | 0.450 ± 0.150 | 8.0 ± 0.0 | 4 ± 0 | 2 ± 0 | 200 ± 0 "
                   "| 0.212 |")
    assert other.startswith("| rate1e-5 | 1 |")  # the 5 is not its seed
