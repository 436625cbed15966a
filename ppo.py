"""PPO, Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347), as RLHF uses it (InstructGPT,
arXiv:2203.02155; details from "The N+ Implementation Details of RLHF with PPO", arXiv:2403.17031, "N+" below):

    maximize  1/Σ|o_j| Σ_{i,t}  min(ρ Â, clip(ρ, 1 − ε, 1 + ε) Â)                                 (PPO eq. 7)
    where     ρ_{i,t} = π(o_{i,t}) / π_old(o_{i,t})
              Â_{i,t} = Σ_l (γλ)^l δ_{t+l},   δ_t = r_t + γ V_{t+1} − V_t                         (PPO eq. 11, 12)
              r_{i,t} = −β·log(π_old/π_ref), plus the completion's score at its last token        (InstructGPT eq. 2)
    minimize  1/Σ|o_j| Σ_{i,t}  ½ max((V − V̂)², (clip(V, V_old ± ε_v) − V̂)²),   V̂ = Â + V_old  (N+)

The critic V is a second network: before each token, it predicts the sum of the rewards still to come. V_old, and the V
in δ, are its predictions before the rollout's first update. GRPO has no critic: it compares whole completions instead.
For the policy's loss, though not for V̂, Â is whitened (scaled to mean 0, standard deviation 1) over each minibatch.

Without flags, the script teaches the built-in tiny model to add, on a CPU, in about a minute. README.md shows how to
train real models on your own data, on one GPU or many.
With --reward runs/reward_model/model, the scores come from the model that reward_model.py has saved.

Symbols: π is the policy, π_old the one that sampled, ρ = π/π_old, π_ref the policy before training; o_i is a
completion, o_{i,t} its token t, π(o_{i,t}) that token's probability given all before it; |o_i| is the completion's
length in tokens. Â > 0 makes tokens likelier, Â < 0 less likely.
Shapes: N prompts with one completion each; T tokens per completion, padded to the longest; B rows in a micro-batch,
padded to the longest of these rows only.
"""
from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import common
from common import flag, sample, token_logprobs, token_values


@dataclass
class Config(common.RunConfig):  # RunConfig has the flags that all scripts share: --model, --data, …
    steps: int = flag(15, "training steps, each on a new rollout batch")
    prompts_per_step: int = flag(256, "N: prompts per rollout batch, one completion each (N+, arXiv:2403.17031: 512)")
    max_new_tokens: int = flag(40, "completions are cut off after this many tokens (N+: 53)")
    temperature: float = flag(1.0, "sampling temperature, which every log-prob uses as well (N+: 0.7)")
    reward: str = flag("verifier", "verifier, FILE.py:FUNCTION called with (prompt, completion, row), or the directory "
                                   "of a reward model")
    format_reward: float = flag(0.0, "weight of the extra reward for the form <think>…</think><answer>…</answer>")
    normalize_scores: bool = flag(True, "scale a reward model's scores to mean 0, std 1 on the first rollout (Ziegler "
                                        "et al.), so that β, ε_v and --missing_eos_score suit any reward model; "
                                        "--no_normalize_scores: as they are")
    missing_eos_score: float = flag(-1.0, "limit on the score of a completion without EOS (N+: always -1); 1e9: none")
    kl_coef: float = flag(0.2, "β: weight of the KL penalty in the reward; at 0, no reference is loaded (N+: 0.05)")
    kl_target: float = flag(0.0, "adapt β to keep the KL at this many nats per completion (Ziegler et al.'s code: 6); "
                                 "0: fixed β")
    gamma: float = flag(1.0, "γ: discount; a reward k tokens later counts γ^k (InstructGPT: 1)")
    lam: float = flag(0.95, "λ of GAE: 0 trusts the critic's next value, 1 only the rewards that came; 1 suits long "
                            "completions (N+: 0.95)")
    minibatches: int = flag(1, "minibatches per rollout batch, an optimizer step each (N+: 1)")
    updates_per_batch: int = flag(4, "passes (PPO epochs) over a rollout batch, in the same minibatches (N+: 4)")
    clip_eps: float = flag(0.2, "ε: ratios are clipped to 1 ± ε (PPO: 0.2)")
    value_clip_eps: float = flag(0.2, "ε_v: values are clipped to their old value ± ε_v (N+: 0.2)")
    value_coef: float = flag(0.1, "weight of the value loss; scales the critic's gradient before clipping (N+: 0.1)")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus (PPO eq. 9; RLHF goes without)")
    lr: float = flag(1e-4, "learning rate; 1e-6 suits a real model (N+: 3e-6, falling to 0: --lr_schedule linear)")
    value_lr: float = flag(1e-3, "learning rate of the critic; 1e-5 suits a real model (N+: the policy's)")


def token_rewards(scores: torch.Tensor, logprobs, ref_logprobs, mask, kl_coef: float) -> torch.Tensor:
    """Rewards [N, T] of single tokens: −β·(log π − log π_ref) at each, plus the completion's score [N] at the last.

    This is InstructGPT's eq. 2 without its pretraining term, spread over the tokens. The KL is not differentiated: it
    reaches the policy through the advantages, like any reward.
    """
    penalty = kl_coef * (logprobs - ref_logprobs)
    last = mask.cumsum(1) == mask.sum(1, keepdim=True)  # [N, T]; true after it too, where the mask is false
    return (scores.reshape(-1, 1).where(last, 0.0) - penalty).where(mask, 0.0)


def gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float):
    """Generalized advantage estimation -> (advantages, returns), both [N, T] and 0 outside the mask.

    Â_t = δ_t + γλ Â_{t+1} with δ_t = r_t + γ V_{t+1} − V_t (PPO eq. 11, 12), where t + 1 is the next token in the mask.
    The value after the last one is 0, even if the completion was cut off. The returns Â_t + V_t, which the critic
    learns, are λ-returns: for γ = λ = 1, the sum of the rewards to come.
    """
    rewards = rewards.where(mask, 0.0)
    values = values.where(mask, 0.0)
    advantages = torch.zeros_like(rewards + values)
    advantage = next_value = advantages.new_zeros(len(advantages))  # [N] each, of the next token in the mask
    for t in reversed(range(advantages.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = (delta + gamma * lam * advantage).where(mask[:, t], advantage)
        next_value = values[:, t].where(mask[:, t], next_value)
        advantages[:, t] = advantage
    advantages = advantages.where(mask, 0.0)
    return advantages, advantages + values


def whiten(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(Â − mean) / std over all tokens of the mask: [N, T] -> [N, T], 0 outside the mask, and 0 if all are equal.

    Pass all tokens of an optimizer step together: per micro-batch or per rank, it would be another algorithm. Where the
    rewards hardly differ, what is left is mostly the critic's error, and gets std 1 as well. The PPO and InstructGPT
    papers do not mention whitening. OpenAI's baselines (ppo2) and lm-human-preferences whiten each minibatch too, but
    on each rank by itself; N+ whitens each rank's whole rollout. Before GAE, lm-human-preferences (N+: optionally) also
    scales the token rewards to std 1 around their mean (`whiten_rewards`); this script does not.
    """
    count = mask.sum().clamp(min=1)
    mean = advantages.where(mask, 0.0).sum() / count
    centered = (advantages - mean).where(mask, 0.0)
    std = ((centered ** 2).sum() / count).sqrt()
    all_equal = (advantages[mask] == advantages[mask][:1]).all()  # then their std is only a rounding error
    return (centered / (std + 1e-8)).masked_fill(all_equal, 0.0)


def token_weights(mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Weights [N, T] of the tokens in the loss, from their mask (bool [N, T]); 0 outside the mask.

    num_tokens is the number of tokens in the whole optimizer step, over all micro-batches and ranks.
    """
    return mask / max(num_tokens, 1)  # 1 / Σ|o_j|


def ppo_loss(logprobs, old_logprobs, advantages, weights, clip_eps: float):
    """PPO eq. 7 as a loss: Σ_{i,t} w · −min(ρ Â, clip(ρ) Â). Returns (loss, stats).

    All tensors are [B, T]. Gradients flow into `logprobs` only. Where a weight is 0, the other tensors may hold
    anything, even NaN.
    """
    active = weights != 0  # `where` sets the rest to 0; multiplying NaN by a weight of 0 would not
    log_ratio = (logprobs - old_logprobs.detach()).where(active, 0.0)
    advantages = advantages.detach().where(active, 0.0)
    ratio = log_ratio.clamp(-20, 20).exp()  # ρ, kept finite
    # While π is still π_old, ρ = 1 and ∇ρ = ∇log π, so the gradient of the loss is −Σ w Â ∇log π: the plain policy
    # gradient (REINFORCE).
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    # The minimum takes the gradient away from a token whose ratio has left the range in the direction in which its
    # advantage pushes it. A token whose ratio has left it in the other direction keeps its gradient.
    loss = -(weights * torch.min(unclipped, clipped)).sum()
    stats = {"clip_fraction": common.masked_mean((clipped < unclipped).float(), active),
             "approx_kl": common.masked_mean(ratio - 1 - log_ratio, active)}  # an estimate of KL(π_old‖π)
    return loss, stats


def value_loss(values, old_values, returns, weights, clip_eps: float):
    """Σ_{i,t} w · ½ max((V − V̂)², (clip(V, V_old ± ε_v) − V̂)²). Returns (loss, stats).

    As with the policy's clip, a value that has moved more than ε_v towards its return gets no gradient. It gets one
    again only when it is farther beyond its return than the clipped value falls short of it.
    All tensors are [B, T]. Gradients flow into `values` only. Where a weight is 0, the other tensors may hold
    anything, even NaN.
    """
    active = weights != 0
    values = values.where(active, 0.0)
    old_values = old_values.detach().where(active, 0.0)
    returns = returns.detach().where(active, 0.0)
    unclipped = (values - returns) ** 2
    clipped = (values.clamp(old_values - clip_eps, old_values + clip_eps) - returns) ** 2
    loss = 0.5 * (weights * torch.max(unclipped, clipped)).sum()
    stats = {"value_clip_fraction": common.masked_mean((clipped > unclipped).float(), active)}
    return loss, stats


def load_value_model(cfg: Config, device, tokenizer):
    """The critic. It starts from the reward model, if --reward names one with the policy's vocabulary and a context
    that is long enough, else from the policy.

    Its head starts at zero, so that the first advantages are sums of rewards, discounted by γλ, without noise. N+ keeps
    the reward model's head instead; but that has only read whole completions, and its scores are off by `reward_shift`.
    """
    name = common.model_name(cfg)
    if common.is_reward_model(cfg.reward):
        vocabulary = common.load_tokenizer(cfg.reward, cfg.trust_remote_code).get_vocab()
        config = AutoConfig.from_pretrained(cfg.reward, trust_remote_code=cfg.trust_remote_code)
        longest = min(cfg.max_prompt_tokens + cfg.max_new_tokens, tokenizer.model_max_length)
        if vocabulary == tokenizer.get_vocab() and common.context_length(config) >= longest:
            name = cfg.reward
        else:
            common.say(f"--reward {cfg.reward}: another vocabulary than the policy's, or a context of fewer than "
                       f"{longest} tokens (--max_prompt_tokens + --max_new_tokens): the critic starts from --model")
    model = common.load_model(name, device, cls=AutoModelForSequenceClassification,
                              trust_remote_code=cfg.trust_remote_code, num_labels=1)
    torch.nn.init.zeros_(model.score.weight)
    return model


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 − Var(V̂ − V) / Var(V̂) over all tokens: 1 for a perfect critic, 0 for one no better than a constant."""
    values, returns = values[mask], returns[mask]
    variance = returns.var(correction=0)
    if variance <= (1e-6 * torch.stack([values, returns]).abs().max()) ** 2:  # equal returns, but for rounding
        return 0.0
    return (1 - (returns - values).var(correction=0) / variance).item()


def adapted_kl_coef(kl_coef: float, kl: float, target: float) -> float:
    """The next β after a rollout with a KL of `kl` nats per completion: it rises while the KL is above the target.

    β ← β (1 + 0.1·e) with e = clip((kl − target) / target, −0.2, 0.2) (Ziegler et al., arXiv:1909.08593, section 2.2).
    """
    error = min(max((kl - target) / target, -0.2), 0.2)
    return kl_coef * (1 + 0.1 * error)


def main(cfg: Config) -> None:
    run = common.Run(cfg)
    if cfg.kl_target > 0 and cfg.kl_coef == 0:
        raise common.UserError("--kl_target: needs a --kl_coef above 0 to begin with")
    score = common.load_reward(replace(cfg, format_reward=0.0))  # "2. Score" adds it
    problems, eval_problems = common.read_train_and_eval(cfg)
    policy, tokenizer = common.load_policy(cfg, run.device)
    reference = common.load_reference(cfg, run.device) if cfg.kl_coef > 0 else None  # without it, ref_logprobs is 0
    value_model = load_value_model(cfg, run.device, tokenizer)
    optimizer, schedule = common.make_optimizer(policy, cfg)
    value_optimizer, value_schedule = common.make_optimizer(value_model, replace(cfg, lr=cfg.value_lr))
    eval_problems = common.encode_prompts(eval_problems, tokenizer, cfg, "--eval_data")
    data = common.Shuffled(common.encode_prompts(problems, tokenizer, cfg, "--data"), cfg.seed)

    run.extra = {"kl_coef": cfg.kl_coef, "score_mean": 0.0, "score_std": 1.0}  # a checkpoint holds these and all below
    run.start(data, policy=(policy, optimizer, schedule), value=(value_model, value_optimizer, value_schedule))
    if run.next_step == 0:  # step 0: evaluate before training
        run.end_step(0, common.evaluate(policy, tokenizer, eval_problems, score, cfg))

    for step in run.steps():
        meter = common.Meter()  # weighted means, over micro-batches and ranks
        kl_coef = run.extra["kl_coef"]

        # 1. Roll out: one completion for each of N prompts.
        batch = data.next(cfg.prompts_per_step)
        rollout = sample(policy, tokenizer, [problem.prompt_ids for problem in batch], 1,
                         cfg.max_new_tokens, cfg.temperature)

        # 2. Score: normalize, add the format reward, and limit what a completion without EOS can score.
        rewards, correct = (scores[:, 0] for scores in score(batch, rollout))  # [N] each
        mean_score = rewards.mean().item()
        if step == 1 and cfg.normalize_scores and common.is_reward_model(cfg.reward):
            run.extra["score_mean"] = mean_score
            if rewards.max() > rewards.min():  # the std of equal scores would be a rounding error
                run.extra["score_std"] = rewards.std(correction=0).item()
        rewards = (rewards - run.extra["score_mean"]) / run.extra["score_std"]
        if cfg.format_reward > 0:
            well_formed = [common.format_reward(problem.opening + completion)
                           for problem, completion in zip(batch, rollout.completions, strict=True)]
            rewards += cfg.format_reward * torch.tensor(well_formed, device=run.device)
        rewards = rewards.where(rollout.finished, rewards.clamp(max=cfg.missing_eos_score))
        # A single reward equals itself, and still teaches the critic.
        common.warn_without_signal(step, teaches=len(batch) == 1 or (rewards != rewards[0]).any())

        # 3. Advantages: compare the rewards from each token on with the critic's prediction, and whiten.
        minibatches = torch.randperm(len(rollout.mask)).tensor_split(cfg.minibatches)  # shuffled row numbers
        old_logprobs = common.rollout_logprobs(
            policy, rollout, minibatches, cfg.micro_batch_tokens, cfg.temperature)  # [N, T]; the KL penalty needs all
        ref_logprobs = common.rollout_logprobs(reference, rollout, minibatches, cfg.micro_batch_tokens, cfg.temperature)
        old_values = common.rollout_values(value_model, rollout, minibatches, cfg.micro_batch_tokens)  # [N, T]
        shaped_rewards = token_rewards(rewards, old_logprobs, ref_logprobs, rollout.mask, kl_coef)  # [N, T]
        advantages, returns = gae(shaped_rewards, old_values, rollout.mask, cfg.gamma, cfg.lam)  # [N, T] each
        for minibatch in minibatches:
            advantages[minibatch] = whiten(advantages[minibatch], rollout.mask[minibatch])

        # 4. Update. Weights are relative to the whole minibatch, so the gradients of its micro-batches just add up.
        for minibatch in minibatches * cfg.updates_per_batch:  # all of them, so many times over
            weights = token_weights(rollout.mask, int(rollout.mask[minibatch].sum()))  # [N, T]; only its rows are read
            total_loss = torch.zeros((), device=run.device)
            total_value_loss = torch.zeros((), device=run.device)
            for rows, input_ids, attention_mask, T in common.micro_batches(rollout, minibatch, cfg.micro_batch_tokens):
                logprobs, entropy = token_logprobs(policy, input_ids, attention_mask, T, cfg.temperature)  # [B, T]
                loss, stats = ppo_loss(
                    logprobs, old_logprobs[rows, :T],
                    advantages[rows, :T], weights[rows, :T],
                    cfg.clip_eps)
                if cfg.entropy_coef > 0:
                    loss = loss - cfg.entropy_coef * (weights[rows, :T] * entropy).sum()
                loss.backward()
                total_loss += loss.detach()

                values = token_values(value_model, input_ids, attention_mask, T)  # [B, T]
                critic_loss, value_stats = value_loss(
                    values, old_values[rows, :T],
                    returns[rows, :T], weights[rows, :T],
                    cfg.value_clip_eps)
                (cfg.value_coef * critic_loss).backward()
                total_value_loss += critic_loss.detach()

                mask = rollout.mask[rows, :T]
                meter.add(mask.sum(), entropy=common.masked_mean(entropy, mask), **stats, **value_stats)
            meter.add(1, **run.optimizer_step(policy, optimizer, schedule, total_loss))
            critic_metrics = run.optimizer_step(value_model, value_optimizer, value_schedule, total_value_loss)
            meter.add(1, **{f"value_{name}": value for name, value in critic_metrics.items()})
        kl_per_completion = (old_logprobs - ref_logprobs).where(rollout.mask, 0.0).sum(dim=1).mean().item()  # in nats
        if cfg.kl_target > 0:
            run.extra["kl_coef"] = adapted_kl_coef(kl_coef, kl_per_completion, cfg.kl_target)

        # 5. Log.
        metrics = {
            "score": mean_score,
            "reward": rewards.mean().item(),
            "accuracy": correct.float().mean().item(),
            **meter.means(),
            "explained_variance": explained_variance(old_values, returns, rollout.mask),
            "sampler_gap": common.masked_mean((old_logprobs - rollout.logprobs).abs(), rollout.mask).item(),
            "completion_length": rollout.lengths.float().mean().item(),
            "truncated_fraction": 1 - rollout.finished.float().mean().item(),
            **run.timing(rollout.lengths.sum())}
        if reference is not None:
            kl = common.masked_mean(old_logprobs - ref_logprobs, rollout.mask)  # nats per token
            metrics |= {"kl": kl.item(), "kl_per_completion": kl_per_completion, "kl_coef": kl_coef}

        # 6. Evaluate and save.
        run.log_samples(step, batch, rollout, rewards[:, None], advantages[:, 0])  # in step 1, and when it evaluates
        if run.evaluates(step):
            metrics |= common.evaluate(policy, tokenizer, eval_problems, score, cfg)
        run.keep_model(step, policy, tokenizer)  # every --model_every steps
        run.end_step(step, metrics)
    run.finish(policy, tokenizer)


if __name__ == "__main__":
    common.launch(main, Config)
