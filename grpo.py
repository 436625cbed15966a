"""GRPO, Group Relative Policy Optimization (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300):

    maximize  1/N Σ_i 1/|o_i| Σ_t  [ min(ρ Â, clip(ρ, 1 − ε, 1 + ε) Â) − β·KL ]                          (eq. 3)
    where     ρ = π(o_{i,t}) / π_old(o_{i,t}),  Â = (R_i − mean(R)) / std(R) over the prompt's group     (section 4.1.2)
              KL = π_ref/π − log(π_ref/π) − 1                                                            (eq. 4, "k3")

There is no critic, PPO's network that predicts rewards: a completion is judged against the others of its prompt.

Without flags, the script teaches the built-in tiny model to add, on a CPU, in about a minute. README.md shows how to
train real models on your own data, on one GPU or many.

Symbols: π is the policy, π_old the one that sampled, ρ = π/π_old, π_ref the policy before training; o_i is a
completion, o_{i,t} its token t, π(o_{i,t}) that token's probability given all before it; |o_i| is the completion's
length in tokens, R_i its reward. Â > 0 makes tokens likelier, Â < 0 less likely.
Shapes: P prompts with G completions each, N = P·G completions (in the formulas: those of one update); T tokens per
completion, padded to the longest; B rows in a micro-batch, padded to the longest of these rows only.
"""
from dataclasses import dataclass

import torch

import common
from common import flag, sample, token_logprobs


@dataclass
class Config(common.RunConfig):  # RunConfig has the flags that all scripts share: --model, --data, …
    steps: int = flag(60, "training steps, each on a new rollout batch")
    prompts_per_step: int = flag(16, "P: prompts per rollout batch (GRPO's paper 1,024/64 = 16, DAPO's 512, Dr. "
                                     "GRPO's code 128)")
    group_size: int = flag(16, "G: completions per prompt (GRPO's paper 64, DAPO's 16, Dr. GRPO's code 8)")
    max_new_tokens: int = flag(40, "L_max: completions are cut off after this many tokens (GRPO's paper 1,024, DAPO's "
                                   "20,480, Dr. GRPO's code 3,000)")
    temperature: float = flag(1.0, "sampling temperature, which every log-prob uses as well")
    reward: str = flag("verifier", "verifier, FILE.py:FUNCTION called with (prompt, completion, row), or the directory "
                                   "of a reward model")
    format_reward: float = flag(0.0, "weight of the extra reward for the form <think>…</think><answer>…</answer>")
    divide_by_std: bool = flag(True, "advantage (R − mean) / std, as in the paper; --no_divide_by_std: R − mean")
    minibatches: int = flag(1, "minibatches per rollout batch, an optimizer step each (GRPO's paper 1, DAPO's 16, "
                               "Dr. GRPO's code 8)")
    updates_per_batch: int = flag(1, "μ: passes (PPO epochs) over a rollout batch, in the same minibatches (paper: 1)")
    clip_eps: float = flag(0.2, "ε: ratios are clipped to 1 ± ε (with one update per rollout, the default, all are 1)")
    kl_coef: float = flag(0.04, "β: weight of the KL to the reference; at 0, no reference is loaded (paper: 0.04)")
    lr: float = flag(1e-4, "learning rate; 1e-6 suits a real model (paper: 1e-6)")


def group_advantages(rewards: torch.Tensor, divide_by_std: bool = True) -> torch.Tensor:
    """Advantages [P, G] from rewards [P, G]: each completion is compared with its group.

    They are exactly 0 in a group whose rewards are all equal, and in a group of one.
    """
    rewards = 1.0 * rewards  # they may be bool or int
    rewards = rewards - rewards[:, :1]  # equal rewards become exactly 0; their mean might be rounded
    mean = rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True, correction=min(1, rewards.shape[1] - 1))  # sample std; 0 for a group of one
    return (rewards - mean) / (std + 1e-6) if divide_by_std else rewards - mean


def token_weights(mask: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Weights [N, T] of the tokens in the loss, from their mask (bool [N, T]); 0 outside the mask.

    num_sequences counts the completions of the whole optimizer step, over all micro-batches and ranks.
    """
    return mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / num_sequences  # 1 / (num_sequences·|o_i|)


def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, weights, clip_eps: float, kl_coef: float):
    """Eq. 3 as a loss: Σ_{i,t} w · (−min(ρ Â, clip(ρ) Â) + β·KL). Returns (loss, stats).

    All tensors are [B, T]; advantages may be [B]. Gradients flow into `logprobs` only. Where a weight is 0, the other
    tensors may hold anything, even NaN.
    """
    active = weights != 0  # `where` sets the rest to 0; multiplying NaN by a weight of 0 would not
    log_ratio = (logprobs - old_logprobs.detach()).where(active, 0.0)
    advantages = advantages.detach().reshape(len(logprobs), -1).where(active, 0.0)
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
    if kl_coef > 0:  # otherwise ref_logprobs is not read
        log_ref_ratio = (ref_logprobs.detach() - logprobs).where(active, 0.0).clamp(max=20)  # log(π_ref/π)
        # k3: never negative. Over samples of π its mean is KL(π‖π_ref), but the mean of its gradient is ∇KL(π_ref‖π).
        kl = log_ref_ratio.exp() - log_ref_ratio - 1
        loss = loss + kl_coef * (weights * kl).sum()
        stats["kl"] = common.masked_mean(kl, active)
    return loss, stats


def main(cfg: Config) -> None:
    run = common.Run(cfg)
    score = common.load_reward(cfg)
    problems, eval_problems = common.read_train_and_eval(cfg)
    policy, tokenizer = common.load_policy(cfg, run.device)
    reference = common.load_reference(cfg, run.device) if cfg.kl_coef > 0 else None  # without it, ref_logprobs is 0
    optimizer, schedule = common.make_optimizer(policy, cfg)
    eval_problems = common.encode_prompts(eval_problems, tokenizer, cfg, "--eval_data")
    data = common.Shuffled(common.encode_prompts(problems, tokenizer, cfg, "--data"), cfg.seed)

    run.start(data, policy=(policy, optimizer, schedule))  # what a checkpoint holds, and --resume restores
    if run.next_step == 0:  # step 0: evaluate before training
        run.end_step(0, common.evaluate(policy, tokenizer, eval_problems, score, cfg))

    for step in run.steps():
        meter = common.Meter()  # weighted means, over micro-batches and ranks

        # 1. Roll out: G completions for each of P prompts.
        batch = data.next(cfg.prompts_per_step)
        rollout = sample(policy, tokenizer, [problem.prompt_ids for problem in batch], cfg.group_size,
                         cfg.max_new_tokens, cfg.temperature)

        # 2. Score.
        rewards, correct = score(batch, rollout)  # [P, G] each

        # 3. Advantages: compare each completion with its group.
        advantages = group_advantages(rewards, cfg.divide_by_std).flatten()  # [N]
        common.warn_without_signal(step, teaches=advantages.any())

        # 4. Update. Weights are relative to the whole minibatch, so the gradients of its micro-batches just add up.
        minibatches = torch.randperm(len(advantages)).tensor_split(cfg.minibatches)  # shuffled row numbers
        # In update 0 the policy is still the one that sampled, so its log-probs there serve as the old ones (below).
        # By the time of the later minibatches it has changed, so their old log-probs are computed now.
        old_logprobs = common.rollout_logprobs(
            policy, rollout, minibatches[1:], cfg.micro_batch_tokens, cfg.temperature)  # [N, T]
        ref_logprobs = common.rollout_logprobs(reference, rollout, minibatches, cfg.micro_batch_tokens, cfg.temperature)

        for update, minibatch in enumerate(minibatches * cfg.updates_per_batch):  # all of them, μ times over
            weights = token_weights(rollout.mask, len(minibatch))  # [N, T]; only its rows are read
            total_loss = torch.zeros((), device=run.device)
            for rows, input_ids, attention_mask, T in common.micro_batches(rollout, minibatch, cfg.micro_batch_tokens):
                logprobs, entropy = token_logprobs(policy, input_ids, attention_mask, T, cfg.temperature)  # [B, T]
                mask = rollout.mask[rows, :T]
                if update == 0:
                    old_logprobs[rows, :T] = logprobs.detach()
                    gap = (logprobs - rollout.logprobs[rows, :T]).abs()  # nothing but rounding
                    meter.add(mask.sum(), sampler_gap=common.masked_mean(gap, mask))
                loss, stats = grpo_loss(
                    logprobs, old_logprobs[rows, :T],
                    ref_logprobs[rows, :T],
                    advantages[rows], weights[rows, :T],
                    cfg.clip_eps, cfg.kl_coef)
                loss.backward()
                total_loss += loss.detach()
                meter.add(mask.sum(), entropy=common.masked_mean(entropy, mask), **stats)
            if update == 0:  # each process has recorded its own rows
                old_logprobs[minibatch] = common.sum_over_ranks(old_logprobs[minibatch])
            meter.add(1, **run.optimizer_step(policy, optimizer, schedule, total_loss))

        # 5. Log.
        metrics = {
            "reward": rewards.mean().item(),
            "accuracy": correct.float().mean().item(),
            "zero_std_fraction": (rewards == rewards[:, :1]).all(dim=1).float().mean().item(),
            **meter.means(),
            "completion_length": rollout.lengths.float().mean().item(),
            "wrong_length": common.masked_mean(rollout.lengths, ~correct.flatten()).item(),
            "truncated_fraction": 1 - rollout.finished.float().mean().item(),
            **run.timing(rollout.lengths.sum())}

        # 6. Evaluate and save.
        run.log_samples(step, batch, rollout, rewards, advantages)  # in step 1, and when it evaluates
        if run.evaluates(step):
            metrics |= common.evaluate(policy, tokenizer, eval_problems, score, cfg)
        run.keep_model(step, policy, tokenizer)  # every --model_every steps
        run.end_step(step, metrics)
    run.finish(policy, tokenizer)


if __name__ == "__main__":
    common.launch(main, Config)
