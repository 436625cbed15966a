"""Dr. GRPO on hand-worked numbers (no std, no |o_i|, no KL), the diff to grpo.py, and a whole run."""
import subprocess

import pytest
import torch

import common
import dr_grpo
import grpo
from helpers import (ROOT, assert_metrics, assert_same_gradient, assert_same_weights, begin_with, is_right,
                     load_tiny_model, plain_logprobs, plain_update, random_model, record_run)


def test_the_diff_to_grpo_is_short():
    diff = subprocess.run(["diff", "grpo.py", "dr_grpo.py"], cwd=ROOT, capture_output=True, text=True).stdout
    assert sum(line[0] in "<>" for line in diff.splitlines()) <= 45


def test_advantages_by_hand():
    """Rewards 1 0 0 0: mean .25. Rewards 1 1 0 0: mean .5. There is no std to divide by."""
    torch.testing.assert_close(dr_grpo.group_advantages(torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0]])),
                               torch.tensor([[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]]))


def test_a_long_wrong_answer_is_not_forgiven():
    """Two completions of 1 and 4 tokens, L_max = 4: every token weighs 1/(2·4). In GRPO, those of the long completion
    weigh a quarter of the short one's."""
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    torch.testing.assert_close(dr_grpo.token_weights(mask, 2, 4), mask / 8)
    assert grpo.token_weights(mask, 2)[1, 0] == grpo.token_weights(mask, 2)[0, 0] / 4


def test_the_loss_is_grpos_without_kl():
    torch.manual_seed(0)
    logprobs, old_logprobs = 5 * torch.randn(2, 3, 5)  # ratios from e⁻¹² to e¹³
    advantages, weights = torch.tensor([-1.0, 1, 2]), torch.rand(3, 5)
    torch.testing.assert_close(dr_grpo.dr_grpo_loss(logprobs, old_logprobs, advantages, weights, 0.2),
                               grpo.grpo_loss(logprobs, old_logprobs, None, advantages, weights, 0.2, 0.0))


@pytest.mark.parametrize("max_tokens", [1, 100, 100_000])
def test_the_gradient_is_the_unbiased_policy_gradient_for_any_micro_batch_size(max_tokens):
    """Compared with the definition, on-policy: −1/(N·L_max) Σ_i Â_i Σ_t ∇log π(o_{i,t}), each completion on its own."""
    model, tokenizer = random_model("Qwen2")
    torch.manual_seed(0)
    rollout = common.sample(model, tokenizer, ["1+1=?", "12+34=?"], 3, 20)
    advantages, weights = torch.randn(6), dr_grpo.token_weights(rollout.mask, 6, 20)

    def in_micro_batches():
        for rows, input_ids, attention_mask, T in common.micro_batches(rollout, list(range(6)), max_tokens):
            logprobs, _ = common.token_logprobs(model, input_ids, attention_mask, T)
            dr_grpo.dr_grpo_loss(logprobs, logprobs.detach(), advantages[rows], weights[rows, :T], 0.2)[0].backward()

    def by_definition():
        for i in range(6):
            (-advantages[i] * plain_logprobs(model, rollout, i).sum() / (6 * 20)).backward()

    assert_same_gradient([model], in_micro_batches, by_definition, atol=1e-6)


def test_the_expected_gradient_is_that_of_the_expected_reward():
    """−(G − 1)/G · ∇E[R] / L_max, exactly: over all 49 groups of G = 2 that can be sampled, by their probability.

    A vocabulary of three and L_max = 2 allow seven completions: EOS (token 1) alone, or another token and any second
    one. (G − 1)/G is there because a completion's own reward is a part of the mean that it is compared with.
    """
    model, _ = random_model("Qwen2", vocab_size=3)
    completions = [[1], *([first, second] for first in (0, 2) for second in (0, 1, 2))]
    input_ids, attention_mask, mask = common.collate([[2, 0]] * 7, completions, 0)
    torch.manual_seed(0)
    rewards, groups = torch.randn(7), torch.cartesian_prod(torch.arange(7), torch.arange(7))  # [49, 2]

    def by_enumeration():
        logprobs, _ = common.token_logprobs(model, input_ids, attention_mask, 2)
        chances = logprobs.detach().sum(1).exp()[groups].prod(1)  # [49]
        assert chances.sum().item() == pytest.approx(1)
        rows, advantages = groups.flatten(), dr_grpo.group_advantages(rewards[groups]).flatten()
        weights = dr_grpo.token_weights(mask[rows], 2, 2) * chances.repeat_interleave(2)[:, None]
        dr_grpo.dr_grpo_loss(logprobs[rows], logprobs[rows].detach(), advantages, weights, 0.2)[0].backward()

    def by_definition():
        logprobs, _ = common.token_logprobs(model, input_ids, attention_mask, 2)
        expected_reward = (logprobs.sum(1).exp() * rewards).sum()
        (-1 / 2 * expected_reward / 2).backward()

    assert_same_gradient([model], by_enumeration, by_definition, atol=1e-6)


def test_every_update_is_that_of_the_plain_algorithm(tmp_path, monkeypatch):
    """Written out one completion at a time: two steps, each with two minibatches and two passes.

    No completion reaches L_max = 40, so dividing by the longest completion instead would show.
    """
    steps = record_run(
        monkeypatch, "dr_grpo.py", tmp_path / "run", "--steps", 2, "--prompts_per_step", 4, "--group_size", 4,
        "--minibatches", 2, "--updates_per_batch", 2, "--max_new_tokens", 40, "--temperature", 0.8, "--clip_eps", 0.05,
        "--format_reward", 0.25, "--lr", 2e-4, "--lr_schedule", "linear", "--max_grad_norm", 0.5,
        "--micro_batch_tokens", 200)
    policy = load_tiny_model()
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    rates = iter(2e-4 * (1 - n / 8) for n in range(8))  # a linear decay to 0 over all 8 updates
    for step in steps:
        begin_with(step, 0, (policy, optimizer))
        [rollout], [order] = step.rollouts, step.orders
        rewards = torch.tensor([is_right(rollout, i) + 0.25 * common.format_reward(rollout.completions[i])
                                for i in range(16)])
        advantages = (rewards.view(4, 4) - rewards.view(4, 4).mean(1, keepdim=True)).flatten()
        with torch.no_grad():
            old = [plain_logprobs(policy, rollout, i, 0.8) for i in range(16)]
        updates, clipped = [], []
        for update, minibatch in enumerate(order.tensor_split(2) * 2):
            begin_with(step, update, (policy, optimizer))
            loss = 0
            for i in minibatch.tolist():
                ratio = (plain_logprobs(policy, rollout, i, 0.8) - old[i]).exp()
                unclipped, bounded = ratio * advantages[i], ratio.clamp(0.95, 1.05) * advantages[i]
                loss = loss - torch.min(unclipped, bounded).sum() / (40 * len(minibatch))  # 1 / (L_max·N)
                clipped.append(bounded < unclipped)
            updates.append(plain_update(optimizer, loss, next(rates), 0.5))
        assert step.updates == [pytest.approx(update, rel=2e-3, abs=1e-5) for update in updates]
        assert_metrics(step, updates, {"reward": rewards.mean(), "clip_fraction": torch.cat(clipped).float().mean()})
        assert "kl" not in step.metrics and rollout.lengths.max() < 40
    assert_same_weights(tmp_path / "run", policy)
    assert any(step.metrics["clip_fraction"] > 0 for step in steps)  # ε was small enough to clip
