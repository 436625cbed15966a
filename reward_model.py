"""Reward model (Bradley–Terry; Christiano et al. 2017, arXiv:1706.03741; InstructGPT, arXiv:2203.02155):

    minimize  −log σ(r(x, y⁺) − r(x, y⁻) − margin)                     mean over pairs               (InstructGPT eq. 1)
    ranked    −1/(K(K−1)/2) Σ_{i<j} log σ(r(x, y_i) − r(x, y_j))       all pairs of K answers, each read once
    centred   + c·(r(x, y⁺) + r(x, y⁻))²                               mean over pairs             (arXiv:2312.09244)

An update weighs all its pairs alike: a ranking that gives more of them counts for more (InstructGPT: rankings alike).

r is a language model with a scalar head, read at the last token. ppo.py takes the result by --reward DIRECTORY.

Without flags: a reward model for additions, from pairs that the verifier judged. README.md: real models and data.

Shapes: B pairs, or prompts with K answers each, best first, of a micro-batch; N answers of the step.
"""
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

import common
from common import flag


@dataclass
class Config(common.RunConfig):
    steps: int = flag(1000, "updates")
    pairs_per_step: int = flag(32, "rows per update: pairs, or rankings with all their pairs (InstructGPT: 64)")
    max_completion_tokens: int = flag(1024, "answers are cut here, and then end without EOS")
    center_coef: float = flag(0.01, "c: weight of (r⁺ + r⁻)², which holds scores near 0 (TRL advises 0.01)")
    lr: float = flag(5e-4, "learning rate: 1e-5 for a real model (InstructGPT: 9e-6)")
    lr_schedule: Literal["constant", "linear", "cosine"] = flag("linear", "after the warm-up (InstructGPT: cosine)")
    warmup_steps: int = flag(10, "updates of linear warm-up, the first at rate 0")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this norm")
    eval_every: int = flag(100, "steps between evaluations; there is one before the first step and one after the last")


def preference_loss(chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | None = None):
    """Scores [B], [B] -> (loss, stats): mean of −log σ(r⁺ − r⁻ − margin) (InstructGPT eq. 1; margin: Llama 2 eq. 2)."""
    difference = chosen - rejected
    loss = -F.logsigmoid(difference - (0.0 if margin is None else margin)).mean()
    return loss, {"pair_accuracy": (difference > 0).float().mean().detach(), "margin": difference.mean().detach()}


def ranking_loss(rewards: torch.Tensor):
    """Scores [B, K], best first -> (loss, stats): mean of −log σ(r_i − r_j) over all K(K−1)/2 pairs i < j of a row.

    For rankings of one length and without ties. `main` has others too, and takes `preference_loss` of their pairs.
    """
    better, worse = torch.triu_indices(rewards.shape[1], rewards.shape[1], offset=1, device=rewards.device)
    return preference_loss(rewards[:, better].flatten(), rewards[:, worse].flatten())


def calibration_error(differences: torch.Tensor, bins: int = 10) -> float:
    """Score differences [n] of (chosen − rejected) -> expected calibration error: does σ(Δ) = 0.8 mean 80% preferred?

    Each pair is read in the direction the model prefers: confidence σ(|Δ|), right where Δ > 0, half right in a tie. The
    mean gap between confidence and share right, over bins of confidence, weighted by their sizes.
    """
    confidence, right = torch.sigmoid(differences.abs()), torch.heaviside(differences, differences.new_tensor(0.5))
    bin_of = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    gaps = [(confidence[bin_of == b].mean() - right[bin_of == b].mean()).abs() * (bin_of == b).float().mean()
            for b in bin_of.unique()]
    return float(sum(gaps))


def scale_fresh_head(model) -> None:
    """Give a new scalar head (the checkpoint had none) the spread 1/√(H + 1): scores then start at size 1
    (arXiv:2403.17031, on the reward head)."""
    if not any("SequenceClassification" in name for name in model.config.architectures or ()):
        spread = getattr(model.config, "initializer_range", 0.02)
        with torch.no_grad():
            model.score.weight.mul_((model.config.get_text_config().hidden_size + 1) ** -0.5 / spread)


def pad_unlike_eos(tokenizer) -> int:
    """The pad id to save. transformers reads the score at the last token that is not padding: that must be the EOS.

    Another special token, else the last of the vocabulary, which is rare: as pad token it is left out of decoded text.
    """
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        special = sorted(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        other = next(i for i in (*special, len(tokenizer) - 1, 0) if i != tokenizer.eos_token_id)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(other)
    return tokenizer.pad_token_id


def evaluate(model, preferences, pad_id: int, cfg: Config, device) -> dict[str, float]:
    """Accuracy, margin and calibration over all pairs of held-out rows."""
    if not preferences:
        return {}
    batch, blocks, pairs = common.collate_preferences(preferences, pad_id, device)
    better, worse = common.all_scores(model, batch, blocks, cfg.micro_batch_tokens)[pairs].unbind(1)
    differences = better - worse
    return {"eval_pair_accuracy": torch.heaviside(differences, differences.new_tensor(0.5)).mean().item(),  # tie: ½
            "eval_margin": differences.mean().item(), "eval_calibration_error": calibration_error(differences)}


def main(cfg: Config) -> None:
    run = common.Run(cfg)
    preferences, eval_preferences = common.read_train_and_eval(cfg, common.read_preferences)
    model, tokenizer = common.load_policy(cfg, run.device, cls=AutoModelForSequenceClassification, num_labels=1)
    scale_fresh_head(model)
    optimizer, schedule = common.make_optimizer(model, cfg, betas=(0.9, 0.95))  # InstructGPT's
    eval_preferences = common.encode_preferences(eval_preferences, tokenizer, cfg, "--eval_data")
    data = common.Shuffled(common.encode_preferences(preferences, tokenizer, cfg, "--data"), cfg.seed)
    pad_id = tokenizer.pad_token_id

    run.start(data, model=(model, optimizer, schedule))
    if run.next_step == 0:
        run.end_step(0, evaluate(model, eval_preferences, pad_id, cfg, run.device))

    for step in run.steps():
        meter = common.Meter()

        # 1. The step's answers, one sequence each, and its pairs: all those of a ranking, in one update.
        drawn = data.next(cfg.pairs_per_step)
        batch, blocks, pairs = common.collate_preferences(drawn, pad_id, run.device)  # blocks: the rows of one prompt
        better, worse = pairs.unbind(1)  # rows
        margins = torch.tensor([preference.margin for preference in drawn for _ in preference.pairs], device=run.device)

        # 2. Update: each micro-batch counts by its share of the step's pairs; nothing is averaged.
        total_loss = torch.zeros((), device=run.device)
        for rows, input_ids, attention_mask, T in common.micro_batches(batch, blocks, cfg.micro_batch_tokens):
            scores = torch.zeros(len(batch.mask), device=run.device).index_put(  # [N], 0 outside the micro-batch
                (rows,), common.sequence_scores(model, input_ids, attention_mask))
            here = torch.isin(better, rows)  # both answers of a pair are in it, or neither
            loss, stats = preference_loss(scores[better[here]], scores[worse[here]], margins[here])
            loss = loss + cfg.center_coef * (scores[better[here]] + scores[worse[here]]).square().mean()
            count = here.sum() * (T > 0)  # T = 0: a rank without rows of its own keeps step with the others
            loss = loss * count / len(pairs)
            loss.backward()
            total_loss += loss.detach()
            meter.add(count, **stats)
        meter.add(1, **run.optimizer_step(model, optimizer, schedule, total_loss))

        # 3. Log.
        metrics = {**meter.means(), **run.timing(batch.attention_mask.sum())}

        # 4. Evaluate and save.
        if run.evaluates(step):
            metrics |= evaluate(model, eval_preferences, pad_id, cfg, run.device)
        run.end_step(step, metrics)

    # A Bradley–Terry score has no zero of its own. Put it at the mean chosen answer: the head has no bias, so
    # model/config.json keeps the shift, and --reward subtracts it.
    batch, blocks, _ = common.collate_preferences(data.items[:2000], pad_id, run.device)
    scores = common.all_scores(model, batch, blocks, cfg.micro_batch_tokens)
    model.config.reward_shift = scores[[rows[0] for rows in blocks]].mean().item()
    model.config.pad_token_id = pad_unlike_eos(tokenizer)
    run.finish(model, tokenizer)


if __name__ == "__main__":
    common.launch(main, Config)
