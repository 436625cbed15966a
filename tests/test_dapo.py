"""DAPO: its four techniques on hand-worked numbers, invariances, the diff to grpo.py, and whole runs."""
import json
import math
import subprocess
from collections import Counter

import pytest
import torch

import common
import dapo
import grpo
from helpers import (ROOT, assert_metrics, assert_same_gradient, assert_same_weights, begin_with, is_right,
                     load_tiny_model, on_few_problems, plain_entropies, plain_finished, plain_logprobs, plain_update,
                     random_model, read_metrics, record_run, run_script)


def test_the_diff_to_grpo_is_short():
    diff = subprocess.run(["diff", "grpo.py", "dapo.py"], cwd=ROOT, capture_output=True, text=True).stdout
    assert sum(line[0] in "<>" for line in diff.splitlines()) <= 145


# ----------------------------------------------------------------------------------------------------- clip-higher

@pytest.mark.parametrize("ratio, advantage, value, slope", [
    (1.35, 1.0, 1.28, 0.0),   # clipped: counts as 1.28·Â; with GRPO's ε = .2 it would be 1.2·Â
    (1.25, 1.0, 1.25, 1.25),  # still pushed up; GRPO would have clipped it
    (0.75, -1.0, -0.80, 0.0),
    (0.75, 1.0, 0.75, 0.75),
    (1.35, -1.0, -1.35, -1.35),
    (1e6, -1.0, -1e6, -1e6)])  # however far it went: there is no dual clip
def test_clip_higher_by_hand(ratio, advantage, value, slope):
    """ε_low = .2, ε_high = .28: min(ρÂ, clip(ρ, .8, 1.28)Â), and its derivative in log π (eq. 10)."""
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, stats = dapo.dapo_loss(logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), 0.2, 0.28)
    loss.backward()
    assert loss.item() == pytest.approx(-value, rel=1e-5)
    assert logprobs.grad.item() == pytest.approx(-slope, rel=1e-5)
    assert stats["clip_fraction"] == (slope == 0)


def test_a_symmetric_clip_holds_rare_tokens_down():
    """The paper's reason for clip-higher: ε = .2 clips a rise of a probability from .01 to .0121, but not one from .9
    to 1."""
    for old, new, clipped in ((0.01, 0.0121, 1), (0.9, 1.0, 0)):
        _, stats = dapo.dapo_loss(torch.tensor([[math.log(new)]]), torch.tensor([[math.log(old)]]),
                                  torch.ones(1), torch.ones(1, 1), 0.2, 0.2)
        assert stats["clip_fraction"] == clipped


# ------------------------------------------------------------------------------------------------ token-level loss

def test_every_token_of_the_step_counts_the_same():
    """Completions of 1 and 3 tokens: GRPO gives the lone token 1/2 and the others 1/6; DAPO gives each 1/4."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]]).bool()
    torch.testing.assert_close(dapo.token_weights(mask, 4), mask / 4)
    torch.testing.assert_close(grpo.token_weights(mask, 2), torch.tensor([[1 / 2, 0, 0], [1 / 6, 1 / 6, 1 / 6]]))


def test_the_papers_reading_is_a_mean_per_prompt():
    """Eq. 12: one prompt has 1 + 3 tokens, the other 2 + 0: token weights 1/4 · 1/2 and 1/2 · 1/2."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]]).bool()
    weights = dapo.unit_token_weights(mask, 2, 4)
    torch.testing.assert_close(weights, mask * torch.tensor([[1 / 8], [1 / 8], [1 / 4], [1 / 4]]))


def test_a_minibatch_without_a_token_in_the_loss():
    """--overlong_filtering may leave none: weights of 0, not NaN."""
    assert (dapo.token_weights(torch.zeros(2, 3).bool(), 0) == 0).all()
    assert dapo.token_weights(torch.tensor([[True]]), 1) == 1


def test_switched_off_the_weights_and_the_loss_are_grpos():
    torch.manual_seed(0)
    mask = torch.arange(6) < torch.tensor([6, 3, 1, 4])[:, None]
    weights = grpo.token_weights(mask, 4)
    torch.testing.assert_close(dapo.unit_token_weights(mask, 1, 4), weights)
    logprobs, old_logprobs, advantages = torch.randn(4, 6), torch.randn(4, 6), torch.randn(4)
    torch.testing.assert_close(dapo.dapo_loss(logprobs, old_logprobs, advantages, weights, 0.2, 0.2),
                               grpo.grpo_loss(logprobs, old_logprobs, None, advantages, weights, 0.2, 0.0))
    rewards = torch.rand(3, 5)
    torch.testing.assert_close(dapo.group_advantages(rewards), grpo.group_advantages(rewards))
    assert (dapo.soft_overlong_penalty(torch.tensor([1, 50, 100]), 100, 0) == 0).all()


@pytest.mark.parametrize("average", ["token", "prompt", "sequence"])
@pytest.mark.parametrize("max_tokens", [1, 100, 100_000])
def test_any_micro_batch_size_gives_the_same_gradient(average, max_tokens):
    """Against the definition: every completion alone, mean over the tokens of a unit, mean over units. The ratio of
    e^0.1 = 1.105 is inside the clip."""
    model, tokenizer = random_model("Qwen2")
    torch.manual_seed(0)
    rollout = common.sample(model, tokenizer, ["1+1=?", "12+34=?"], 4, 20)
    advantages = torch.randn(8)
    units = {"token": [range(8)], "prompt": [range(4), range(4, 8)], "sequence": [[i] for i in range(8)]}[average]
    if average == "token":
        weights = dapo.token_weights(rollout.mask, int(rollout.mask.sum()))
    else:
        weights = dapo.unit_token_weights(rollout.mask, len(units[0]), 8)

    def in_micro_batches():
        for rows, input_ids, attention_mask, T in common.micro_batches(rollout, list(range(8)), max_tokens):
            logprobs, _ = common.token_logprobs(model, input_ids, attention_mask, T)
            loss, _ = dapo.dapo_loss(logprobs, logprobs.detach() - 0.1, advantages[rows], weights[rows, :T], 0.2, 0.28)
            loss.backward()

    def by_definition():
        for unit in units:
            losses = []
            for i in unit:
                logprobs = plain_logprobs(model, rollout, i)
                ratio = (logprobs - (logprobs.detach() - 0.1)).exp()
                losses.append(-ratio * advantages[i])
            (torch.cat(losses).mean() / len(units)).backward()

    assert_same_gradient([model], in_micro_batches, by_definition)


# -------------------------------------------------------------------------------------------- overlong punishment

def test_equation_13_at_its_corners():
    """L_max = 100, L_cache = 20: 0 up to 80 tokens, −.5 at 90, −1 from 100 on."""
    lengths = torch.tensor([0, 79, 80, 81, 90, 99, 100, 120])
    torch.testing.assert_close(dapo.soft_overlong_penalty(lengths, 100, 20),
                               torch.tensor([0, 0, 0, -0.05, -0.5, -0.95, -1, -1]))


def test_an_answer_far_from_the_cut_is_not_punished(tmp_path):
    """No completion has more than 32 of 40 tokens, so rewards are 1 and −1 (eq. 7), even that of the longest. Without
    dynamic sampling all groups are kept, also those that teach nothing, so nothing is said of missing ones."""
    errors = run_script("dapo.py", "--steps", 1, "--prompts_per_step", 8, "--group_size", 2, "--no_dynamic_sampling",
                        "--output_dir", tmp_path / "run", *on_few_problems(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {row["reward"] for row in rows} <= {-1, 1}
    step = read_metrics(tmp_path / "run")[1]  # of all 16 completions
    assert step["kept_fraction"] < 1 and "both right and wrong" not in errors
    assert step["reward"] == 2 * step["accuracy"] - 1 and step["truncated_fraction"] == 0


def test_the_script_says_when_filtering_leaves_nothing(tmp_path):
    """All completions are cut off, so none is in the loss, however their rewards differ."""
    (tmp_path / "reward.py").write_text("import random\ndef f(prompt, completion, row): return random.random()\n")
    errors = run_script("dapo.py", "--steps", 1, "--prompts_per_step", 2, "--group_size", 8, "--max_new_tokens", 10,
                        "--overlong_filtering", "--no_dynamic_sampling", "--reward", f"{tmp_path / 'reward.py'}:f",
                        "--output_dir", tmp_path / "run", *on_few_problems(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert "teaches nothing" in errors and all(row["advantage"] == 0 for row in rows)
    assert len({row["reward"] for row in rows}) == len(rows)  # they differ within each group


# ------------------------------------------------------------------------------------------------ dynamic sampling

def fake_sampler(kinds):
    """A `roll_out` for dynamic_sampling, and the list of the counts it is asked for.

    The group of prompt i is all right ("1"), all wrong ("0") or mixed ("m"), as kinds[i] says; kinds repeats. Rewards
    say nothing of that: with a reward model or a format bonus, a wrong completion may have one above 0.
    """
    asked, groups = [], {"1": [True, True], "0": [False, False], "m": [True, False]}

    def roll_out(count):
        first = sum(asked)
        asked.append(count)
        correct = torch.tensor([groups[kinds[i % len(kinds)]] for i in range(first, first + count)])
        return list(range(first, first + count)), None, torch.ones(correct.shape), correct
    return roll_out, asked


def test_informative_groups():
    correct = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 1]]).bool()
    assert dapo.informative_groups(correct).tolist() == [False, False, True, True]


def test_dynamic_sampling_refills_until_there_are_enough():
    roll_out, asked = fake_sampler("1m0m")  # every other group is informative
    drawn, groups = dapo.dynamic_sampling(roll_out, 4, 10)
    assert asked == [4, 4]  # 2 of the first 4 are informative; at that rate, 2 more take 4 prompts
    assert groups.tolist() == [1, 3, 5, 7] and len(drawn) == 2


def test_dynamic_sampling_asks_for_what_is_missing_and_leaves_out_what_is_too_much():
    roll_out, asked = fake_sampler("1mmmmm")
    assert dapo.dynamic_sampling(roll_out, 4, 10)[1].tolist() == [1, 2, 3, 4]
    assert asked == [4, 2]  # 1 more, at a rate of 3/4, takes 2 prompts; both are informative, so one is dropped
    roll_out, asked = fake_sampler("11mmmm")
    dapo.dynamic_sampling(roll_out, 6, 10)
    assert asked[:2] == [6, 3]  # 2 more, at a rate of 4/6, take 3 prompts and no more


def test_dynamic_sampling_counts_the_share_over_all_that_was_drawn():
    """5 of 10 are informative, then 2 of 10: at a rate of 7/20, the three missing take 3·20/7 = 8.6, so 9 prompts."""
    roll_out, asked = fake_sampler("m" * 5 + "1" * 5 + "m" * 2 + "1" * 8 + "m" * 9)
    assert len(dapo.dynamic_sampling(roll_out, 10, 5)[1]) == 10 and asked == [10, 10, 9]


def test_dynamic_sampling_stops_at_once_when_all_are_informative():
    roll_out, asked = fake_sampler("m")
    assert dapo.dynamic_sampling(roll_out, 4, 10)[1].tolist() == [0, 1, 2, 3] and asked == [4]


def test_dynamic_sampling_gives_up_at_its_limit():
    roll_out, asked = fake_sampler("1" * 7 + "m" + "0" * 100)
    assert dapo.dynamic_sampling(roll_out, 4, 3)[1].tolist() == [7] and len(asked) == 3
    roll_out, asked = fake_sampler("0")
    assert dapo.dynamic_sampling(roll_out, 4, 3)[1].tolist() == []
    assert asked == [4, 4, 4]  # 16 might not fit into memory


@pytest.mark.parametrize("kinds", ["m10", "0m", "mm1", "11110m"])
def test_no_uninformative_group_is_trained_on(kinds):
    roll_out, _ = fake_sampler(kinds)
    drawn, groups = dapo.dynamic_sampling(roll_out, 5, 20)
    correct = torch.cat([correct for *_, correct in drawn])
    assert len(groups) == 5 == len(set(groups.tolist())) and dapo.informative_groups(correct[groups]).all()


# ------------------------------------------------------------------------------------------------------ whole runs

@pytest.mark.parametrize("average, switches", [
    ("token", ["--overlong_filtering"]), ("prompt", ["--overlong_filtering"]),
    ("sequence", ["--no_dynamic_sampling", "--no_divide_by_std"])])
def test_every_update_is_that_of_the_plain_algorithm(average, switches, tmp_path, monkeypatch):
    """Algorithm 1 of DAPO, one completion at a time: P = 6, G = 4, ε = .01 and .06, L_max = 21, L_cache = 4.

    The loss is a mean over the tokens of each unit, then over units. The unit is the whole minibatch for "token" (the
    authors' code: a micro-batch), a prompt's group for "prompt" (eq. 12), a single completion for "sequence" (GRPO).
    """
    unit_of = {"token": lambda i: 0, "prompt": lambda i: i // 4, "sequence": lambda i: i}[average]
    steps = record_run(
        monkeypatch, "dapo.py", tmp_path / "run", "--steps", 2, "--prompts_per_step", 6, "--group_size", 4,
        "--minibatches", 2, "--updates_per_batch", 2, "--max_new_tokens", 21, "--temperature", 1.3, "--clip_low", 0.01,
        "--clip_high", 0.06, "--overlong_buffer", 4, "--loss_average", average, "--lr", 2e-4, "--max_grad_norm", 0.5,
        "--micro_batch_tokens", 200, *switches)
    policy = load_tiny_model()
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for step in steps:
        begin_with(step, 0, (policy, optimizer))
        drawn = [(rollout, i) for rollout in step.rollouts for i in range(len(rollout.mask))]
        lengths = torch.tensor([int(rollout.lengths[i]) for rollout, i in drawn])
        finished = torch.cat([plain_finished(rollout) for rollout in step.rollouts])
        right = torch.tensor([float(is_right(*one)) for one in drawn])
        rewards = 2 * right - 1 - (lengths - 17).clamp(min=0) / 4  # eq. 7 and 13; 17 = L_max − L_cache = 21 − 4
        groups = rewards.view(-1, 4)  # one row per prompt
        advantages = groups - groups.mean(1, keepdim=True)
        if "--no_divide_by_std" not in switches:
            advantages = advantages / (groups.std(1, keepdim=True) + 1e-6)  # eq. 9
        advantages = advantages.flatten()
        mixed = [p for p, group in enumerate(right.view(-1, 4)) if 0 < group.sum() < 4]  # eq. 11
        prompts = range(6) if "--no_dynamic_sampling" in switches else mixed[:6]
        kept = [4 * p + g for p in prompts for g in range(4)]  # indices into drawn
        trained = lengths * finished if "--overlong_filtering" in switches else lengths  # tokens in the loss
        with torch.no_grad():
            old = {i: plain_logprobs(policy, *drawn[i], 1.3) for i in kept}
        updates, clipped, entropies = [], [], []
        for update, minibatch in enumerate(torch.tensor(kept)[step.orders[0]].tensor_split(2) * 2):
            begin_with(step, update, (policy, optimizer))
            loss = 0
            tokens = Counter()  # tokens in the loss, per unit
            rows = minibatch.tolist() if average == "token" else kept  # a prompt's rows may be in several minibatches
            for i in rows:
                tokens[unit_of(i)] += trained[i]
            for i in minibatch[trained[minibatch] > 0].tolist():
                ratio = (plain_logprobs(policy, *drawn[i], 1.3) - old[i]).exp()
                unclipped, bounded = ratio * advantages[i], ratio.clamp(0.99, 1.06) * advantages[i]
                objective = torch.min(unclipped, bounded).sum() / tokens[unit_of(i)] / len(tokens)  # eq. 8
                loss = loss - objective * len(rows) / len(minibatch)  # so that the minibatches' mean is eq. 12
                clipped.append(bounded < unclipped)
                entropies.append(plain_entropies(policy, *drawn[i], 1.3).detach())
            updates.append(plain_update(optimizer, loss, 2e-4, 0.5))
        assert step.updates == [pytest.approx(update, rel=2e-3, abs=1e-5) for update in updates]
        assert_metrics(step, updates, {
            "reward": rewards.mean(), "accuracy": right.mean(), "clip_fraction": torch.cat(clipped).float().mean(),
            "kept_fraction": len(mixed) / len(groups), "wasted_groups": max(0, len(mixed) - 6),
            "sampled_tokens": lengths.sum(), "entropy": torch.cat(entropies).mean(),
            "truncated_fraction": (~finished).float().mean(),
            "zero_std_fraction": (groups == groups[:, :1]).all(1).float().mean()})  # with the length penalty
    assert_same_weights(tmp_path / "run", policy)
    assert any(step.metrics["clip_fraction"] > 0 for step in steps)  # ε was small enough to clip
    assert any(len(step.rollouts) > 1 for step in steps) or "--no_dynamic_sampling" in switches


@pytest.mark.parametrize("minibatches", [4, 3])
def test_few_rows_make_few_updates(minibatches, tmp_path, monkeypatch):
    """With fewer groups than asked for, there are fewer minibatches, of about the usual size: 4·2/4 = 2 rows, or
    4·2/3 = 8/3.

    Their number is rounded up: a group alone makes one update, and not none.
    """
    steps = record_run(
        monkeypatch, "dapo.py", tmp_path / "run", "--steps", 3, "--prompts_per_step", 4, "--group_size", 2,
        "--minibatches", minibatches, "--max_generation_batches", 1)
    kept = [round(4 * step.metrics["kept_fraction"]) for step in steps]
    assert [len(step.updates) for step in steps] == [math.ceil(minibatches * k / 4) for k in kept] and min(kept) < 4
    assert all(update["grad_norm"] > 0 for step in steps for update in step.updates)


def test_minibatches_may_be_uneven(tmp_path, monkeypatch):
    """Eight completions make three minibatches, of 3, 3 and 2, and not four of 2."""
    [step] = record_run(monkeypatch, "dapo.py", tmp_path / "run", "--steps", 1, "--prompts_per_step", 4,
                        "--group_size", 2, "--minibatches", 3, "--no_dynamic_sampling")
    assert len(step.updates) == 3


def test_without_an_informative_group_the_step_makes_no_update(tmp_path):
    """No reward is above 0, so no group has a right answer: the step gives up, says so, logs a loss and gradient of 0,
    and the run goes on, with its warm-up where it was. The rewards differ within a group too, but a completion that is
    left out gets no advantage."""
    (tmp_path / "reward.py").write_text("import random\n\ndef never(prompt, completion, row):\n"
                                        "    return -random.random()\n")
    errors = run_script("dapo.py", "--steps", 2, "--prompts_per_step", 2, "--group_size", 2, "--eval_every", 100,
                        "--max_generation_batches", 2, "--reward", f"{tmp_path / 'reward.py'}:never", "--output_dir",
                        tmp_path / "run", "--warmup_steps", 2, *on_few_problems(tmp_path))
    assert "step 1: 0 of 4 groups have both right and wrong completions, 2 wanted" in errors
    assert "step 1 teaches nothing" in errors
    samples = [json.loads(line) for line in open(tmp_path / "run" / "samples.jsonl")]
    assert len({sample["reward"] for sample in samples}) == len(samples)
    assert all(sample["advantage"] == 0 for sample in samples)
    steps = read_metrics(tmp_path / "run")[1:]
    names = "grad_norm", "loss", "kept_fraction", "lr", "clip_fraction", "entropy", "sampler_gap"
    assert [[step[name] for name in names] for step in steps] == [[0] * 4 + [None] * 3] * 2


@pytest.mark.parametrize("average, size", [("prompt", 4), ("sequence", 1)])
def test_the_units_of_the_loss_average(average, size, tmp_path, monkeypatch):
    """With "prompt", the G rows of a prompt share a unit; with "sequence", each row is its own.

    This looks at the units themselves, since the loss hardly depends on them: the tiny model's answers to a prompt are
    almost equally long.
    """
    units, unit_token_weights = [], dapo.unit_token_weights

    def recorded(*args):
        units.append(args)
        return unit_token_weights(*args)

    monkeypatch.setattr(dapo, "unit_token_weights", recorded)
    [step] = record_run(monkeypatch, "dapo.py", tmp_path / "run", "--steps", 1, "--prompts_per_step", 3,
                        "--group_size", 4, "--no_dynamic_sampling", "--loss_average", average)
    [(mask, rows, _)], [rollout] = units, step.rollouts
    assert torch.equal(mask, rollout.mask) and rows == size
