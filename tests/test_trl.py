"""The gradients of whole runs against those of TRL's trainers: pip install trl==1.16.0 datasets. Skipped without them.

TRL is given what our run has sampled, and its rewards. It accumulates over micro-batches of four rows, our scripts over
as many as fit into --micro_batch_tokens. Every update has the same gradient, where the formulas are the same. Some of
TRL 1.16's are others: k3 is multiplied by ρ (unless `use_bias_correction_kl` is off), DAPO's loss divides by the mean
token count of the minibatches, DPO's "sigmoid" ignores `label_smoothing`, and PPO (in 1.12) puts a completion's score
on the padding after its EOS.
"""
import json

import pytest
import torch
import transformers

import common
from helpers import few_pairs, is_right, load_tiny_model, record_run, save

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
if not trl.__version__.startswith("1.16."):  # its trainers change from version to version
    pytest.skip("wants trl 1.16", allow_module_level=True)
LR = 1e-4


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(script, *flags) -> the steps of a run (`record_run`), and the gradients of its updates, {name: tensor}."""
    def record(script, *flags):
        gradients, optimizer_step = [], common.Run.optimizer_step

        def keep(run, model, *args):
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
            return optimizer_step(run, model, *args)
        monkeypatch.setattr(common.Run, "optimizer_step", keep)
        steps = record_run(monkeypatch, script, tmp_path / "run", "--lr", LR, "--warmup_steps", 0,
                           "--lr_schedule", "constant", "--max_grad_norm", 1e9, "--micro_batch_tokens", 500, *flags)
        return steps, gradients
    return record


def train(trainer_class, config_class, directory, model, rows, updates, rows_per_update, **settings) -> list[dict]:
    """Train with TRL -> the gradients of its updates."""
    gradients = []

    class Keep(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args, model, **kwargs):
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    trainer_settings = {name: settings.pop(name) for name in ("reward_funcs", "rollout_func") if name in settings}
    config = config_class(
        output_dir=str(directory), use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=updates,
        learning_rate=LR, lr_scheduler_type="constant", max_grad_norm=1e9, per_device_train_batch_size=4,
        gradient_accumulation_steps=rows_per_update // 4, report_to="none", save_strategy="no", disable_tqdm=True,
        **settings)
    trainer_class(model=model, args=config, train_dataset=datasets.Dataset.from_list(rows), callbacks=[Keep()],
                  processing_class=common.tiny_tokenizer(), **trainer_settings).train()
    return gradients


def assert_same_gradients(ours, theirs, limit) -> None:
    """At most `limit` apart, as a share of their norm."""
    for a, b in zip(ours, theirs, strict=True):
        a, b = (torch.cat([x[name].flatten() for name in a]) for x in (a, b))
        assert b.norm() > 0 and (a - b).norm() < limit * b.norm()


@pytest.mark.parametrize("script, flags, settings, limit", [
    ("grpo", ["--kl_coef", 0.3, "--temperature", 0.8],
     dict(loss_type="grpo", beta=0.3, temperature=0.8, use_bias_correction_kl=False), 3e-4),
    ("grpo", ["--kl_coef", 0, "--no_divide_by_std"], dict(loss_type="grpo", scale_rewards="none"), 1e-4),
    ("dr_grpo", [], dict(loss_type="dr_grpo", scale_rewards="none"), 1e-4),
    ("dapo", ["--no_dynamic_sampling", "--overlong_buffer", 0, "--clip_low", 0.1, "--clip_high", 0.05],
     dict(loss_type="dapo", epsilon=0.1, epsilon_high=0.05), 3e-4)])
def test_two_updates_of_each_of_two_rollouts(run, tmp_path, script, flags, settings, limit):
    """A rollout's second update has ratios other than 1, of which some are clipped. Where advantages are divided by the
    std, TRL adds 1e-4 to it and we 1e-6: hence the higher limit."""
    steps, ours = run(f"{script}.py", "--steps", 2, "--prompts_per_step", 8, "--group_size", 4,
                      "--updates_per_batch", 2, *flags)
    batches = iter([(step.batches[0], step.rollouts[0]) for step in steps])
    rewards = []

    def rollout_func(prompts, trainer):
        batch, rollout = next(batches)
        rows = [problem for problem in batch for _ in range(4)]
        assert prompts == [problem.prompt for problem in rows]
        rewards[:] = [float(is_right(rollout, i)) for i in range(len(rows))]
        ids = [row[mask].tolist() for row, mask in zip(rollout.input_ids[:, -rollout.mask.shape[1]:], rollout.mask)]
        return {"prompt_ids": [problem.prompt_ids for problem in rows], "completion_ids": ids, "logprobs": None}
    assert all(step.metrics["clip_fraction"] > 0 for step in steps)
    theirs = train(
        trl.GRPOTrainer, trl.GRPOConfig, tmp_path / "trl", load_tiny_model(),
        [{"prompt": problem.prompt} for step in steps for problem in step.batches[0]], len(ours), 32,
        num_generations=4, num_iterations=2, max_completion_length=40, shuffle_dataset=False,
        reward_funcs=lambda completions, **kwargs: rewards, rollout_func=rollout_func, **{"beta": 0.0, **settings})
    assert_same_gradients(ours, theirs, limit)


@pytest.mark.parametrize("script, flags, settings", [
    ("dpo", ["--beta", 0.3], dict(beta=0.3)),
    ("reward_model", ["--center_coef", 0.1], dict(center_rewards_coefficient=0.1, adam_beta2=0.95))])
def test_three_updates_from_the_same_pairs(run, tmp_path, script, flags, settings):
    pairs, start = few_pairs(tmp_path), tmp_path / "start"
    model = load_tiny_model()
    if script == "reward_model":  # with a head, or each side would draw one of its own
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            common.build_tiny_model("arithmetic"), num_labels=1)
    save(start, model, common.tiny_tokenizer())
    _, ours = run(f"{script}.py", "--model", start, "--data", pairs, "--eval_data", pairs, "--steps", 3,
                  "--pairs_per_step", 12, *flags)  # all pairs in each step
    trainer = (trl.DPOTrainer, trl.DPOConfig) if script == "dpo" else (trl.RewardTrainer, trl.RewardConfig)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    theirs = train(*trainer, tmp_path / "trl", model, rows, 3, 12, max_length=None, **settings)
    assert_same_gradients(ours, theirs, 1e-5)
