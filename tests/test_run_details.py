"""`Run`, one method at a time: output directory, logs, checkpoints. (test_runs.py runs whole scripts.)"""
import collections
import dataclasses
import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import grpo
from helpers import ROOT, FakeRun, random_model, read_metrics


def begin(tmp_path, extra={"scale": 1.0}, **flags):
    """Start a run of a small linear model whose learning rate halves -> (run, model, optimizer, schedule)."""
    model = torch.nn.Linear(2, 1)
    run = common.Run(grpo.Config(**{"output_dir": str(tmp_path / "run"), "lr": 0.1, **flags}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5 ** update)
    run.extra = dict(extra)
    run.start(common.Shuffled([1, 2], 0), policy=(model, optimizer, schedule))
    run.bar.close()  # otherwise it is drawn when Python exits
    return run, model, optimizer, schedule


def test_the_default_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert common.Run(grpo.Config()).directory == Path("runs/grpo")


def test_config_json_says_how_the_run_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = begin(tmp_path, seed=3)[0]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["flags"], config["script"]) == (vars(run.cfg), "grpo.py")
    git = ["git", "-C", ROOT, "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    assert config["versions"]["torch"] == torch.__version__ and config["commit"] == (commit or None)  # not that of cwd
    assert (config["processes"], config["device"]) == (1, "cpu")


def test_neither_git_nor_a_file_system_with_locks_is_needed(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise OSError("not there")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(subprocess, "run", fails)
    monkeypatch.setattr(common.fcntl, "lockf", fails)
    begin(tmp_path)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["commit"] is None


def test_overwrite_removes_what_a_run_writes_and_nothing_else(tmp_path):
    begin(tmp_path)
    for name in common.Run.WRITES:
        path = tmp_path / "run" / name.replace("*", "7")
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text("old")
    (tmp_path / "run" / "models" / "mine").mkdir()
    (tmp_path / "run" / "tensorboard").unlink()
    (tmp_path / "run" / "tensorboard").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    begin(tmp_path, overwrite=True)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock", "checkpoint", "config.json", "models",
                                                                    "notes.txt"]
    assert [p.name for p in (tmp_path / "run" / "models").iterdir()] == ["mine"]


@pytest.mark.parametrize("removed", range(1, 6))
def test_an_interrupted_overwrite_cannot_be_resumed(removed, tmp_path, monkeypatch):
    """The old run's checkpoint would pass for the new run's. --overwrite itself can be repeated."""
    begin(tmp_path)
    remove, done = common.remove, []

    def killed(path):
        if len(done) == removed:
            raise KeyboardInterrupt
        done.append(remove(path))
    monkeypatch.setattr(common, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path, overwrite=True)
    monkeypatch.setattr(common, "remove", remove)
    with pytest.raises(common.UserError, match="--resume: no checkpoint"):
        begin(tmp_path, resume=True)
    begin(tmp_path, overwrite=True)


def test_overwrite_spares_the_reward_model_in_use(tmp_path, monkeypatch):
    """However the two paths are written."""
    begin(tmp_path)
    (tmp_path / "run" / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    for reward in (str(tmp_path / "run" / "model"), "run/model"):
        for output_dir in (str(tmp_path / "run"), "run"):
            with pytest.raises(common.UserError, match="is in, the run that would be replaced"):
                begin(tmp_path, overwrite=True, reward=reward, output_dir=output_dir)


def test_what_may_change_with_resume_and_what_not(tmp_path):
    begin(tmp_path)
    may_change = {"micro_batch_tokens": 100, "gradient_checkpointing": True, "eval_samples": 4, "eval_every": 3,
                  "eval_data": "other", "save_every": 7, "model_every": 5, "steps": 900, "max_bad_steps": 9}
    begin(tmp_path, resume=True, **may_change)
    for field in dataclasses.fields(grpo.Config):
        if field.name not in {*may_change, "resume", "overwrite", "output_dir", "log_to"}:
            other = {bool: not field.default, str: "other", int: 2, float: 0.125}.get(
                field.type, "on" if field.name == "thinking" else "linear")
            with pytest.raises(common.UserError, match=f"--{field.name} was"):
                begin(tmp_path, resume=True, **{field.name: other})


def test_a_flag_that_is_newer_than_the_run_had_its_default(tmp_path):
    begin(tmp_path)
    config = tmp_path / "run" / "config.json"
    saved = json.loads(config.read_text())
    del saved["flags"]["clip_eps"]  # as an earlier version wrote it
    config.write_text(json.dumps(saved))
    with pytest.raises(common.UserError, match="--clip_eps was 0.2 and is now 0.3"):
        begin(tmp_path, resume=True, clip_eps=0.3)
    begin(tmp_path, resume=True)


def test_a_flag_that_is_gone_had_a_value(tmp_path):
    begin(tmp_path)
    config = tmp_path / "run" / "config.json"
    saved = json.loads(config.read_text())
    config.write_text(json.dumps(saved | {"flags": saved["flags"] | {"gamma": 0.9}}))
    with pytest.raises(common.UserError, match="--gamma was 0.9 and is now None"):
        begin(tmp_path, resume=True)


@pytest.mark.parametrize("warmup, said", [(23, False), (24, True)])
def test_a_run_that_is_all_warm_up_says_so(warmup, said, capsys):
    """Of 24 updates the last has 23/24 of the rate."""
    cfg = grpo.Config(steps=4, minibatches=3, updates_per_batch=2, warmup_steps=warmup)
    common.warn_of_flags(cfg)
    assert ("--warmup_steps 24: the run has at most 24 updates" in capsys.readouterr().err) == said


def test_the_seed_is_that_of_all_random_numbers(tmp_path):
    drawn = []
    for seed in (1, 2, 1):
        begin(tmp_path / str(len(drawn)), seed=seed)
        drawn.append((torch.rand(1).item(), random.random(), np.random.rand()))
    assert drawn[0] == drawn[2] and all(a != b for a, b in zip(*drawn[:2]))


def test_a_signal_saves(tmp_path):
    """At once, and not only after --save_every steps: the steps since the last checkpoint would be lost."""
    run = begin(tmp_path)[0]
    run.stop_signal = signal.SIGTERM
    with pytest.raises(SystemExit) as stopped:
        run.end_step(1, {})
    assert stopped.value.code == 143 and [path.name for path in run.checkpoints()] == ["step-000002"]
    with pytest.raises(OSError):  # closed: `leave` may skip the exit handlers, and with them wandb's
        os.fstat(run.lock)


def test_a_signal_to_one_process_stops_them_all(tmp_path, monkeypatch):
    """After the same step: a process that went on alone would wait for the others."""
    run = begin(tmp_path)[0]
    def gather(mine):  # the other one has got a signal; its random state is the same
        return mine + [(signal.SIGTERM, item[1]) for item in mine if isinstance(item, tuple)]
    monkeypatch.setattr(common, "gather_in_order", gather)
    with pytest.raises(SystemExit) as stopped:
        run.end_step(1, {})
    assert stopped.value.code == 143


def test_signals_are_the_runs_from_its_start_to_its_end(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(common.Run, "catches_signals", True)  # as `launch` does
    monkeypatch.setattr(os, "register_at_fork", lambda **kwargs: None)
    monkeypatch.setattr(signal, "signal", lambda *call: calls.append(call))
    run = begin(tmp_path)[0]
    assert calls[:2] == [(signal.SIGINT, run.note_signal), (signal.SIGTERM, run.note_signal)]
    run.close()
    assert calls[-2:] == [(signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)]


def test_a_second_signal_ends_at_once(monkeypatch):
    handlers = {}
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.update({number: handler}))
    run = FakeRun(None)
    run.note_signal(signal.SIGTERM, None)
    assert run.stop_signal == signal.SIGTERM and handlers == {signal.SIGTERM: signal.SIG_DFL}


@pytest.mark.parametrize("broken, error", [("os.rename", OSError("full")),
                                           ("torch.distributed.checkpoint.save", RuntimeError("full"))])
def test_a_checkpoint_that_cannot_be_written(broken, error, tmp_path, monkeypatch):
    """The first one of a run, and a later one."""
    def fail(*args, **kwargs):
        raise error
    with monkeypatch.context() as full, pytest.raises(common.TrainingFailed, match=": full; no checkpoint is intact"):
        full.setattr(broken, fail)
        begin(tmp_path)
    run = begin(tmp_path, overwrite=True)[0]
    monkeypatch.setattr(broken, fail)
    with pytest.raises(common.TrainingFailed, match="cannot save to .*: full; step-000000 is intact"):
        run.end_step(run.cfg.save_every, {})
    assert [path.name for path in (run.directory / "checkpoint").iterdir()] == ["step-000000"]


def test_a_model_without_gradient_checkpointing(tmp_path):
    model = random_model("Qwen2")[0]
    type(model).supports_gradient_checkpointing, before = False, type(model).supports_gradient_checkpointing
    try:
        with pytest.raises(common.UserError, match="^--gradient_checkpointing"):
            common.make_optimizer(model, grpo.Config(gradient_checkpointing=True))
    finally:
        type(model).supports_gradient_checkpointing = before


def test_the_first_line_of_the_root_cause():
    try:
        try:
            raise ValueError("the cause\nand more")
        except ValueError:
            raise KeyError("what came of it")
    except KeyError as error:
        assert common.innermost(error) == "ValueError: the cause"
    assert common.innermost(OSError()) == "OSError: "
    with pytest.raises(common.UserError, match=r"^file \(RuntimeError\)$"), common.one_line_errors("file"):
        raise RuntimeError
    with pytest.raises(torch.OutOfMemoryError), common.one_line_errors("--model x"):  # `launch` has advice
        raise torch.OutOfMemoryError


def test_a_stream_that_nobody_reads_does_not_fail():
    """A pipe's reader may have ended, or a terminal may have been closed."""
    def write(text):
        raise OSError(errno.EIO, "Input/output error")
    assert common.outliving_reader(write)("text") is None and common.outliving_reader(len)("text") == 4


def test_a_checkpoint_every_so_many_steps_and_after_the_last(tmp_path):
    run = begin(tmp_path, save_every=2, steps=5)[0]
    saved = []
    for step in range(6):
        run.end_step(step, {})
        saved.append(run.checkpoints()[-1].name)
    assert saved == ["step-000000", "step-000000", "step-000003", "step-000003", "step-000005", "step-000006"]


def test_all_the_state_comes_back(tmp_path):
    run, model, optimizer, schedule = begin(tmp_path)
    run.extra = {"scale": 2.5}
    model(torch.ones(1, 2)).sum().backward()
    run.optimizer_step(model, optimizer, schedule, torch.tensor(0.0))
    run.data.next(3)
    run.next_step = 1
    torch.rand(5)  # the random state is no longer that of the seed
    random.random(), np.random.rand()
    run.save_checkpoint()
    drawn = torch.rand(1), random.random(), np.random.rand()
    again, other, moments, rates = begin(tmp_path, resume=True)
    assert (again.next_step, again.extra, again.data.position) == (1, {"scale": 2.5}, 3)
    assert (torch.rand(1), random.random(), np.random.rand()) == drawn
    assert rates.get_last_lr() == [0.05] and moments.param_groups[0]["lr"] == 0.05
    for ours, theirs in zip((other.weight, *moments.state[other.weight].values()),
                            (model.weight, *optimizer.state[model.weight].values()), strict=True):
        assert torch.equal(ours, theirs)
    assert [p.name for p in again.checkpoints()] == ["step-000001"]


class Sharded(torch.Tensor):
    def full_tensor(self):
        return self


def test_a_checkpoint_keeps_what_a_script_wants(tmp_path):
    """`torch.distributed.checkpoint` alone would make strings of keys, and drop what came after `start`."""
    def extra(n):
        return {"accuracy": {i: i / 2 for i in range(n)}, "seen": collections.Counter("ab" * n), "none": {},
                "pair": (n, [n]), "rollouts": collections.deque(torch.full((2,), i) for i in range(n)),
                "mixed": {"a": torch.tensor(n), "b": [torch.tensor(n), *range(n)]},
                "scale": torch.full((2,), n), "weights": {"a": torch.full((2,), n), 1: torch.tensor(n)}}

    def filled(extra):
        return [extra["scale"], *extra["weights"].values()]
    run, kept = begin(tmp_path, extra=extra(0))[0], extra(2)
    for tensor in filled(run.extra):
        tensor.fill_(2)
    run.extra |= kept | {name: run.extra[name] for name in ("scale", "weights")}
    for step in (1, 2):  # a resumed run can also save again
        run.next_step = step
        run.save_checkpoint()
        at_start = extra(0)
        run = begin(tmp_path, extra=at_start, resume=True)[0]
        assert str(run.extra) == str(extra(2))
        assert all(a is b for a, b in zip(filled(run.extra), filled(at_start)))
    for change in ({"weights": kept["weights"] | {"b": torch.tensor(2)}}, {"none": {"a": torch.tensor(1)}},
                   {"scale": 1}, {"scale": torch.ones(3).long()}, {"scale": torch.ones(2)}, {"late": 1}):
        whole, run.extra = run.extra, run.extra | change
        with pytest.raises(common.TrainingFailed, match="run.extra: a key, or a tensor's shape or dtype"):
            run.save_checkpoint()
        run.extra = whole
    fewer = extra(0)
    del fewer["weights"]["a"]
    with pytest.raises(common.UserError, match=r"of another run: layout of run.extra was .*'weights', {'a': "):
        begin(tmp_path, extra=fewer, resume=True)
    run.extra["pair"] = [Sharded(torch.ones(2))]
    with pytest.raises(common.TrainingFailed, match="run.extra: a sharded tensor among other values"):
        run.save_checkpoint()


def test_what_resume_would_not_bring_back_is_refused(tmp_path):
    run, model, *_ = begin(tmp_path)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(common.TrainingFailed, match="step 1: policy has a gradient that no run.optimizer_step has use"):
        run.end_step(1, {})
    model.zero_grad()
    run.end_step(1, {})
    model.late = torch.nn.Parameter(torch.ones(2))  # which the optimizer, made before, will never move
    model.late.sum().backward()
    with pytest.raises(common.TrainingFailed, match="step 2: policy has a gradient .*that its optimizer lacks"):
        run.end_step(2, {})
    del model.late
    model.bias.requires_grad_(False)  # then a checkpoint would not hold its moments
    with pytest.raises(common.TrainingFailed, match="requires_grad has changed since run.start"):
        run.save_checkpoint()


def test_a_head_of_ones_own_and_a_rate_of_ones_own():
    """As README has it: an optimizer for a module without layers, and a learning rate that stands in two places. Over
    four updates of warm-up it is 0, ¼, ½ and ¾ of the full one, which is halved before the second of them."""
    cfg, head = grpo.Config(lr=0.25, warmup_steps=4), torch.nn.Linear(2, 1)
    optimizer, schedule = common.make_optimizer(head, cfg)
    run, rates = FakeRun(cfg, head=(head, optimizer, schedule)), []
    for update in range(5):
        if update == 1:
            schedule.base_lrs = [0.125]
            optimizer.param_groups[0]["lr"] = 0.125 * schedule.lr_lambdas[0](schedule.last_epoch)
        before = head.bias.item()
        head(torch.ones(2)).backward()
        rates.append(run.optimizer_step(head, optimizer, schedule, torch.tensor(0.0))["lr"])
        assert before - head.bias.item() == pytest.approx(rates[-1], rel=1e-4)  # Adam's step, for a constant gradient
    assert rates == [0, 0.03125, 0.0625, 0.09375, 0.125]


@pytest.mark.parametrize("later", [1.0, float("nan")])  # a good update later in the step does not prevent it
def test_too_many_bad_updates_in_a_row_end_the_run_saved(later, tmp_path):
    """The run ends after the step that reaches the limit. --resume continues with the next step and the same count."""
    run, model, optimizer, schedule = begin(tmp_path, max_bad_steps=2)

    def do(step, *factors):
        for factor in factors:
            (model(torch.ones(1, 2)).sum() * factor).backward()
            metrics = run.optimizer_step(model, optimizer, schedule, torch.tensor(0.0))
        run.end_step(step, metrics)
    do(1, float("nan"))
    with pytest.raises(common.TrainingFailed, match="--max_bad_steps 2: so many updates in a row .*saved"):
        do(2, float("nan"), later)
    assert [path.name for path in run.checkpoints()] == ["step-000003"]
    with pytest.raises(OSError):  # the directory is free again
        os.fstat(run.lock)
    run, model, optimizer, schedule = begin(tmp_path, max_bad_steps=2, resume=True)
    assert run.next_step == 3 and run.bad_steps == {"policy": 0 if later == 1.0 else 3}
    do(3, 1.0, float("nan"), 1.0)  # a good update resets the count


def test_a_bad_update_of_the_critic_does_not_save_a_failing_policy():
    """The policy has reached --max_bad_steps 2, the critic has not."""
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    parts = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters())
        parts.append((model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)))
    run = FakeRun(SimpleNamespace(max_grad_norm=1.0, max_bad_steps=2), policy=parts[0], value=parts[1])
    for part in (parts[0], parts[0], parts[1]):
        part[0](torch.ones(1, 2)).sum().backward()
        run.optimizer_step(*part, torch.tensor(math.nan))
    assert run.failing


def test_the_last_checkpoint_is_there_until_the_next_one_is(tmp_path, monkeypatch):
    run = begin(tmp_path)[0]
    run.next_step, rename = 1, common.os.rename
    def killed(source, target):
        if target.name == "step-000001":
            raise KeyboardInterrupt
        rename(source, target)
    monkeypatch.setattr(common.os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        run.save_checkpoint()
    assert [path.name for path in run.checkpoints()] == ["step-000000"]


def test_a_failed_save_leaves_the_last_checkpoint_alone(tmp_path, monkeypatch):
    run = begin(tmp_path)[0]
    run.next_step = 1
    def full(*args, checkpoint_id):
        checkpoint_id.mkdir()
        (checkpoint_id / "half").write_text("x")
        raise common.dcp.api.CheckpointException("save", {0: (OSError(28, "No space left on device"), None)})
    monkeypatch.setattr(common.dcp, "save", full)
    with pytest.raises(common.TrainingFailed, match="No space left on device; step-000000 is intact"):
        run.save_checkpoint()
    assert [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()] == ["step-000000"]


def test_what_a_killed_save_left_is_not_in_the_next(tmp_path):
    run = begin(tmp_path)[0]
    (tmp_path / "run" / "checkpoint" / "unfinished").mkdir()
    (tmp_path / "run" / "checkpoint" / "unfinished" / "stale").write_text("of a killed process")
    (tmp_path / "run" / "checkpoint" / "step-old").mkdir()
    run.next_step = 1
    run.save_checkpoint()
    assert [p.name for p in run.checkpoints()] == ["step-000001"]
    assert not list((tmp_path / "run").glob("checkpoint/*/stale"))


def test_lines_of_steps_to_be_done_again_are_dropped(tmp_path):
    run = FakeRun(None)
    run.directory, run.next_step = tmp_path, 2
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text('{"step": 1}\n{"step": 1}\n{"step": 2}\n{"ste')
    run.drop_later_lines()
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / name).read_text() == '{"step": 1}\n{"step": 1}\n'


def test_a_gradient_is_clipped_by_hand():
    """The gradient (3, 4) has norm 5, which is reported. It is scaled to norm 0.5: (0.3, 0.4). The 4 is that of a
    parameter of your own, which the optimizer has beside the model's."""
    model, own = torch.nn.Linear(1, 1, bias=False), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*model.parameters(), own], lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    before = model.weight.item()
    (model(torch.tensor([3.0])) + 4 * own).backward()
    run = FakeRun(SimpleNamespace(max_grad_norm=0.5, max_bad_steps=5), policy=(model, optimizer, schedule))
    done = run.optimizer_step(model, optimizer, schedule, torch.tensor(1.5))
    assert done == {"loss": 1.5, "grad_norm": pytest.approx(5), "lr": 1.0}
    assert (before - model.weight.item(), -own.item()) == pytest.approx((0.3, 0.4))


def test_a_skipped_update_does_not_advance_the_rate(tmp_path):
    run, model, optimizer, schedule = begin(tmp_path)
    (model(torch.ones(1, 2)).sum() * float("nan")).backward()
    assert run.optimizer_step(model, optimizer, schedule, torch.tensor(0.0))["lr"] == 0.1
    assert schedule.get_last_lr() == [0.1]
    assert model.weight.grad is None


def test_time_tokens_and_memory():
    run = FakeRun(None)
    run.device, run.began = torch.device("cpu"), time.perf_counter() - 2
    timing = run.timing(torch.tensor(100))
    assert timing["seconds"] >= 2 and timing["tokens_per_second"] * timing["seconds"] == pytest.approx(100)
    assert 100 < timing["peak_memory_mb"] < 100_000  # importing torch takes more than 100


def test_the_time_of_a_step_begins_with_the_step():
    run = FakeRun(grpo.Config(steps=3))
    run.device, run.next_step = torch.device("cpu"), 1
    began, phases = [], []
    for _ in run.steps():
        began.append(run.began)
        phases.append(dict(common.PHASE_SECONDS))
        common.PHASE_SECONDS["rollout"] += 1.0
    assert began == sorted(set(began)) and len(began) == 3 and phases == [{}] * 3


@pytest.mark.parametrize("device, step, gap, warns", [
    ("cpu", 1, 0.0009, False), ("cpu", 1, 0.002, True), ("cpu", 2, 0.002, False), ("cuda", 1, 0.09, False),
    ("cuda", 1, 0.11, True)])
def test_a_sampler_that_is_off_by_more_than_rounding_is_named_once(device, step, gap, warns, tmp_path, capsys):
    """In bfloat16, as on a GPU, rounding is up to a tenth of a nat."""
    run = begin(tmp_path)[0]
    run.device = torch.device(device)
    run.end_step(step, {"sampler_gap": torch.tensor(gap)})
    assert ("more than rounding" in capsys.readouterr().err) == warns
    assert read_metrics(tmp_path / "run")[0]["sampler_gap"] == pytest.approx(gap)


def test_samples_are_two_of_each_of_four_prompts(tmp_path):
    run = FakeRun(grpo.Config(eval_every=7))
    run.directory = tmp_path
    problems = [common.Problem("", [], f"a{p}", {}, rendered=(str(p), True)) for p in range(5)]
    rollout = SimpleNamespace(completions=[f"{p}.{g}" for p in range(5) for g in range(3)],
                              finished=torch.arange(15) % 2 == 0)
    numbers = torch.arange(15.0)
    for step in range(1, 9):  # in the first step, and in those that evaluate
        run.log_samples(step, problems, rollout, numbers.view(5, 3), -numbers)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert rows == [{"step": step, "prompt": str(p), "completion": f"{p}.{g}", "finished": (3 * p + g) % 2 == 0,
                     "answer": f"a{p}", "reward": 3.0 * p + g, "advantage": -(3.0 * p + g)}
                    for step in (1, 7) for p in range(4) for g in range(2)]


def install(monkeypatch, package):
    """Make importlib find the package, and the others as before: transformers asks it too."""
    find = common.importlib.util.find_spec
    monkeypatch.setattr(common.importlib.util, "find_spec", lambda name, *more: name == package or find(name, *more))


def test_tensorboard_gets_every_metric(tmp_path, monkeypatch):
    logged = []
    class Writer:
        def __init__(self, directory, purge_step): logged.append((directory, purge_step))
        def add_scalar(self, *args): logged.append(args)
        def flush(self): logged.append("flushed")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    install(monkeypatch, "tensorboard")
    run = begin(tmp_path, log_to="tensorboard")[0]
    run.end_step(3, {"loss": 0.5})
    assert logged == [(tmp_path / "run" / "tensorboard", 0), ("loss", 0.5, 3), ("epoch", 0.0, 3), "flushed"]


def test_wandb_gets_every_metric(tmp_path, monkeypatch):
    """A resumed run continues the one that wandb has, and one that replaces it begins another. wandb's own variables
    name the project and the run."""
    logged, ids, names = [], [], []

    def init(id, resume, project, name, **settings):
        ids.append(id)
        logged.append(resume)
        names.append((project, name))
        return SimpleNamespace(log=lambda metrics, step: logged.append((metrics, step)))
    fake = SimpleNamespace(init=init, finish=lambda: logged.append("finished"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    install(monkeypatch, "wandb")
    for flags in ({}, {"resume": True}, {"overwrite": True}):
        run = begin(tmp_path, log_to="wandb", **flags)[0]
        run.end_step(0, {"loss": 0.5})
        run.close()
        monkeypatch.setenv("WANDB_PROJECT", "addition")
        monkeypatch.setenv("WANDB_NAME", "first")
    assert names == [("rl", "run"), ("addition", "first"), ("addition", "first")]
    assert logged == ["allow", ({"loss": 0.5, "epoch": 0.0}, 0), "finished"] * 3
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("value", [None, "x", torch.ones(2), np.ones(2)])
def test_a_metric_that_is_no_number_is_named(tmp_path, value):
    run = begin(tmp_path)[0]
    with pytest.raises(common.TrainingFailed, match="metric mine: want a single number, not"):
        run.end_step(1, {"loss": torch.tensor(0.5), "mine": value})
    run.end_step(1, {"one": torch.ones(1), "np": np.float32(0.5), "int": 3, "bool": True, "nan": math.nan})
    assert read_metrics(tmp_path / "run") == [
        {"step": 1, "one": 1.0, "np": 0.5, "int": 3, "bool": True, "nan": None, "epoch": 0.0}]


def test_an_epoch_is_a_pass_over_the_data(tmp_path):
    run = begin(tmp_path)[0]  # its data are two rows
    run.data.next(5)
    run.end_step(1, {})
    assert read_metrics(tmp_path / "run")[0]["epoch"] == 2.5
