"""PPO, Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347), as RLHF uses it (InstructGPT,
arXiv:2203.02155; details from "The N+ Implementation Details of RLHF with PPO", arXiv:2403.17031):

    maximize  1/Σ|o_j| Σ_{i,t}  min(ρ Â, clip(ρ, 1 − ε, 1 + ε) Â)                                 (PPO eq. 7)
    with      ρ_{i,t} = π(o_{i,t}) / π_old(o_{i,t})
              Â_{i,t} = Σ_l (γλ)^l δ_{t+l},   δ_t = r_t + γ V_{t+1} − V_t                         (PPO eq. 11, 12)
              r_{i,t} = −β·log(π_old/π_ref) at every token, + the score at the last               (InstructGPT eq. 2)
    minimize  1/Σ|o_j| Σ_{i,t}  ½ max((V − V̂)², (clip(V, V_old ± ε_v) − V̂)²),   V̂ = Â + V_old

A critic V, a network of its own, says what each token was worth; GRPO compares whole completions instead.

Without flags: the tiny model learns additions on a CPU, in about a minute. README.md: real models, data, many GPUs.
With --reward runs/reward_model/model: the same, scored by the model that reward_model.py has saved.

Shapes: N prompts with a completion each; T padded completion length; B rows of a micro-batch.
"""
import dataclasses
import math
from dataclasses import dataclass

import torch
from transformers import AutoModelForSequenceClassification

import common
from common import flag, sample, token_logprobs, token_values


@dataclass
class Config(common.RunConfig):
    steps: int = flag(15, "rollout batches")
    prompts_per_step: int = flag(256, "N: prompts per rollout batch, a completion each (N+: 512)")
    max_new_tokens: int = flag(40, "T: completions are cut here (N+: 53)")
    temperature: float = flag(1.0, "of sampling, and of every log-prob (N+: 0.7)")
    reward: str = flag("verifier", "verifier, FILE.py:FUNCTION called with (prompt, completion, row), or the directory "
                                   "of a reward model")
    format_reward: float = flag(0.0, "weight of the reward for <think>…</think><answer>…</answer>")
    normalize_scores: bool = flag(True, "a reward model's scores minus their mean over the first rollout, divided by "
                                        "their std (Ziegler et al.): β, ε_v and the next flag then fit any of them")
    missing_eos_score: str = flag("-1", "without EOS a score is at most this (N+: is -1); none: what --reward gives")
    kl_coef: float = flag(0.2, "β: weight of the KL penalty in the reward; 0 loads no reference (N+: 0.05)")
    kl_target: float = flag(0.0, "nats per completion: β is adapted to hold the KL there; 0: β stays (Ziegler: 6)")
    gamma: float = flag(1.0, "γ: discount (InstructGPT: 1)")
    lam: float = flag(0.95, "λ: of generalized advantage estimation (N+: 0.95)")
    minibatches: int = flag(1, "optimizer steps per pass over the rollout batch (N+: 1)")
    updates_per_batch: int = flag(4, "passes over the rollout batch, each in the same minibatches (N+: 4)")
    clip_eps: float = flag(0.2, "ε: the ratio is clipped to 1 ± ε (PPO: 0.2)")
    value_clip_eps: float = flag(0.2, "ε_v: the value is clipped to its old value ± ε_v (N+: 0.2)")
    value_coef: float = flag(0.1, "weight of the value loss: it scales the critic's gradient before clipping (N+: 0.1)")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus (PPO eq. 9; RLHF: 0)")
    lr: float = flag(1e-4, "learning rate: 1e-6 for a real model (N+: 3e-6)")
    value_lr: float = flag(1e-3, "learning rate of the critic: 1e-5 for a real model (N+: 3e-6)")
    warmup_steps: int = flag(0, "updates of linear warm-up, the first at rate 0")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this norm, the critic's by itself")


def token_rewards(scores: torch.Tensor, logprobs, ref_logprobs, mask, kl_coef: float) -> torch.Tensor:
    """scores [N], the rest [N, T] -> [N, T]: −β·(log π − log π_ref) at each token, + the score at the last.

    InstructGPT eq. 2 without its pretraining term, a token at a time. ref_logprobs may be None where kl_coef is 0.
    Nothing is differentiated: the KL is paid for like any reward, through the advantages.
    """
    penalty = kl_coef * (logprobs - ref_logprobs) if kl_coef > 0 else torch.zeros_like(logprobs)
    last = torch.arange(mask.shape[1], device=mask.device) == mask.sum(1, keepdim=True) - 1  # [N, T]
    return (scores[:, None].where(last, 0.0) - penalty).where(mask, 0.0)


def gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float):
    """Generalized advantage estimation: all [N, T] -> (advantages, returns), both 0 where the mask is false.

    δ_t = r_t + γ V_{t+1} − V_t,  Â_t = δ_t + γλ Â_{t+1} (PPO eq. 11, 12); the value after the last token is 0, for
    completions that were cut as well. The critic's target is Â_t + V_t, the λ-return: with γ = λ = 1 the plain sum of
    the rewards to come.
    """
    rewards, values = rewards.where(mask, 0.0), values.where(mask, 0.0)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    deltas = rewards + gamma * next_values - values
    advantages, later = torch.zeros_like(deltas), deltas.new_zeros(len(deltas))
    for t in reversed(range(deltas.shape[1])):
        later = deltas[:, t] + gamma * lam * later
        advantages[:, t] = later
    advantages = advantages.where(mask, 0.0)
    return advantages, advantages + values


def whiten(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N, T] -> [N, T]: (Â − mean) / std over all tokens of the mask, 0 elsewhere, 0 where all of them are equal.

    Give it every token of the optimizer step: per micro-batch or per rank it would be another algorithm. (The
    papers of PPO and InstructGPT do not mention it. OpenAI's baselines and lm-human-preferences whiten each minibatch,
    N+ a rank's whole rollout. Population std.)
    """
    count = mask.sum().clamp(min=1)
    centered = (advantages - advantages.where(mask, 0.0).sum() / count).where(mask, 0.0)
    scaled = centered / ((centered ** 2).sum() / count).sqrt().add(1e-8)
    equal = advantages.where(mask, -torch.inf).amax() == advantages.where(mask, torch.inf).amin()
    return scaled.masked_fill(equal, 0.0)


def token_weights(mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """mask bool [N, T] -> [N, T], each token's weight in the loss; 0 outside the mask.

    num_tokens counts the tokens of the whole optimizer step: micro-batches and ranks add up to it.
    """
    return mask / max(num_tokens, 1)  # 1 / Σ|o_j|


def ppo_loss(logprobs, old_logprobs, advantages, weights, clip_eps: float):
    """Σ_{i,t} w · (−min(ρ Â, clip(ρ) Â)), PPO eq. 7. All [B, T]. -> (loss, stats).

    Gradients flow into `logprobs` alone. Where the weight is 0 nothing else matters, NaN included.
    """
    active = weights > 0
    log_ratio = (logprobs - old_logprobs.detach()).where(active, 0.0)
    advantages = advantages.detach().where(active, 0.0)
    ratio = log_ratio.clamp(-20, 20).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    loss = -(weights * torch.min(unclipped, clipped)).sum()
    stats = {"clip_fraction": common.masked_mean((clipped < unclipped).float(), active)}
    return loss, stats


def value_loss(values, old_values, returns, weights, clip_eps: float):
    """Σ_{i,t} w · ½ max((V − V̂)², (clip(V, V_old ± ε_v) − V̂)²). All [B, T]. -> (loss, stats).

    Like the policy's clip: no gradient for moving further than ε_v away from the old value, toward the return.
    Gradients flow into `values` alone. Where the weight is 0 nothing else matters, NaN included.
    """
    active = weights > 0
    values = values.where(active, 0.0)
    old_values, returns = old_values.detach().where(active, 0.0), returns.detach().where(active, 0.0)
    unclipped = (values - returns) ** 2
    clipped = (values.clamp(old_values - clip_eps, old_values + clip_eps) - returns) ** 2
    loss = 0.5 * (weights * torch.max(unclipped, clipped)).sum()
    stats = {"value_clip_fraction": common.masked_mean((clipped > unclipped).float(), active)}
    return loss, stats


def load_value_model(cfg: Config, device, tokenizer):
    """The critic: starts from the reward model, if --reward names one with the policy's vocabulary, else the policy.

    Its head starts at 0: the first advantages are then the returns themselves, without a random head's noise. (The
    reward model's own head has seen only whole completions, and `reward_shift` is still in its scores.)
    """
    name = common.model_name(cfg)
    if common.is_reward_model(cfg.reward) and common.load_tokenizer(
            cfg.reward, cfg.trust_remote_code).get_vocab() == tokenizer.get_vocab():
        name = cfg.reward
    model = common.load_model(name, device, cls=AutoModelForSequenceClassification,
                              trust_remote_code=cfg.trust_remote_code, num_labels=1)
    torch.nn.init.zeros_(model.score.weight)
    return model


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 − Var(V̂ − V) / Var(V̂) over the tokens: 1 is a perfect critic, 0 one no better than a constant."""
    values, returns = values[mask], returns[mask]
    variance = returns.var(correction=0)
    return (1 - (returns - values).var(correction=0) / variance).item() if variance > 0 else 0.0


def adapted_kl_coef(kl_coef: float, kl: float, target: float) -> float:
    """β after a batch whose KL was `kl` nats per completion: up where above the target, down where below.

    β ← β (1 + 0.1·e), e = clip((kl − target) / target, −0.2, 0.2) (Ziegler et al. 2019, arXiv:1909.08593,
    section 2.2).
    """
    return kl_coef * (1 + 0.1 * min(max((kl - target) / target, -0.2), 0.2))


def main(cfg: Config) -> None:
    check(cfg)
    run = common.Run(cfg)
    score = common.load_reward(dataclasses.replace(cfg, format_reward=0.0))  # added to the normalized score, below
    problems, eval_problems = common.read_train_and_eval(cfg)
    policy, tokenizer = common.load_policy(cfg, run.device)
    reference = common.load_reference(cfg, run.device) if cfg.kl_coef > 0 else None
    value_model = load_value_model(cfg, run.device, tokenizer)
    optimizer, schedule = common.make_optimizer(policy, cfg)
    value_optimizer, value_schedule = common.make_optimizer(value_model, dataclasses.replace(cfg, lr=cfg.value_lr))
    eval_problems = common.encode_prompts(eval_problems, tokenizer, cfg, "--eval_data")
    data = common.Shuffled(common.encode_prompts(problems, tokenizer, cfg, "--data"), cfg.seed)

    run.extra = {"kl_coef": cfg.kl_coef, "score_mean": 0.0, "score_std": 1.0}  # --resume brings them back
    run.start(data, policy=(policy, optimizer, schedule), value=(value_model, value_optimizer, value_schedule))
    if run.next_step == 0:
        run.end_step(0, common.evaluate(policy, tokenizer, eval_problems, score, cfg))

    for step in run.steps():
        meter = common.Meter()
        kl_coef = run.extra["kl_coef"]

        # 1. Roll out: one completion of each of N prompts.
        batch = data.next(cfg.prompts_per_step)
        rollout = sample(policy, tokenizer, [problem.prompt_ids for problem in batch], 1,
                         cfg.max_new_tokens, cfg.temperature)

        # 2. Score.
        rewards, correct = score(batch, rollout)  # [N, 1] each
        if step == 1 and common.is_reward_model(cfg.reward) and cfg.normalize_scores:
            std = rewards.std(correction=0).item() if rewards.max() > rewards.min() else 1.0  # of equal ones: rounding
            run.extra |= {"score_mean": rewards.mean().item(), "score_std": std}
        rewards = (rewards - run.extra["score_mean"]) / run.extra["score_std"]
        if cfg.format_reward > 0:
            well_formed = [[common.format_reward(problem.opening + completion)]
                           for problem, completion in zip(batch, rollout.completions)]
            rewards += cfg.format_reward * torch.tensor(well_formed, device=run.device)
        if cfg.missing_eos_score != "none":
            rewards = rewards.where(rollout.finished[:, None], rewards.clamp(max=float(cfg.missing_eos_score)))

        # 3. Advantages: each token's rewards to come against the critic's values, whitened.
        minibatches = torch.randperm(len(rollout.mask)).tensor_split(cfg.minibatches)  # row numbers, shuffled
        old_logprobs = common.rollout_logprobs(
            policy, rollout, minibatches, cfg.micro_batch_tokens, cfg.temperature)  # [N, T]
        ref_logprobs = common.rollout_logprobs(reference, rollout, minibatches, cfg.micro_batch_tokens, cfg.temperature)
        old_values = common.rollout_values(value_model, rollout, minibatches, cfg.micro_batch_tokens)  # [N, T]
        advantages, returns = gae(token_rewards(rewards[:, 0], old_logprobs, ref_logprobs, rollout.mask, kl_coef),
                                  old_values, rollout.mask, cfg.gamma, cfg.lam)  # [N, T] each
        for minibatch in minibatches:
            advantages[minibatch] = whiten(advantages[minibatch], rollout.mask[minibatch])

        # 4. Update: micro-batches add up to the gradient of the whole minibatch; nothing is averaged.
        for minibatch in minibatches * cfg.updates_per_batch:
            weights = torch.zeros(rollout.mask.shape, device=run.device)  # [N, T], 0 outside the minibatch
            weights[minibatch] = token_weights(rollout.mask[minibatch], int(rollout.lengths[minibatch].sum()))
            total_loss, total_value_loss = torch.zeros(2, device=run.device)
            for rows, input_ids, attention_mask, T in common.micro_batches(rollout, minibatch, cfg.micro_batch_tokens):
                logprobs, entropy = token_logprobs(policy, input_ids, attention_mask, T, cfg.temperature)  # [B, T]
                loss, stats = ppo_loss(
                    logprobs, old_logprobs[rows, :T],
                    advantages[rows, :T], weights[rows, :T], cfg.clip_eps)
                if cfg.entropy_coef > 0:
                    loss = loss - cfg.entropy_coef * (weights[rows, :T] * entropy).sum()
                loss.backward()
                total_loss += loss.detach()

                values = token_values(value_model, input_ids, attention_mask, T)  # [B, T]
                loss, value_stats = value_loss(
                    values, old_values[rows, :T], returns[rows, :T], weights[rows, :T], cfg.value_clip_eps)
                (cfg.value_coef * loss).backward()
                total_value_loss += loss.detach()
                mask = rollout.mask[rows, :T]
                meter.add(mask.sum(), entropy=common.masked_mean(entropy, mask), **stats, **value_stats)
            meter.add(1, **run.optimizer_step(policy, optimizer, schedule, total_loss))
            of_value = run.optimizer_step(value_model, value_optimizer, value_schedule, total_value_loss)
            meter.add(1, **{f"value_{name}": value for name, value in of_value.items()})

        # 5. Log.
        metrics = {
            "reward": rewards.mean().item(), "accuracy": correct.float().mean().item(), **meter.means(),
            "explained_variance": explained_variance(old_values, returns, rollout.mask),
            "completion_length": rollout.lengths.float().mean().item(),
            "truncated_fraction": 1 - rollout.finished.float().mean().item(),
            **run.timing(rollout.lengths.sum())}
        if reference is not None:
            log_ratio = (old_logprobs - ref_logprobs).where(rollout.mask, 0.0)  # [N, T], "k1"
            metrics |= {"kl": common.masked_mean(log_ratio, rollout.mask).item(), "kl_coef": kl_coef}
            if cfg.kl_target > 0:
                run.extra["kl_coef"] = adapted_kl_coef(kl_coef, log_ratio.sum(1).mean().item(), cfg.kl_target)

        # 6. Evaluate and save.
        if run.evaluates(step):
            run.log_samples(step, batch, rollout, rewards, advantages[:, 0])
            metrics |= common.evaluate(policy, tokenizer, eval_problems, score, cfg)
        run.end_step(step, metrics)
    run.finish(policy, tokenizer)


def check(cfg: Config) -> None:
    """What the limits of single flags do not catch."""
    try:
        finite = cfg.missing_eos_score == "none" or math.isfinite(float(cfg.missing_eos_score))
    except ValueError:
        finite = False
    if not finite:
        raise common.UserError(f"--missing_eos_score {cfg.missing_eos_score}: want a number or none")
    if cfg.kl_target > 0 and cfg.kl_coef == 0:
        raise common.UserError("--kl_target: needs a --kl_coef above 0 to begin with")


if __name__ == "__main__":
    common.launch(main, Config)
