"""Dr. GRPO, "GRPO done right" (Liu et al. 2025, arXiv:2503.20783): grpo.py with

    advantage   (R − mean) / std  →  R − mean         group_advantages: no extra weight for easy and hard questions
    weight      1 / (N·|o_i|)     →  1 / (N·L_max)    token_weights: no discount for long wrong answers
    KL          β·k3              →  none             dr_grpo_loss

No critic: a completion is judged against the other completions of its prompt.

Without flags: the tiny model learns additions on a CPU, in about a minute. README.md: real models, data, many GPUs.

Shapes: P prompts, G completions of each, N = P·G; T padded completion length; B rows of a micro-batch.
"""
from dataclasses import dataclass

import torch

import common
from common import flag, sample, token_logprobs


@dataclass
class Config(common.RunConfig):
    steps: int = flag(60, "rollout batches")
    prompts_per_step: int = flag(16, "P: prompts per rollout batch (authors' script: 128, --minibatches 8)")
    group_size: int = flag(16, "G: completions per prompt (authors' script: 8)")
    max_new_tokens: int = flag(40, "L_max: completions are cut here (authors' script: 3,000)")
    temperature: float = flag(1.0, "of sampling, and of every log-prob")
    reward: str = flag("verifier", "verifier, FILE.py:FUNCTION called with (prompt, completion, row), or the directory "
                                   "of a reward model")
    format_reward: float = flag(0.0, "weight of the reward for <think>…</think><answer>…</answer>")
    minibatches: int = flag(1, "optimizer steps per pass over the rollout batch")
    updates_per_batch: int = flag(1, "μ: passes over the rollout batch, each in the same minibatches (paper: 1)")
    clip_eps: float = flag(0.2, "ε: the ratio is clipped to 1 ± ε; with one update a rollout, the default, nothing is")
    lr: float = flag(1e-4, "learning rate: 1e-6 for a real model (paper: 1e-6)")
    warmup_steps: int = flag(0, "updates of linear warm-up, the first at rate 0")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this norm")


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """rewards [P, G] -> advantages [P, G], each completion against its group.

    Exactly 0 where all rewards of a group are equal, and for a group of one.
    """
    rewards = rewards - rewards[:, :1]  # equal rewards are 0 from here on, free of any rounding of their mean
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    return advantages


def token_weights(mask: torch.Tensor, num_sequences: int, max_new_tokens: int) -> torch.Tensor:
    """mask bool [N, T] -> [N, T], each token's weight in the loss; 0 outside the mask.

    num_sequences counts the completions of the whole optimizer step: micro-batches and ranks add up to it.
    """
    return mask / max_new_tokens / num_sequences  # 1 / (L_max·N); the paper has L_max in listing 1 alone


def dr_grpo_loss(logprobs, old_logprobs, advantages, weights, clip_eps: float):
    """Σ_{i,t} w · −min(ρ Â, clip(ρ) Â). All [B, T] but advantages [B]. -> (loss, stats).

    Gradients flow into `logprobs` alone. Where the weight is 0 nothing else matters, NaN included.
    """
    active = weights > 0
    log_ratio = (logprobs - old_logprobs.detach()).where(active, 0.0)
    advantages = advantages.detach()[:, None].where(active, 0.0)
    ratio = log_ratio.clamp(-20, 20).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    loss = -(weights * torch.min(unclipped, clipped)).sum()
    stats = {"clip_fraction": common.masked_mean((clipped < unclipped).float(), active)}
    return loss, stats


def main(cfg: Config) -> None:
    run = common.Run(cfg)
    score = common.load_reward(cfg)
    problems, eval_problems = common.read_train_and_eval(cfg)
    policy, tokenizer = common.load_policy(cfg, run.device)
    optimizer, schedule = common.make_optimizer(policy, cfg)
    eval_problems = common.encode_prompts(eval_problems, tokenizer, cfg, "--eval_data")
    data = common.Shuffled(common.encode_prompts(problems, tokenizer, cfg, "--data"), cfg.seed)

    run.start(data, policy=(policy, optimizer, schedule))
    if run.next_step == 0:
        run.end_step(0, common.evaluate(policy, tokenizer, eval_problems, score, cfg))

    for step in run.steps():
        meter = common.Meter()

        # 1. Roll out: G completions of each of P prompts.
        batch = data.next(cfg.prompts_per_step)
        rollout = sample(policy, tokenizer, [problem.prompt_ids for problem in batch], cfg.group_size,
                         cfg.max_new_tokens, cfg.temperature)

        # 2. Score.
        rewards, correct = score(batch, rollout)  # [P, G] each

        # 3. Advantages: each completion's reward against its group's.
        advantages = group_advantages(rewards).flatten()  # [N]
        common.warn_without_signal(step, advantages)

        # 4. Update: micro-batches add up to the gradient of the whole minibatch; nothing is averaged.
        minibatches = torch.randperm(len(advantages)).tensor_split(cfg.minibatches)  # row numbers, shuffled
        # The first minibatch is on-policy: its old log-probs are the new ones, which update 0 fills in (0 until then).
        old_logprobs = common.rollout_logprobs(
            policy, rollout, minibatches[1:], cfg.micro_batch_tokens, cfg.temperature)  # [N, T]

        for update, minibatch in enumerate(minibatches * cfg.updates_per_batch):
            weights = torch.zeros(rollout.mask.shape, device=run.device)  # [N, T], 0 outside the minibatch
            weights[minibatch] = token_weights(rollout.mask[minibatch], len(minibatch), cfg.max_new_tokens)
            total_loss = torch.zeros((), device=run.device)
            for rows, input_ids, attention_mask, T in common.micro_batches(rollout, minibatch, cfg.micro_batch_tokens):
                logprobs, entropy = token_logprobs(policy, input_ids, attention_mask, T, cfg.temperature)  # [B, T]
                if update == 0:
                    old_logprobs[rows, :T] = logprobs.detach()
                loss, stats = dr_grpo_loss(
                    logprobs, old_logprobs[rows, :T],
                    advantages[rows], weights[rows, :T], cfg.clip_eps)
                loss.backward()
                total_loss += loss.detach()
                mask = rollout.mask[rows, :T]
                meter.add(mask.sum(), entropy=common.masked_mean(entropy, mask), **stats)
            meter.add(1, **run.optimizer_step(policy, optimizer, schedule, total_loss))

        # 5. Log.
        metrics = {
            "reward": rewards.mean().item(), "accuracy": correct.float().mean().item(), **meter.means(),
            "completion_length": rollout.lengths.float().mean().item(),
            "wrong_length": common.masked_mean(rollout.lengths, ~correct.flatten()).item(),
            "truncated_fraction": 1 - rollout.finished.float().mean().item(),
            **run.timing(rollout.lengths.sum())}

        # 6. Evaluate and save.
        if run.evaluates(step):
            run.log_samples(step, batch, rollout, rewards, advantages)
            metrics |= common.evaluate(policy, tokenizer, eval_problems, score, cfg)
        run.end_step(step, metrics)
    run.finish(policy, tokenizer)


if __name__ == "__main__":
    common.launch(main, Config)
