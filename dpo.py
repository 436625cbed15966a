"""DPO, Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290):

    minimize  −log σ(β (Δ_policy − Δ_reference))        Δ = log π(y⁺|x) − log π(y⁻|x), mean over pairs        (eq. 7)
    gradient  −β (1 − σ(β(Δ_policy − Δ_reference))) (∇log π(y⁺|x) − ∇log π(y⁻|x))                  (section 4)

No reward model and no sampling: β·log(π/π_ref) is the implicit reward, and 1 − σ, the probability that it gives to
the wrong order, plays the role of an advantage.
--reference_free drops Δ_reference; --label_smoothing s is conservative DPO; --on_policy samples the pairs as it goes
and lets --reward pick the better one.

Without flags: the tiny model learns additions from pairs of its own answers. README.md: real models and data.

Shapes: B pairs of a micro-batch; N answers of the step, P prompts if it samples them; T padded answer length.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import common
from common import flag, sample, token_logprobs


@dataclass
class Config(common.RunConfig):
    steps: int = flag(60, "updates")
    pairs_per_step: int = flag(64, "pairs per update (paper: 64)")
    max_completion_tokens: int = flag(1024, "answers are cut here, and then end without EOS")
    on_policy: bool = flag(False, "sample two answers to each prompt of --data; --reward picks the better one")
    max_new_tokens: int = flag(40, "sampled answers are cut here")
    temperature: float = flag(1.0, "of sampling, and of every log-prob")
    reward: str = flag("verifier", "judge of --on_policy and of the evaluation: verifier, FILE.py:FUNCTION or a model")
    format_reward: float = flag(0.0, "weight of the reward for <think>…</think><answer>…</answer>")
    eval_problems: str = flag("", "problems with answers, to measure greedy accuracy on; arithmetic brings its own")
    beta: float = flag(0.1, "β: how far the policy may leave the reference (paper: 0.1)")
    reference_free: bool = flag(False, "Δ_reference = 0: no reference model")
    label_smoothing: float = flag(0.0, "s: share of pairs taken to be the wrong way round (cDPO)")
    lr: float = flag(1e-5, "learning rate: 1e-6 for a real model (paper: 1e-6, with RMSprop; here AdamW)")
    warmup_steps: int = flag(10, "updates of linear warm-up, the first at rate 0 (paper: 150)")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this norm")


AT_ONCE = 1000  # preferences whose log-probs are worked out together


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta: float, label_smoothing: float = 0.0):
    """Sequence log-probs [B] each -> (losses [B], stats). Both refs None: reference-free.

    −(1 − s)·log σ(h) − s·log σ(−h) with h = β(Δ_policy − Δ_reference) (eq. 7; s: Mitchell 2023, "cDPO").
    """
    h = beta * (chosen - rejected)
    if ref_chosen is not None:
        h = h - beta * (ref_chosen - ref_rejected).detach()
    losses = -(1 - label_smoothing) * F.logsigmoid(h) - label_smoothing * F.logsigmoid(-h)
    stats = {"pair_accuracy": (h > 0).float().mean(), "margin": h.mean(),
             "weight": (torch.sigmoid(-h) - label_smoothing).mean(),  # −∂loss/∂h
             "chosen_logprobs": chosen.mean(), "rejected_logprobs": rejected.mean()}
    return losses, {name: value.detach() for name, value in stats.items()}


def sequence_logprobs(model, input_ids, attention_mask, T: int, temperature: float) -> torch.Tensor:
    """log π(y|x) [rows]: the sum over the answer's tokens, EOS included."""
    return token_logprobs(model, input_ids, attention_mask, T, temperature)[0].sum(dim=1)


def all_sequence_logprobs(model, batch, blocks, cfg: Config) -> torch.Tensor:
    """log π(y|x) [N] of every row of the batch, the same on every rank, without gradient; 0 where the model is None."""
    return common.rollout_logprobs(model, batch, [blocks], cfg.micro_batch_tokens, cfg.temperature).sum(dim=1)


def evaluate(policy, tokenizer, preferences, problems, score, cfg: Config, device) -> dict[str, float]:
    """Greedy accuracy on the problems; how often the implicit reward β(log π − log π_ref) orders a pair right."""
    metrics = common.evaluate(policy, tokenizer, problems, score, cfg)
    right = []
    for start in range(0, len(preferences), AT_ONCE):  # as their reference log-probs: until it moves, exact ties
        some = preferences[start:start + AT_ONCE]
        batch, blocks, pairs = common.collate_preferences(some, tokenizer.pad_token_id, device)
        rewards = all_sequence_logprobs(policy, batch, blocks, cfg) - reference_logprobs(some, device)  # [N]
        better, worse = rewards[pairs].unbind(1)
        right.append(torch.heaviside(better - worse, better.new_tensor(0.5)))  # tie: ½
    if right:
        metrics["eval_pair_accuracy"] = torch.cat(right).mean().item()
    return metrics


def reference_logprobs(preferences, device) -> torch.Tensor:
    """log π_ref(y|x) [N] of all their answers, as `main` computed them before the first update."""
    return torch.tensor([logprob for preference in preferences for logprob in preference.ref_logprobs], device=device)


def main(cfg: Config) -> None:
    run = common.Run(cfg)
    score = common.load_reward(cfg)
    eval_problems, eval_preferences = [], []
    if cfg.on_policy:
        items, eval_problems = common.read_train_and_eval(cfg)
    else:
        items, eval_preferences = common.read_train_and_eval(cfg, common.read_preferences)
    if held_out := cfg.eval_problems or (cfg.data if common.is_built_in(cfg.data) and not cfg.on_policy else ""):
        eval_problems = common.read_problems(held_out, "eval", need_answer=cfg.reward == "verifier")
    policy, tokenizer = common.load_policy(cfg, run.device)
    reference = common.load_reference(cfg, run.device) if cfg.on_policy and not cfg.reference_free else None
    optimizer, schedule = common.make_optimizer(policy, cfg)
    eval_problems = common.encode_prompts(eval_problems, tokenizer, cfg, "--eval_problems",
                                          common.SYSTEM_PROMPT if cfg.on_policy else "")  # as the training prompts
    eval_preferences = common.encode_preferences(eval_preferences, tokenizer, cfg, "--eval_data")
    if cfg.on_policy:
        items = common.encode_prompts(items, tokenizer, cfg, "--data")
    else:
        rankings = common.encode_preferences(items, tokenizer, cfg, "--data")
        items = [pair for ranking in rankings for pair in ranking.split()]  # all the pairs of a ranking
    data = common.Shuffled(items, cfg.seed)

    # The reference is the policy before its first update. So its log-probs are computed here, once, and one model is
    # all that stays in memory.
    for preferences in ([] if cfg.on_policy else data.first(cfg.steps * cfg.pairs_per_step), eval_preferences):
        for start in range(0, len(preferences), AT_ONCE):
            some = preferences[start:start + AT_ONCE]
            batch, blocks, _ = common.collate_preferences(some, tokenizer.pad_token_id, run.device)
            logprobs = all_sequence_logprobs(None if cfg.reference_free else policy, batch, blocks, cfg).tolist()
            for preference, rows in zip(some, blocks):
                preference.ref_logprobs = [logprobs[row] for row in rows]

    run.start(data, policy=(policy, optimizer, schedule))
    if run.next_step == 0:
        run.end_step(0, evaluate(policy, tokenizer, eval_preferences, eval_problems, score, cfg, run.device))

    for step in run.steps():
        meter = common.Meter()

        # 1. The step's pairs: the rows of each in the batch, chosen first.
        drawn, metrics = data.next(cfg.pairs_per_step), {}
        if cfg.on_policy:  # two samples for each prompt, the better one by its reward; a tie is no pair
            batch = sample(policy, tokenizer, [problem.prompt_ids for problem in drawn], 2, cfg.max_new_tokens,
                           cfg.temperature)
            rewards, correct = score(drawn, batch)  # [P, 2] each
            best, untied = rewards.argmax(dim=1).tolist(), (rewards[:, 0] != rewards[:, 1]).nonzero()[:, 0].tolist()
            blocks = [[2 * p + best[p], 2 * p + 1 - best[p]] for p in untied]
            ref_logprobs = all_sequence_logprobs(reference, batch, blocks, cfg)  # [N]
            metrics = {"reward": rewards.mean().item(), "accuracy": correct.float().mean().item(),
                       "ties": len(drawn) - len(blocks), "sampled_tokens": int(batch.lengths.sum())}
        else:
            batch, blocks, _ = common.collate_preferences(drawn, tokenizer.pad_token_id, run.device)
            ref_logprobs = reference_logprobs(drawn, run.device)  # [N]

        # 2. Update: every pair counts 1 / pairs of the step; micro-batches add up, nothing is averaged.
        total_loss = torch.zeros((), device=run.device)
        for rows, input_ids, attention_mask, T in common.micro_batches(batch, blocks, cfg.micro_batch_tokens):
            logprobs = sequence_logprobs(policy, input_ids, attention_mask, T, cfg.temperature)  # [2B]
            losses, stats = dpo_loss(logprobs[::2], logprobs[1::2], ref_logprobs[rows[::2]], ref_logprobs[rows[1::2]],
                                     cfg.beta, cfg.label_smoothing)
            count = len(losses) * (T > 0)  # T = 0: a rank without a pair keeps step with the others
            loss = losses.mean() * count / len(blocks)
            loss.backward()
            total_loss += loss.detach()
            meter.add(count, **stats)
        if blocks:
            meter.add(1, **run.optimizer_step(policy, optimizer, schedule, total_loss))

        # 3. Log.
        metrics = {
            "loss": 0.0, "grad_norm": 0.0, "lr": schedule.get_last_lr()[0],  # of a step where all pairs tie
            **metrics, **meter.means(), **run.timing(batch.attention_mask.sum())}

        # 4. Evaluate and save.
        if run.evaluates(step):
            metrics |= evaluate(policy, tokenizer, eval_preferences, eval_problems, score, cfg, run.device)
        run.end_step(step, metrics)
    run.finish(policy, tokenizer)


if __name__ == "__main__":
    common.launch(main, Config)
