"""Whole runs: clear errors, exact resumption, and the same numbers for any number of processes."""
import contextlib
import dataclasses
import functools
import importlib
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

import common
import grpo
from helpers import (ROOT, FakeRun, beside, ended_well, few_problems, fork, fork_ranks, launch_script, on_few_problems,
                     random_model, read_metrics, run_script, save)

SCRIPTS = ["grpo", "dapo", "dr_grpo", "ppo", "dpo", "dpo --on_policy", "reward_model"]
# Groups so large that a single process reads shared prefixes once. Most completions differ, so few rows are copies.
LARGE_GROUPS = "grpo --prompts_per_step 8 --group_size 32 --max_new_tokens 12 --temperature 3"


def write(path, text):
    path.write_text(text, errors="surrogateescape")  # "\udcff" becomes the byte ff, which no UTF-8 text has
    return path


def small_runs(folder):
    """A function from a script to the command of a run of three steps, on data that it writes to the folder."""
    draw, rows = random.Random(0), []
    for row in common.arithmetic_rows(2, "train")[:12]:
        right, slip, carry = (common.worked_answer(row["prompt"], draw, *wrong) for wrong in ((0, 0), (0, 1), (1, 1)))
        rows.append({"prompt": row["prompt"], "responses": [right, slip, carry], "scores": [1, 0, 0]})
    ranked = write(folder / "ranked.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    problems = on_few_problems(folder)
    groups = ["--prompts_per_step", 4, "--group_size", 4, "--minibatches", 2, *problems]
    own = {LARGE_GROUPS: problems,
           "ppo": ["--prompts_per_step", 8, "--minibatches", 2, "--updates_per_batch", 2, *problems],
           "dpo": ["--pairs_per_step", 8, "--data", ranked, "--eval_data", ranked],
           "dpo --on_policy": ["--pairs_per_step", 8, *problems],
           "reward_model": ["--pairs_per_step", 4, "--data", ranked, "--eval_data", ranked]}

    def command(script):
        name, *switches = script.split()
        return [f"{name}.py", *switches, "--steps", 3, "--save_every", 1, "--eval_every", 2, *own.get(script, groups)]
    return command


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    return small_runs(tmp_path_factory.mktemp("data"))


# ------------------------------------------------------------------------------------------------------- bad input

@pytest.fixture
def fails(tmp_path, monkeypatch, capsys):
    """fails(*flags) -> the line on stderr. Checks that it is the only one, exit code 2, and that nothing is written."""
    def run(*flags, script="grpo"):
        module = importlib.import_module(script)
        for optional in ("datasets", "wandb"):
            monkeypatch.setitem(sys.modules, optional, None)  # imports fail, as if it were not installed
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, flags)])
        if "--output_dir" not in flags:
            sys.argv += ["--output_dir", str(tmp_path / "out")]
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            common.launch(module.main, module.Config)
        printed = capsys.readouterr()
        assert stopped.value.code == 2 and "Traceback" not in printed.err, printed.err
        lines = [line for line in printed.err.splitlines() if line.strip()]
        assert len(lines) == 1 and lines[0].startswith(f"{script}.py: error: "), lines
        assert not (tmp_path / "out").exists()
        return lines[0]
    return run


GOOD_ROW = '{"prompt": "1+1=?", "answer": "2"}\n'


@pytest.mark.parametrize("content, message", [
    ("", "no rows"), (GOOD_ROW + '{"prompt": "1+', "line 2: want a JSON object, one a line"),
    (GOOD_ROW + '{"prompt": "1+1=?"}', "line 2: no answer"),
    (GOOD_ROW + '{"prompt": "1+1=?", "answer": " "}', "line 2: no answer"),
    (GOOD_ROW + '{"prompt": 5, "answer": "2"}', "line 2: want a prompt"),
    (GOOD_ROW + '{"prompt": "1+1=?", "answer": {}}', "line 2: no answer"),
    (GOOD_ROW + '{"prompt": "1+1=?", "answer": NaN}', "line 2: no answer"),
    (GOOD_ROW + '{"prompt": "", "answer": "2"}', "line 2: want a prompt"),
    ("[]", "line 1: want a JSON object"),
    (GOOD_ROW + '{"prompt": "\\ud83d", "answer": "2"}', "line 2: want a JSON object, one a line ('"),
    (GOOD_ROW + '{"prompt": "\\uD83D", "answer": "2"}', "line 2: want a JSON object, one a line ('"),
    (GOOD_ROW + '{"prompt": "\udcff", "answer": "2"}', "line 2: want a JSON object, one a line ('"),
    (GOOD_ROW + '{"prompt": "1", "answer": ' + "9" * 5000 + "}", "a line (Exceeds the limit")])
def test_bad_rows(fails, tmp_path, content, message):
    path = write(tmp_path / "rows.jsonl", content)
    for name in ("--data", "--eval_data"):
        line = fails(name, path)
        assert "rows.jsonl" in line and message in line


@pytest.mark.parametrize("flags, message", [
    (["--data", "nowhere.jsonl"], "nowhere.jsonl: cannot be read as JSON lines (No such file"),
    (["--data", "arithmetic:x"], "arithmetic:DIGITS"), (["--data", "arithmetic:²"], "arithmetic:DIGITS"),
    (["--data", "arithmetic:"], "arithmetic:DIGITS"), (["--data", " "], "--data: is empty"),
    (["--data", "arithmetics.jsonl"], "arithmetics.jsonl: cannot be read"), (["--data="], "--data: is empty"),
    (["--data", "someone/dataset"], "pip install datasets"),
    (["--max_prompt_tokens", 2], "no rows left"),
    (["--model", "nowhere/at-all"], "--model nowhere/at-all"),
    (["--model", "./nowhere"], "./nowhere: no directory or hub id"),
    (["--model", "runs/grpo/modle"], "runs/grpo/modle: no directory or hub id"),
    (["--group_size", 1], "--group_size 1: must be at least 2"),
    (["--steps", 0], "--steps 0: must be at least 1"), (["--prompts_per_step", -3], "--prompts_per_step -3"),
    (["--prompts_per_step", 10 ** 11], "--prompts_per_step 100000000000: must be between 1 and 1000000"),
    (["--max_new_tokens", 0], "--max_new_tokens 0"), (["--lr", "nan"], "--lr nan"), (["--lr", "inf"], "--lr inf"),
    (["--lr", "fast"], "--lr"),
    (["--temperature", 0], "--temperature 0.0: must be above 0"), (["--clip_eps", 2], "--clip_eps 2"),
    (["--seed", 1.5], "--seed"), (["--seed", 2 ** 32], "--seed 4294967296: must be between"),
    (["--minibatches", 1000], "--minibatches 1000"),
    (["--stepz", 3], "unknown flag --stepz, did you mean --steps?"), (["--lrr=3"], "did you mean --lr?"),
    (["--learning_rate", 1], "unknown flag --learning_rate; see --help"),
    (["--reward", "nowhere.py:f"], "no file nowhere.py"), (["--reward", "exact"], "--reward exact"),
    (["--reward", "someone/reward-model"], "reward model's directory (one from the hub: hf download it)"),
    (["--data", "train.parquet"], "train.parquet: want JSON lines; datasets.load_dataset('parquet', data_files="),
    (["--eval_data", "test.csv"], "test.csv: want JSON lines; datasets.load_dataset('csv', data_files="),
    (["--reward", f"{ROOT}/grpo.py"], "grpo.py: no function is named; want verifier, FILE.py:FUNCTION"),
    (["--max_new_tokens", 1024], "--max_new_tokens 1024: the context of tiny is 1024"),
    (["--output_dir", "/proc/nowhere"], "--output_dir /proc/nowhere"), (["--output_dir", "a" * 300], "name too long"),
    (["--output_dir", f"{ROOT}/README.md"], "is a file"), (["--output_dir", f"{ROOT}/README.md/x"], "--output_dir"),
    (["--resume"], "--resume: no checkpoint in"),
    (["--log_to", "wandb"], "pip install wandb"), (["--log_to", "paper"], "--log_to"),
    (["nowhere.yaml"], "nowhere.yaml: "),
    (["--data=nowhere.json"], ": nowhere.json: cannot be read as JSON lines (No such file"),
    (["--system_prompt"], "--system_prompt: expected one argument")])
def test_bad_flags(fails, flags, message):
    assert message in fails(*flags)


def test_bad_clip_of_dapo(fails):
    assert "--clip_low 2.0: must be between 0 and 1" in fails("--clip_low", 2, script="dapo")


def test_an_overlong_buffer_longer_than_the_completions(fails):
    """It would penalize even an empty completion. The default of 8 is accepted with any --max_new_tokens."""
    assert "--overlong_buffer 100: more than --max_new_tokens 40" in fails("--overlong_buffer", 100, script="dapo")
    import dapo
    common.check_config(dapo.Config(max_new_tokens=6))


def test_of_two_files_of_held_out_problems_none_is_ignored(fails):
    flags = "--on_policy", "--eval_data", "arithmetic:1", "--eval_problems", "arithmetic:3"
    assert "--eval_problems: with --on_policy, --eval_data holds" in fails(*flags, script="dpo")
    # Held-out data is looked for first: reading --data may take long.
    assert "missing.jsonl" in fails("--data", "no_pairs.jsonl", "--eval_problems", "missing.jsonl", script="dpo")


def test_bad_reward_file(fails, tmp_path):
    path = write(tmp_path / "reward.py", "value = 3\n")
    assert "has no function missing" in fails("--reward", f"{path}:missing")
    assert "has no function value" in fails("--reward", f"{path}:value")
    write(path, "import nothing_of_that_name\n")
    assert "does not load: ModuleNotFoundError" in fails("--reward", f"{path}:f")
    write(path, "def f(*args): return 1\nimport sys\nsys.exit(0)\n")  # as a script does
    assert "does not load: SystemExit" in fails("--reward", f"{path}:f")


@pytest.mark.parametrize("body, message", [
    ("raise KeyError('gold')", "raised KeyError: 'gold'"), ("return float('nan')", "returned nan"),
    ("raise SystemExit(0)", "raised SystemExit"), ("raise ValueError('<html>' * 1000)", "raised ValueError: <html>"),
    ("raise GeneratorExit", "raised GeneratorExit"), ("import json; json.loads('x')", "raised JSONDecodeError"),
    ("return 10 ** 400", "returned 1000"),
    ("return 1e300", "returned 1e+300"), ("return None", "returned None"), ("return 'good'", "returned 'good'")])
def test_a_reward_function_that_fails_names_the_row(tmp_path, body, message):
    path = write(tmp_path / "reward.py", f"def f(prompt, completion, row):\n    {body}\n")
    judge = common.load_reward_function(f"{path}:f")
    with pytest.raises(common.UserError) as error:
        judge(common.Problem("1+1=?", [], "2", {"prompt": "1+1=?", "id": 77}), "two")
    assert message in str(error.value) and "'id': 77" in str(error.value)
    assert ("(line 2)" in str(error.value)) == ("return" not in body) and len(str(error.value)) < 1500


@pytest.mark.parametrize("rewards, graded", [
    ("0, 1, 1.0, -1, True", False), ("1, 0.5, 0.25", True), ("(0.5, True), (0.25, False)", False)])
def test_of_graded_rewards_it_says_once_what_counts_as_correct(tmp_path, capsys, rewards, graded):
    path = write(tmp_path / "reward.py", f"rewards = iter([{rewards}])\ndef f(*args): return next(rewards)\n")
    judge = common.load_reward_function(f"{path}:f")
    for _ in eval(f"[{rewards}]"):
        judge(common.Problem("1+1=?", [], "2", {}), "2")
    assert capsys.readouterr().err.count("count those above 0 as correct") == graded


def test_ctrl_c_in_a_reward_function_is_no_error_of_it(tmp_path):
    path = write(tmp_path / "reward.py", "def f(prompt, completion, row):\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        common.load_reward_function(f"{path}:f")(common.Problem("1+1=?", [], "2", {}), "2")


def test_a_row_about_memory_is_no_lack_of_it(fails, tmp_path, monkeypatch):
    """The message shows the row."""
    path = write(tmp_path / "reward.py", "def f(prompt, completion, row):\n    return row['missing']\n")
    rows = write(tmp_path / "rows.jsonl", '{"prompt": "1+1=?", "note": "CUDA out of memory"}\n')

    def main(cfg):
        problems = common.read_problems(str(rows), need_answer=False)
        common.load_reward(cfg)(problems, SimpleNamespace(completions=["2"]))
    monkeypatch.setattr(importlib.import_module("grpo"), "main", main)
    assert "raised KeyError: 'missing'" in fails("--reward", f"{path}:f")


def test_a_reward_function_can_not_change_the_row_for_later_calls(tmp_path):
    path = write(tmp_path / "reward.py", "def f(prompt, completion, row):\n"
                 "    row['extra'].append(completion)\n"
                 "    return len(row['extra']) + (row.pop('answer') == completion)\n")
    judge = common.load_reward_function(f"{path}:f")
    problem = common.Problem("1+1=?", [], "2", {"answer": "2", "extra": []})
    assert [judge(problem, "2"), judge(problem, "2")] == [(2.0, True), (2.0, True)]


@pytest.mark.parametrize("name", ["rewards", "json"])  # "json" is also a standard module
def test_a_reward_file_is_a_module_whose_parts_can_be_pickled(name, tmp_path):
    path = write(tmp_path / f"{name}.py", "import pickle\nclass Own:\n    pass\n"
                 "def f(prompt, completion, row): return type(pickle.loads(pickle.dumps(Own()))) is Own\n")
    assert common.load_reward_function(f"{path}:f")(common.Problem("1+1=?", [], "2", {}), "") == (1.0, True)
    assert sys.modules["json"] is json


def test_a_judged_rollout_leaves_the_random_state(tmp_path):
    """Else a caller that draws its batches by `random` would draw the same one after each call."""
    path = write(tmp_path / "reward.py", "import numpy, random\nnumpy.random.seed(7)\nrandom.seed(7)\n"
                 "def f(prompt, completion, row): return random.random(), False\n")
    rollout = common.Rollout(*[torch.ones(1, 1)] * 2, torch.ones(1, 1).bool(), ["2"], torch.ones(1).bool())
    states = random.getstate(), np.random.get_state()[1].tolist()
    score = common.load_reward(grpo.Config(reward=f"{path}:f"))
    rewards, correct = score([common.Problem("1+1=?", [], "2", {})], rollout)
    assert rewards > 0 and not correct
    torch.manual_seed(7)
    assert score([common.Problem("1+1=?", [], "2", {})], rollout)[0] != rewards  # other draws
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


def test_the_verifier_wants_an_answer():
    """Without one, all completions would be wrong: for those who judge by two rewards."""
    rollout = common.Rollout(*[torch.ones(1, 1)] * 2, torch.ones(1, 1).bool(), ["2"], torch.ones(1).bool())
    with pytest.raises(common.UserError, match="a row has no answer: {'prompt': '1"):
        common.load_reward(grpo.Config())([common.Problem("1+1=?", [], None, {"prompt": "1+1=?"})], rollout)


def test_what_a_reward_function_changes_for_the_whole_process_is_undone(tmp_path):
    path = write(tmp_path / "reward.py", "import os, torch\ntorch.set_grad_enabled(False)\ntorch.manual_seed(42)\n"
                 "torch.set_default_dtype(torch.float64)\ntorch.set_default_device('meta')\n"
                 "def f(prompt, completion, row):\n    torch.set_grad_enabled(False)\n    os.chdir('/')\n"
                 "    return 1\n")
    here, state = os.getcwd(), torch.get_rng_state()
    common.load_reward_function(f"{path}:f")(common.Problem("1+1=?", [], "2", {}), "2")
    assert torch.is_grad_enabled() and os.getcwd() == here and torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32 and torch.zeros(1).device.type == "cpu"


def test_a_program_that_a_reward_function_starts_does_not_get_ctrl_c(tmp_path):
    """It would end without a verdict, while the run still finishes its step. Here it sends SIGINT to itself."""
    path = write(tmp_path / "reward.py", "import subprocess, sys\n"
                 "program = 'import os, signal; os.kill(os.getpid(), signal.SIGINT); print(1)'\n"
                 "def start():\n"
                 "    return subprocess.run([sys.executable, '-c', program], capture_output=True).stdout == b'1\\n'\n"
                 "while_it_loads = start()\n"
                 "def f(prompt, completion, row):\n    return while_it_loads and start()\n")
    assert common.load_reward_function(f"{path}:f")(common.Problem("1+1=?", [], "2", {}), "2") == (1.0, True)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_process_that_a_reward_function_forks_can_be_ended(tmp_path):
    """`terminate` must end it, since time limits are enforced in this way, but SIGINT must not.

    Ctrl-C sends SIGINT to every process of a terminal. The run then finishes its step, and still needs the reward.
    A child may also be ended before it has begun, as leaving `with Pool()` does: here it begins late.
    """
    path = write(tmp_path / "reward.py", """
import multiprocessing, os, signal, time
late = []
os.register_at_fork(after_in_child=lambda: time.sleep(len(late)))
def child(ready):
    os.kill(os.getpid(), signal.SIGINT)
    ready.set()
    time.sleep(60)
def f(prompt, completion, row):
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    process = fork.Process(target=child, args=(ready,))
    process.start()
    assert ready.wait(10)
    process.terminate()
    process.join(10)
    late.append(1)
    other = fork.Process(target=time.sleep, args=(60,))
    other.start()
    other.terminate()
    other.join(10)
    late.clear()
    return process.exitcode + other.exitcode
""")
    errors = run_script("grpo.py", "--reward", f"{path}:f", "--steps", 1, "--prompts_per_step", 1, "--group_size", 2,
                        "--data", few_problems(tmp_path), "--output_dir", tmp_path / "run")
    assert "stopping" not in errors
    assert read_metrics(tmp_path / "run")[1]["reward"] == -2 * signal.SIGTERM


def test_overwrite_removes_runs_alone_and_never_the_model_that_it_starts_from(fails, tmp_path):
    model, tokenizer = random_model("Qwen2")
    save(tmp_path / "run" / "model", model, tokenizer)
    flags = ["--model", tmp_path / "run" / "model", "--output_dir", str(tmp_path / "run"), "--overwrite"]
    assert "holds model, but no run" in fails(*flags)
    assert "holds config.json, but no run" in fails("--output_dir", str(tmp_path / "run" / "model"), "--overwrite")
    write(tmp_path / "run" / "config.json", '{"flags": {}}')
    assert "is in, the run that would be replaced" in fails(*flags)
    samples = write(tmp_path / "run" / "samples.jsonl", GOOD_ROW)
    (tmp_path / "run" / "models" / "step-1").mkdir(parents=True)
    reward = write(tmp_path / "run" / "models" / "step-1" / "reward.py", "")
    for name, value in ("--data", samples), ("--eval_data", samples), ("--reward", f"{reward}:f"):
        assert "is in, the run that would be replaced" in fails(name, str(value), *flags[2:])
    (tmp_path / "none").mkdir()
    write(tmp_path / "none" / "config.json", '{"flags": {}}')  # and no checkpoint
    assert "holds a run already; --overwrite replaces it" in fails("--output_dir", str(tmp_path / "none"))
    (tmp_path / "none" / "checkpoint" / "step-000001").mkdir(parents=True)  # of another script
    write(tmp_path / "none" / "config.json", '{"script": "ppo.py", "flags": {}}')
    assert "holds a run already; --overwrite replaces it" in fails("--output_dir", str(tmp_path / "none"))
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_run_within_what_another_run_writes_is_refused(fails, tmp_path):
    """The outer one replaces its model/ at its end, and models/step-N if it repeats step N."""
    write(tmp_path / "metrics.jsonl", "")
    for inner in "model/rl", "models/step-1/rl", "checkpoint":
        assert f"is in what the run in {tmp_path} writes" in fails("--output_dir", str(tmp_path / inner))


def test_a_directory_that_is_no_model(fails, tmp_path):
    (tmp_path / "empty").mkdir()
    assert f"--model {tmp_path / 'empty'}" in fails("--model", tmp_path / "empty")
    model, tokenizer = random_model("Qwen2")
    model.save_pretrained(tmp_path / "no_tokenizer")
    assert "no tokenizer there" in fails("--model", tmp_path / "no_tokenizer")
    tokenizer.save_pretrained(tmp_path / "no_weights")
    model.config.save_pretrained(tmp_path / "no_weights")
    assert "no_weights" in fails("--model", tmp_path / "no_weights")
    model.save_pretrained(tmp_path / "no_weights")  # two layers; the config will say three
    random_model("Qwen2", num_hidden_layers=3)[0].config.save_pretrained(tmp_path / "no_weights")
    assert "no weights for model.layers.2." in fails("--model", tmp_path / "no_weights")
    random_model("Qwen2", intermediate_size=48)[0].config.save_pretrained(tmp_path / "no_weights")
    assert "model.layers.0.mlp.down_proj.weight is [32, 64], but [32, 48] is wanted" in fails(
        "--model", tmp_path / "no_weights")
    weights = tmp_path / "no_weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "not a model that transformers can load" in fails("--model", tmp_path / "no_weights")


def test_tokenizer_and_model_that_do_not_fit(fails, tmp_path):
    model, tokenizer = random_model("Qwen2")
    save(tmp_path / "model", model, tokenizer)
    rows = write(tmp_path / "rows.jsonl", GOOD_ROW)
    # Neither advice on --lr, nor a word on --eval_data, which is missing, or on a run that is all warm-up
    assert "no rows left" in fails("--model", tmp_path / "model", "--max_prompt_tokens", 1, "--data", rows,
                                   "--warmup_steps", 99)
    backend = Tokenizer(models.WordLevel({"<eos>": 0, "1": 1, "9": 500}, unk_token="1"))  # few tokens, a high id
    common.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path / "model")
    assert "its tokenizer has ids up to 500, its embedding only 26 rows" in fails("--model", tmp_path / "model")
    model.resize_token_embeddings(12)
    save(tmp_path / "model", model, tokenizer)
    assert "its tokenizer has ids up to 25, its embedding only 12 rows" in fails("--model", tmp_path / "model")


def test_nothing_is_built_before_a_bad_flag_is_noticed(fails, monkeypatch):
    def build(*args):
        raise AssertionError("built")
    for name in ("train_tiny_model", "build_tiny_model", "build_tiny_preferences"):
        monkeypatch.setattr(common, name, build)
    assert "nowhere.jsonl: cannot be read" in fails("--eval_data", "nowhere.jsonl", script="reward_model")


def test_flags_from_a_file_and_help(tmp_path, capsys):
    path = write(tmp_path / "flags.yml", "steps: 7\nlr: 1.0e-3\ndivide_by_std: false\neval_data:\n")
    cfg = common.parse_config(grpo.Config, [str(path), "--steps", "9"])
    assert (cfg.steps, cfg.lr, cfg.divide_by_std) == (9, 1e-3, False)
    assert cfg.eval_data == ""  # a flag without a value keeps its default
    path = write(tmp_path / "flags.json", '{\n\t"steps": 7,\n\t"divide_by_std": false\n}')  # YAML has no tabs
    cfg = common.parse_config(grpo.Config, [str(path)])
    assert (cfg.steps, cfg.divide_by_std) == (7, False)
    for switch in "no_divide_by_std", "no-divide-by-std":
        path = write(tmp_path / "other.yaml", f"{switch}: true\ngradient_checkpointing: true\n")
        cfg = common.parse_config(grpo.Config, [str(path)])
        assert not cfg.divide_by_std and cfg.gradient_checkpointing
    with pytest.raises(common.UserError, match="other.yaml: a file of flags has to come first"):
        common.parse_config(grpo.Config, ["--steps", "9", str(path)])
    with pytest.raises(common.UserError, match="other.yaml: a file of flags has to come first"):
        common.parse_config(grpo.Config, [str(path), str(path)])
    # as on a command line, and not the booleans that YAML makes of these
    path = write(path, "thinking: off\nsystem_prompt: no\ndivide_by_std: off\nlr: 1e-3\neval_data: ~\nmodel: 'null'\n")
    cfg = common.parse_config(grpo.Config, [str(path)])
    assert (cfg.thinking, cfg.system_prompt, cfg.divide_by_std, cfg.lr) == ("off", "no", False, 1e-3)
    assert (cfg.eval_data, cfg.model) == ("", "null")
    assert common.parse_config(grpo.Config, [str(write(path, "# steps: 7\n"))]) == grpo.Config()
    for line, message in (("steps: true", "--steps: invalid int value"), ("- x", "true.yaml: want a mapping .*list"),
                          ("steps", "true.yaml: want a mapping .*str"), ("thinking: yes", "--thinking: invalid choice"),
                          ("no_divide_by_std: false", "--no_divide_by_std: ignored explicit argument")):
        with pytest.raises(common.UserError, match=message):
            common.parse_config(grpo.Config, [str(write(tmp_path / "true.yaml", line))])
    with pytest.raises(common.UserError, match="did you mean --eval_data"):
        common.parse_config(grpo.Config, ["--evaldata=eval.json"])
    with pytest.raises(common.UserError, match="unknown flag --1"):
        common.parse_config(grpo.Config, [str(write(path, "1: true\n"))])
    with pytest.raises(common.UserError, match="other.yaml: .*line 2"):
        common.parse_config(grpo.Config, [str(write(path, "steps: 7\nlr: [1\n"))])
    for several in "[a, b]", "{a: b}":
        with pytest.raises(common.UserError, match="other.yaml: system_prompt: want a single value"):
            common.parse_config(grpo.Config, [str(write(path, f"system_prompt: {several}\n"))])
    with pytest.raises(SystemExit):
        common.parse_config(grpo.Config, ["--help"])
    assert "--micro_batch_tokens" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- stopping, resuming

TIMING = {"seconds", "rollout_seconds", "reward_seconds", "tokens_per_second", "peak_memory_mb"}


def outcome(directory):
    """What must be bit-equal: metrics without timings, and the final weights."""
    metrics = [{k: v for k, v in m.items() if k not in TIMING} for m in read_metrics(directory)]
    return metrics, load_file(directory / "model" / "model.safetensors")


def assert_close(metrics, expected, **tolerance):
    """Compare the metrics of a step, but for timings."""
    for name in expected.keys() - TIMING:
        # In DPO's first step all margins are 0, and rounding decides their signs.
        if name != "pair_accuracy" or abs(expected["margin"]) > 1e-5:
            assert metrics[name] == pytest.approx(expected[name], **tolerance), name


def assert_same_outcome(one, other):
    (metrics, weights), (other_metrics, other_weights) = outcome(one), outcome(other)
    assert metrics == other_metrics
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def wait_for(condition, process, said, seconds=120):
    """Wait until the condition holds. If the process ends first or time runs out, fail with the text of `said()`."""
    alive = getattr(process, "is_alive", None) or (lambda: process.poll() is None)
    end = time.time() + seconds
    while not condition():
        if not alive() or time.time() > end:
            process.kill()  # `said` reads its stderr up to the end
            pytest.fail(said())
        time.sleep(0.01)


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory, small):
    """whole_run(script) -> the directory of an uninterrupted run that keeps the model of every step; done once."""
    done = {}

    def run(script):
        if script not in done:
            done[script] = tmp_path_factory.mktemp("runs") / "whole"
            run_script(*small(script), "--model_every", 1, "--output_dir", done[script])
        return done[script]
    return run


def kill_and_resume(folder, scripts):
    """Kill a run of each script (that of grpo.py twice) at a random moment, and resume it -> the folder of the runs."""
    small = small_runs(folder)
    for script in scripts:
        out, errors, draw = folder / script, folder / "stderr", random.Random(script)
        log, command = out / "metrics.jsonl", [*small(script), "--output_dir", out]
        for resume in ([], ["--resume"])[:2 if script == "grpo" else 1]:
            written = log.stat().st_mtime_ns if resume else 0
            process = fork(errors, launch_script, *command, *resume)
            wait_for(lambda: log.exists() and log.stat().st_mtime_ns > written, process, errors.read_text)
            time.sleep(draw.uniform(0.0, 0.7))
            process.kill()
            process.join()
        ended_well(fork(errors, launch_script, *command, "--resume"), errors)
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_models_on_the_way_are_kept_and_the_last_is_that_of_the_end(script, whole_run):
    """All files of it, which for a reward model means its `reward_shift` too."""
    out = whole_run(script)
    kept = [{file.name: file.read_bytes() for file in folder.iterdir()}
            for folder in [*sorted(out.glob("models/*")), out / "model"]]
    assert [folder.name for folder in sorted(out.glob("models/*"))] == ["step-1", "step-2", "step-3"]
    assert len({folder["model.safetensors"] for folder in kept}) == 3  # every step has moved the weights
    assert kept[2] == kept[3] and all(folder.keys() == kept[3].keys() for folder in kept)


@beside(kill_and_resume)
@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_at_random_and_resumed_the_end_is_bit_equal(script, whole_run, job):
    assert_same_outcome(whole_run(script), job / script)


@pytest.mark.parametrize("number, code, heard", [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, True)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(number, code, heard, small, whole_run, tmp_path):
    """Even if nobody reads stderr any more: in `python grpo.py 2>&1 | tee log`, Ctrl-C also ends tee."""
    out, errors = tmp_path / "stopped", tmp_path / "stderr"
    command = [*small("grpo"), "--save_every", 100, "--model_every", 1, "--output_dir", out]
    os.mkfifo(errors)
    descriptor = os.open(errors, os.O_RDONLY | os.O_NONBLOCK)  # otherwise `open` waits for a writer
    os.set_blocking(descriptor, True)
    reader = open(descriptor)
    process = fork(errors, launch_script, *command)
    wait_for((out / "metrics.jsonl").exists, process, reader.read)
    if not heard:
        reader.close()
    os.kill(process.pid, number)
    process.join(timeout=120)
    process.kill()  # in case it did not stop
    assert process.exitcode == code and (not heard or "--resume" in reader.read())
    reader.close()
    assert len(list(out.glob("checkpoint/step-*"))) == 1 and len(read_metrics(out)) < 4
    # Each step's model is kept, that of the last one too: --resume goes on after it.
    assert len(list(out.glob("models/step-*"))) == len(read_metrics(out)) - 1
    run_script(*command, "--resume")
    assert_same_outcome(whole_run("grpo"), out)


def test_a_finished_run_can_be_made_longer_and_is_never_overwritten(tmp_path):
    out = tmp_path / "run"
    flags = ["--prompts_per_step", 2, "--group_size", 2, "--output_dir", out, *on_few_problems(tmp_path)]
    run_script("grpo.py", "--steps", 1, *flags)
    before = (out / "metrics.jsonl").read_text()
    again = run_script("grpo.py", "--steps", 1, *flags, code=2)
    assert all(name in again for name in ("--resume", "--overwrite", "--output_dir"))
    changed = run_script("grpo.py", "--steps", 2, *flags, "--resume", "--group_size", 4, code=2)
    assert "--group_size was 2 and is now 4" in changed
    assert "of grpo.py, not of dr_grpo.py" in run_script("dr_grpo.py", "--steps", 2, *flags, "--resume", code=2)
    shutil.rmtree(out / "model")  # as if the run was killed just before writing it
    run_script("grpo.py", "--steps", 1, *flags, "--resume")
    assert (out / "model" / "model.safetensors").exists() and (out / "metrics.jsonl").read_text() == before
    run_script("grpo.py", "--steps", 2, *flags, "--resume")
    assert [m["step"] for m in read_metrics(out)] == [0, 1, 2]
    assert "has done 2 steps" in run_script("grpo.py", "--steps", 1, *flags, "--resume", code=2)

    [checkpoint] = out.glob("checkpoint/step-*")
    for file in checkpoint.iterdir():
        file.write_bytes(file.read_bytes()[:100])
    damaged = run_script("grpo.py", "--steps", 3, *flags, "--resume", code=2)
    assert "is damaged" in damaged and "Traceback" not in damaged
    (out / "metrics.jsonl").write_text("no metrics")
    run_script("grpo.py", "--steps", 1, *flags, "--overwrite")
    assert (out / "metrics.jsonl").read_text().startswith('{"step": 0')


def test_a_command_that_torchrun_repeats_resumes(tmp_path, monkeypatch):
    """Even with --overwrite, which would otherwise delete the earlier run."""
    command = ["dr_grpo.py", "--prompts_per_step", 2, *on_few_problems(tmp_path), "--output_dir",
               tmp_path / "run", "--overwrite", "--steps"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # there is no checkpoint yet
    assert "more than rounding" not in run_script(*command, 1)  # of `sampler_gap`
    first = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "as with --resume" in run_script(*command, 2)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().startswith(first)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2]


def test_a_directory_takes_one_run_at_a_time(tmp_path):
    """A run waits in its reward function. Meanwhile no other may continue or replace it; then it goes on."""
    path = write(tmp_path / "reward.py", f"""
import pathlib, time
here, end = pathlib.Path({str(tmp_path)!r}), time.time() + 20
def f(prompt, completion, row):
    (here / "waiting").touch()
    while not (here / "go").exists() and time.time() < end:
        time.sleep(0.01)
    return 1
""")
    out, errors = tmp_path / "run", tmp_path / "stderr"
    flags = ["--steps", 1, "--prompts_per_step", 1, "--group_size", 2, *on_few_problems(tmp_path),
             "--reward", f"{path}:f", "--output_dir", out]
    process = fork(errors, launch_script, "grpo.py", *flags)
    wait_for((tmp_path / "waiting").exists, process, errors.read_text)
    for more in ["--resume"], ["--overwrite"]:
        assert "another run is writing there" in run_script("grpo.py", *flags, *more, code=2)
    (tmp_path / "go").touch()
    ended_well(process, errors)
    assert [m["step"] for m in read_metrics(out)] == [0, 1]


def test_a_run_that_has_ended_meanwhile_is_noticed(tmp_path, monkeypatch):
    """Of two runs started at once, the second may get the directory only when the first has ended."""
    flags = ["--steps", 1, "--prompts_per_step", 1, "--group_size", 2, *on_few_problems(tmp_path),
             "--output_dir", tmp_path / "run"]
    run_script("grpo.py", *flags)
    check, calls = common.Run.check_directory, []
    monkeypatch.setattr(common.Run, "check_directory", lambda run: calls.append(run) if not calls else check(run))
    assert "holds a run already" in run_script("grpo.py", *flags, code=2)


def test_a_signal_while_the_first_checkpoint_is_written_does_not_break_it(tmp_path, monkeypatch):
    flags = ["--steps", 1, "--prompts_per_step", 1, "--group_size", 2, *on_few_problems(tmp_path),
             "--output_dir", tmp_path / "run"]
    save, saved = common.dcp.save, []
    monkeypatch.setattr(common.dcp, "save", lambda *args, **kwargs: (
        saved or os.kill(os.getpid(), signal.SIGINT), saved.append(save(*args, **kwargs))))
    run_script("grpo.py", *flags, code=130)
    run_script("grpo.py", *flags, "--resume")
    assert len(read_metrics(tmp_path / "run")) == 2


def test_overwrite_removes_a_link_and_not_what_it_points_to(tmp_path):
    flags = ["--steps", 1, "--prompts_per_step", 1, "--group_size", 2, *on_few_problems(tmp_path),
             "--output_dir", tmp_path / "run"]
    run_script("grpo.py", *flags)
    for name in ("model", "checkpoint"):  # moved to another disk
        (tmp_path / "run" / name).rename(tmp_path / name)
        (tmp_path / "run" / name).symlink_to(tmp_path / name)
    run_script("grpo.py", *flags, "--overwrite")
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert (tmp_path / "model" / "model.safetensors").exists() and list((tmp_path / "checkpoint").glob("step-*"))
    assert not (tmp_path / "run" / ".model.old").is_symlink()


@pytest.mark.parametrize("schedule, rates", [("linear", [4, 2, 2, 1]), ("constant", [4, 4, 4, 4])])
def test_a_run_made_longer_has_the_rates_of_its_new_length(schedule, rates, tmp_path):
    """Linear over two steps: 4e-4, 2e-4. Over four: 4e-4, 3e-4, 2e-4, 1e-4, of which the last two are done here."""
    flags = ["--prompts_per_step", 2, "--group_size", 2, "--max_new_tokens", 4, "--lr", 4e-4, "--lr_schedule", schedule,
             "--output_dir", tmp_path, *on_few_problems(tmp_path)]
    for more in ["--steps", 2], ["--steps", 4, "--resume"]:
        said = run_script("grpo.py", *flags, *more)
        assert ("learning rates of a run of 4 steps" in said) == ("--resume" in more and schedule == "linear")
    assert [metrics["lr"] for metrics in read_metrics(tmp_path)[1:]] == pytest.approx([rate * 1e-4 for rate in rates])


@pytest.mark.parametrize("script", ["grpo", "dapo", "dr_grpo", "ppo", "dpo --on_policy"])
def test_every_evaluation_is_on_the_held_out_problems(script, tmp_path, monkeypatch):
    """Before the first step, and after the last."""
    asked = []
    monkeypatch.setattr(common, "evaluate", lambda policy, tokenizer, problems, *rest:
                        asked.append([problem.prompt for problem in problems]) or {})
    name, *switches = script.split()
    held_out = few_problems(tmp_path)
    run_script(f"{name}.py", *switches, "--steps", 1, "--output_dir", tmp_path / "run",
               "--eval_problems" if switches else "--eval_data", held_out,
               "--pairs_per_step" if switches else "--prompts_per_step", 2,
               *["--max_generation_batches", 1] * (name == "dapo"))
    assert asked == [[json.loads(line)["prompt"] for line in held_out.read_text().splitlines()]] * 2


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_from_python_or_a_notebook(tmp_path, monkeypatch):
    """There Ctrl-C stops at once. What handled it before still does, also if the run, as here, begins in a thread."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    cfg = grpo.Config(steps=2, prompts_per_step=2, group_size=2, max_new_tokens=4, output_dir=str(tmp_path / "run"),
                      eval_data=str(few_problems(tmp_path)))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(common.Run, "evaluates", lambda run, step: signal.default_int_handler(signal.SIGINT, None))
        grpo.main(cfg)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    thread = threading.Thread(target=grpo.main, args=[dataclasses.replace(cfg, resume=True)])
    thread.start()
    thread.join()
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "run")] == [0, 1, 2]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["script"] == "grpo.py"  # not pytest
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_update_is_skipped_and_counted(bad, capsys):
    cfg = grpo.Config(lr=0.1)
    model, critic = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    run = FakeRun(cfg, policy=(model, optimizer, schedule), value=(critic, None, None))

    def step(factor):
        loss = model(torch.ones(1, 2)).sum() * factor
        loss.backward()
        return run.optimizer_step(model, optimizer, schedule, loss.detach())

    step(bad)
    step(bad)
    assert torch.equal(model.weight, before) and run.bad_steps["policy"] == 2
    assert "policy: loss" in (said := capsys.readouterr().err) and "2 in a row" in said
    step(1.0)
    assert run.bad_steps["policy"] == 0 and not torch.equal(model.weight, before)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    run.optimizer_step(model, optimizer, schedule, torch.tensor(bad))  # only the loss is non-finite
    assert torch.equal(model.weight, before) and run.bad_steps["policy"] == 1
    critic(torch.ones(1, 2)).sum().backward()
    run.optimizer_step(critic, torch.optim.AdamW(critic.parameters()), schedule, torch.tensor(0.0))
    assert run.bad_steps["policy"] == 1  # a good update of the critic does not reset the policy's count
    critic(torch.ones(1, 2)).sum().backward()
    run.optimizer_step(critic, torch.optim.AdamW(critic.parameters()), schedule, torch.tensor(bad))
    assert run.bad_steps == {"policy": 1, "value": 1}  # each model has its own count


def test_a_checkpoint_before_the_first_update_leaves_the_optimizer_as_it_was(tmp_path):
    """DAPO makes no update while it finds no informative group, and a checkpoint may be saved meanwhile.

    AdamW's first update is lr·sign(gradient) = 0.1. As step 2 it would be 0.074: with m̂ = .1/(1 − .9²) = .526 and
    v̂ = .001/(1 − .999²) = .500, it is .1·.526/√.500.
    """
    import dapo

    def begin(**flags):
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        run = common.Run(dapo.Config(output_dir=str(tmp_path / "run"), lr=0.1, lr_schedule="constant", **flags))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
        schedule = transformers.get_constant_schedule(optimizer)
        run.start(common.Shuffled([1, 2], 0), policy=(model, optimizer, schedule))
        return run, model, optimizer, schedule

    first = begin()
    first[0].end_step(1, {"loss": math.nan})
    assert '"loss": null' in (tmp_path / "run" / "metrics.jsonl").read_text()  # strict JSON parsers refuse NaN
    first[0].save_checkpoint()
    for run, model, optimizer, schedule in (first, begin(resume=True)):
        assert run.next_step == 2
        model(torch.ones(1, 2)).sum().backward()
        run.optimizer_step(model, optimizer, schedule, torch.tensor(0.0))
        assert torch.allclose(model.weight, torch.full((1, 2), 0.9))


def test_a_part_that_no_gradient_reaches_can_be_resumed(tmp_path, monkeypatch):
    """AdamW holds no state for such a part. Gemma 3's image tower is one."""
    def begin(resume, seed=0, rows=2, prompt=1):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"read": torch.nn.Linear(2, 1), "idle": torch.nn.Linear(2, 1)})
        run = common.Run(grpo.Config(output_dir=str(tmp_path / "run"), resume=resume, seed=seed))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = transformers.get_constant_schedule(optimizer)
        run.start(common.Shuffled([prompt] * rows, 0), policy=(model, optimizer, schedule))

        def step(x):
            model["read"](torch.tensor([x, 1.0])).sum().backward()
            run.optimizer_step(model, optimizer, schedule, torch.tensor(0.0))
            return [p.detach().clone() for p in model.parameters()]
        return run, step

    run, step = begin(resume=False)
    step(1.0)
    run.next_step = 1
    run.save_checkpoint()
    whole, resumed = step(-2.0), begin(resume=True)[1](-2.0)
    assert all(map(torch.equal, whole, resumed))
    with pytest.raises(common.UserError, match="step-000001 is of another run: rows of --data was 2"):
        begin(resume=True, rows=3)  # a position in two rows says nothing about three
    with pytest.raises(common.UserError, match="step-000001 is of another run: checksum of --data was"):
        begin(resume=True, prompt=2)
    for file in (tmp_path / "run").glob("checkpoint/*/*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(common.UserError, match="is damaged.*(EOF|Error)"):
        begin(resume=True)


def test_a_part_that_an_update_does_not_reach_moves_by_its_momentum(tmp_path):
    """As it does with several processes, where such a part has a gradient of zeros (`shard`)."""
    run, ends = common.Run(grpo.Config(output_dir=str(tmp_path))), []
    for zeros in (False, True):
        model = torch.nn.Linear(2, 1, bias=False)
        model.weight.data[:] = 1.0
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = transformers.get_constant_schedule(optimizer)
        run.trained, run.bad_steps = {"policy": (model, optimizer, schedule)}, {}
        for reached in (True, False, True):
            if reached or zeros:
                (model(torch.ones(2)) * reached).sum().backward()
            run.optimizer_step(model, optimizer, schedule, torch.tensor(0.0))
        ends.append(model.weight)
    assert torch.equal(*ends)


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize("optimizer_class", [functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.NAdam,
                                             functools.partial(torch.optim.AdamW, amsgrad=True)])
def test_another_optimizer_and_a_reference_that_is_renewed_are_resumed_too(optimizer_class, tmp_path):
    """For those who change the script: only its own optimizer is AdamW, a checkpoint also keeps `run.extra` and the
    random states of Python and numpy, a schedule may compute a rate from the one before, and flags may change."""
    def begin(resume):
        torch.manual_seed(0)
        model, reference = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        run = common.Run(grpo.Config(output_dir=str(tmp_path), resume=resume))
        run.extra = {"reference": reference.state_dict()}
        run.cfg.clip_eps += 0.1
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        run.start(common.Shuffled([1], 0), policy=(model, optimizer, schedule))

        def step():
            model(torch.tensor([random.uniform(1, 2), np.random.uniform(-2, -1)]).float()).sum().backward()
            run.optimizer_step(model, optimizer, schedule, torch.tensor(0.0))
            reference.load_state_dict(model.state_dict())
            run.cfg.temperature *= 0.9
            return [p.detach().clone() for p in (*model.parameters(), *reference.parameters())]
        return run, step, reference

    run, step, reference = begin(resume=False)
    run.next_step = 1
    run.save_checkpoint()  # before the first update, which this must not change
    step()
    run.next_step = 2
    run.save_checkpoint()
    renewed, whole = reference.weight.clone(), step()
    run, step, reference = begin(resume=True)
    assert torch.equal(reference.weight, renewed) and all(map(torch.equal, step(), whole))


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    """If a save fails half-way, the last checkpoint is still there, and the message says so."""
    directory = tmp_path / "run"
    run = FakeRun(grpo.Config())
    run.directory, run.next_step, run.extra, run.data = directory, 0, {}, common.Shuffled([1], 0)
    run.script = "grpo.py"
    run.save_checkpoint()
    assert [path.name for path in run.checkpoints()] == ["step-000000"]

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full)
    run.next_step = 1
    with pytest.raises(common.TrainingFailed, match="No space left on device.*step-000000 is intact"):
        run.save_checkpoint()
    assert [path.name for path in run.checkpoints()] == ["step-000000"]

    def no_room(folder):
        raise SafetensorError("I/O error: No space left on device")
    with pytest.raises(common.TrainingFailed, match="cannot write .*model: I/O error: No space left on device"):
        common.write_directory(directory / "model", no_room)
    assert not list(directory.glob("model*"))
    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(common.TrainingFailed, match="cannot write .*metrics.jsonl; --resume .*No space left"):
        run.append("metrics.jsonl", [{}])


@pytest.mark.parametrize("script", ["grpo", "ppo", "reward_model"])
def test_gradient_checkpointing_changes_nothing_and_frozen_layers_stay(script, small, whole_run, tmp_path):
    """The tiny model has three layers, of which --freeze_layers 0.4 freezes the first."""
    for name, flags in (("recomputed", ["--gradient_checkpointing"]), ("frozen", ["--freeze_layers", 0.4])):
        run_script(*small(script), "--steps", 1, "--warmup_steps", 0, *flags, "--output_dir", tmp_path / name)
    plain, recomputed = read_metrics(whole_run(script))[1], read_metrics(tmp_path / "recomputed")[1]
    for key in ("loss", "grad_norm"):
        assert recomputed[key] == pytest.approx(plain[key], rel=1e-4, abs=1e-6)
    before = load_file(Path(common.build_tiny_model("arithmetic")) / "model.safetensors")
    after = load_file(tmp_path / "frozen" / "model" / "model.safetensors")
    moved = {name.split("layers.")[1][0] for name in before
             if "layers." in name and not torch.equal(before[name], after[name])}
    assert moved == {"1", "2"}


@pytest.mark.parametrize("function, error, advice", [
    ("sample", "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')",
     "or start again with a lower --prompts_per_step"),
    ("token_logprobs", "torch.distributed.DistBackendError('NCCL error\\nCuda failure 2 out of memory')",
     "--resume with a lower --micro_batch_tokens")])
def test_out_of_gpu_memory_says_where_and_which_flag_helps(function, error, advice, tmp_path, monkeypatch):
    scope = {"torch": torch}
    exec(f"def {function}(*args): raise {error}", scope)
    monkeypatch.setattr(importlib.import_module("grpo"), function, scope[function])
    errors = run_script("grpo.py", "--prompts_per_step", 2, "--output_dir", tmp_path / "run", code=1)
    message, *others = [line for line in errors.replace("\r", "\n").splitlines() if "error" in line]
    assert message.startswith("grpo.py: error: out of memory ") and not others, errors
    assert advice in message and "checkpoint, if any, is intact" in message
    assert list((tmp_path / "run" / "checkpoint").glob("step-*/.metadata"))


# --------------------------------------------------------------------------------------- one GPU, played by a CPU

@pytest.mark.parametrize("script", ["grpo", "ppo", "dpo", "reward_model"])
def test_a_run_as_on_one_gpu_agrees_with_float32_and_resumes(script, small, tmp_path, monkeypatch, request):
    """FSDP2 in a single process, as one module or (resumed) with one per layer, bfloat16, fused norms and GraphStep.
    Only the kernels are a CPU's (test_cuda.py: those of a GPU).

    Bfloat16 has 8 bits, so a step's numbers agree with those of an ordinary run on the same samples up to a few
    percent. (With a small --lr: Adam's first update moves a weight by all of it, however small the weight's gradient,
    whose sign may be rounding.)
    """
    ordinary = {name: getattr(common, name) for name in ("setup_device", "compute_dtype", "shard", "is_small")}
    graph_steps, sample, samples = request.getfixturevalue("one_gpu"), common.sample, []

    def sample_here(*args, **kwargs):
        rollout = sample(*args, **kwargs)
        if name == "whole":
            samples.append(rollout)
        return samples.pop(0) if name == "ordinary" else rollout
    for module in (common, importlib.import_module(script)):
        monkeypatch.setattr(module, "sample", sample_here, raising=False)
    monkeypatch.setattr(common, "is_small", lambda *_: name != "resumed")
    for name, *flags in (["whole", 2], ["resumed", 1], ["resumed", 2, "--resume"],
                         ["recomputed", 1, "--gradient_checkpointing"], ["ordinary", 1]):
        if name == "ordinary":
            for changed, function in ordinary.items():
                monkeypatch.setattr(common, changed, function)
        run_script(*small(script), "--lr", 1e-6, *["--value_lr", 1e-6] * (script == "ppo"), "--eval_every", 1,
                   "--output_dir", tmp_path / name, "--steps", *flags)
    assert_same_outcome(tmp_path / "whole", tmp_path / "resumed")
    (metrics, weights), (expected, _) = outcome(tmp_path / "whole"), outcome(tmp_path / "ordinary")
    counts = "pair_accuracy", "eval_pair_accuracy", "eval_calibration_error"  # of few pairs: a close one turns around
    for step in (0, 1):
        close = {key: value for key, value in expected[step].items() if key not in counts}
        assert_close(metrics[step], close, rel=0.1, abs=0.02)
    recomputed = read_metrics(tmp_path / "recomputed")[1]
    assert recomputed["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=0.02)
    assert metrics[1].get("sampler_gap", 0) < 0.002  # log-probs of a forward pass, and of one that decodes
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert bool(graph_steps) == (script in ("grpo", "ppo"))  # the others sample nothing


@pytest.mark.parametrize("one_module", [True, False])
def test_a_forward_pass_without_a_backward_pass_does_not_matter(one_module, one_gpu, monkeypatch):
    """For those who change the script: such a pass, for a number to log, leaves the root's parameters gathered."""
    monkeypatch.setattr(common, "is_small", lambda *_: one_module)
    cfg, batch = grpo.Config(freeze_layers=0.5), common.collate([[3, 4]] * 2, [[5, 6], [7]], 0)
    outcomes = []
    for looks in (False, True):
        model = common.load_model(common.build_tiny_model("arithmetic"), common.setup_device())
        if looks:
            common.token_logprobs(model, *batch[:2], 2)
        policy = model, *common.make_optimizer(model, cfg)
        common.token_logprobs(model, *batch[:2], 2)[0].sum().backward()
        with torch.no_grad():
            if looks:
                common.token_logprobs(model, *batch[:2], 2)
            norm = FakeRun(cfg, policy=policy).optimizer_step(*policy, torch.tensor(0.0))["grad_norm"]
            outcomes.append([torch.tensor(norm), common.token_logprobs(model, *batch[:2], 2)[0],
                             *(parameter.full_tensor() for parameter in model.state_dict().values())])
    assert norm > cfg.max_grad_norm and all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("script", ["grpo --temperature 2", "dapo --loss_average prompt", *SCRIPTS[2:]])
def test_tensors_of_the_gpu_meet_none_of_the_cpu(script, small, whole_run, tmp_path, request):
    """`TensorsOnGpu` refuses what CUDA would. Otherwise the numbers are a CPU's. (Hot, rows end at different times.)"""
    expected = read_metrics(whole_run(script))
    graph_steps = request.getfixturevalue("tensors_on_gpu")
    run_script(*small(script), "--steps", 1, "--output_dir", tmp_path / "run")
    for metrics, on_cpu in zip(read_metrics(tmp_path / "run"), expected[:2], strict=True):
        assert_close(metrics, on_cpu, rel=1e-3, abs=1e-5)
    assert bool(graph_steps) == (script not in ("dpo", "reward_model"))  # these sample nothing


# ---------------------------------------------------------------------------------------------- several processes

def run_in_two_processes(folder, scripts):
    """What `one_of_two` does, in two processes -> the folder of the runs."""
    small = small_runs(folder)
    runs = [[*map(str, small(script)), "--output_dir", str(folder / script)] for script in scripts]
    shutil.copytree(common.build_tiny_model("arithmetic"), folder / "tiny")
    write(folder / "tiny" / "generation_config.json", '{"eos_token_id": [1, 2]}')  # chat models have two EOS tokens
    ranks = fork_ranks(folder / "stderr", one_of_two, folder, runs)
    for rank in ranks:
        ended_well(rank, folder / "stderr")
    return folder


def train_on_other_minibatches(folder, out):
    """grpo.py with an edit: its second pass reads other minibatches, so it needs the old log-probs of all rows."""
    source, loop = (ROOT / "grpo.py").read_text(), "minibatches * cfg.updates_per_batch"
    assert source.count(loop) == 1
    module = types.ModuleType("grpo")
    sys.modules["grpo"] = module
    exec(source.replace(loop, "[*minibatches, *torch.randperm(len(advantages)).tensor_split(2)]"), module.__dict__)
    script, *flags = map(str, small_runs(folder)("grpo"))
    module.main(common.parse_config(module.Config, [*flags, "--steps", "2", "--output_dir", str(out)]))


def one_of_two(folder, runs):
    """Stop each run after step 2 and resume it; then check what one process alone cannot show."""
    class Stopped(Exception):
        pass

    def end_step(run, step, metrics, end_step=common.Run.end_step):
        end_step(run, step, metrics)
        if step == 2 and not run.cfg.resume:
            raise Stopped
    common.Run.end_step = end_step
    common.HEAD_SLICE["cpu"] = 500  # compute the head in slices, as for a large vocabulary
    for script, *flags in runs:
        module = importlib.import_module(script.removesuffix(".py"))
        sys.argv = [script, *flags]
        with contextlib.suppress(Stopped):
            module.main(common.parse_config(module.Config, flags))
        module.main(common.parse_config(module.Config, [*flags, "--resume"]))
    with contextlib.suppress(Stopped):
        train_on_other_minibatches(folder, folder / "other minibatches")

    def write_odd_models():
        random_model("Rwkv")[0].save_pretrained(rwkv)
        model = random_model("DiffLlama", tie_word_embeddings=False)[0]
        model.save_pretrained(odd)
        model.config.tie_word_embeddings = True
        model.config.save_pretrained(odd)

    device, rank = common.setup_device(), common.rank()
    tiny, odd, rwkv = (str(folder / name) for name in ("tiny", "odd", "rwkv"))
    tokenizer, model = common.load_tokenizer(tiny), common.load_model(tiny, device)
    assert common.eos_ids(model, tokenizer) == [tokenizer.eos_token_id, 2], model.generation_config  # on every rank
    rollout = common.sample(model, tokenizer, ["12+34=?"], 1, 8, greedy=True)  # fewer rows than ranks
    assert rollout.completions[0].startswith("<think>2+4=6"), rollout.completions

    # DiffLlama draws its constants from the CPU's random numbers, also where it is built without its weights. Here its
    # config.json ties the head to the embedding, but the weights do not.
    common.on_main_rank(write_odd_models)
    torch.manual_seed(0)
    untied = common.load_model(odd, device)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    first, second = common.gather_in_order([torch.get_rng_state()])
    assert torch.equal(first, second)

    # One row for two ranks: the second reads a single token, to keep step. It gives RWKV's time_decay no gradient.
    if hasattr(common.FSDPModule, "set_reduce_scatter_unused_params"):  # torch 2.11 lacks it
        batch, norms = common.collate([[3, 4]], [[5, 6]], 0), []
        for model in (common.AutoModelForCausalLM.from_pretrained(rwkv).eval(), common.load_model(rwkv, device)):
            plain = not isinstance(model, common.FSDPModule)
            for rows, ids, mask, T in [(0, *batch[:2], 2)] if plain else common.micro_batches(batch, [0], 100):
                common.token_logprobs(model, ids, mask, T)[0].sum().backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1)))
        assert norms[0] == pytest.approx(norms[1], rel=1e-4), norms

    # A module that `shard` has not seen: each rank's half of the gradient counts.
    linear = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(linear.weight)
    sgd = torch.optim.SGD(linear.parameters(), lr=1.0)
    own = linear, sgd, torch.optim.lr_scheduler.ConstantLR(sgd, 1.0)
    (linear(torch.ones(1, 1)) * 0.25 * (1 + rank)).sum().backward()
    assert FakeRun(grpo.Config(), own=own).optimizer_step(*own, torch.tensor(0.0))["grad_norm"] == pytest.approx(0.75)
    assert linear.weight.item() == pytest.approx(-0.75)

    # A head of your own around one that is tied to the embedding
    class Head(torch.nn.Module):
        def __init__(self, head):
            super().__init__()
            self.head, self.change = head, torch.nn.Parameter(torch.zeros(head.in_features))

        def forward(self, hidden):
            return self.head(hidden + self.change)

    def shard_with_head(model, device, shard=common.shard):
        model.lm_head = Head(model.lm_head)
        return shard(model, device)
    common.shard, shard = shard_with_head, common.shard
    model, common.shard = common.load_model(tiny, device), shard
    assert model.lm_head.head.weight is model.model.embed_tokens.weight
    plain = common.AutoModelForCausalLM.from_pretrained(tiny).eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    with common.gathered(model):
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)

    # A module around a model that `shard` has seen (as torch.compile makes one): FSDP has summed its gradient.
    batch, norms = common.collate([[3, 4]], [[5, 6]], 0), []
    for module in (model, torch.nn.Sequential(model)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        own = module, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        common.token_logprobs(model, *batch[:2], 2)[0].sum().backward()
        norms.append(FakeRun(grpo.Config(), own=own).optimizer_step(*own, torch.tensor(0.0))["grad_norm"])
    assert norms[0] == pytest.approx(norms[1]), norms

    # Metrics that a rank adds in another order, or not at all
    meter = common.Meter()
    for name in ["right", "wrong"][::1 - 2 * rank] + ["first alone"][rank:]:
        meter.add(1 + rank, **{name: len(name) + rank})
    assert meter.means() == pytest.approx({"right": 17 / 3, "wrong": 17 / 3, "first alone": 11})

    def refuses(message, function, *args):
        with pytest.raises(common.UserError, match=message):
            function(*args)
    refuses("other rows", common.Shuffled, [common.Problem("1", [5], str(rank), {})], 0)  # another answer on each rank
    cfg = grpo.Config(output_dir=f"{folder}/on-machine-{rank}")
    refuses("--eval_data: holds other rows", common.encode_prompts, [common.Problem("1" * (rank + 1), [], "1", {})],
            tokenizer, cfg, "--eval_data")
    common.Run.catches_signals = True
    refuses("--seed: another value on another machine", common.Run, dataclasses.replace(cfg, seed=rank))
    drawn = common.Rollout(torch.ones(1, 3), torch.ones(1, 3), torch.ones(1, 1) > 0, [str(rank)], torch.ones(1) > 0)
    refuses("completions differ", common.load_reward(cfg), [common.Problem("1", [3], "1", {})], drawn)
    if rank == 1:
        os.mkdir(cfg.output_dir)
        write(Path(cfg.output_dir, ".lock"), "")  # left by an earlier run
    run = common.Run(cfg)
    refuses("want a directory that all machines share", run.start, common.Shuffled([1], 0))
    run.data, run.log, logged = common.Shuffled([1], 0), lambda *a, **k: None, []
    run.append = lambda name, rows: logged.extend(rows)
    run.bar = SimpleNamespace(set_postfix=lambda *a, **k: None, update=lambda n: None)
    weight = untied.lm_head.weight.detach()  # sharded
    run.end_step(1, {"size": weight.abs().sum()})
    size = common.unsharded(weight).abs().sum().item()  # on every rank: it is collective
    assert rank or logged[0]["size"] == pytest.approx(size)
    torch.rand(1 + rank)
    refuses("step 1: the processes have drawn different numbers", run.end_step, 1, {})
    for _ in range(2):  # from SLURM, and from torchrun, which had it from SLURM
        os.kill(os.getpid(), signal.SIGTERM)
    assert run.stop_signal == signal.SIGTERM
    sys.argv = ["grpo.py"]
    common.launch(lambda cfg: None, common.RunConfig)  # exits as a script does


@beside(run_in_two_processes)
@pytest.mark.parametrize("script", [*SCRIPTS, LARGE_GROUPS])
def test_two_processes_give_the_numbers_of_one(script, whole_run, small, job, tmp_path, monkeypatch):
    """Sampled tokens are the same too, since each row has its own random numbers. And one process can go on with what
    two have begun."""
    if script == "grpo":
        monkeypatch.setitem(sys.modules, "grpo", grpo)  # what it is again in the end
        train_on_other_minibatches(tmp_path, tmp_path / "one")
        both = read_metrics(tmp_path / "one"), read_metrics(job / "other minibatches")
        for alone, together in zip(*both, strict=True):
            assert_close(together, alone, rel=1e-3, abs=1e-5)
        monkeypatch.setitem(sys.modules, "grpo", grpo)
    shared, read = [], common.read_prefixes_once
    monkeypatch.setattr(common, "read_prefixes_once", lambda *args: (shared.append(args), read(*args))[1])
    one, two = read_metrics(whole_run(script)), read_metrics(job / script)
    assert [metrics["step"] for metrics in two] == [0, 1, 2, 3]
    if script in ("grpo", "ppo"):
        begun = (one, whole_run(script), small(script)), (two, job / script, small_runs(job)(script))
        for metrics, run, command in begun:
            longer = shutil.copytree(run, tmp_path / run.parent.name / run.name)
            run_script(*command, "--steps", 4, "--resume", "--output_dir", longer)
            metrics.append(read_metrics(longer)[4])
    for alone, together in zip(one, two):
        assert_close(together, alone, rel=1e-3, abs=1e-5)
    assert (job / script / "model" / "model.safetensors").exists()
    assert shared or script != LARGE_GROUPS  # the single process did read prefixes once


@pytest.mark.parametrize("script", ["dpo --on_policy", "reward_model"])
def test_a_rank_that_only_keeps_step_with_the_others_adds_nothing(script, small, whole_run, tmp_path, monkeypatch):
    """With fewer blocks than ranks, `micro_batches` gives an idle rank rows of another one, with T = 0."""
    deal = common.micro_batches

    def with_an_idle_rank(*args):
        dealt = list(deal(*args))
        yield from dealt
        for rows, input_ids, attention_mask, T in dealt[:1]:
            yield rows, input_ids[:, :-T], attention_mask[:, :-T], 0
    expected = whole_run(script)
    monkeypatch.setattr(common, "micro_batches", with_an_idle_rank)
    run_script(*small(script), "--output_dir", tmp_path / "run")
    assert_same_outcome(expected, tmp_path / "run")


def test_a_row_has_the_same_random_numbers_in_its_reward_on_any_process(tmp_path, monkeypatch):
    """So the number of processes makes no difference, and --resume needs no random state of its own for each."""
    path = write(tmp_path / "reward.py", "import random, numpy, torch\n"
                 "def f(prompt, completion, row):\n"
                 "    return random.random() + numpy.random.rand() + torch.rand(1).item()\n")
    score = common.load_reward(SimpleNamespace(reward=f"{path}:f", format_reward=0))
    rollout = common.Rollout(None, None, torch.ones(6, 1, dtype=torch.bool), ["x"] * 6, torch.ones(6).bool())
    problems, state = [common.Problem("1+1=?", [], "2", {})] * 3, torch.get_rng_state()
    rewards = score(problems, rollout)[0].flatten()
    assert rewards.unique().numel() == 6 and torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(common, "my_share", lambda total: reversed(range(total)))  # score in another order
    monkeypatch.setattr(common, "rank", lambda: 1)  # and on another process
    assert torch.equal(score(problems, rollout)[0].flatten().flip(0), rewards)
    torch.rand(1)  # as a step's sampling does
    assert not torch.isin(score(problems, rollout)[0], rewards).any()


def fail_alone(folder, _):
    path = write(folder / "reward.py", """
import os
def f(prompt, completion, row):
    if os.environ["RANK"] == "1":
        raise KeyError("gold")
    return 1.0
""")
    errors = folder / "stderr"
    rank, other = fork_ranks(errors, launch_script, "grpo.py", "--reward", f"{path}:f", "--output_dir", folder / "run",
                             *on_few_problems(folder))
    rank.join()
    other.kill()  # as torchrun does once a process has ended
    return rank.exitcode, errors.read_text()


@beside(fail_alone)
def test_an_error_of_one_process_ends_the_first_which_says_it(job):
    code, stderr = job
    message, = [line for line in stderr.replace("\r", "\n").splitlines() if "grpo.py: error: " in line]
    assert code == 2 and "raised KeyError: 'gold'" in message and "Traceback" not in stderr, stderr


def without_waiting(*command):
    time.sleep = lambda seconds: None  # for torchrun to end it
    launch_script(*command)


def kill_a_rank(folder, _):
    out, errors = folder / "run", folder / "stderr"
    rank, other = fork_ranks(errors, without_waiting, "grpo.py", "--steps", 1000, "--output_dir", out,
                             *on_few_problems(folder))
    wait_for((out / "metrics.jsonl").exists, rank, errors.read_text)
    other.kill()
    rank.join()
    return rank.exitcode, errors.read_text()


@beside(kill_a_rank)
def test_a_rank_that_is_killed_takes_the_other_with_it(job):
    """One that hangs would waste the machine."""
    code, stderr = job
    assert code == 1 and "grpo.py: error: another process of this run has ended" in stderr
    assert "Traceback" not in stderr, stderr


def kill_and_resume_torchrun(folder, _):
    out = folder / "run"
    flags = ["--output_dir", out, "--save_every", 1, *on_few_problems(folder)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "grpo.py",
               "--steps", 1000, *flags]
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(out.glob("checkpoint/step-*[1-9]*")), process, process.stderr.read)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    killed = process.communicate(timeout=90)[1]  # returns once every process has closed stderr
    next_step = max(int(path.name.removeprefix("step-")) for path in out.glob("checkpoint/step-*"))
    resumed = run_script("grpo.py", "--steps", next_step, *flags, "--resume", processes=2)
    return len(ranks), killed, resumed, next_step, [m["step"] for m in read_metrics(out)], (out / "model").exists()


@beside(kill_and_resume_torchrun)
def test_torchrun_that_is_killed_takes_its_ranks_with_it_and_resumes(job):
    """One that outlives it would write into the resumed run."""
    ranks, killed, resumed, next_step, steps, has_model = job
    assert ranks == 2
    assert 'grpo.py", line' not in killed, killed  # no traceback of the script
    assert steps == list(range(next_step + 1)) and has_model, resumed


@pytest.mark.parametrize("error, said", [
    (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
     "another process of this run has ended"),
    (common.UserError("--model x: no directory or hub id (Connection reset by peer)"), "--model x: no directory")])
def test_a_process_that_lost_another_says_so_in_one_line(error, said, monkeypatch, capsys):
    def main(cfg):
        raise error
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # for torchrun to end it
    with pytest.raises(SystemExit) as stopped:
        common.launch(main, common.RunConfig)
    assert stopped.value.code == getattr(error, "exit_code", 1)
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"grpo.py: error: {said}")


@pytest.mark.parametrize("rank, error, waits", [
    ("0", common.UserError("--data: no such file"), False), ("1", common.UserError("--data: no such file"), True),
    ("0", RuntimeError("gloo: Connection closed by peer"), True)])
def test_an_error_of_all_processes_is_told_by_the_first(rank, error, waits, monkeypatch, capsys):
    """When that one has ended, torchrun ends those that wait; so it does where another one has failed first."""
    def main(cfg):
        raise error
    calls = []
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(signal, "signal", lambda *call: calls.append(call))
    sleep = time.sleep  # other threads may call it, too
    monkeypatch.setattr(time, "sleep", lambda seconds: calls.append(seconds) if seconds == 15 else sleep(seconds))
    with pytest.raises(SystemExit):
        common.launch(main, common.RunConfig)
    assert calls == [(signal.SIGTERM, signal.SIG_DFL), 15] * waits


def test_a_bug_in_one_of_several_processes_ends_it_at_once(monkeypatch, capsys):
    """A Python that shuts down by itself would also shut NCCL down, which may wait for the other processes."""
    def main(cfg):
        raise KeyError("a bug")
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    monkeypatch.setattr(common, "world_size", lambda: 2)
    monkeypatch.setattr(os, "_exit", lambda code: sys.exit(f"_exit({code})"))
    with pytest.raises(SystemExit, match=r"^_exit\(1\)$"):
        common.launch(main, common.RunConfig)
    assert capsys.readouterr().err.endswith("KeyError: 'a bug'\n")


def test_the_workers_of_a_reward_function_end_with_its_process(monkeypatch):
    """One of several leaves by os._exit, which runs no exit handler: a ProcessPoolExecutor's would stay for ever."""
    monkeypatch.setattr(common, "world_size", lambda: 2)
    monkeypatch.setattr(os, "_exit", sys.exit)
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=[60])
    child.start()
    all_children = multiprocessing.process.active_children
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [one for one in all_children() if one is child])
    with pytest.raises(SystemExit):
        common.leave(together=False)
    child.join(30)
    assert child.exitcode == -signal.SIGTERM


def test_every_process_wants_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(common.UserError, match=r"^8 processes see 4 GPU\(s\): want one for each"):
        common.setup_device()
