"""PPO: its equations on hand-worked numbers and against their definitions, invariances, the critic, and whole runs."""
import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer,
                          PreTrainedTokenizerFast)

import common
import ppo
from helpers import (assert_metrics, assert_same_gradient, assert_same_weights, begin_with, few_problems, is_right,
                     load_tiny_model, on_few_problems, plain_entropies, plain_finished, plain_logprobs, plain_update,
                     random_model, read_metrics, record_run, row_alone, run_script, save)

LENGTHS = [6, 3, 1, 0]  # from the full width to a completion without tokens
MASK = torch.arange(6) < torch.tensor(LENGTHS)[:, None]


def random_critic(architecture: str = "Qwen2", seed: int = 0):
    """A sequence classifier with one label and random weights, and its tokenizer."""
    policy, tokenizer = random_model(architecture, seed)
    policy.config.num_labels = 1
    critic = AutoModelForSequenceClassification.from_config(policy.config).eval()
    critic.base_model.load_state_dict(policy.base_model.state_dict())
    torch.nn.init.normal_(critic.score.weight, std=0.3)
    return critic, tokenizer


def plain_values(critic, rollout, i):
    """Values [|o_i|], each of the state before a token of completion i, computed without padding or other rows."""
    ids, n = row_alone(rollout, i)
    return critic.score(critic.base_model(ids[None])[0])[0, -n - 1:-1, 0]


# ------------------------------------------------------------------------------------------- rewards per token

def test_token_rewards_by_hand():
    """β = .1: −.1·(−1 − (−2)) = −.1, then −.1·(−1 − 0) + 5 = 5.1 at the last token.

    A lone token gets both the penalty and the score: −.1·(−3 − (−1)) − 1 = −.8.
    """
    logprobs = torch.tensor([[-1.0, -1, -9], [-3, -9, -9]])
    ref_logprobs = torch.tensor([[-2.0, 0, 4], [-1, 4, 4]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    rewards = ppo.token_rewards(torch.tensor([5.0, -1.0]), logprobs, ref_logprobs, mask, 0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 5.1, 0], [-0.8, 0, 0]]))
    column = torch.tensor([[5.0], [-1.0]])  # [N, 1], as `score` returns them
    torch.testing.assert_close(ppo.token_rewards(column, logprobs, ref_logprobs, mask, 0.1), rewards)
    rewards = ppo.token_rewards(torch.tensor([5.0, -1.0]), logprobs, torch.zeros(2, 3), mask, 0.0)  # no reference
    torch.testing.assert_close(rewards, torch.tensor([[0, 5.0, 0], [-1, 0, 0]]))


def test_token_rewards_sum_to_the_score_less_the_kl():
    """InstructGPT eq. 2: Σ_t r_t = score − β·(log π(o) − log π_ref(o))."""
    torch.manual_seed(0)
    scores, logprobs, ref_logprobs = torch.randn(3), torch.randn(3, 6), torch.randn(3, 6)
    mask = MASK[:3]
    expected = scores - 0.3 * ((logprobs - ref_logprobs) * mask).sum(1)
    torch.testing.assert_close(ppo.token_rewards(scores, logprobs, ref_logprobs, mask, 0.3).sum(1), expected)


# -------------------------------------------------------------------------------------------------- advantages

def gae_by_definition(rewards, values, mask, gamma, lam):
    """PPO eq. 11, 12: Â_t = Σ_l (γλ)^l (r_{t+l} + γ V_{t+l+1} − V_{t+l}), token by token, in Python floats."""
    advantages = torch.zeros(rewards.shape)
    for i, n in enumerate(mask.sum(1).tolist()):
        r, v = rewards[i, :n].tolist(), values[i, :n].tolist() + [0.0]
        for t in range(n):
            advantages[i, t] = sum((gamma * lam) ** l * (r[t + l] + gamma * v[t + l + 1] - v[t + l])
                                   for l in range(n - t))
    return advantages


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (1.0, 0.0), (0.0, 0.5)])
def test_gae_is_the_double_sum(gamma, lam):
    torch.manual_seed(0)
    rewards, values = torch.randn(4, 6), torch.randn(4, 6)
    expected = gae_by_definition(rewards, values, MASK, gamma, lam)
    advantages, returns = ppo.gae(rewards, values, MASK, gamma, lam)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, (expected + values) * MASK)
    assert (advantages[~MASK] == 0).all() and (returns[~MASK] == 0).all()


def test_gae_by_hand():
    """γ = 1, λ = .5, rewards 0 0 1, values .2 .4 .8: δ = .2, .4, .2; Â = .2 + .5·.5 = .45, .4 + .5·.2 = .5, .2."""
    advantages, returns = ppo.gae(torch.tensor([[0.0, 0, 1, 7]]), torch.tensor([[0.2, 0.4, 0.8, 7]]),
                                  torch.tensor([[True, True, True, False]]), 1.0, 0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.45, 0.5, 0.2, 0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.65, 0.9, 1.0, 0]]))


def test_what_a_tool_wrote_is_skipped():
    """With a hole in its mask, a completion is scored at its last own token, and its advantages are those of its own
    tokens alone."""
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0], [1, 0, 1, 1, 1, 0, 0]]).bool()
    scores, logprobs, ref_logprobs, values = torch.randn(2), *torch.randn(3, 2, 7)

    def advantages(mask, *tensors):
        logprobs, ref_logprobs, values = tensors
        return ppo.gae(ppo.token_rewards(scores, logprobs, ref_logprobs, mask, 0.3), values, mask, 0.9, 0.8)
    own = [tensor[mask].view(2, 4) for tensor in (logprobs, ref_logprobs, values)]
    for result, expected in zip(advantages(mask, logprobs, ref_logprobs, values), advantages(own[0] == own[0], *own)):
        assert torch.equal(result[mask].view(2, 4), expected) and not result[~mask].any()


def test_gae_of_completions_without_tokens():
    empty = torch.zeros(2, 0)
    assert all(out.shape == (2, 0) for out in ppo.gae(empty, empty, empty.bool(), 1.0, 0.95))


def test_without_discounting_gae_is_return_minus_value():
    """γ = λ = 1: Â_t = Σ_{s ≥ t} r_s − V_t, and the critic's target is the sum of the rewards still to come."""
    torch.manual_seed(0)
    rewards, values = torch.randn(4, 6), torch.randn(4, 6)
    advantages, returns = ppo.gae(rewards, values, MASK, 1.0, 1.0)
    to_come = (rewards * MASK).flip(1).cumsum(1).flip(1) * MASK
    torch.testing.assert_close(returns, to_come)
    torch.testing.assert_close(advantages, (to_come - values) * MASK)


def test_whitening_by_hand():
    """1 2 | 3 6 in two completions: mean 3, squared deviations 4 1 0 9, variance 14 / 4 = 3.5. All tokens share a mean
    and a std: whitened by itself, each completion would become −1 1, and the better one would no longer stand out."""
    advantages = torch.tensor([[1.0, 2, 99], [3, 6, 99]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]]).bool()
    torch.testing.assert_close(ppo.whiten(advantages, mask),
                               torch.tensor([[-2.0, -1, 0], [0, 3, 0]]) / math.sqrt(3.5))


@pytest.mark.parametrize("value", [0.0, 0.1, -0.1, 0.3, -3.3333333, 1e6])
def test_equal_advantages_are_exactly_zero(value):
    """Also where their mean rounds (18 times 0.1, 21 times 0.3), which a std of the same size would blow up, and where
    the padding, which is 0 after `gae`, is larger than they are."""
    for mask in (MASK, torch.ones(3, 7).bool(), (torch.arange(8) < 6).expand(3, 8)):
        for padding in (value, 0.0):
            assert (ppo.whiten(torch.full(mask.shape, value).where(mask, padding), mask) == 0).all()
    assert (ppo.whiten(torch.full((1, 1), value), torch.ones(1, 1).bool()) == 0).all()   # a single token
    assert (ppo.whiten(torch.full((1, 1), value), torch.zeros(1, 1).bool()) == 0).all()  # no token at all


def test_advantages_too_small_to_be_squared_are_not_divided_by_0():
    """In float32, the square of 1e-30 is 0."""
    assert ppo.whiten(torch.tensor([[0.0, 1e-30]]), torch.ones(1, 2).bool()).isfinite().all()


# ------------------------------------------------------------------------------------------------ weights and loss

def test_weights_are_a_mean_over_all_tokens():
    """Three completions of 1, 2 and 0 tokens: 1/3 for each token. No tokens at all: 0, not NaN."""
    mask = torch.tensor([[1, 0], [1, 1], [0, 0]]).bool()
    torch.testing.assert_close(ppo.token_weights(mask, mask.sum()), torch.tensor([[1, 0], [1, 1], [0, 0]]) / 3)
    assert (ppo.token_weights(mask & False, 0) == 0).all()
    assert ppo.token_weights(torch.tensor([[True]]), 1) == 1


@pytest.mark.parametrize("value, target, loss, slope", [
    (0.1, 1.0, 0.405, -0.9),   # moved less than ε_v: ½·.9²
    (0.5, 1.0, 0.320, 0.0),    # moved too far towards the target: counts as V = .2, ½·.8², without gradient
    (-0.5, 1.0, 1.125, -1.5),  # moved too far away from the target: ½·1.5², and pushed back
    (0.5, 0.1, 0.080, 0.4)])   # overshot the target: ½·max(.4², .1²), and pushed back
def test_the_four_cases_of_value_clipping(value, target, loss, slope):
    """V_old = 0, ε_v = .2: ½ max((V − V̂)², (clip(V, −.2, .2) − V̂)²), and its derivative in V."""
    values = torch.tensor([[value]], requires_grad=True)
    result, stats = ppo.value_loss(values, torch.zeros(1, 1), torch.tensor([[target]]), torch.ones(1, 1), 0.2)
    result.backward()
    assert result.item() == pytest.approx(loss, rel=1e-5)
    assert values.grad.item() == pytest.approx(slope, rel=1e-5, abs=1e-7)
    assert stats["value_clip_fraction"] == (slope == 0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_nothing_under_the_mask_matters(garbage):
    """The whole chain: token rewards, GAE, whitening, both losses and their gradients, explained variance."""
    def run(fill):
        tensors = [torch.linspace(-3, -1, 24).view(4, 6) * k for k in (1.0, 1.1, 0.9, 0.7)]
        logprobs, old_logprobs, ref_logprobs, values = [t.where(MASK, fill) for t in tensors]
        scores = torch.tensor([1.0, -1.0, 0.5, fill])  # the last completion has no tokens
        rewards = ppo.token_rewards(scores, old_logprobs, ref_logprobs, MASK, 0.1).where(MASK, fill)
        advantages, returns = ppo.gae(rewards, values, MASK, 1.0, 0.95)
        weights = ppo.token_weights(MASK, MASK.sum())
        white = ppo.whiten(advantages.where(MASK, fill), MASK)
        logprobs, new_values = logprobs.requires_grad_(), (values * 1.5).requires_grad_()
        policy_loss, policy_stats = ppo.ppo_loss(logprobs, old_logprobs, white.where(MASK, fill), weights, 0.2)
        critic_loss, critic_stats = ppo.value_loss(new_values, values, returns.where(MASK, fill), weights, 0.2)
        (policy_loss + critic_loss).backward()
        explained = torch.tensor(ppo.explained_variance(values, returns.where(MASK, fill), MASK))
        return (advantages, returns, white, policy_loss.detach(), critic_loss.detach(), logprobs.grad, new_values.grad,
                explained, *policy_stats.values(), *critic_stats.values())

    for clean, dirty in zip(run(0.0), run(garbage)):
        assert clean.isfinite().all() and torch.equal(clean, dirty)


def test_gradients_flow_into_the_log_probs_and_the_values_alone():
    tensors = [torch.randn(3, 5, requires_grad=True) for _ in range(6)]
    ppo.ppo_loss(*tensors[:3], torch.rand(3, 5), 0.2)[0].backward()
    ppo.value_loss(*tensors[3:], torch.rand(3, 5), 0.2)[0].backward()
    assert tensors[0].grad.any() and tensors[3].grad.any()
    assert all(tensors[i].grad is None for i in (1, 2, 4, 5))


def test_explained_variance_by_hand():
    """Returns 1 2 3, of variance 2/3."""
    returns, mask = torch.tensor([[1.0, 2, 3, 9]]), torch.tensor([[1, 1, 1, 0]]).bool()
    for values, expected in (
            ([1.0, 2, 3, 0], 1),    # perfect
            ([3.0, 4, 5, 0], 1),    # off by a constant
            ([7.0, 7, 7, 0], 0),    # a constant
            ([3.0, 2, 1, 0], -3)):  # the wrong way round: errors −2 0 2, of variance 8/3, so 1 − 4
        assert ppo.explained_variance(torch.tensor([values]), returns, mask) == pytest.approx(expected, abs=1e-6)
    assert ppo.explained_variance(returns, torch.ones(1, 4), mask) == 0.0  # the returns are all equal
    rounded = torch.ones(1, 4) + torch.tensor([0, 1e-7, 0, 0])
    assert ppo.explained_variance(returns, rounded, mask) == 0.0  # but for rounding
    for large in ([1e3, -1e3, 1e3, 0], [-1e3] * 4):  # returns are advantages plus these, and round like them
        assert ppo.explained_variance(torch.tensor([large]), torch.tensor([[0, 1e-4, 0, 0]]), mask) == 0.0
    for scaled in (returns * 1e-6, 1 + returns * 1e-4):  # small differences that are no rounding
        assert ppo.explained_variance(scaled, scaled, mask) == 1.0


def test_the_kl_controller_by_hand():
    """Target 6: at 6.6, e = .1 and β grows by 1%; however far the KL is from the target, β moves by 2% at most."""
    assert ppo.adapted_kl_coef(0.2, 6.6, 6.0) == pytest.approx(0.2 * 1.01)
    assert ppo.adapted_kl_coef(0.2, 600.0, 6.0) == pytest.approx(0.2 * 1.02)
    assert ppo.adapted_kl_coef(0.2, -5.0, 6.0) == pytest.approx(0.2 * 0.98)
    assert ppo.adapted_kl_coef(0.2, 6.0, 6.0) == 0.2


def test_the_kl_controller_gets_nats_per_completion(tmp_path, monkeypatch):
    """The log has the mean per token: times the mean length, that is the mean per completion."""
    given, adapt = [], ppo.adapted_kl_coef
    monkeypatch.setattr(ppo, "adapted_kl_coef", lambda coef, kl, target: given.append(kl) or adapt(coef, kl, target))
    run_script("ppo.py", "--steps", 2, "--prompts_per_step", 8, "--kl_target", 3, "--lr", 1e-3,
               "--output_dir", tmp_path / "run", *on_few_problems(tmp_path))
    logged = [m["kl"] * m["completion_length"] for m in read_metrics(tmp_path / "run")[1:]]
    assert given == pytest.approx(logged, rel=1e-4, abs=1e-6) and abs(given[1]) > 0.05


# ------------------------------------------------------------------------------------------------------ the critic

@pytest.mark.parametrize("architecture", ["Qwen2", "Llama", "GPT2", "Mistral"])
def test_the_value_of_a_token_is_that_of_the_state_before_it(architecture):
    """V_t is the head's output on the prefix that ends at token t − 1; here, each prefix is read without padding."""
    critic, tokenizer = random_critic(architecture)
    prompts = [tokenizer.encode(text) for text in ("12+34=?", "7+8=?")]
    completions = [tokenizer.encode("2+4=6") + [tokenizer.eos_token_id], tokenizer.encode("15")]
    input_ids, attention_mask, mask = common.collate(prompts, completions, tokenizer.pad_token_id)
    T = mask.shape[1]
    values = common.token_values(critic, input_ids, attention_mask, T)
    for row, (prompt, completion) in enumerate(zip(prompts, completions)):
        for t in range(len(completion)):
            hidden = critic.base_model(torch.tensor([prompt + completion[:t]])).last_hidden_state[:, -1]
            torch.testing.assert_close(values[row, t], critic.score(hidden)[0, 0], rtol=1e-4, atol=1e-5)
    assert (values[~mask] == 0).all()

    for t in range(T):  # replacing the tokens from t on changes no value up to V_t
        changed = input_ids.clone()
        changed[:, input_ids.shape[1] - T + t:] = 9
        torch.testing.assert_close(common.token_values(critic, changed, attention_mask, T)[:, :t + 1],
                                   values[:, :t + 1], rtol=1e-5, atol=1e-6)


def test_the_critic_starts_from_the_reward_model_only_if_that_can_read_all_rows(tmp_path, policy_directory, capsys):
    """Their vocabularies must be the same, and its context (256 here) not shorter than a prompt and its completion."""
    save_reward_model(tmp_path / "rm")
    tokenizer = common.load_tokenizer(str(tmp_path / "rm"))
    cfg = reward_config(tmp_path / "rm", policy_directory)
    assert ppo.load_value_model(cfg, torch.device("cpu"), tokenizer).config.model_type == "llama"
    for allowed, policy_context, start in ((216, 1000, "llama"), (217, 256, "llama"), (217, 257, "qwen2")):
        cfg.max_new_tokens, tokenizer.model_max_length = allowed, policy_context  # beside prompts of up to 40 tokens
        assert ppo.load_value_model(cfg, torch.device("cpu"), tokenizer).config.model_type == start
    assert "fewer than 257 tokens" in capsys.readouterr().err
    ids = tokenizer.get_vocab()
    swapped = SimpleNamespace(  # as many, but not the same
        get_vocab=lambda: ids | {"1": ids["2"], "2": ids["1"]}, model_max_length=100)
    assert ppo.load_value_model(cfg, torch.device("cpu"), swapped).config.model_type == "qwen2"
    tokenizer.add_tokens("a new one")
    assert ppo.load_value_model(cfg, torch.device("cpu"), tokenizer).config.model_type == "qwen2"


def test_all_that_is_loaded_may_bring_its_own_code_if_the_flag_says_so(tmp_path, policy_directory, monkeypatch):
    """--trust_remote_code is for the policy, the reference, the reward model and the critic that starts from it."""
    save_reward_model(tmp_path / "rm")
    cfg, device = reward_config(tmp_path / "rm", policy_directory, trust_remote_code=True), torch.device("cpu")
    asked = []

    def recorded(load):
        def call(name, *args, trust_remote_code=False, **kwargs):
            asked.append((Path(name).name, trust_remote_code))
            return load(name, *args, **kwargs)
        return call
    for part in (common.AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification):
        monkeypatch.setattr(part, "from_pretrained", recorded(part.from_pretrained))
    monkeypatch.setattr(common, "get_tokenizer_config", recorded(common.get_tokenizer_config))
    _, tokenizer = common.load_policy(cfg, device)
    common.load_reference(cfg, device)
    common.load_reward(cfg)
    ppo.load_value_model(cfg, device, tokenizer)
    assert set(asked) == {("policy", True), ("rm", True)}


def test_the_critic_starts_at_zero_from_the_policy(tmp_path):
    policy, tokenizer = random_model("Qwen2")
    save(tmp_path, policy, tokenizer)
    random_state = torch.get_rng_state()
    cfg = SimpleNamespace(model=str(tmp_path), reward="verifier", data="arithmetic", trust_remote_code=False)
    critic = ppo.load_value_model(cfg, torch.device("cpu"), tokenizer)
    # Only one rank reads the weights: if loading drew random numbers, the ranks would diverge.
    assert torch.equal(random_state, torch.get_rng_state())
    ids = torch.tensor([[3, 9, 10, 11]])
    assert (common.token_values(critic, ids, torch.ones_like(ids), 3) == 0).all()
    torch.testing.assert_close(critic.base_model(ids)[0], policy.base_model(ids)[0])
    assert all(parameter.requires_grad for parameter in critic.parameters())


def test_the_expected_gradient_is_that_of_the_score_less_the_kl():
    """−∇(E[score] − β·KL(π‖π_ref)), exactly: over all completions, by their probability, with γ = λ = 1, before
    whitening, and whatever the critic says.

    A vocabulary of three and two tokens allow seven completions: EOS (token 1) alone, or another token and any second.
    """
    (policy, _), (reference, _) = (random_model("Qwen2", seed, vocab_size=3) for seed in (0, 1))
    completions = [[1], *([first, second] for first in (0, 2) for second in (0, 1, 2))]
    input_ids, attention_mask, mask = common.collate([[2, 0]] * 7, completions, 0)
    torch.manual_seed(0)
    scores, values = torch.randn(7), torch.tensor([[5.0, 0], *[[5.0, 2]] * 3, *[[5.0, -3]] * 3])
    with torch.no_grad():
        ref_logprobs, _ = common.token_logprobs(reference, input_ids, attention_mask, 2)

    def by_enumeration():
        logprobs, _ = common.token_logprobs(policy, input_ids, attention_mask, 2)
        old_logprobs = logprobs.detach()
        rewards = ppo.token_rewards(scores, old_logprobs, ref_logprobs, mask, 0.3)
        advantages, _ = ppo.gae(rewards, values, mask, 1.0, 1.0)
        weights = mask * old_logprobs.sum(1, keepdim=True).exp()
        ppo.ppo_loss(logprobs, old_logprobs, advantages, weights, 0.2)[0].backward()

    def by_definition():
        logprobs = common.token_logprobs(policy, input_ids, attention_mask, 2)[0].sum(1)
        kl = (logprobs.exp() * (logprobs - ref_logprobs.sum(1))).sum()
        (0.3 * kl - (logprobs.exp() * scores).sum()).backward()

    assert_same_gradient([policy], by_enumeration, by_definition, atol=1e-6)


@pytest.mark.parametrize("max_tokens", [1, 60, 200, 100_000])
def test_any_micro_batch_size_gives_the_same_gradients(max_tokens):
    """Compared with the definition, for policy and critic: each completion on its own, one mean over all tokens."""
    policy, tokenizer = random_model("Qwen2")
    critic, _ = random_critic()
    torch.manual_seed(0)
    rollout = common.sample(policy, tokenizer, ["1+1=?", "12+34=?", "5+60=?"] * 4, 1, 20)
    shape = rollout.mask.shape
    advantages, returns, old_values = torch.randn(shape), torch.randn(shape), torch.randn(shape)
    weights = ppo.token_weights(rollout.mask, rollout.mask.sum())

    def in_micro_batches():
        for rows, input_ids, attention_mask, T in common.micro_batches(rollout, range(12), max_tokens):
            logprobs, _ = common.token_logprobs(policy, input_ids, attention_mask, T)
            ppo.ppo_loss(logprobs, logprobs.detach(), advantages[rows, :T], weights[rows, :T], 0.2)[0].backward()
            values = common.token_values(critic, input_ids, attention_mask, T)
            ppo.value_loss(values, old_values[rows, :T], returns[rows, :T], weights[rows, :T], 0.2)[0].backward()

    def by_definition():
        total = int(rollout.mask.sum())
        for i in range(12):
            logprobs, values = plain_logprobs(policy, rollout, i), plain_values(critic, rollout, i)
            n = len(values)
            (-(logprobs * advantages[i, :n]).sum() / total).backward()  # at ρ = 1, the gradient of eq. 7
            old, target = old_values[i, :n], returns[i, :n]
            clipped = old + (values - old).clamp(-0.2, 0.2)
            (torch.max((values - target) ** 2, (clipped - target) ** 2).sum() / 2 / total).backward()

    assert_same_gradient([policy, critic], in_micro_batches, by_definition)


# -------------------------------------------------------------------------------------------------- reward models

def save_reward_model(directory, shift=0.0, size=1.0):
    model, tokenizer = random_critic("Llama")
    model.config.reward_shift = shift
    model.score.weight.data *= size
    save(directory, model, tokenizer)
    return model


def reward_config(directory, policy_directory, **changes):
    return SimpleNamespace(**{**dict(model=str(policy_directory), reward=str(directory), data="arithmetic",
                                     trust_remote_code=False, system_prompt="", micro_batch_tokens=80,
                                     format_reward=0.0, max_prompt_tokens=40, max_new_tokens=20), **changes})


@pytest.fixture
def policy_directory(tmp_path):
    policy, tokenizer = random_model("Qwen2", seed=1)
    save(tmp_path / "policy", policy, tokenizer)
    return tmp_path / "policy"


def problems_and_rollout(policy_directory):
    policy = AutoModelForCausalLM.from_pretrained(policy_directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(policy_directory)
    rows = [{"prompt": "1+1=?", "answer": "2"}, {"prompt": "12+34=?", "answer": "46"}]
    problems = [common.Problem(row["prompt"], tokenizer.encode(row["prompt"]), row["answer"], row) for row in rows]
    torch.manual_seed(0)
    return problems, common.sample(policy, tokenizer, [p.prompt_ids for p in problems], 4, 12)


@pytest.mark.parametrize("end", [common.tiny_tokenizer().eos_token_id, 9])
def test_a_reward_model_reads_the_sampled_tokens_at_their_end(end, tmp_path, policy_directory, monkeypatch):
    """The reward is its score of each row without padding, minus the config's shift. It is read at `turn_end`, with
    which all answers end that the model has learned from; one that was cut, or ended with another token, gets it in
    place of its last one."""
    monkeypatch.setattr(common, "answer_form", lambda tokenizer: ("", "", [end]))
    model = save_reward_model(tmp_path / "rm", shift=1.0)
    problems, rollout = problems_and_rollout(policy_directory)
    assert rollout.finished.any() and not rollout.finished.all()
    other_end = rollout.finished.nonzero()[0, 0]
    last = rollout.attention_mask[other_end].nonzero()[-1, 0]
    rollout.input_ids[other_end, last] = 5  # as if it were another end
    for name in ("input_ids", "attention_mask", "mask"):  # so that none reaches the last column
        setattr(rollout, name, torch.nn.functional.pad(getattr(rollout, name), (0, 1)))
    rewards, correct = common.load_reward(reward_config(tmp_path / "rm", policy_directory))(problems, rollout)
    assert rewards.shape == correct.shape == (2, 4) and not correct.any()
    for i in range(8):
        ids = rollout.input_ids[i][rollout.attention_mask[i].bool()]
        ids[-1] = end
        expected = model.score(model.base_model(ids[None])[0])[0, -1, 0] - 1.0
        torch.testing.assert_close(rewards.flatten()[i], expected, rtol=1e-4, atol=1e-5)
    rollout.completions[2] = "<think>1+1=2</think><answer>2</answer>"  # as if sampled
    cfg = reward_config(tmp_path / "rm", policy_directory, format_reward=0.5)
    with_format, correct = common.load_reward(cfg)(problems, rollout)
    expected = torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(with_format - rewards, 0.5 * expected)
    assert torch.equal(correct, expected.bool())
    problems[1].answer = None  # without an answer, what is correct is what scores above 0
    rewards, correct = common.load_reward(reward_config(tmp_path / "rm", policy_directory))(problems, rollout)
    assert torch.equal(correct, torch.stack([expected[0] > 0, rewards[1] > 0])) and 0 < correct[1].sum() < 4


def test_a_score_is_of_the_prompt_too(tmp_path, policy_directory):
    """Equal completions of two prompts are no copies."""
    save_reward_model(tmp_path / "rm")
    problems, rollout = problems_and_rollout(policy_directory)
    T = rollout.mask.shape[1]
    for name in ("input_ids", "attention_mask"):
        getattr(rollout, name)[4:, -T:] = getattr(rollout, name)[:4, -T:]
    rollout.mask[4:], rollout.completions[4:] = rollout.mask[:4].clone(), rollout.completions[:4]
    rewards, _ = common.load_reward(reward_config(tmp_path / "rm", policy_directory))(problems, rollout)
    assert (rewards[0] != rewards[1]).all()


def test_what_does_not_fit_into_a_reward_models_context_is_cut(tmp_path, policy_directory, capsys):
    """As the answers were that it has learned from, with the end at the cut. A prompt that leaves no room
    loses its beginning: a run must not end for it, since --resume would meet it again."""
    model = save_reward_model(tmp_path / "rm")
    problems, rollout = problems_and_rollout(policy_directory)
    longest, config = int(rollout.attention_mask.sum(1).max()), tmp_path / "rm" / "config.json"
    saved = json.loads(config.read_text())
    for context in (longest, longest - 2):
        config.write_text(json.dumps({**saved, "max_position_embeddings": context}))
        rewards, _ = common.load_reward(reward_config(tmp_path / "rm", policy_directory))(problems, rollout)
        for ids, mask, reward in zip(rollout.input_ids, rollout.attention_mask, rewards.flatten()):
            ids = ids[mask.bool()][:context].clone()
            ids[-1] = common.tiny_tokenizer().eos_token_id
            torch.testing.assert_close(reward, model.score(model.base_model(ids[None])[0])[0, -1, 0])
    assert "sequences where its context ends" in capsys.readouterr().err
    lengths = [len(problem.prompt_ids) for problem in problems for _ in range(4)]
    assert set(lengths) == {5, 7}
    for context in (7, 8):  # 8: the prompt of 7 would leave room for the end alone
        config.write_text(json.dumps({**saved, "max_position_embeddings": context}))
        rewards, _ = common.load_reward(reward_config(tmp_path / "rm", policy_directory))(problems, rollout)
        assert len(set(rewards[1].tolist())) > 1
        for ids, mask, length, reward in zip(rollout.input_ids, rollout.attention_mask, lengths, rewards.flatten()):
            ids = ids[mask.bool()]
            start = min(len(ids) - context, length - 1) if length == 7 else 0
            ids = ids[start:start + context].clone()
            ids[-1] = common.tiny_tokenizer().eos_token_id
            torch.testing.assert_close(reward, model.score(model.base_model(ids[None])[0])[0, -1, 0])


def test_copies_of_a_completion_get_one_score(tmp_path, policy_directory, monkeypatch):
    """Though they were scored in different micro-batches, which round differently: here, by whole numbers."""
    save_reward_model(tmp_path / "rm")
    problems, rollout = problems_and_rollout(policy_directory)
    for copy in (1, 3):
        for rows in (rollout.input_ids, rollout.attention_mask, rollout.mask):
            rows[copy] = rows[0]
    monkeypatch.setattr(common, "all_scores", lambda model, batch, *_: torch.arange(float(len(batch.mask))))
    rewards, _ = common.load_reward(reward_config(tmp_path / "rm", policy_directory))(problems, rollout)
    assert rewards.tolist() == [[0, 0, 1, 0], [2, 3, 4, 5]]


def test_a_reward_model_of_another_vocabulary_reads_the_text(tmp_path, policy_directory):
    """A reward model and its tokenizer get their token ids reversed: it must now read the decoded text.

    Expected is its score of each prompt and completion, tokenized anew, with EOS. The system prompt, here "7", is that
    of the run.
    """
    model = save_reward_model(tmp_path / "rm")
    problems, rollout = problems_and_rollout(policy_directory)
    tokenizer = common.tiny_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    size = len(tokenizer)
    state["model"]["vocab"] = {token: size - 1 - i for token, i in state["model"]["vocab"].items()}
    for token in state["added_tokens"]:
        token["id"] = size - 1 - token["id"]
    reversed_ids = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), pad_token="<pad>",
                                           eos_token="<eos>", unk_token="<unk>", clean_up_tokenization_spaces=False)
    assert reversed_ids.eos_token_id == size - 1 - tokenizer.eos_token_id
    with torch.no_grad():
        table = model.base_model.embed_tokens.weight
        table.copy_(table.flip(0).clone())
    save(tmp_path / "rm", model, reversed_ids)
    cfg = reward_config(tmp_path / "rm", policy_directory, system_prompt="7")
    rewards, _ = common.load_reward(cfg)(problems, rollout)
    for i, text in enumerate(rollout.completions):
        ids = reversed_ids.encode(f"7\n\n{problems[i // 4].prompt}{text}") + [reversed_ids.eos_token_id]
        expected = model.score(model.base_model(torch.tensor([ids]))[0])[0, -1, 0]
        torch.testing.assert_close(rewards.flatten()[i], expected, rtol=1e-4, atol=1e-5)


def test_a_reward_model_with_another_template_reads_its_own(tmp_path, policy_directory):
    """It has the policy's vocabulary, but learned from conversations. The policy's prompts have no template."""
    model, tokenizer = save_reward_model(tmp_path / "rm"), common.tiny_tokenizer()
    tokenizer.chat_template = ("{% for m in messages if m['role'] == 'user' %}({{ m['content'] }}),{% endfor %}"
                               "{% if not add_generation_prompt %}{{ messages[-1]['content'] }}<eos>{% endif %}")
    save(tmp_path / "rm", model, tokenizer)
    problems, rollout = problems_and_rollout(policy_directory)
    rewards, _ = common.load_reward(reward_config(tmp_path / "rm", policy_directory, system_prompt="none"))(
        problems, rollout)
    for i, text in enumerate(rollout.completions):
        ids = tokenizer.encode(f"({problems[i // 4].prompt}),{text}") + [tokenizer.eos_token_id]
        expected = model.score(model.base_model(torch.tensor([ids]))[0])[0, -1, 0]
        torch.testing.assert_close(rewards.flatten()[i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("learned, read, warns", [
    ("", "none", False), ("", "", True), ("none", "", True), ("7", "7", False), ("7", "none", True), (None, "", False)])
def test_another_system_prompt_than_the_reward_models_is_said(learned, read, warns, tmp_path, policy_directory, capsys):
    """Empty means none to reward_model.py, but the default one to ppo.py."""
    model, tokenizer = save_reward_model(tmp_path / "rm"), common.tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    if learned is not None:
        model.config.reward_system_prompt = learned
    save(tmp_path / "rm", model, tokenizer)
    common.load_reward(reward_config(tmp_path / "rm", policy_directory, system_prompt=read))
    assert ("has learned with --system_prompt" in capsys.readouterr().err) == warns


@pytest.mark.parametrize("shift", [None, 1.0])
def test_a_reward_model_of_others_reads_all_that_its_template_writes(shift, tmp_path, policy_directory, monkeypatch):
    """ChatML and Gemma write a newline (here: a comma) behind the token that ends a turn. TRL's reward models have
    learned to judge there, at the last token of the template's text; those of reward_model.py, which have a
    `reward_shift`, at the end of the turn. Policy and reward model have the same tokenizer."""
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{{ '(' if m.role == 'user' else '' }}{{ m.content }}"
                               "{{ ')' if m.role == 'user' else '<eos>,' }}{% endfor %}")
    model = save_reward_model(tmp_path / "rm")
    if shift is None:
        del model.config.reward_shift
    else:
        model.config.reward_shift = shift
    for directory in (tmp_path / "rm", policy_directory):
        tokenizer.save_pretrained(directory)
    model.config.save_pretrained(tmp_path / "rm")
    problems, rollout = problems_and_rollout(policy_directory)
    for problem in problems:
        problem.prompt_ids = tokenizer.encode(f"({problem.prompt})")
    policy = AutoModelForCausalLM.from_pretrained(policy_directory).eval()
    rollout = common.sample(policy, tokenizer, [problem.prompt_ids for problem in problems], 4, 12)
    rewards, _ = common.load_reward(reward_config(tmp_path / "rm", policy_directory, system_prompt="none"))(
        problems, rollout)
    for i, reward in enumerate(rewards.flatten()):
        talk = [{"role": "user", "content": problems[i // 4].prompt},
                {"role": "assistant", "content": rollout.completions[i]}]
        ids = tokenizer.apply_chat_template(talk, return_dict=False)
        assert tokenizer.decode(ids[-2:]) == "<eos>,"
        if shift is not None:
            ids = ids[:-1]
        if rollout.finished[i] or shift is None:
            expected = model.score(model.base_model(torch.tensor([ids]))[0])[0, -1, 0] - (shift or 0.0)
            torch.testing.assert_close(reward, expected, rtol=1e-4, atol=1e-5)
    assert rollout.finished.any() and not rollout.finished.all()
    # Where its context ends, the turn still does.
    config = tmp_path / "rm" / "config.json"
    longest = int(rollout.attention_mask.sum(1).max())
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": longest - 3}))
    scored = []
    monkeypatch.setattr(common, "all_scores", lambda model, batch, *_: scored.append(batch) or torch.zeros(8))
    common.load_reward(reward_config(tmp_path / "rm", policy_directory, system_prompt="none"))(problems, rollout)
    lengths = scored[0].attention_mask.sum(1)
    assert lengths.max() == longest - 3
    as_text = common.retokenize(problems, rollout, tokenizer, "none", whole=shift is None)  # for another vocabulary
    for batch in (scored[0], as_text):
        for ids, mask in zip(batch.input_ids, batch.attention_mask):
            assert tokenizer.decode(ids[mask.bool()]).endswith("<eos>," if shift is None else "<eos>")


def test_scores_that_are_not_finite_are_refused(tmp_path, policy_directory, monkeypatch):
    """PPO's normalization would carry a NaN into every step to come."""
    save_reward_model(tmp_path / "rm")
    score = common.load_reward(reward_config(tmp_path / "rm", policy_directory))
    monkeypatch.setattr(common, "all_scores", lambda model, batch, *_: torch.full((len(batch.mask),), math.nan))
    with pytest.raises(common.UserError, match="--reward .*: it gives scores that are not finite"):
        score(*problems_and_rollout(policy_directory))


@pytest.mark.parametrize("normalize", [True, False])
def test_a_run_with_a_reward_model(tmp_path, normalize):
    """A Qwen2 policy with a Llama reward model and critic: accuracy still comes from the verifier.

    Normalized scores have mean 0 on the first rollout, and a resumed run keeps the same scale.
    """
    save_reward_model(tmp_path / "rm", shift=1.5)
    flags = ["--prompts_per_step", 16, "--reward", tmp_path / "rm", "--output_dir", tmp_path / "run",
             *on_few_problems(tmp_path), "--missing_eos_score", 1e9, *["--no_normalize_scores"] * (not normalize)]
    for extra in (["--steps", 1], ["--steps", 2, "--resume"]):
        run_script("ppo.py", *flags, *extra)
    _, first, second = read_metrics(tmp_path / "run")
    assert 0 < first["accuracy"] < 1 and (abs(first["reward"]) < 1e-5) == normalize
    assert 1e-4 < abs(second["reward"] - first["reward"]) < 1  # the same scale, not a new mean of 0


def test_the_format_reward_keeps_its_weight_beside_normalised_scores(tmp_path, monkeypatch):
    """Scaling the reward model's head by 100 changes nothing: the well-formed completions still get 0.5 more."""
    rewards = {}
    for size in (1.0, 100.0):
        save_reward_model(tmp_path / f"rm-{size}", size=size)
        for weight in (0.0, 0.5) if size == 1 else (0.5,):
            out = tmp_path / f"run-{size}-{weight}"
            [step] = record_run(monkeypatch, "ppo.py", out, "--steps", 1, "--prompts_per_step", 16, "--reward",
                                tmp_path / f"rm-{size}", "--format_reward", weight, "--max_new_tokens", 21,
                                "--missing_eos_score", 1e9)
            lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
            rewards[size, weight] = torch.tensor([step.metrics["reward"], *(line["reward"] for line in lines)])
    formed = torch.tensor([common.format_reward(text) for text in step.rollouts[0].completions])
    assert 0 < formed.mean() < 1
    formed = torch.tensor([formed.mean(), *formed[:4]])  # of all sixteen, and of each in samples.jsonl
    for size in (1.0, 100.0):
        torch.testing.assert_close(rewards[size, 0.5], rewards[1.0, 0.0] + 0.5 * formed, rtol=1e-3, atol=1e-4)


def test_ppo_judges_the_format_of_what_the_template_began(tmp_path, monkeypatch):
    """The template has written <think> already, so completions begin behind it."""
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}<think>"
    save(tmp_path / "base", load_tiny_model(), tokenizer)
    judged, format_reward = [], common.format_reward
    monkeypatch.setattr(common, "format_reward", lambda text: judged.append(text) or format_reward(text))
    run_script("ppo.py", "--model", tmp_path / "base", "--system_prompt", "none", "--steps", 1,
               "--prompts_per_step", 4, "--format_reward", 0.5, "--output_dir", tmp_path / "run",
               "--data", few_problems(tmp_path), "--lr", 1e-5, "--value_lr", 1e-5)
    assert len(judged) == 8  # by `score`, whose bonus has weight 0, and then by PPO
    assert all(re.match("<think>(?!<think>)", text) for text in judged)


def test_equal_scores_have_no_spread(tmp_path, monkeypatch):
    """Twelve scores of 0.1, whose std is not 0 in float32 but a rounding error: normalized, each is 0 all the same,
    and the loss is finite."""
    scores = torch.full((12, 1), 0.1)
    assert scores.std(correction=0) > 0 and (scores - scores.mean()).any()
    save_reward_model(tmp_path / "rm")
    monkeypatch.setattr(common, "load_reward", lambda cfg: lambda problems, rollout: (scores, scores > 0))
    run_script("ppo.py", "--steps", 1, "--prompts_per_step", 12, "--reward", tmp_path / "rm", "--output_dir",
               tmp_path / "run", "--missing_eos_score", 1e9, "--data", few_problems(tmp_path))
    step = read_metrics(tmp_path / "run")[1]
    assert abs(step["reward"]) < 1e-6 and math.isfinite(step["loss"])


def test_the_critic_has_the_policys_flags_but_for_its_learning_rate(tmp_path, monkeypatch):
    given, make = [], common.make_optimizer

    def start(run, data, **trained):  # instead of a run
        raise common.UserError("enough")
    monkeypatch.setattr(common, "make_optimizer", lambda model, cfg: given.append(cfg) or make(model, cfg))
    monkeypatch.setattr(common.Run, "start", start)
    run_script("ppo.py", "--value_lr", 0.5, "--freeze_layers", 0.4, "--lr_schedule", "linear", "--warmup_steps", 3,
               "--gradient_checkpointing", "--output_dir", tmp_path / "run", *on_few_problems(tmp_path), code=2)
    policy, critic = map(vars, given)
    assert critic == {**policy, "lr": 0.5}


def test_a_single_reward_teaches_the_critic(tmp_path):
    """It equals itself, but that is no lack of signal."""
    errors = run_script("ppo.py", "--steps", 1, "--prompts_per_step", 1, "--max_new_tokens", 4, "--output_dir",
                        tmp_path / "run", *on_few_problems(tmp_path))
    assert "teaches nothing" not in errors


def test_a_directory_that_is_no_reward_model_is_refused_by_name(tmp_path, policy_directory):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    for name in ("empty", "broken"):
        with pytest.raises(common.UserError, match=f"^--reward .*{name}"):
            common.load_reward(reward_config(tmp_path / name, policy_directory))
    policy, tokenizer = random_model("Llama")
    policy.config.num_labels = 2
    save(tmp_path / "two", AutoModelForSequenceClassification.from_config(policy.config), tokenizer)
    with pytest.raises(common.UserError, match="^--reward .*two: want a sequence classifier with one label"):
        common.load_reward(reward_config(tmp_path / "two", policy_directory))
    with pytest.raises(common.UserError, match="^--reward .*policy: no weights for score.weight"):
        common.load_reward(reward_config(policy_directory, policy_directory))  # it has no head
    save_reward_model(tmp_path / "larger")
    tokenizer.add_tokens(["one", "more"])  # to the tokenizer, but not to the embedding
    tokenizer.save_pretrained(tmp_path / "larger")
    with pytest.raises(common.UserError, match="^--reward .*larger: its tokenizer has ids up to 27, its embedding"):
        common.load_reward(reward_config(tmp_path / "larger", policy_directory))


def test_a_reward_model_needs_no_embedding_of_its_pad_token(tmp_path, policy_directory):
    """Many tokenizers had none, and got one; positions tell where padding is."""
    model, tokenizer = save_reward_model(tmp_path), common.tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    problems, rollout = problems_and_rollout(policy_directory)
    assert not rollout.attention_mask.all()
    rewards = []
    for rows in (26, 27):
        model.resize_token_embeddings(rows)
        save(tmp_path, model, tokenizer)
        rewards.append(common.load_reward(reward_config(tmp_path, policy_directory))(problems, rollout)[0])
    torch.testing.assert_close(*rewards)


# ---------------------------------------------------------------------------------------------------- whole runs

def test_a_whole_run_learns_and_its_model_loads(tmp_path):
    """Two steps: the first samples from the reference, with a critic that predicts 0; accuracy rises; model/ loads."""
    out = tmp_path / "run"
    run_script("ppo.py", "--steps", 2, "--prompts_per_step", 192, "--output_dir", out)
    metrics = read_metrics(out)
    assert [m["step"] for m in metrics] == list(range(3))
    first = metrics[1]
    assert first["kl"] == 0 and first["explained_variance"] == 0 and first["kl_coef"] == ppo.Config.kl_coef
    assert {"reward", "accuracy", "entropy", "loss", "lr", "grad_norm", "clip_fraction", "completion_length",
            "truncated_fraction", "seconds", "tokens_per_second", "peak_memory_mb", "value_loss", "value_lr",
            "value_grad_norm", "value_clip_fraction"} <= first.keys()
    assert metrics[0]["eval_accuracy"] <= 0.65 and metrics[2]["eval_accuracy"] >= metrics[0]["eval_accuracy"] + 0.2
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out / "model"), AutoTokenizer.from_pretrained(out / "model")
    rollout = common.sample(model, tokenizer, ["12+34=?"], 1, 40, greedy=True)
    assert rollout.completions[0].startswith("<think>") and rollout.finished.all()


@pytest.mark.parametrize("beta, gamma, lam, bonus, missing", [(0.1, 0.9, 0.8, 0.05, -0.5), (0.0, 1.0, 1.0, 0.0, None)])
def test_every_update_is_that_of_the_plain_algorithm(beta, gamma, lam, bonus, missing, tmp_path, monkeypatch):
    """PPO as RLHF uses it, written out one completion at a time.

    InstructGPT's reward (eq. 2), clip and GAE (PPO eq. 7, 11, 12), advantages whitened over each minibatch, Ziegler's
    adaptive β. Two steps, each with two minibatches and two passes.
    """
    steps = record_run(
        monkeypatch, "ppo.py", tmp_path / "run", "--steps", 2, "--prompts_per_step", 12, "--minibatches", 2,
        "--updates_per_batch", 2, "--max_new_tokens", 21, "--temperature", 0.8, "--gamma", gamma, "--lam", lam,
        "--kl_coef", beta, *["--kl_target", 3] * (beta > 0), "--entropy_coef", bonus, "--clip_eps", 0.05,
        "--value_clip_eps", 0.1, "--value_coef", 0.5, "--missing_eos_score", 1e9 if missing is None else missing,
        "--lr", 2e-4, "--value_lr", 1e-3, "--max_grad_norm", 0.5, "--micro_batch_tokens", 80)
    policy, reference = load_tiny_model(), load_tiny_model()
    critic = AutoModelForSequenceClassification.from_pretrained(
        common.build_tiny_model("arithmetic"), num_labels=1).eval()  # the policy's body, and a head of zeros
    torch.nn.init.zeros_(critic.score.weight)
    optimizer, critic_optimizer = (torch.optim.AdamW(m.parameters(), weight_decay=0.0) for m in (policy, critic))
    for step in steps:
        begin_with(step, 0, (policy, optimizer), (critic, critic_optimizer))
        [rollout], [order] = step.rollouts, step.orders
        right, finished = [float(is_right(rollout, i)) for i in range(12)], plain_finished(rollout)
        scores = [right[i] if finished[i] or missing is None else missing for i in range(12)]
        with torch.no_grad():  # log π_old, log π_ref and V_old of every token
            old = [plain_logprobs(policy, rollout, i, 0.8) for i in range(12)]
            ref = [plain_logprobs(reference, rollout, i, 0.8) for i in range(12)]
            old_values = [plain_values(critic, rollout, i) for i in range(12)]
        advantages = []
        for i in range(12):
            rewards = -beta * (old[i] - ref[i])  # InstructGPT eq. 2, spread over the tokens
            rewards[-1] += scores[i]
            values = torch.cat([old_values[i], torch.zeros(1)])  # 0 after the last token
            deltas = rewards + gamma * values[1:] - values[:-1]  # PPO eq. 12
            advantages.append(torch.stack([  # PPO eq. 11: Â_t = Σ_l (γλ)^l δ_{t+l}
                sum((gamma * lam) ** l * delta for l, delta in enumerate(deltas[t:]))
                for t in range(len(deltas))]))
        returns = [advantages[i] + old_values[i] for i in range(12)]  # V̂ = Â + V_old, with Â not whitened
        updates, value_updates, clipped, value_clipped, entropies = [], [], [], [], []
        for update, minibatch in enumerate(order.tensor_split(2) * 2):
            begin_with(step, update, (policy, optimizer), (critic, critic_optimizer))
            all_advantages = torch.cat([advantages[i] for i in minibatch])
            loss = value_loss = 0
            for i in minibatch.tolist():
                white = (advantages[i] - all_advantages.mean()) / all_advantages.std(correction=0)
                ratio = (plain_logprobs(policy, rollout, i, 0.8) - old[i]).exp()
                unclipped, bounded = ratio * white, ratio.clamp(0.95, 1.05) * white
                entropy = plain_entropies(policy, rollout, i, 0.8)
                loss = loss - (torch.min(unclipped, bounded) + bonus * entropy).sum() / len(all_advantages)  # eq. 7, 9
                values = plain_values(critic, rollout, i)
                near = values.clamp(old_values[i] - 0.1, old_values[i] + 0.1)
                errors, near_errors = (values - returns[i]) ** 2, (near - returns[i]) ** 2
                value_loss = value_loss + 0.5 * torch.max(errors, near_errors).sum() / len(all_advantages)
                clipped.append(bounded < unclipped)
                value_clipped.append(near_errors > errors)
                entropies.append(entropy.detach())
            updates.append(plain_update(optimizer, loss, 2e-4, 0.5))
            value_update = plain_update(critic_optimizer, 0.5 * value_loss, 1e-3, 0.5)
            value_updates.append(value_update | {"loss": value_loss.item()})
        for ours, plain in ((step.updates[::2], updates), (step.updates[1::2], value_updates)):
            assert ours == [pytest.approx(update, rel=2e-3, abs=1e-5) for update in plain]
        log_ratios, all_values, all_returns = torch.cat(old) - torch.cat(ref), torch.cat(old_values), torch.cat(returns)
        expected = {
            "reward": sum(scores) / 12, "accuracy": sum(right) / 12, "clip_fraction": torch.cat(clipped).float().mean(),
            "value_clip_fraction": torch.cat(value_clipped).float().mean(), "entropy": torch.cat(entropies).mean(),
            "truncated_fraction": (~finished).float().mean(),
            "explained_variance": 1 - (all_returns - all_values).var(correction=0) / all_returns.var(correction=0)}
        for name in ("loss", "grad_norm", "lr"):
            expected[f"value_{name}"] = sum(update[name] for update in value_updates) / len(value_updates)
        if beta:
            expected |= {"kl": log_ratios.mean(), "kl_per_completion": log_ratios.sum() / 12, "kl_coef": beta}
            error = log_ratios.sum() / 12 / 3 - 1  # (KL − target) / target, with a target of 3 nats per completion
            beta *= 1 + 0.1 * error.clamp(-0.2, 0.2).item()
        assert_metrics(step, updates, expected)
        assert ("kl" in step.metrics) == (beta > 0)
        assert step.metrics["tokens_per_second"] * step.metrics["seconds"] == pytest.approx(int(rollout.lengths.sum()))
    assert_same_weights(tmp_path / "run", policy)
    for name in ("clip_fraction", "value_clip_fraction"):  # both ε were small enough to clip
        assert any(step.metrics[name] > 0 for step in steps)


def test_completions_without_eos_get_their_score_and_the_kl_coefficient_survives_a_resume(tmp_path, monkeypatch):
    """Four steps in one run, and in two runs of two steps, log the same numbers. A right form lifts no score above the
    limit."""
    monkeypatch.setattr(common, "format_reward", lambda text: 1.0)
    flags = ["--prompts_per_step", 8, "--max_new_tokens", 8, "--missing_eos_score", "-2.5", "--kl_target", 0.01,
             "--format_reward", 0.5, "--updates_per_batch", 1, "--save_every", 1, "--lr", 1e-3, "--warmup_steps", 3,
             *on_few_problems(tmp_path)]
    run_script("ppo.py", "--steps", 4, "--output_dir", tmp_path / "whole", *flags)
    expected = read_metrics(tmp_path / "whole")
    assert expected[1]["reward"] == -2.5  # no completion ends within eight tokens
    coefficients = [m["kl_coef"] for m in expected[1:]]
    for name, rate in (("lr", 1e-3), ("value_lr", ppo.Config.value_lr)):  # both warm up
        assert [m[name] / rate for m in expected[1:]] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert coefficients[1] == pytest.approx(ppo.Config.kl_coef * 0.98) and len(set(coefficients)) == 4
    for steps in (2, 4):
        run_script("ppo.py", "--steps", steps, "--output_dir", tmp_path / "parts", *flags, *["--resume"] * (steps == 4))
    for a, b in itertools.zip_longest(expected, read_metrics(tmp_path / "parts")):
        for name in ("reward", "kl", "kl_coef", "loss", "lr", "value_loss", "value_lr", "explained_variance"):
            assert a.get(name) == b.get(name)


@pytest.mark.parametrize("flags, word", [
    (["--missing_eos_score", "low"], "--missing_eos_score"),
    (["--missing_eos_score", "nan"], "--missing_eos_score"),
    (["--missing_eos_score=-inf"], "--missing_eos_score"),
    (["--kl_target", 6, "--kl_coef", 0], "--kl_target"),
    (["--lam", 1.5], "--lam"),
    (["--reward", "no/such/directory"], "--reward")])
def test_mistakes_are_one_line(tmp_path, flags, word):
    errors = run_script("ppo.py", "--output_dir", tmp_path / "run", *flags, code=2)
    assert len(errors.strip().splitlines()) == 1 and word in errors


def test_the_samples_of_ppo_have_the_advantage_of_their_first_token(tmp_path):
    """γ = λ = 1, no KL, a critic of zeros: before whitening, Â of every token is the reward, 1 or 0."""
    reward = tmp_path / "reward.py"  # not by what was sampled, which another CPU rounds otherwise
    reward.write_text("def odd(prompt, completion, row): return int(row['answer']) % 2")
    run_script("ppo.py", "--steps", 1, "--prompts_per_step", 8, "--kl_coef", 0, "--lam", 1, "--reward", f"{reward}:odd",
               "--updates_per_batch", 1, "--output_dir", tmp_path / "run", *on_few_problems(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {row["reward"] for row in rows} == {0, 1}
    assert not {"kl", "kl_per_completion", "kl_coef"} & read_metrics(tmp_path / "run")[1].keys()  # of no reference
    assert all((row["advantage"] > 0) == (row["reward"] == 1) and row["advantage"] != row["reward"] for row in rows)


def test_a_reward_models_scores_are_normalised_and_then_those_without_eos_bounded(tmp_path, monkeypatch):
    """(score − mean) / std over the first rollout; then, without EOS, at most --missing_eos_score. The mean of
    the scores themselves, which can be compared with other runs, is logged too."""
    save_reward_model(tmp_path / "rm")
    [step] = record_run(
        monkeypatch, "ppo.py", tmp_path / "run", "--steps", 1, "--prompts_per_step", 16, "--max_new_tokens", 21,
        "--temperature", 1.3, "--reward", tmp_path / "rm", "--missing_eos_score", -0.5)
    [rollout], [problems] = step.rollouts, step.batches
    scores, _ = common.load_reward(ppo.Config(reward=str(tmp_path / "rm")))(problems, rollout)
    finished = plain_finished(rollout)
    normal = ((scores - scores.mean()) / scores.std(correction=0))[:, 0]
    expected = torch.tensor([score if done else min(score, -0.5) for score, done in zip(normal.tolist(), finished)])
    assert (normal[~finished] < -0.5).any() and (normal[~finished] > -0.5).any() and finished.any()
    assert step.metrics["reward"] == pytest.approx(expected.mean().item(), rel=1e-4)
    assert step.metrics["score"] == pytest.approx(scores.mean().item(), rel=1e-4)
    right = [is_right(rollout, i) for i in range(16)]  # by the verifier
    assert step.metrics["accuracy"] == pytest.approx(sum(right) / 16) != (normal > 0).float().mean().item()
