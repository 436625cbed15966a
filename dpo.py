"""DPO, Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290):

    minimize  −log σ(β (Δ_policy − Δ_reference)),  Δ = log π(y⁺|x) − log π(y⁻|x),  mean over pairs         (eq. 7)
    gradient  −β (1 − σ(β(Δ_policy − Δ_reference))) (∇log π(y⁺|x) − ∇log π(y⁻|x))                          (section 4)

There is no reward model and, without --on_policy, no sampling: β·log(π/π_ref) is an implicit reward. In the gradient,
1 − σ, the probability that this reward orders the pair wrongly, weighs the pair as an advantage would: one that is
already in the right order counts little.

--reference_free drops Δ_reference. --label_smoothing makes it conservative DPO. --on_policy samples two answers to each
prompt and lets --reward pick the better one.

Without flags, the script teaches the built-in tiny model to add, from pairs of its own answers. README.md shows how to
train real models on your own data, on one GPU or many.

Symbols: π is the policy, π_ref the policy before training; x is a prompt, y⁺ its chosen and y⁻ its rejected answer; σ
is the logistic function.
Shapes: B pairs in a micro-batch; N answers in a step (to P prompts, if sampled); T tokens per answer, padded.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import common
from common import flag, sample, token_logprobs


@dataclass
class Config(common.RunConfig):  # RunConfig has the flags that all scripts share: --model, --data, …
    steps: int = flag(60, "training steps, one update each")
    pairs_per_step: int = flag(64, "pairs per step (paper: 64); --on_policy: prompts (equal rewards make no pair)")
    max_completion_tokens: int = flag(1024, "longer answers are cut off here, and then have no EOS")
    on_policy: bool = flag(False, "sample two answers to each prompt of --data, and let --reward pick the better one")
    max_new_tokens: int = flag(40, "sampled answers are cut off after this many tokens")
    temperature: float = flag(1.0, "sampling temperature, which every log-prob uses as well")
    reward: str = flag("verifier", "judge of sampled answers: verifier, FILE.py:FUNCTION called with (prompt, "
                                   "completion, row), or the directory of a reward model")
    format_reward: float = flag(0.0, "weight of the extra reward for the form <think>…</think><answer>…</answer>")
    eval_problems: str = flag("", "problems with answers, for greedy accuracy; --data arithmetic brings its own")
    beta: float = flag(0.1, "β: how strongly the reference holds the policy back (paper: 0.1)")
    reference_free: bool = flag(False, "use no reference model: Δ_reference = 0")
    label_smoothing: float = flag(0.0, "s: assumed share of pairs that are the wrong way round (cDPO)")
    lr: float = flag(1e-5, "learning rate; 1e-6 suits a real model (paper: 1e-6, but with RMSprop)")
    warmup_steps: int = flag(10, "optimizer steps of linear warm-up, the first with a learning rate of 0 (paper: 150)")


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta: float, label_smoothing: float = 0.0):
    """The loss of each of B pairs, from the log-probs [B] of whole answers. Returns (losses [B], stats).

    −(1 − s)·log σ(h) − s·log σ(−h) with h = β(Δ_policy − Δ_reference): eq. 7, and for s > 0 conservative DPO (Mitchell
    2023). If both refs are None, Δ_reference is 0.
    """
    h = beta * (chosen - rejected)
    chosen_reward, rejected_reward = beta * chosen, beta * rejected  # the implicit rewards, β·log(π/π_ref)
    if ref_chosen is not None or ref_rejected is not None:
        h = h - beta * (ref_chosen - ref_rejected).detach()
        chosen_reward, rejected_reward = chosen_reward - beta * ref_chosen, rejected_reward - beta * ref_rejected
    losses = -(1 - label_smoothing) * F.logsigmoid(h) - label_smoothing * F.logsigmoid(-h)
    stats = {
        "pair_accuracy": (h > 0).float().mean(),
        "margin": h.mean(),
        "weight": (torch.sigmoid(-h) - label_smoothing).mean(),  # −∂loss/∂h
        "chosen_reward": chosen_reward.mean(),
        "rejected_reward": rejected_reward.mean(),
        "chosen_logprobs": chosen.mean(),
        "rejected_logprobs": rejected.mean()}
    return losses, {name: value.detach() for name, value in stats.items()}


def answer_logprobs(model, tokenizer, preferences, cfg: Config, device) -> list[torch.Tensor]:
    """log π(y|x) [K] of the K answers of each preference, without gradient; 0 if the model is None."""
    def compute(batch, blocks):
        return common.rollout_logprobs(model, batch, [blocks], cfg.micro_batch_tokens, cfg.temperature).sum(dim=1)
    return common.of_each_preference(compute, preferences, tokenizer.pad_token_id, device)


def evaluate(policy, tokenizer, preferences, problems, score, cfg: Config, device) -> dict[str, float]:
    """Greedy accuracy on the problems, and how well the implicit reward β·log(π/π_ref) orders the held-out pairs."""
    metrics = common.evaluate(policy, tokenizer, problems, score, cfg)
    if preferences:
        logprobs = answer_logprobs(policy, tokenizer, preferences, cfg, device)
        # The implicit rewards [K] of each preference, and [pairs] of the better and the worse answer of each pair.
        rewards = [cfg.beta * (own - preference.ref_logprobs) for own, preference in zip(logprobs, preferences)]
        chosen, rejected = torch.cat([r[torch.tensor(p.pairs)] for r, p in zip(rewards, preferences)]).unbind(1)
        differences = chosen - rejected
        # A tie is half right: before the first update, policy and reference agree, and all pairs tie.
        right = torch.heaviside(differences, differences.new_tensor(0.5))
        metrics |= {
            "eval_pair_accuracy": right.mean().item(),
            "eval_margin": differences.mean().item(),
            "eval_chosen_reward": chosen.mean().item(),
            "eval_rejected_reward": rejected.mean().item(),
            "eval_loss": -F.logsigmoid(differences).mean().item()}
    return metrics


def main(cfg: Config) -> None:
    run = common.Run(cfg)
    if cfg.on_policy and cfg.eval_data and cfg.eval_problems:
        raise common.UserError("--eval_problems: with --on_policy, --eval_data holds the problems already")
    score = common.load_reward(cfg)
    source = cfg.eval_problems or (cfg.data if common.is_built_in(cfg.data) and not cfg.on_policy else "")
    eval_problems = []
    if source:  # first, since the file may be missing, and reading --data may take long
        eval_problems = common.read_problems(source, "eval", need_answer=cfg.reward == "verifier")
    if cfg.on_policy:
        items, held_out = common.read_train_and_eval(cfg)
        eval_problems, eval_preferences = eval_problems or held_out, []
    else:
        items, eval_preferences = common.read_train_and_eval(cfg, common.read_preferences)
    policy, tokenizer = common.load_policy(cfg, run.device)
    reference = common.load_reference(cfg, run.device) if cfg.on_policy and not cfg.reference_free else None
    optimizer, schedule = common.make_optimizer(policy, cfg)
    eval_problems = common.encode_prompts(eval_problems, tokenizer, cfg,
                                          "--eval_problems" if cfg.eval_problems else "--eval_data",
                                          common.SYSTEM_PROMPT if cfg.on_policy else "")  # as in the training prompts
    eval_preferences = common.encode_preferences(eval_preferences, tokenizer, cfg, "--eval_data")
    if cfg.on_policy:
        items = common.encode_prompts(items, tokenizer, cfg, "--data")
    else:
        rankings = common.encode_preferences(items, tokenizer, cfg, "--data")
        items = [pair for ranking in rankings for pair in ranking.split()]
    data = common.Shuffled(items, cfg.seed)

    # The reference is the policy before its first update. Its log-probs of given answers are computed once, here, so
    # that no second model stays in memory (and before run.start, because --resume loads a later policy there). With
    # --on_policy there are no answers yet, so the reference stays.
    if not cfg.on_policy:
        if not cfg.reference_free:
            common.say("computing the reference's log-probs")  # of many pairs, this takes long
        for preferences in (data.first(cfg.steps * cfg.pairs_per_step), eval_preferences):  # all that will be read
            logprobs = answer_logprobs(None if cfg.reference_free else policy, tokenizer, preferences, cfg, run.device)
            for preference, ref_logprobs in zip(preferences, logprobs):
                preference.ref_logprobs = ref_logprobs

    run.start(data, policy=(policy, optimizer, schedule))  # what a checkpoint holds, and --resume restores
    if run.next_step == 0:  # step 0: evaluate before training
        run.end_step(0, evaluate(policy, tokenizer, eval_preferences, eval_problems, score, cfg, run.device))

    for step in run.steps():
        meter = common.Meter()  # weighted means, over micro-batches and ranks

        # 1. The step's pairs, given or sampled, and their log-probs under the reference.
        drawn = data.next(cfg.pairs_per_step)
        if cfg.on_policy:
            batch = sample(policy, tokenizer, [problem.prompt_ids for problem in drawn], 2,
                           cfg.max_new_tokens, cfg.temperature)
            rewards, correct = score(drawn, batch)  # [P, 2] each
            pairs = []  # [chosen row, rejected row]; equal rewards make no pair
            for p, (first, second) in enumerate(rewards.tolist()):
                if first > second:
                    pairs.append([2 * p, 2 * p + 1])
                elif second > first:
                    pairs.append([2 * p + 1, 2 * p])
            ref_logprobs = common.rollout_logprobs(
                reference, batch, [pairs], cfg.micro_batch_tokens, cfg.temperature).sum(dim=1)  # [N], 0 for ties
            metrics = {
                "reward": rewards.mean().item(),
                "accuracy": correct.float().mean().item(),
                "completion_length": batch.lengths.float().mean().item(),
                "truncated_fraction": 1 - batch.finished.float().mean().item(),
                "ties": len(drawn) - len(pairs),
                "sampled_tokens": int(batch.lengths.sum())}
        else:
            # Here a block, the rows that answer one prompt, is a pair: [chosen row, rejected row].
            batch, pairs = common.collate_preferences(drawn, tokenizer.pad_token_id, run.device)
            ref_logprobs = torch.cat([pair.ref_logprobs for pair in drawn])  # [N]
            metrics = {}

        # 2. Update. Each pair weighs 1 / pairs of the step, so the gradients of micro-batches just add up.
        total_loss = torch.zeros((), device=run.device)
        for rows, input_ids, attention_mask, T in common.micro_batches(batch, pairs, cfg.micro_batch_tokens):
            # log π(y|x) [2B]: the sum over an answer's tokens, EOS included
            logprobs = token_logprobs(policy, input_ids, attention_mask, T, cfg.temperature)[0].sum(dim=1)
            chosen, rejected = rows[::2], rows[1::2]  # a pair's rows are adjacent
            losses, stats = dpo_loss(
                logprobs[::2], logprobs[1::2],
                ref_logprobs[chosen], ref_logprobs[rejected],
                cfg.beta, cfg.label_smoothing)
            count = len(losses) if T > 0 else 0  # T = 0: a dummy, since FSDP wants as many passes of every rank
            loss = losses.mean() * count / len(pairs)
            loss.backward()
            total_loss += loss.detach()
            meter.add(count, **stats)
        common.warn_without_signal(step, teaches=len(pairs) > 0)
        if pairs:
            meter.add(1, **run.optimizer_step(policy, optimizer, schedule, total_loss))

        # 3. Log.
        metrics = {
            "loss": 0.0, "grad_norm": 0.0, "pair_accuracy": math.nan, "margin": math.nan,
            "lr": optimizer.param_groups[0]["lr"],  # these five stay if all pairs tie
            **metrics, **meter.means(), **run.timing(batch.attention_mask.sum())}

        # 4. Evaluate and save.
        if cfg.on_policy:
            run.log_samples(step, drawn, batch, rewards)  # in step 1, and when it evaluates
        if run.evaluates(step):
            metrics |= evaluate(policy, tokenizer, eval_preferences, eval_problems, score, cfg, run.device)
        run.keep_model(step, policy, tokenizer)  # every --model_every steps
        run.end_step(step, metrics)
    run.finish(policy, tokenizer)


if __name__ == "__main__":
    common.launch(main, Config)
