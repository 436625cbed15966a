"""PPO's equations by hand and against their definitions, its invariances, the critic, and whole runs."""
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer,
                          PreTrainedTokenizerFast)

import common
import ppo
from helpers import (assert_metrics, assert_same_weights, begin_with, few_problems, is_right, load_tiny_model,
                     plain_entropies, plain_finished, plain_logprobs, plain_update, random_model, read_metrics,
                     record_run, row_alone, run_script)

LENGTHS = [6, 3, 1, 0]  # masks that end early, and a completion without tokens
MASK = torch.arange(6) < torch.tensor(LENGTHS)[:, None]


def random_critic(architecture: str = "Qwen2", seed: int = 0):
    """A random classifier with one label, and its tokenizer."""
    policy, tokenizer = random_model(architecture, seed)
    policy.config.num_labels = 1
    critic = AutoModelForSequenceClassification.from_config(policy.config).eval()
    critic.base_model.load_state_dict(policy.base_model.state_dict())
    torch.nn.init.normal_(critic.score.weight, std=0.3)
    return critic, tokenizer


def plain_values(critic, rollout, i):
    """Values [|o_i|] of the states before the tokens of completion i, read alone."""
    ids, n = row_alone(rollout, i)
    return critic.score(critic.base_model(ids[None])[0])[0, -n - 1:-1, 0]


# ------------------------------------------------------------------------------------------- rewards per token

def test_token_rewards_by_hand():
    """β = .1: −.1·(−1 − (−2)) = −.1, then −.1·(−1 − 0) + 5 = 5.1 at the last token; a lone token has both."""
    logprobs, ref_logprobs = torch.tensor([[-1.0, -1, -9], [-3, -9, -9]]), torch.tensor([[-2.0, 0, 4], [-1, 4, 4]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    rewards = ppo.token_rewards(torch.tensor([5.0, -1.0]), logprobs, ref_logprobs, mask, 0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 5.1, 0], [-0.8, 0, 0]]))
    rewards = ppo.token_rewards(torch.tensor([5.0, -1.0]), logprobs, torch.zeros(2, 3), mask, 0.0)  # without reference
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
    """Â_t = Σ_l (γλ)^l (r_{t+l} + γ V_{t+l+1} − V_{t+l}), token by token, in Python's floats."""
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


def test_gae_of_completions_without_tokens():
    empty = torch.zeros(2, 0)
    assert all(out.shape == (2, 0) for out in ppo.gae(empty, empty, empty.bool(), 1.0, 0.95))


def test_without_discounting_gae_is_return_minus_value():
    """γ = λ = 1: Â_t = Σ_{s ≥ t} r_s − V_t, and the critic's target is the sum of the rewards to come."""
    torch.manual_seed(0)
    rewards, values = torch.randn(4, 6), torch.randn(4, 6)
    advantages, returns = ppo.gae(rewards, values, MASK, 1.0, 1.0)
    to_come = (rewards * MASK).flip(1).cumsum(1).flip(1) * MASK
    torch.testing.assert_close(returns, to_come)
    torch.testing.assert_close(advantages, (to_come - values) * MASK)


def test_whitening_by_hand():
    """1 2 3 6 over two completions: mean 3, squares 4 1 0 9, variance 3.5."""
    advantages = torch.tensor([[1.0, 2, 99], [3, 6, 99]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]]).bool()
    torch.testing.assert_close(ppo.whiten(advantages, mask),
                               torch.tensor([[-2.0, -1, 0], [0, 3, 0]]) / math.sqrt(3.5))


def test_whitening_is_over_the_whole_batch():
    """Two halves of different scale keep their difference; whitened apart, each would have mean 0 and std 1."""
    torch.manual_seed(0)
    advantages = torch.randn(4, 6) + torch.tensor([0.0, 0, 10, 10])[:, None]
    mask = torch.ones(4, 6).bool()
    white = ppo.whiten(advantages, mask)
    assert abs(white.mean()) < 1e-6 and white.std(correction=0).item() == pytest.approx(1)
    assert white[:2].mean() < -0.9 and white[2:].mean() > 0.9


@pytest.mark.parametrize("value", [0.0, 0.1, -3.3333333, 1e6])
def test_equal_advantages_are_exactly_zero(value):
    assert (ppo.whiten(torch.full((4, 6), value), MASK) == 0).all()
    assert (ppo.whiten(torch.full((1, 1), value), torch.ones(1, 1).bool()) == 0).all()  # a single token
    assert (ppo.whiten(torch.full((1, 1), value), torch.zeros(1, 1).bool()) == 0).all()  # none


# ------------------------------------------------------------------------------------------------ weights and loss

def test_weights_are_a_mean_over_all_tokens():
    """Lengths 1, 2 and 0: 1/3 each."""
    mask = torch.tensor([[1, 0], [1, 1], [0, 0]]).bool()
    torch.testing.assert_close(ppo.token_weights(mask, mask.sum()), torch.tensor([[1, 0], [1, 1], [0, 0]]) / 3)
    assert (ppo.token_weights(mask & False, 0) == 0).all()


@pytest.mark.parametrize("ratio, advantage, value, slope", [
    (1.00, 1.0, 1.00, 1.00), (1.10, 1.0, 1.10, 1.10),
    (1.35, 1.0, 1.20, 0.00),   # ε = .2 counts 1.2·Â and stops pushing up
    (0.50, 1.0, 0.50, 0.50),   # a good token that fell is pushed back up
    (0.50, -1.0, -0.80, 0.00), (1.35, -1.0, -1.35, -1.35),
    (5.00, -1.0, -5.00, -5.00), (1e6, -1.0, -1e6, -1e6)])  # no second clip hides here
def test_the_clipped_surrogate_by_hand(ratio, advantage, value, slope):
    """min(ρÂ, clip(ρ, .8, 1.2)Â), and its derivative with respect to log π: ρÂ inside, 0 where the clip is chosen."""
    logprobs = torch.tensor([[math.log(ratio) - 2.0]], requires_grad=True)
    loss, stats = ppo.ppo_loss(logprobs, torch.tensor([[-2.0]]), torch.tensor([[advantage]]), torch.ones(1, 1), 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-value, rel=1e-5)
    assert logprobs.grad.item() == pytest.approx(-slope, rel=1e-5)
    assert stats["clip_fraction"] == (slope == 0)


@pytest.mark.parametrize("value, target, loss, slope", [
    (0.1, 1.0, 0.405, -0.9),   # inside ε = .2: ½·.9²
    (0.5, 1.0, 0.320, 0.0),    # moved too far, toward the target: counted at .2, ½·.8², and not pushed
    (-0.5, 1.0, 1.125, -1.5),  # moved too far, away from the target: counted and pushed in full, ½·1.5²
    (0.5, 0.1, 0.080, 0.4)])   # overshot: ½·max(.4², .1²)
def test_the_four_cases_of_value_clipping(value, target, loss, slope):
    """½ max((V − V̂)², (clip(V, ±.2) − V̂)²) around an old value of 0, and its derivative in V."""
    values = torch.tensor([[value]], requires_grad=True)
    result, stats = ppo.value_loss(values, torch.zeros(1, 1), torch.tensor([[target]]), torch.ones(1, 1), 0.2)
    result.backward()
    assert result.item() == pytest.approx(loss, rel=1e-5)
    assert values.grad.item() == pytest.approx(slope, rel=1e-5, abs=1e-7)
    assert stats["value_clip_fraction"] == (slope == 0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_nothing_under_the_mask_matters(garbage):
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


@pytest.mark.parametrize("difference", [-5000.0, 5000.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_huge_log_ratios_stay_finite(difference, advantage):
    logprobs = torch.tensor([[difference]], requires_grad=True)
    loss, _ = ppo.ppo_loss(logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1), 0.2)
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()


def test_explained_variance_by_hand():
    """Returns 1 2 3 have variance 2/3. A perfect critic, one that is off by a constant: 1. A constant one: 0. Twice the
    deviation, the wrong way round (3 2 1): errors −2 0 2, variance 8/3, 1 − 4 = −3."""
    returns, mask = torch.tensor([[1.0, 2, 3, 9]]), torch.tensor([[1, 1, 1, 0]]).bool()
    for values, expected in (([1.0, 2, 3, 0], 1), ([3.0, 4, 5, 0], 1), ([7.0, 7, 7, 0], 0), ([3.0, 2, 1, 0], -3)):
        assert ppo.explained_variance(torch.tensor([values]), returns, mask) == pytest.approx(expected, abs=1e-6)
    assert ppo.explained_variance(returns, torch.ones(1, 4), mask) == 0.0


def test_the_kl_controller_by_hand():
    """Target 6: at 6.6 e = .1, β grows by 1%; far above or below it moves by 2% at most."""
    assert ppo.adapted_kl_coef(0.2, 6.6, 6.0) == pytest.approx(0.2 * 1.01)
    assert ppo.adapted_kl_coef(0.2, 600.0, 6.0) == pytest.approx(0.2 * 1.02)
    assert ppo.adapted_kl_coef(0.2, -5.0, 6.0) == pytest.approx(0.2 * 0.98)
    assert ppo.adapted_kl_coef(0.2, 6.0, 6.0) == 0.2


# ------------------------------------------------------------------------------------------------------ the critic

@pytest.mark.parametrize("architecture", ["Qwen2", "Llama", "GPT2", "Mistral"])
def test_the_value_of_a_token_is_that_of_the_state_before_it(architecture):
    """Against the classifier's own head on each prefix alone, without padding: V_t reads the tokens up to t − 1."""
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

    for t in range(T):  # and other tokens from t on change nothing up to t
        changed = input_ids.clone()
        changed[:, input_ids.shape[1] - T + t:] = 9
        torch.testing.assert_close(common.token_values(critic, changed, attention_mask, T)[:, :t + 1],
                                   values[:, :t + 1], rtol=1e-5, atol=1e-6)


def test_a_critic_of_another_vocabulary_is_not_taken(tmp_path, policy_directory):
    """The critic reads what the policy writes: it starts from the reward model only where both number tokens alike."""
    save_reward_model(tmp_path / "rm")
    tokenizer = common.load_tokenizer(str(tmp_path / "rm"))
    cfg = reward_config(tmp_path / "rm", policy_directory)
    assert ppo.load_value_model(cfg, torch.device("cpu"), tokenizer).config.model_type == "llama"
    tokenizer.add_tokens("a new one")
    assert ppo.load_value_model(cfg, torch.device("cpu"), tokenizer).config.model_type == "qwen2"


def test_the_critic_starts_at_zero_from_the_policy(tmp_path):
    policy, tokenizer = random_model("Qwen2")
    policy.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    random_state = torch.get_rng_state()
    cfg = SimpleNamespace(model=str(tmp_path), reward="verifier", data="arithmetic", trust_remote_code=False)
    critic = ppo.load_value_model(cfg, torch.device("cpu"), tokenizer)
    assert torch.equal(random_state, torch.get_rng_state())  # or ranks, of which one reads the weights, would part
    ids = torch.tensor([[3, 9, 10, 11]])
    assert (common.token_values(critic, ids, torch.ones_like(ids), 3) == 0).all()
    torch.testing.assert_close(critic.base_model(ids)[0], policy.base_model(ids)[0])
    assert all(parameter.requires_grad for parameter in critic.parameters())


@pytest.mark.parametrize("max_tokens", [1, 60, 200, 100_000])
def test_any_micro_batch_size_gives_the_same_gradients(max_tokens):
    """Policy and critic, against the definition: every completion alone, and one mean over the tokens of all."""
    policy, tokenizer = random_model("Qwen2")
    critic, _ = random_critic()
    torch.manual_seed(0)
    rollout = common.sample(policy, tokenizer, ["1+1=?", "12+34=?", "5+60=?"] * 4, 1, 20)
    shape = rollout.mask.shape
    advantages, returns, old_values = torch.randn(shape), torch.randn(shape), torch.randn(shape)
    weights = ppo.token_weights(rollout.mask, rollout.mask.sum())

    def gradients(add_losses):
        policy.zero_grad()
        critic.zero_grad()
        add_losses()
        return [torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
                for model in (policy, critic)]

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
            (-(logprobs * advantages[i, :n]).sum() / total).backward()
            old, target = old_values[i, :n], returns[i, :n]
            clipped = old + (values - old).clamp(-0.2, 0.2)
            (torch.max((values - target) ** 2, (clipped - target) ** 2).sum() / 2 / total).backward()

    for ours, expected in zip(gradients(in_micro_batches), gradients(by_definition)):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)


# -------------------------------------------------------------------------------------------------- reward models

def save_reward_model(directory, shift=0.0, size=1.0):
    model, tokenizer = random_critic("Llama")
    model.config.reward_shift = shift
    model.score.weight.data *= size
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def reward_config(directory, policy_directory, **changes):
    return SimpleNamespace(**{**dict(model=str(policy_directory), reward=str(directory), data="arithmetic",
                                     trust_remote_code=False, system_prompt="", micro_batch_tokens=80,
                                     format_reward=0.0), **changes})


@pytest.fixture
def policy_directory(tmp_path):
    policy, tokenizer = random_model("Qwen2", seed=1)
    policy.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def problems_and_rollout(policy_directory):
    policy = AutoModelForCausalLM.from_pretrained(policy_directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(policy_directory)
    rows = [{"prompt": "1+1=?", "answer": "2"}, {"prompt": "12+34=?", "answer": "46"}]
    problems = [common.Problem(row["prompt"], tokenizer.encode(row["prompt"]), row["answer"], row) for row in rows]
    torch.manual_seed(0)
    return problems, common.sample(policy, tokenizer, [p.prompt_ids for p in problems], 4, 12)


def test_a_reward_model_reads_the_sampled_tokens_at_the_last_of_them(tmp_path, policy_directory):
    """Its score of each row alone, EOS included where there is one, less the shift of its config."""
    model = save_reward_model(tmp_path / "rm", shift=0.25)
    problems, rollout = problems_and_rollout(policy_directory)
    assert rollout.finished.any() and not rollout.finished.all()
    rewards, correct = common.load_reward(reward_config(tmp_path / "rm", policy_directory))(problems, rollout)
    assert rewards.shape == correct.shape == (2, 4) and not correct.any()
    for i in range(8):
        ids = rollout.input_ids[i][rollout.attention_mask[i].bool()]
        expected = model.score(model.base_model(ids[None])[0])[0, -1, 0] - 0.25
        torch.testing.assert_close(rewards.flatten()[i], expected, rtol=1e-4, atol=1e-5)
    rollout.completions[2] = "<think>1+1=2</think><answer>2</answer>"  # say
    with_format, correct = common.load_reward(reward_config(
        tmp_path / "rm", policy_directory, format_reward=0.5))(problems, rollout)
    expected = torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(with_format - rewards, 0.5 * expected)
    assert torch.equal(correct, expected.bool())


def test_a_reward_model_of_another_vocabulary_reads_the_text(tmp_path, policy_directory):
    """The same model with its token ids shuffled, and its tokenizer too, scores the decoded text as the first would."""
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
    model.save_pretrained(tmp_path / "rm")
    reversed_ids.save_pretrained(tmp_path / "rm")
    rewards, _ = common.load_reward(reward_config(tmp_path / "rm", policy_directory))(problems, rollout)
    for i, (text, finished) in enumerate(zip(rollout.completions, rollout.finished)):
        ids = reversed_ids.encode(problems[i // 4].prompt + text) + [reversed_ids.eos_token_id] * bool(finished)
        expected = model.score(model.base_model(torch.tensor([ids]))[0])[0, -1, 0]
        torch.testing.assert_close(rewards.flatten()[i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_run_with_a_reward_model(tmp_path, normalize):
    """Llama as reward model and as critic, under a Qwen2 policy; accuracy is the verifier's. On the first rollout the
    normalised scores have mean 0, and a resumed run keeps their scale."""
    save_reward_model(tmp_path / "rm", shift=1.5)
    flags = ["--prompts_per_step", 16, "--reward", tmp_path / "rm", "--output_dir", tmp_path / "run", "--eval_data",
             few_problems(tmp_path), "--missing_eos_score", "none", *["--no_normalize_scores"] * (not normalize)]
    for extra in (["--steps", 1], ["--steps", 2, "--resume"]):
        done = run_script("ppo.py", *flags, *extra)
        assert done.returncode == 0, done.stderr
    _, first, second = read_metrics(tmp_path / "run")
    assert 0 < first["accuracy"] < 1 and (abs(first["reward"]) < 1e-5) == normalize
    assert 1e-4 < abs(second["reward"] - first["reward"]) < 1  # the same scale, and not a mean of its own


def test_the_format_reward_keeps_its_weight_beside_normalised_scores(tmp_path):
    """A head a hundred times as large gives the same normalised scores, and 0.5 is added to the well-formed ones."""
    rewards = {}
    for size in (1.0, 100.0):
        save_reward_model(tmp_path / f"rm-{size}", size=size)
        for weight in (0.0, 0.5):
            out = tmp_path / f"run-{size}-{weight}"
            done = run_script("ppo.py", "--steps", 1, "--prompts_per_step", 16, "--reward", tmp_path / f"rm-{size}",
                              "--output_dir", out, "--eval_data", few_problems(tmp_path), "--format_reward", weight,
                              "--max_new_tokens", 24, "--missing_eos_score", "none")
            assert done.returncode == 0, done.stderr
            lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
            rewards[size, weight] = torch.tensor([line["reward"] for line in lines])
    formed = torch.tensor([common.format_reward(line["completion"]) for line in lines])
    assert formed.any()
    for size in (1.0, 100.0):
        torch.testing.assert_close(rewards[size, 0.5], rewards[1.0, 0.0] + 0.5 * formed, rtol=1e-3, atol=1e-4)


def test_equal_scores_have_no_spread(tmp_path, monkeypatch):
    """Twelve equal scores, whose std float32 takes for 3e-8: each is worth 0, not a rounding error blown up."""
    scores = torch.full((12, 1), 0.1)
    assert scores.std(correction=0) > 0 and (scores - scores.mean()).any()
    save_reward_model(tmp_path / "rm")
    monkeypatch.setattr(common, "load_reward", lambda cfg: lambda problems, rollout: (scores, scores > 0))
    done = run_script("ppo.py", "--steps", 1, "--prompts_per_step", 12, "--reward", tmp_path / "rm", "--output_dir",
                      tmp_path / "run", "--missing_eos_score", "none", "--data", few_problems(tmp_path))
    assert done.returncode == 0, done.stderr
    assert abs(read_metrics(tmp_path / "run")[1]["reward"]) < 1e-6


def test_a_directory_that_is_no_reward_model_is_refused_by_name(tmp_path, policy_directory):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    for name in ("empty", "broken"):
        with pytest.raises(common.UserError, match=f"^--reward .*{name}"):
            common.load_reward(reward_config(tmp_path / name, policy_directory))


# ---------------------------------------------------------------------------------------------------- whole runs

def test_a_whole_run_learns_and_its_model_loads(tmp_path):
    """Two steps: step one is on-policy, the critic is there, accuracy rises, model/ is the policy alone."""
    out = tmp_path / "run"
    done = run_script("ppo.py", "--steps", 2, "--prompts_per_step", 192, "--output_dir", out)
    assert done.returncode == 0, done.stderr
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
    """PPO as RLHF uses it, one completion at a time: InstructGPT's reward (eq. 2), clip and GAE (PPO eq. 7, 11, 12),
    advantages whitened over each minibatch, Ziegler's adaptive β; two rollouts, two minibatches, two passes."""
    steps = record_run(
        monkeypatch, "ppo.py", tmp_path / "run", "--steps", 2, "--prompts_per_step", 12, "--minibatches", 2,
        "--updates_per_batch", 2, "--max_new_tokens", 21, "--temperature", 0.8, "--gamma", gamma, "--lam", lam,
        "--kl_coef", beta, *["--kl_target", 3] * (beta > 0), "--entropy_coef", bonus, "--clip_eps", 0.05,
        "--value_clip_eps", 0.1, "--value_coef", 0.5, "--missing_eos_score", "none" if missing is None else missing,
        "--lr", 2e-4, "--value_lr", 1e-3, "--max_grad_norm", 0.5, "--micro_batch_tokens", 80)
    policy, reference = load_tiny_model(), load_tiny_model()
    critic = AutoModelForSequenceClassification.from_pretrained(
        common.build_tiny_model("arithmetic"), num_labels=1).eval()  # the policy's body, a head of zeros
    torch.nn.init.zeros_(critic.score.weight)
    optimizer, critic_optimizer = (torch.optim.AdamW(m.parameters(), weight_decay=0.0) for m in (policy, critic))
    for step in steps:
        begin_with(step, (policy, optimizer), (critic, critic_optimizer))
        [rollout], [order] = step.rollouts, step.orders
        right, finished = [float(is_right(rollout, i)) for i in range(12)], plain_finished(rollout)
        scores = [right[i] if finished[i] or missing is None else missing for i in range(12)]
        with torch.no_grad():  # π_old, π_ref and V_old of every token
            old = [plain_logprobs(policy, rollout, i, 0.8) for i in range(12)]
            ref = [plain_logprobs(reference, rollout, i, 0.8) for i in range(12)]
            old_values = [plain_values(critic, rollout, i) for i in range(12)]
        advantages = []
        for i in range(12):
            rewards = -beta * (old[i] - ref[i])  # InstructGPT eq. 2, a token at a time
            rewards[-1] += scores[i]
            values = torch.cat([old_values[i], torch.zeros(1)])  # after the last token: 0
            deltas = rewards + gamma * values[1:] - values[:-1]  # PPO eq. 12
            advantages.append(torch.stack([  # PPO eq. 11: Â_t = Σ_l (γλ)^l δ_{t+l}
                sum((gamma * lam) ** l * delta for l, delta in enumerate(deltas[t:])) for t in range(len(deltas))]))
        returns = [advantages[i] + old_values[i] for i in range(12)]  # what the critic learns; not whitened
        updates, value_updates, clipped, value_clipped, entropies = [], [], [], [], []
        for minibatch in order.tensor_split(2) * 2:
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
            "explained_variance": 1 - (all_returns - all_values).var(correction=0) / all_returns.var(correction=0)}
        for name in ("loss", "grad_norm", "lr"):
            expected[f"value_{name}"] = sum(update[name] for update in value_updates) / len(value_updates)
        if beta:
            expected |= {"kl": log_ratios.mean(), "kl_coef": beta}
            error = log_ratios.sum() / 12 / 3 - 1  # of the target, 3 nats per completion
            beta *= 1 + 0.1 * error.clamp(-0.2, 0.2).item()
        assert_metrics(step, updates, expected)
        assert ("kl" in step.metrics) == (beta > 0)
    assert_same_weights(tmp_path / "run", policy)
    for name in ("clip_fraction", "value_clip_fraction"):  # both ε are small enough to matter
        assert any(step.metrics[name] > 0 for step in steps)


def test_completions_without_eos_get_their_score_and_the_kl_coefficient_survives_a_resume(tmp_path):
    flags = ["--prompts_per_step", 8, "--max_new_tokens", 8, "--missing_eos_score", "-2.5", "--kl_target", 0.01,
             "--updates_per_batch", 1, "--save_every", 1, "--lr", 1e-3, "--eval_data", few_problems(tmp_path)]
    whole = run_script("ppo.py", "--steps", 4, "--output_dir", tmp_path / "whole", *flags)
    assert whole.returncode == 0, whole.stderr
    expected = read_metrics(tmp_path / "whole")
    assert expected[1]["reward"] == -2.5  # eight tokens are too few to end
    coefficients = [m["kl_coef"] for m in expected[1:]]
    assert coefficients[1] == pytest.approx(ppo.Config.kl_coef * 0.98) and len(set(coefficients)) == 4
    for steps in (2, 4):
        part = run_script("ppo.py", "--steps", steps, "--output_dir", tmp_path / "parts", *flags,
                          *["--resume"] * (steps == 4))
        assert part.returncode == 0, part.stderr
    for a, b in itertools.zip_longest(expected, read_metrics(tmp_path / "parts")):
        for name in ("reward", "kl", "kl_coef", "loss", "value_loss", "explained_variance"):
            assert a.get(name) == b.get(name)


@pytest.mark.parametrize("flags, word", [
    (["--missing_eos_score", "low"], "--missing_eos_score"), (["--missing_eos_score", "nan"], "--missing_eos_score"),
    (["--missing_eos_score=-inf"], "--missing_eos_score"), (["--kl_target", 6, "--kl_coef", 0], "--kl_target"),
    (["--lam", 1.5], "--lam"), (["--reward", "no/such/directory"], "--reward")])
def test_mistakes_are_one_line(tmp_path, flags, word):
    done = run_script("ppo.py", "--output_dir", tmp_path / "run", *flags)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and word in done.stderr


def test_equal_advantages_are_exactly_zero_for_any_count():
    """0.3 twenty-one times: their sum rounds, and 3e-8 / 1e-8 would be an advantage."""
    assert (ppo.whiten(torch.full((3, 7), 0.3), torch.ones(3, 7).bool()) == 0).all()


def save_scorer(directory, spread):
    policy, tokenizer = random_model("Llama")
    policy.config.num_labels = 1
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_config(policy.config)
    torch.nn.init.normal_(scorer.score.weight, std=spread)
    for part in (scorer, tokenizer):
        part.save_pretrained(directory)


def test_a_reward_models_scores_are_normalised_and_then_those_without_eos_bounded(tmp_path, monkeypatch):
    """(score − mean) / std over the whole first rollout; then, without EOS, at most what --missing_eos_score says."""
    save_scorer(tmp_path / "rm", 0.3)
    [step] = record_run(monkeypatch, "ppo.py", tmp_path / "run", "--steps", 1, "--prompts_per_step", 16, "--max_new_tokens", 21,
                        "--temperature", 1.3, "--reward", tmp_path / "rm", "--missing_eos_score", -0.5)
    [rollout], [problems] = step.rollouts, step.batches
    scores, _ = common.load_reward(ppo.Config(reward=str(tmp_path / "rm")))(problems, rollout)
    finished = plain_finished(rollout)
    normal = ((scores - scores.mean()) / scores.std(correction=0))[:, 0]
    expected = torch.tensor([s if whole else min(s, -0.5) for s, whole in zip(normal.tolist(), finished)])
    assert (normal[~finished] < -0.5).any() and (normal[~finished] > -0.5).any() and finished.any()
    assert step.metrics["reward"] == pytest.approx(expected.mean().item(), rel=1e-4)


def test_scores_that_are_all_equal_are_not_divided_by_0(tmp_path, monkeypatch):
    save_scorer(tmp_path / "rm", 0.0)
    [step] = record_run(monkeypatch, "ppo.py", tmp_path / "run", "--steps", 1, "--prompts_per_step", 4, "--reward", tmp_path / "rm",
                        "--missing_eos_score", "none", "--updates_per_batch", 1)
    assert step.metrics["reward"] == 0 and math.isfinite(step.metrics["loss"])
