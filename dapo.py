"""DAPO, Decoupled Clip and Dynamic sAmpling Policy Optimization (Yu et al. 2025, arXiv:2503.14476):

    maximize  1/Σ|o_j| Σ_{i,t}  min(ρ Â, clip(ρ, 1 − ε_low, 1 + ε_high) Â)                                   (eq. 8)
    where     ρ = π(o_{i,t}) / π_old(o_{i,t}),  Â = (R_i − mean(R)) / std(R) over the prompt's group         (eq. 9)

This is grpo.py with

    clip     1 ± ε          →  1 − ε_low, 1 + ε_high        dapo_loss               (eq. 10)
    groups   all            →  those with 0 < correct < G   dynamic_sampling        (eq. 11)
    weight   1 / (N·|o_i|)  →  1 / Σ|o_j|                   token_weights           (eq. 12, but over all prompts)
    reward   R              →  R + length penalty           soft_overlong_penalty   (eq. 13)
    reward   1 or 0         →  1 or −1                      load_reward             (eq. 7)
    KL       β·KL           →  none                         dapo_loss               (section 2.3)
    loss     of all         →  of finished ones (opt-in)    --overlong_filtering    (section 3.4)

To switch one off: --clip_high 0.2, --no_dynamic_sampling, --loss_average sequence, --overlong_buffer 0. By default,
as in grpo.py, a rollout gets a single update, which clips nothing; the paper makes 16 (--minibatches 16).

Without flags, the script teaches the built-in tiny model to add, on a CPU, in about a minute. README.md shows how to
train real models on your own data, on one GPU or many.

Symbols: π is the policy, π_old the one that sampled, ρ = π/π_old, π_ref the policy before training; o_i is a
completion, o_{i,t} its token t, π(o_{i,t}) that token's probability given all before it; |o_i| is the completion's
length in tokens, R_i its reward. Â > 0 makes tokens likelier, Â < 0 less likely.
Shapes: P prompts with G completions each, N = P·G completions (in the formulas: those of one update); T tokens per
completion, padded to the longest; B rows in a micro-batch, padded to the longest of these rows only.
"""
import math
from dataclasses import dataclass
from typing import Literal

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
    dynamic_sampling: bool = flag(True, "sample until P groups are only partly right; --no_dynamic_sampling: any P")
    max_generation_batches: int = flag(10, "a step makes at most this many rollouts, then trains on the groups it has")
    overlong_buffer: int = flag(8, "length is penalized from this many tokens before the cut (paper: 4,096); 0: never")
    overlong_filtering: bool = flag(False, "leave truncated completions out of the loss, but not out of their group")
    loss_average: Literal["token", "prompt", "sequence"] = flag(
        "token", "token: mean over all tokens; prompt (eq. 12) or sequence (GRPO): mean within each, then over these")
    minibatches: int = flag(1, "minibatches per rollout batch, an optimizer step each (GRPO's paper 1, DAPO's 16, "
                               "Dr. GRPO's code 8)")
    updates_per_batch: int = flag(1, "μ: passes (PPO epochs) over a rollout batch, in the same minibatches (paper: 1)")
    clip_low: float = flag(0.2, "ε_low: ratios are clipped to at least 1 − ε_low (paper: 0.2)")
    clip_high: float = flag(0.28, "ε_high: ratios are clipped to at most 1 + ε_high (paper: 0.28)")
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


def soft_overlong_penalty(lengths: torch.Tensor, max_new_tokens: int, buffer: int) -> torch.Tensor:
    """Eq. 13: 0 for lengths [N] up to max_new_tokens − buffer, then falling linearly to −1 at max_new_tokens."""
    return ((max_new_tokens - buffer - lengths) / max(buffer, 1)).clamp(-1, 0)


def informative_groups(correct: torch.Tensor) -> torch.Tensor:
    """Which groups (bool [P]) have both right and wrong completions (bool [P, G]): 0 < Σ correct < G (eq. 11)."""
    return correct.any(dim=1) & ~correct.all(dim=1)


def dynamic_sampling(draw, num_prompts: int, max_generation_batches: int):
    """Roll out until `num_prompts` groups are informative, but at most `max_generation_batches` times.

    draw(P) returns (batch, rollout, rewards [P, G], correct [P, G]). In later calls P is the number of prompts that
    should yield the missing groups, at most num_prompts. Returns what all calls returned, and the numbers of the
    groups to train on, counted over all calls. Surplus groups are dropped: the next step has another policy.
    """
    drawn, wanted = [], num_prompts
    for _ in range(max_generation_batches):
        drawn.append(draw(wanted))
        informative = torch.cat([informative_groups(correct) for *_, correct in drawn])
        found = int(informative.sum())
        if found >= num_prompts:
            break
        share = max(found, 1) / len(informative)
        wanted = min(num_prompts, math.ceil((num_prompts - found) / share))
    return drawn, informative.nonzero()[:num_prompts, 0].cpu()


def token_weights(mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Weights [N, T] of the tokens in the loss, from their mask (bool [N, T]); 0 outside the mask.

    num_tokens is the number of tokens in the whole optimizer step, over all micro-batches and ranks. Eq. 12 averages
    over the tokens of each prompt first, then over prompts (see unit_token_weights). The authors' code averaged over
    the tokens of a micro-batch (verl, pull request 623). The default here averages over those of the whole step, so
    that every token counts alike and no micro-batch size changes the gradient.
    """
    return mask / max(num_tokens, 1)  # 1 / Σ|o_j|


def unit_token_weights(mask: torch.Tensor, size: int, num_sequences: int) -> torch.Tensor:
    """--loss_average prompt or sequence: the mean over each unit's tokens, then over the units. A unit is `size`
    adjacent rows, and counts even if filtering has left it no tokens. With size 1, these are grpo.py's weights."""
    num_tokens = mask.sum(dim=1).view(-1, size).sum(dim=1).repeat_interleave(size)  # [N], of each row's unit
    return mask / num_tokens[:, None].clamp(min=1) * size / num_sequences


def dapo_loss(logprobs, old_logprobs, advantages, weights, clip_low: float, clip_high: float):
    """Eq. 8 as a loss: Σ_{i,t} w · −min(ρ Â, clip(ρ) Â). Returns (loss, stats).

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
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    # The minimum takes the gradient away from a token whose ratio has left the range in the direction in which its
    # advantage pushes it. A token whose ratio has left it in the other direction keeps its gradient.
    loss = -(weights * torch.min(unclipped, clipped)).sum()
    stats = {"clip_fraction": common.masked_mean((clipped < unclipped).float(), active),
             "approx_kl": common.masked_mean(ratio - 1 - log_ratio, active)}  # an estimate of KL(π_old‖π)
    return loss, stats


def main(cfg: Config) -> None:
    run = common.Run(cfg)
    score = common.load_reward(cfg, wrong=-1.0)
    problems, eval_problems = common.read_train_and_eval(cfg)
    policy, tokenizer = common.load_policy(cfg, run.device)
    optimizer, schedule = common.make_optimizer(policy, cfg)
    eval_problems = common.encode_prompts(eval_problems, tokenizer, cfg, "--eval_data")
    data = common.Shuffled(common.encode_prompts(problems, tokenizer, cfg, "--data"), cfg.seed)

    run.start(data, policy=(policy, optimizer, schedule))  # what a checkpoint holds, and --resume restores
    if run.next_step == 0:  # step 0: evaluate before training
        run.end_step(0, common.evaluate(policy, tokenizer, eval_problems, score, cfg))

    for step in run.steps():
        meter = common.Meter()  # weighted means, over micro-batches and ranks

        # 1. Roll out, G completions for each prompt, and 2. score them, until P groups are informative.
        def draw(num_prompts):
            batch = data.next(num_prompts)
            rollout = sample(policy, tokenizer, [problem.prompt_ids for problem in batch], cfg.group_size,
                             cfg.max_new_tokens, cfg.temperature)
            rewards, correct = score(batch, rollout)  # [P, G] each
            return batch, rollout, rewards, correct

        if cfg.dynamic_sampling:
            drawn, groups = dynamic_sampling(draw, cfg.prompts_per_step, cfg.max_generation_batches)
        else:
            drawn, groups = [draw(cfg.prompts_per_step)], torch.arange(cfg.prompts_per_step)
        batch, rollout, rewards, correct = common.join_drawn(drawn, tokenizer.pad_token_id)  # now P = len(batch)
        del drawn  # frees memory: join_drawn has copied it
        found = int(informative_groups(correct).sum())
        if len(groups) < cfg.prompts_per_step:
            common.say(f"step {step}: {found} of {len(batch)} groups have both right and wrong completions, "
                       f"{cfg.prompts_per_step} wanted")
        rewards += soft_overlong_penalty(rollout.lengths, cfg.max_new_tokens, cfg.overlong_buffer).view_as(rewards)
        loss_mask = rollout.mask & rollout.finished[:, None] if cfg.overlong_filtering else rollout.mask  # [N, T]

        # 3. Advantages: compare each completion with its group.
        advantages = group_advantages(rewards, cfg.divide_by_std).flatten()  # [N]
        trains = torch.isin(torch.arange(len(batch)), groups).repeat_interleave(cfg.group_size)  # [N]
        advantages = advantages * (trains.to(run.device) & loss_mask.any(dim=1))  # 0 for all that is left out
        common.warn_without_signal(step, teaches=advantages.any())

        # 4. Update. Weights are relative to the whole minibatch, so the gradients of its micro-batches just add up.
        order = trains.nonzero()[:, 0]  # row numbers
        order = order[torch.randperm(len(order))]  # shuffled
        count = math.ceil(cfg.minibatches * len(groups) / cfg.prompts_per_step)  # with fewer groups, fewer minibatches
        minibatches = order.tensor_split(count) if count > 0 else ()
        # In update 0 the policy is still the one that sampled, so its log-probs there serve as the old ones (below).
        # By the time of the later minibatches it has changed, so their old log-probs are computed now.
        old_logprobs = common.rollout_logprobs(
            policy, rollout, minibatches[1:], cfg.micro_batch_tokens, cfg.temperature)  # [N, T]

        for update, minibatch in enumerate(minibatches * cfg.updates_per_batch):  # all of them, μ times over
            if cfg.loss_average == "token":
                weights = token_weights(loss_mask, int(loss_mask[minibatch].sum()))  # [N, T]; only its rows are read
            else:  # a minibatch may hold a part of a group; the tokens of the whole group count
                size = cfg.group_size if cfg.loss_average == "prompt" else 1
                weights = unit_token_weights(loss_mask, size, len(minibatch))
            total_loss = torch.zeros((), device=run.device)
            for rows, input_ids, attention_mask, T in common.micro_batches(rollout, minibatch, cfg.micro_batch_tokens):
                logprobs, entropy = token_logprobs(policy, input_ids, attention_mask, T, cfg.temperature)  # [B, T]
                mask = loss_mask[rows, :T]
                if update == 0:
                    old_logprobs[rows, :T] = logprobs.detach()
                    gap = (logprobs - rollout.logprobs[rows, :T]).abs()  # nothing but rounding
                    meter.add(mask.sum(), sampler_gap=common.masked_mean(gap, mask))
                loss, stats = dapo_loss(
                    logprobs, old_logprobs[rows, :T],
                    advantages[rows], weights[rows, :T],
                    cfg.clip_low, cfg.clip_high)
                loss.backward()
                total_loss += loss.detach()
                meter.add(mask.sum(), entropy=common.masked_mean(entropy, mask), **stats)
            if update == 0:  # each process has recorded its own rows
                old_logprobs[minibatch] = common.sum_over_ranks(old_logprobs[minibatch])
            meter.add(1, **run.optimizer_step(policy, optimizer, schedule, total_loss))

        # 5. Log.
        metrics = {
            "loss": 0.0, "grad_norm": 0.0, "clip_fraction": math.nan, "approx_kl": math.nan, "entropy": math.nan,
            "sampler_gap": math.nan, "lr": optimizer.param_groups[0]["lr"],  # these seven stay if no update is made
            "kept_fraction": found / len(batch), "wasted_groups": max(0, found - cfg.prompts_per_step),
            "sampled_tokens": int(rollout.lengths.sum()),
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
