"""The patches of README's "Changing the algorithm", applied to the scripts and compared with their definitions."""
import sys
import types

import pytest
import torch

import common
from helpers import (ROOT, distributions, is_right, load_tiny_model, on_few_problems, plain_entropies, plain_logprobs,
                     read_metrics, record_run, run_script)

TEXT = (ROOT / "README.md").read_text().split("### Changing the algorithm")[1].split("```diff\n")[1].split("```")[0]
PATCHES = [block.splitlines() for block in TEXT.split("\n\n")]


@pytest.fixture
def patched(monkeypatch):
    """patched(NAME) -> the script as a module, with the patch that is headed by this name. edits: {text: another}."""
    def patch(name, edits={}):
        [(first, *lines)] = [patch for patch in PATCHES if name in patch[0]]
        script = first.removeprefix("# ").split(".py")[0]
        source = (ROOT / f"{script}.py").read_text()
        for change in "\n".join(lines).split("\n@@\n"):
            old, new = ("".join(f"\n{line[1:]}" for line in change.splitlines() if line[0] in kept) + "\n"
                        for kept in (" -", " +"))
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        for old, new in edits.items():
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        module = types.ModuleType(script)
        monkeypatch.setitem(sys.modules, script, module)
        exec(compile(source, f"{script}.py", "exec"), module.__dict__)
        return module
    return patch


def one_step(monkeypatch, tmp_path, *flags, script="grpo.py"):
    """A step of the patched script, 4 prompts × 4 completions -> (what `record_run` has of it, its rewards [4, 4])."""
    [step] = record_run(monkeypatch, script, tmp_path / "run", "--steps", 1, "--prompts_per_step", 4,
                        "--group_size", 4, "--max_new_tokens", 25, "--micro_batch_tokens", 80, *flags)
    return step, torch.tensor([float(is_right(step.rollouts[0], i)) for i in range(16)]).view(4, 4)


def advantages_of(rewards):
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()


def norm_of_gradient(policy, loss):
    policy.zero_grad()
    loss.backward()
    return torch.stack([p.grad.norm() for p in policy.parameters()]).norm().item()


def test_rloo(patched, monkeypatch, tmp_path):
    """∇ Σ_i (R_i − mean of the others) log π(o_i) / N, but for the constant L_max: whole completions, none divided by
    its length. Rewards 1 0 0 0: the others' mean is 0 for the first, 1/3 for the rest."""
    module = patched("RLOO (")
    advantages = module.group_advantages(torch.tensor([[1.0, 0, 0, 0], [2, 2, 2, 2]]))
    torch.testing.assert_close(advantages, torch.tensor([[1, -1 / 3, -1 / 3, -1 / 3], [0, 0, 0, 0]]))
    step, rewards = one_step(monkeypatch, tmp_path, script="dr_grpo.py")
    [rollout], policy = step.rollouts, load_tiny_model()
    others = (rewards.sum(1, keepdim=True) - rewards) / 3
    loss = -sum(advantage * plain_logprobs(policy, rollout, i).sum() / 16
                for i, advantage in enumerate((rewards - others).flatten()))
    assert step.metrics["grad_norm"] == pytest.approx(norm_of_gradient(policy, loss) / 25, rel=1e-3)


def test_reinforce_plus_plus(patched):
    """Less the groups' means, the rewards are ½, −½, 0 and 0: their sample variance is ½ / 3."""
    advantages = patched("REINFORCE++").group_advantages(torch.tensor([[1.0, 0], [1, 1]]))
    torch.testing.assert_close(advantages, torch.tensor([[0.5, -0.5], [0, 0]]) / (0.5 / 3) ** 0.5)


def test_gspo(patched):
    """s_i = (π(o_i) / π_old(o_i))^{1/|o_i|}; the loss is −mean of min(s Â, clip(s) Â), whatever the lengths."""
    gspo, mask = patched("GSPO"), torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()
    logprobs, old, advantages = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3), torch.tensor([1.0, -1, 2])
    with torch.no_grad():
        logprobs[2, 0] = old[2, 0] + 0.1  # one that is not clipped
    loss, _ = gspo.grpo_loss(logprobs, old, None, advantages, gspo.token_weights(mask, 3), 0.2, 0.0)
    expected = 0
    for i in range(3):
        s = (logprobs[i][mask[i]].sum() - old[i][mask[i]].sum()).div(mask[i].sum()).exp()
        expected = expected - torch.min(s * advantages[i], s.clamp(0.8, 1.2) * advantages[i]) / 3
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, logprobs)[0] for x in (loss, expected)))


def test_cispo(patched):
    """The gradient of a token's log-prob is −w·clip(ρ)·Â, also where the clip is active (ratios 2 and ½)."""
    cispo, old = patched("CISPO"), torch.zeros(1, 3)
    logprobs = torch.tensor([[2.0, 1.1, 0.5]]).log().requires_grad_()
    loss, _ = cispo.dapo_loss(logprobs, old, torch.tensor([3.0]), torch.tensor([[0.5, 0.5, 0.5]]), 0.2, 0.28)
    [gradient] = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -0.5 * torch.tensor([[1.28, 1.1, 0.8]]) * 3)


def test_entropy_bonus(patched, monkeypatch, tmp_path):
    patched("entropy bonus")
    step, rewards = one_step(monkeypatch, tmp_path, "--kl_coef", 0)
    [rollout], advantages, policy, loss = step.rollouts, advantages_of(rewards), load_tiny_model(), 0
    for i in range(16):
        logprobs = plain_logprobs(policy, rollout, i)
        objective = (logprobs - logprobs.detach()).exp() * advantages[i] + 0.01 * plain_entropies(policy, rollout, i)
        loss = loss - objective.mean() / 16
    assert step.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert step.metrics["grad_norm"] == pytest.approx(norm_of_gradient(policy, loss), rel=1e-3)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_kl_in_the_reward(minibatches, patched, monkeypatch, tmp_path):
    """The reference is another model here, so that the KL is not 0. All rows have their old log-probs in time."""
    module, references = patched("KL in the reward"), []

    def load_reference(cfg, device):
        torch.manual_seed(1)
        references.append(load_tiny_model())
        for p in references[0].parameters():
            p.data += 0.02 * torch.randn_like(p)
        return references[0].requires_grad_(False)
    monkeypatch.setattr(common, "load_reference", load_reference)
    seen = []
    advantages_from = module.group_advantages
    monkeypatch.setattr(module, "group_advantages", lambda *args: seen.append(args[0]) or advantages_from(*args))
    step, rewards = one_step(monkeypatch, tmp_path, "--kl_coef", 0.1, "--minibatches", minibatches)
    [rollout], policy = step.rollouts, load_tiny_model()
    kl = torch.stack([(plain_logprobs(policy, rollout, i) - plain_logprobs(references[0], rollout, i)).sum()
                      for i in range(16)]).detach()
    assert kl.abs().min() > 1e-3
    torch.testing.assert_close(seen[-1], rewards - 0.1 * kl.view(4, 4), rtol=1e-4, atol=1e-4)
    assert "kl" not in step.metrics  # nothing of it in the loss


def test_the_reference_renewed(patched, monkeypatch, tmp_path):
    """The KL to it is 0 again in the step after; a run that is resumed has the renewed one."""
    patched("the reference renewed", {"step % 20": "step % 2"})
    flags = ["--prompts_per_step", 4, "--group_size", 4, "--max_new_tokens", 25, *on_few_problems(tmp_path)]
    run_script("grpo.py", "--steps", 4, *flags, "--output_dir", tmp_path / "whole")
    for steps in ["--steps", 3], ["--steps", 4, "--resume"]:
        run_script("grpo.py", *steps, *flags, "--output_dir", tmp_path / "resumed")
    whole, resumed = ([metrics["kl"] for metrics in read_metrics(tmp_path / run)[1:]] for run in ("whole", "resumed"))
    assert whole[0] == whole[2] == 0 < min(whole[1], whole[3])
    assert resumed == whole


def test_ipo(patched):
    """Log-ratios of 2 and −1 are 3 apart; β = 0.1 wants 5, so the loss is (3 − 5)², and its gradient 2 (3 − 5)."""
    chosen = torch.tensor([-3.0], requires_grad=True)
    losses, _ = patched("IPO").dpo_loss(chosen, *torch.tensor([[-8.0], [-5], [-7]]), beta=0.1)
    torch.testing.assert_close(losses, torch.tensor([4.0]))
    torch.testing.assert_close(*torch.autograd.grad(losses, chosen), torch.tensor([-4.0]))


@pytest.mark.parametrize("name, flags", [("SimPO", ["--reference_free", "--beta", 2]), ("RPO (arXiv:2404", [])])
def test_losses_with_mean_logprobs(name, flags, patched, monkeypatch, tmp_path):
    """SimPO: −log σ(β (ℓ⁺ − ℓ⁻) − γ), where ℓ is an answer's mean log-prob. RPO: DPO's loss, ln 2 at first, less ℓ⁺."""
    module = patched(name)
    [step] = record_run(monkeypatch, "dpo.py", tmp_path / "run", "--on_policy", "--steps", 1, "--pairs_per_step", 12,
                        "--micro_batch_tokens", 200, "--warmup_steps", 0, *flags)
    [rollout], policy, losses = step.rollouts, load_tiny_model(), []
    right = [is_right(rollout, i) for i in range(24)]
    for i in range(0, 24, 2):
        if right[i] != right[i + 1]:
            chosen, rejected = (plain_logprobs(policy, rollout, j) for j in ((i, i + 1) if right[i] else (i + 1, i)))
            difference = chosen.sum() - rejected.sum()
            losses.append(-(2 * (chosen.mean() - rejected.mean()) - 0.5).sigmoid().log() if name == "SimPO" else
                          -(0.1 * (difference - difference.detach())).sigmoid().log() - chosen.mean())
    loss = sum(losses) / len(losses)
    assert step.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert step.metrics["grad_norm"] == pytest.approx(norm_of_gradient(policy, loss), rel=1e-3)
    preference = common.Preference("", [5, 6], ["", ""], [[7, 8, 1], [9, 1]], [1.0, 0.0])
    [held_out] = module.answer_logprobs(policy, common.tiny_tokenizer(), [preference], module.Config(), "cpu")
    plain = [distributions(policy, torch.tensor([5, 6, *ids]), len(ids)).log_prob(torch.tensor(ids))
             for ids in preference.answer_ids]
    torch.testing.assert_close(held_out, torch.stack([p.mean() if name == "SimPO" else p.sum() for p in plain]))


@pytest.mark.parametrize("gap, factor", [(0.3, 1.35), (-0.3, 0.741), (1.0, 2.0)])
def test_truncated_importance_sampling(gap, factor, patched, monkeypatch, tmp_path):
    """A sampler that gave every token e^{−gap} times the policy's probability: the gradient is e^gap times as large,
    but at most twice."""
    module, sample = patched("importance sampling"), common.sample

    def other_sampler(*args, **kwargs):
        rollout = sample(*args, **kwargs)
        rollout.logprobs = (rollout.logprobs - gap).where(rollout.mask, 0.0)
        return rollout
    monkeypatch.setattr(module, "sample", other_sampler)
    step, rewards = one_step(monkeypatch, tmp_path, "--kl_coef", 0)
    [rollout], advantages, policy = step.rollouts, advantages_of(rewards), load_tiny_model()
    loss = -sum(advantages[i] * plain_logprobs(policy, rollout, i).mean() / 16 for i in range(16))
    assert step.metrics["grad_norm"] == pytest.approx(factor * norm_of_gradient(policy, loss), rel=2e-3)
