"""Reward model (Bradley–Terry; Christiano et al. 2017, arXiv:1706.03741; InstructGPT, arXiv:2203.02155; Llama 2,
arXiv:2307.09288):

    minimize  −log σ(r(x, y⁺) − r(x, y⁻) − margin)                 mean over pairs          (Llama 2 eq. 2)
    ranking   −1/(K(K−1)/2) Σ_{i<j} log σ(r(x, y_i) − r(x, y_j))   `ranking_loss` alone     (InstructGPT eq. 1)
    centring  + c·(r(x, y⁺) + r(x, y⁻))²                           mean over pairs          (arXiv:2312.09244)

r is a language model with a scalar head, read at the last token; it reads each answer of a ranking once. In `main` all
pairs of an update weigh the same, so a long ranking counts for more than a short one. By InstructGPT's eq. 1
(`ranking_loss`, which `main` does not call) every ranking counts the same.

Without flags, the script trains a reward model for additions, from answers that the verifier has ranked. README.md
shows how to train real models on your own data, on one GPU or many. ppo.py takes OUTPUT_DIR/model as --reward.

Symbols: x is a prompt, y⁺ its chosen and y⁻ its rejected answer, y_1 the best of several; σ is the logistic function.
Shapes: B pairs, or prompts with K answers each, in a micro-batch; N answers in a step.
"""
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

import common
from common import flag


@dataclass
class Config(common.RunConfig):  # RunConfig has the flags that all scripts share: --model, --data, …
    steps: int = flag(1000, "training steps, one update each")
    pairs_per_step: int = flag(32, "pairs per step, or rankings with all their pairs (InstructGPT: 64)")
    max_completion_tokens: int = flag(1024, "longer answers are cut off here")
    center_coef: float = flag(0.01, "c: weight of (r⁺ + r⁻)², which keeps scores near 0 (TRL advises 0.01)")
    lr: float = flag(5e-4, "learning rate; 1e-5 suits a real model (InstructGPT: 9e-6)")
    lr_schedule: Literal["constant", "linear", "cosine"] = flag(
        "linear", "after the warm-up (InstructGPT: cosine, to a tenth)")
    warmup_steps: int = flag(10, "optimizer steps of linear warm-up, the first with a learning rate of 0")
    eval_every: int = flag(100, "steps between evaluations; there is one before the first step and one after the last")


def preference_loss(chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | None = None):
    """Mean of −log σ(r⁺ − r⁻ − margin) over the pairs. Returns (loss, stats).

    InstructGPT eq. 1, with the margin of Llama 2 eq. 2. Scores and margin are [B]. The metric `margin` is the mean of
    r⁺ − r⁻ alone.
    """
    difference = chosen.flatten() - rejected.flatten()  # [B, 1] − [B] would be [B, B]
    loss = -F.logsigmoid(difference if margin is None else difference - margin.flatten()).mean()
    return loss, {"pair_accuracy": (difference > 0).float().mean().detach(), "margin": difference.mean().detach()}


def ranking_loss(rewards: torch.Tensor):
    """Mean of −log σ(r_i − r_j) over all K(K−1)/2 pairs i < j of each row of scores [B, K]. Returns (loss, stats).

    Answers stand best first, and do not tie. The rankings of `main` may tie and differ in length: it passes all their
    pairs to `preference_loss`.
    """
    better, worse = torch.triu_indices(rewards.shape[1], rewards.shape[1], offset=1, device=rewards.device)
    return preference_loss(rewards[:, better].flatten(), rewards[:, worse].flatten())


def calibration_error(differences: torch.Tensor, bins: int = 10) -> float:
    """Expected calibration error of score differences Δ = r⁺ − r⁻ [n]: does σ(Δ) = 0.8 mean that 80% prefer y⁺?

    The model prefers the answer with the higher score, with confidence σ(|Δ|). Pairs are put into bins by confidence;
    the error is the mean gap between a bin's confidence and its share of right pairs, weighted by its size.
    """
    confidence = torch.sigmoid(differences.abs())  # 0.5 to 1
    right = torch.heaviside(differences, differences.new_tensor(0.5))  # a tie is half right
    bin_of = ((confidence - 0.5) * 2 * bins).long().clamp(0, bins - 1)  # NaN: any bin; the sum is then NaN
    gaps = differences.new_zeros(bins).index_add(0, bin_of, confidence - right)  # size of the bin times its gap
    return float(gaps.abs().sum() / len(differences))


def scale_fresh_head(model) -> None:
    """If the checkpoint had no scalar head, give the new one a std of 1/√(H + 1), with H the hidden size.

    transformers drew it with `initializer_range`; with this std, scores start at size 1 (arXiv:2403.17031).
    """
    is_fresh = not any("SequenceClassification" in name for name in model.config.architectures or ())
    if is_fresh:
        std = getattr(model.config, "initializer_range", 0.02)
        wanted_std = (model.config.get_text_config().hidden_size + 1) ** -0.5
        with torch.no_grad():
            model.score.weight.mul_(wanted_std / std)


def answer_scores(model, tokenizer, preferences, cfg: Config, device) -> list[torch.Tensor]:
    """Scores r(x, y) [K] of the K answers of each preference, without gradient."""
    def compute(batch, blocks):
        return common.all_scores(model, batch, blocks, cfg.micro_batch_tokens)
    return common.of_each_preference(compute, preferences, tokenizer.pad_token_id, device)


def evaluate(model, tokenizer, preferences, cfg: Config, device) -> dict[str, float]:
    """Accuracy, margin, loss and calibration over all pairs of the held-out rows."""
    if not preferences:
        return {}
    scores = answer_scores(model, tokenizer, preferences, cfg, device)
    better, worse = torch.cat([s[torch.tensor(p.pairs)] for s, p in zip(scores, preferences)]).unbind(1)  # [pairs]
    differences = better - worse
    right = torch.heaviside(differences, differences.new_tensor(0.5))  # a tie is half right
    return {
        "eval_pair_accuracy": right.mean().item(),
        "eval_margin": differences.mean().item(),
        "eval_loss": -F.logsigmoid(differences).mean().item(),
        "eval_calibration_error": calibration_error(differences)}


def complete_config(model, tokenizer, data: common.Shuffled, cfg: Config, device) -> None:
    """Complete what is saved with the model: settings in its config, and a pad token that differs from EOS.

    Only differences of scores have a meaning, so zero is defined as the mean score of the best answers. The head has no
    bias that could hold this shift: it is saved in model/config.json, and --reward subtracts it.
    """
    best_scores = [scores[0] for scores in answer_scores(model, tokenizer, data.first(2000), cfg, device)]
    model.config.reward_shift = torch.stack(best_scores).mean().item()
    model.config.reward_system_prompt = cfg.system_prompt  # --reward warns if the policy's differs
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = common.pad_unlike_eos(tokenizer)
    model.config.problem_type = "regression"  # else transformers' pipeline would return the sigmoid of a score


def main(cfg: Config) -> None:
    run = common.Run(cfg)
    preferences, eval_preferences = common.read_train_and_eval(cfg, common.read_preferences)
    model, tokenizer = common.load_policy(cfg, run.device, cls=AutoModelForSequenceClassification, num_labels=1)
    scale_fresh_head(model)
    optimizer, schedule = common.make_optimizer(model, cfg, betas=(0.9, 0.95))  # as in InstructGPT
    # ended: a cut answer gets its end token all the same, since --reward reads the score there
    eval_preferences = common.encode_preferences(eval_preferences, tokenizer, cfg, "--eval_data", ended=True)
    data = common.Shuffled(common.encode_preferences(preferences, tokenizer, cfg, "--data", ended=True), cfg.seed)

    run.start(data, model=(model, optimizer, schedule))  # what a checkpoint holds, and --resume restores
    if run.next_step == 0:  # step 0: evaluate before training
        run.end_step(0, evaluate(model, tokenizer, eval_preferences, cfg, run.device))

    for step in run.steps():
        meter = common.Meter()  # weighted means, over micro-batches and ranks

        # 1. The step's answers, a row each, and their pairs; blocks are the rows that answer one prompt.
        drawn = data.next(cfg.pairs_per_step)
        batch, blocks = common.collate_preferences(drawn, tokenizer.pad_token_id, run.device)
        pairs = [(rows[i], rows[j]) for preference, rows in zip(drawn, blocks) for i, j in preference.pairs]
        better, worse = torch.tensor(pairs, device=run.device).unbind(1)  # row numbers
        margins = torch.tensor([preference.margin for preference in drawn for _ in preference.pairs], device=run.device)

        # 2. Update. Each pair weighs 1 / pairs of the step, so the gradients of micro-batches just add up.
        total_loss = torch.zeros((), device=run.device)
        for rows, input_ids, attention_mask, T in common.micro_batches(batch, blocks, cfg.micro_batch_tokens):
            scores = torch.zeros(len(batch.mask), device=run.device)  # [N], 0 outside the micro-batch
            scores[rows] = common.sequence_scores(model, input_ids, attention_mask)
            here = torch.isin(better, rows)  # the micro-batch's pairs: it has both answers of a pair, or neither
            chosen, rejected = better[here], worse[here]
            loss, stats = preference_loss(scores[chosen], scores[rejected], margins[here])
            loss = loss + cfg.center_coef * (scores[chosen] + scores[rejected]).square().mean()
            count = here.sum() * (T > 0)  # T = 0: a dummy, since FSDP wants as many passes of every rank
            loss = loss * count / len(pairs)
            loss.backward()
            total_loss += loss.detach()
            meter.add(count, **stats)
        meter.add(1, **run.optimizer_step(model, optimizer, schedule, total_loss))

        # 3. Log.
        metrics = {**meter.means(), **run.timing(batch.attention_mask.sum())}

        # 4. Evaluate and save.
        if run.evaluates(step):
            metrics |= evaluate(model, tokenizer, eval_preferences, cfg, run.device)
        if run.keeps_model(step):
            complete_config(model, tokenizer, data, cfg, run.device)
        run.keep_model(step, model, tokenizer)  # every --model_every steps
        run.end_step(step, metrics)
    complete_config(model, tokenizer, data, cfg, run.device)
    run.finish(model, tokenizer)


if __name__ == "__main__":
    common.launch(main, Config)
