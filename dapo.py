"""DAPO, Decoupled Clip and Dynamic sAmpling Policy Optimization (Yu et al. 2025, arXiv:2503.14476): grpo.py with

    clip     1 ± ε          →  1 − ε_low, 1 + ε_high        dapo_loss               (eq. 10)
    groups   all            →  those with 0 < correct < G   dynamic_sampling        (eq. 11)
    weight   1 / (N·|o_i|)  →  1 / Σ|o_j|                   token_weights           (eq. 12)
    reward   R              →  R + length penalty           soft_overlong_penalty   (eq. 13)
    reward   1 or 0         →  1 or −1                      load_reward             (eq. 7)
    KL       β·k3           →  none                         dapo_loss               (section 2.3)

To switch one off: --clip_high 0.2, --no_dynamic_sampling, --loss_average sequence, --overlong_buffer 0. As in grpo.py
the default is one update a rollout, where ρ = 1 and no clip acts: the paper makes 16 (--minibatches 16).

Without flags: the tiny model learns additions on a CPU, in about a minute. README.md: real models, data, many GPUs.

Shapes: P prompts, G completions of each, N = P·G; T padded completion length; B rows of a micro-batch.
"""
import math
from dataclasses import dataclass
from typing import Literal

import torch

import common
from common import flag, sample, token_logprobs


@dataclass
class Config(common.RunConfig):
    steps: int = flag(60, "rollout batches")
    prompts_per_step: int = flag(16, "P: prompts per rollout batch (paper: 512)")
    group_size: int = flag(16, "G: completions per prompt (paper: 16)")
    max_new_tokens: int = flag(40, "T: completions are cut here (paper: 20,480)")
    temperature: float = flag(1.0, "of sampling, and of every log-prob")
    reward: str = flag("verifier", "verifier, FILE.py:FUNCTION called with (prompt, completion, row), or the directory "
                                   "of a reward model")
    format_reward: float = flag(0.0, "weight of the reward for <think>…</think><answer>…</answer>")
    dynamic_sampling: bool = flag(True, "sample until there are P groups with 0 < correct < G")
    max_generation_batches: int = flag(10, "at most so many rollouts a step; then it trains on the groups it has")
    overlong_buffer: int = flag(8, "tokens before max_new_tokens that cost up to 1 in all (paper: 4,096); 0: off")
    overlong_filtering: bool = flag(False, "truncated completions get no loss; they still count in their group")
    loss_average: Literal["token", "prompt", "sequence"] = flag("token", "see token_weights")
    minibatches: int = flag(1, "optimizer steps per pass over the rollout batch")
    updates_per_batch: int = flag(1, "μ: passes over the rollout batch, each in the same minibatches (paper: 1)")
    clip_low: float = flag(0.2, "ε_low: the ratio is clipped to 1 − ε_low at least")
    clip_high: float = flag(0.28, "ε_high: and to 1 + ε_high at most")
    lr: float = flag(1e-4, "learning rate: 1e-6 for a real model (paper: 1e-6)")
    warmup_steps: int = flag(0, "updates of linear warm-up, the first at rate 0")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this norm")


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """rewards [P, G] -> advantages [P, G], each completion against its group.

    Exactly 0 where all rewards of a group are equal, and for a group of one.
    """
    rewards = rewards - rewards[:, :1]  # equal rewards are 0 from here on, free of any rounding of their mean
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = advantages / (rewards.std(dim=1, keepdim=True, correction=min(1, rewards.shape[1] - 1)) + 1e-6)
    return advantages


def soft_overlong_penalty(lengths: torch.Tensor, max_new_tokens: int, buffer: int) -> torch.Tensor:
    """lengths [N] -> [N]: 0 up to max_new_tokens − buffer, then linearly down to −1 at max_new_tokens (eq. 13)."""
    return ((max_new_tokens - buffer - lengths) / max(buffer, 1)).clamp(-1, 0)


def informative_groups(correct: torch.Tensor) -> torch.Tensor:
    """correct bool [P, G] -> bool [P]: 0 < Σ correct < G (eq. 11). The others could teach length alone."""
    return correct.any(dim=1) & ~correct.all(dim=1)


def dynamic_sampling(roll_out, num_prompts: int, max_generation_batches: int):
    """Roll out until `num_prompts` groups are informative, at most `max_generation_batches` times.

    roll_out(P) -> (batch, rollout, rewards [P, G], correct [P, G]). Returns the list of these and the numbers of the
    groups to train on, counted through the list, at most `num_prompts`. After the first time it asks for as many
    prompts as the share kept so far makes necessary. Groups beyond num_prompts are lost: after the update they would
    no longer be on-policy.
    """
    drawn, wanted = [], num_prompts
    for _ in range(max_generation_batches):
        drawn.append(roll_out(wanted))
        informative = torch.cat([informative_groups(correct) for *_, correct in drawn])
        missing = num_prompts - int(informative.sum())
        if missing <= 0:
            break
        kept_share = max(int(informative.sum()), 1) / len(informative)
        wanted = min(num_prompts, math.ceil(missing / kept_share))
    return drawn, informative.nonzero()[:num_prompts, 0].cpu()


def token_weights(mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """mask bool [N, T] -> [N, T], each token's weight in the loss; 0 outside the mask.

    num_tokens counts the tokens of the whole optimizer step: micro-batches and ranks add up to it. Eq. 12 averages
    over the tokens of one prompt's group, then over prompts (`unit_token_weights`). The authors' own code weighs
    all tokens of the step alike, and so does this one.
    """
    return mask / max(num_tokens, 1)  # 1 / Σ|o_j|


def unit_token_weights(mask: torch.Tensor, unit_of: torch.Tensor) -> torch.Tensor:
    """--loss_average prompt or sequence: mean over the tokens of a unit, then over units, numbered in unit_of [N]."""
    units, unit_of = unit_of.unique(return_inverse=True)
    num_tokens = torch.zeros(len(units)).index_add(0, unit_of, mask.sum(dim=1).float().cpu()).to(mask.device)
    return mask / num_tokens[unit_of, None].clamp(min=1) / len(units)


def dapo_loss(logprobs, old_logprobs, advantages, weights, clip_low: float, clip_high: float):
    """Σ_{i,t} w · −min(ρ Â, clip(ρ) Â), eq. 8. All [B, T] but advantages [B]. -> (loss, stats).

    Gradients flow into `logprobs` alone. Where the weight is 0 nothing else matters, NaN included.
    """
    active = weights > 0
    log_ratio = (logprobs - old_logprobs.detach()).where(active, 0.0)
    advantages = advantages.detach()[:, None].where(active, 0.0)
    ratio = log_ratio.clamp(-20, 20).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -(weights * torch.min(unclipped, clipped)).sum()
    stats = {"clip_fraction": common.masked_mean((clipped < unclipped).float(), active)}
    return loss, stats


def main(cfg: Config) -> None:
    run = common.Run(cfg)
    score = common.load_reward(cfg, wrong=-1.0)
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

        # 1. Roll out: G completions of each prompt, and 2. score, until P groups are informative.
        def roll_out(num_prompts):
            batch = data.next(num_prompts)
            rollout = sample(policy, tokenizer, [problem.prompt_ids for problem in batch], cfg.group_size,
                             cfg.max_new_tokens, cfg.temperature)
            return batch, rollout, *score(batch, rollout)  # rewards and correct, [P, G] each

        if cfg.dynamic_sampling:
            drawn, groups = dynamic_sampling(roll_out, cfg.prompts_per_step, cfg.max_generation_batches)
        else:
            drawn, groups = [roll_out(cfg.prompts_per_step)], torch.arange(cfg.prompts_per_step)
        batch, rollout, rewards, correct = common.join_drawn(drawn, tokenizer.pad_token_id)
        kept = int(informative_groups(correct).sum())
        if len(groups) < cfg.prompts_per_step:
            common.say(f"step {step}: {kept} of {len(batch)} groups are informative, {cfg.prompts_per_step} wanted")
        rewards += soft_overlong_penalty(rollout.lengths, cfg.max_new_tokens, cfg.overlong_buffer).view_as(rewards)
        trained = rollout.mask & (rollout.finished[:, None] | (not cfg.overlong_filtering))  # [N, T] tokens with a loss

        # 3. Advantages: each completion's reward against its group's.
        advantages = group_advantages(rewards).flatten()  # [N]
        common.warn_without_signal(step, advantages)

        # 4. Update: micro-batches add up to the gradient of the whole minibatch; nothing is averaged.
        rows = (groups[:, None] * cfg.group_size + torch.arange(cfg.group_size)).flatten()
        minibatches = rows[torch.randperm(len(rows))].tensor_split(min(cfg.minibatches, len(rows))) if len(rows) else ()
        # The first minibatch is on-policy: its old log-probs are the new ones, which update 0 fills in (0 until then).
        old_logprobs = common.rollout_logprobs(
            policy, rollout, minibatches[1:], cfg.micro_batch_tokens, cfg.temperature)  # [N, T]

        for update, minibatch in enumerate(minibatches * cfg.updates_per_batch):
            weights = torch.zeros(rollout.mask.shape, device=run.device)  # [N, T], 0 outside the minibatch
            if cfg.loss_average == "token":
                weights[minibatch] = token_weights(trained[minibatch], int(trained[minibatch].sum()))
            else:  # units of the whole step, for minibatches may split a group; only the minibatch's rows are read
                dealt = torch.cat(minibatches)
                unit_of = dealt // cfg.group_size if cfg.loss_average == "prompt" else dealt
                weights[dealt] = unit_token_weights(trained[dealt], unit_of) * len(dealt) / len(minibatch)
            total_loss = torch.zeros((), device=run.device)
            for rows, input_ids, attention_mask, T in common.micro_batches(rollout, minibatch, cfg.micro_batch_tokens):
                logprobs, entropy = token_logprobs(policy, input_ids, attention_mask, T, cfg.temperature)  # [B, T]
                if update == 0:
                    old_logprobs[rows, :T] = logprobs.detach()
                loss, stats = dapo_loss(
                    logprobs, old_logprobs[rows, :T],
                    advantages[rows], weights[rows, :T], cfg.clip_low, cfg.clip_high)
                loss.backward()
                total_loss += loss.detach()
                mask = trained[rows, :T]
                meter.add(mask.sum(), entropy=common.masked_mean(entropy, mask), **stats)
            meter.add(1, **run.optimizer_step(policy, optimizer, schedule, total_loss))

        # 5. Log.
        metrics = {
            "loss": 0.0, "grad_norm": 0.0, "lr": schedule.get_last_lr()[0],  # of a step without an update
            "kept_fraction": kept / len(batch), "wasted_groups": max(0, kept - cfg.prompts_per_step),
            "sampled_tokens": int(rollout.lengths.sum()),
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
