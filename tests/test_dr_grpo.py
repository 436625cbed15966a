"""Dr. GRPO by hand: no std, no length, no KL; and the diff to grpo.py."""
import subprocess

import pytest
import torch

import common
import dr_grpo
import grpo
from helpers import ROOT, random_model, read_metrics, run_script


def test_the_diff_to_grpo_is_the_papers_list_of_changes():
    diff = subprocess.run(["diff", "grpo.py", "dr_grpo.py"], cwd=ROOT, capture_output=True, text=True).stdout
    assert sum(line[0] in "<>" for line in diff.splitlines()) < 46


def test_advantages_by_hand():
    """Rewards 1 0 0 0: mean .25. A question that is answered once in four counts no more than one answered twice."""
    torch.testing.assert_close(dr_grpo.group_advantages(torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0]])),
                               torch.tensor([[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]]))
    assert (dr_grpo.group_advantages(torch.full((2, 7), 0.1)) == 0).all()
    assert (dr_grpo.group_advantages(torch.ones(2, 1)) == 0).all()


def test_a_long_wrong_answer_is_not_forgiven():
    """Lengths 1 and 4 at L_max 4: each token 1/(2·4). GRPO gives the tokens of the long answer a quarter of the other's."""
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    torch.testing.assert_close(dr_grpo.token_weights(mask, 2, 4), mask / 8)
    assert grpo.token_weights(mask, 2)[1, 0] == grpo.token_weights(mask, 2)[0, 0] / 4


def test_the_loss_is_grpos_without_kl():
    torch.manual_seed(0)
    logprobs, old_logprobs, advantages, weights = torch.randn(3, 5), torch.randn(3, 5), torch.randn(3), torch.rand(3, 5)
    torch.testing.assert_close(dr_grpo.dr_grpo_loss(logprobs, old_logprobs, advantages, weights, 0.2),
                               grpo.grpo_loss(logprobs, old_logprobs, None, advantages, weights, 0.2, 0.0))


@pytest.mark.parametrize("max_tokens", [1, 100, 100_000])
def test_the_gradient_is_the_unbiased_policy_gradient_for_any_micro_batch_size(max_tokens):
    """On-policy: −1/(N·L_max) Σ_i Â_i Σ_t ∇log π(o_{i,t}), every completion computed alone."""
    model, tokenizer = random_model("Qwen2")
    torch.manual_seed(0)
    rollout = common.sample(model, tokenizer, ["1+1=?", "12+34=?"], 3, 20)
    advantages, weights = torch.randn(6), dr_grpo.token_weights(rollout.mask, 6, 20)
    model.zero_grad()
    for rows, input_ids, attention_mask, T in common.micro_batches(rollout, list(range(6)), max_tokens):
        logprobs, _ = common.token_logprobs(model, input_ids, attention_mask, T)
        dr_grpo.dr_grpo_loss(logprobs, logprobs.detach(), advantages[rows], weights[rows, :T], 0.2)[0].backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    for i in range(6):
        n = int(rollout.lengths[i])
        ids = rollout.input_ids[i][rollout.attention_mask[i].bool()]
        logprobs = model(ids[None]).logits[0, -n - 1:-1].log_softmax(-1).gather(1, ids[-n:, None])
        (-advantages[i] * logprobs.sum() / (6 * 20)).backward()
    torch.testing.assert_close(gradient, torch.cat([p.grad.flatten() for p in model.parameters()]), rtol=1e-3, atol=1e-6)


def test_a_whole_run(tmp_path):
    done = run_script("dr_grpo.py", "--steps", 3, "--prompts_per_step", 4, "--group_size", 4, "--eval_every", 100,
                      "--minibatches", 2, "--updates_per_batch", 2, "--output_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(tmp_path / "run")
    assert "kl" not in metrics[1] and metrics[1]["grad_norm"] > 0 and metrics[-1]["step"] == 3
