"""Small random models of many architectures, ways to run a script, and plain versions of its parts to check it by."""
import contextlib
import copy
import importlib
import io
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from tqdm import tqdm

import common

aten = torch.ops.aten
ROOT = Path(__file__).parent.parent
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256)
MORE_SIZES = {
    "Gemma2": dict(head_dim=8), "Lfm2": dict(layer_types=["conv", "full_attention"]),
    "Qwen3_5Text": dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, head_dim=8,
                        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8),
    "Gemma4Text": dict(head_dim=8, global_head_dim=16, layer_types=["sliding_attention", "full_attention"],
                       hidden_size_per_layer_input=8, vocab_size_per_layer_input=len(common.TINY_VOCABULARY)),
    "Llama4Text": dict(head_dim=8, intermediate_size_mlp=64, num_local_experts=2),
    "FalconH1": dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8),
    "RecurrentGemma": dict(num_key_value_heads=1, block_types=("recurrent", "attention"))}
OTHER_SIZES = {  # of architectures that have other names for them
    **dict.fromkeys(("GPT2", "OpenAIGPT"), dict(n_embd=32, n_layer=2, n_head=4, n_positions=256)),
    "GPTNeoX": {name: size for name, size in SIZES.items() if name != "num_key_value_heads"},
    "GPTNeo": dict(hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    "Mamba": dict(hidden_size=32, num_hidden_layers=2, time_step_rank=2)}


def random_model(architecture: str, seed: int = 0, **changes):
    """A two-layer model with random weights and the tiny model's vocabulary -> (model, tokenizer)."""
    tokenizer = common.tiny_tokenizer()
    sizes = OTHER_SIZES.get(architecture, SIZES | MORE_SIZES.get(architecture, {}))
    config_class = getattr(transformers, architecture + "Config")
    config = config_class(pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
                          eos_token_id=tokenizer.eos_token_id, **{"vocab_size": len(tokenizer), **sizes, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # larger than usual, so that greedy choices are not close to ties
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    return model.eval(), tokenizer


def save(directory, *parts) -> None:
    """Write a model and its tokenizer to a directory."""
    for part in parts:
        part.save_pretrained(directory)


def run_script(script: str, *flags, processes: int = 0, code: int = 0) -> str:
    """Run `python SCRIPT flags` in this process (with `processes`, under torchrun), check its exit code, and return its
    stderr."""
    command = [str(ROOT / script), *map(str, flags)]
    if processes:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        done = subprocess.run(launcher + command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == code, done.stderr
        return done.stderr
    module, argv, ended, errors = importlib.import_module(script.removesuffix(".py")), sys.argv, 0, io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.argv = command
    try:
        with contextlib.redirect_stderr(errors):
            common.launch(module.main, module.Config)
    except SystemExit as stopped:
        ended = stopped.code
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended == code, errors.getvalue()
    return errors.getvalue()


def fork(output, function, *args, **environment):
    """Start a process that calls function(*args), with these environment variables, and with its output in a file.

    It is forked from a server that has already imported torch and transformers, which saves five seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["common"])
    process = context.Process(target=call_forked, args=(str(output), environment, function, *args))
    process.start()
    return process


def call_forked(output, environment, function, *args):
    os.chdir(ROOT)  # runs/ is relative to the working directory
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    tqdm.set_lock(threading.RLock())  # as `launch` does
    function(*args)


def fork_ranks(errors, function, *args) -> list:
    """Two processes for `fork`, as torchrun would start them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # a free one
    return [fork(errors, function, *args, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                 MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests") for rank in "01"]


def launch_script(script, *flags):
    """Run `python SCRIPT flags` in a process that `fork` has started."""
    sys.argv = [script, *map(str, flags)]
    module = importlib.import_module(script.removesuffix(".py"))
    common.launch(module.main, module.Config)


def ended_well(process, errors) -> None:
    """Wait for a process of `fork`; fail with what it wrote to `errors` unless it exits with code 0."""
    process.join()
    assert process.exitcode == 0, Path(errors).read_text()


def beside(job):
    """Decorate a test to run `job(folder, parameters)` in the background, on a core that earlier tests leave idle.

    `parameters` are those of the selected tests. The fixture `job` returns what the job returns, or raises its error.
    """
    def mark(test):
        test.job = job
        return test
    return mark


def build_tiny_model(folder, _) -> None:
    """A job: build the tiny model, if runs/ does not hold it yet."""
    ended_well(fork(folder / "stderr", build_tiny_model_here), folder / "stderr")


def build_tiny_model_here():
    common.setup_device()
    common.build_tiny_model("arithmetic")


def run_tests(folder, ids) -> dict[str, str]:
    """A job: have a second pytest run the tests with these ids -> {id: why it failed, or ""}."""
    if not ids:
        return {}
    ended_well(fork(folder / "stderr", run_tests_here, folder / "outcomes", ids, TESTS_BESIDE="1"), folder / "stderr")
    return json.loads((folder / "outcomes").read_text())


def run_tests_here(path, ids):
    class Recorder:
        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.failed:
                outcomes[report.nodeid] = report.longreprtext if report.failed else ""
    outcomes = {}
    pytest.main(["-q", "-p", "no:cacheprovider", *ids], plugins=[Recorder()])
    path.write_text(json.dumps(outcomes))


def few_problems(folder) -> Path:
    """A file of twenty held-out problems."""
    path = Path(folder) / "few.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in common.arithmetic_rows(2, "eval")[:20]))
    return path


def on_few_problems(folder) -> list:
    """Flags to train and evaluate on twenty problems. To read a default run's 7,707 takes a quarter of a second, to
    evaluate on its 200 half a second."""
    problems = few_problems(folder)
    return ["--data", problems, "--eval_data", problems]


def few_pairs(folder) -> Path:
    """A file of twelve pairs of a right and a wrong answer; the wrong ones are cut at different lengths."""
    path, draw, rows = Path(folder) / "pairs.jsonl", random.Random(0), []
    for i, row in enumerate(common.arithmetic_rows(2, "train")[:12]):
        right, wrong = (common.worked_answer(row["prompt"], draw, 0, slips) for slips in (0, 1))
        rows.append({"prompt": row["prompt"], "chosen": right, "rejected": wrong[:-i] if i else wrong})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class RecordedGraph(TorchDispatchMode):
    """A CUDA graph for a CPU: it records the operations that run under it; `replay` repeats them on the same memory.

    What Python computed in between is not computed again. An operation that would make Python wait for the GPU fails.
    """

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation.overloadpacket not in (aten._local_scalar_dense, aten.nonzero, aten.equal, aten._unique2)
        with torch._C.DisableTorchFunction():  # GpuTensors are plain ones here
            results = operation(*args, **(kwargs or {}))
        self.operations.append((operation, args, kwargs or {}, results))
        return results

    def replay(self):
        with torch._C.DisableTorchFunction():
            for operation, args, kwargs, results in self.operations:
                for old, new in zip(tree_leaves(results), tree_leaves(operation(*args, **kwargs))):
                    if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():  # no view, not in place
                        old.copy_(new)


def use_graph_steps(monkeypatch) -> list:
    """Let a CPU decode with GraphStep and a RecordedGraph. Returns a list, to be filled with the rows and the width of
    each one that is made."""
    steps, new_layer = [], common.RoomyLayer.__init__

    def capture(self):
        self.run()  # as on CUDA, once before the capture
        self.graph = RecordedGraph()
        with self.graph:
            self.logits = self.run()
        steps.append((len(self.ids), self.width))

    def zeroed(self, *args):  # as on CUDA: columns to come are read, with weight 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", torch.zeros)
            new_layer(self, *args)
    monkeypatch.setattr(common.GraphStep, "capture", capture)
    monkeypatch.setattr(common.RoomyLayer, "__init__", zeroed)
    monkeypatch.setattr(common, "LEAST_COLUMNS", 64)  # lower limits, because the tests' rows are short and few
    monkeypatch.setattr(common, "LEAST_ROWS", 4)
    monkeypatch.setattr(common, "can_use_graph", lambda model, cache: (
        model.config._attn_implementation == "sdpa"
        and all(isinstance(layer, common.RoomyLayer) for layer in cache.layers)))
    return steps


class GpuTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU. Under `TensorsOnGpu`, what is computed from it says so too."""
    device = property(lambda self: torch.device("cuda", 0))
    is_cuda = property(lambda self: True)


class TensorsOnGpu(TorchFunctionMode):
    """Under this, whatever is made on or moved to "cuda" is a GpuTensor, and an operation fails where CUDA would refuse
    it because other tensors are on the CPU. Those may be indices, single numbers, or what is copied."""
    in_backward = False  # there, autograd passes plain tensors

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, wanted = getattr(function, "__name__", ""), []
        args, kwargs = tree_map_only(torch.device, lambda d: wanted.append(d) or torch.device("cpu"),
                                     (args, kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_cpu = [tensor for tensor in tensors if not isinstance(tensor, GpuTensor) and tensor.dim() > 0]
        if on_gpu := any(isinstance(tensor, GpuTensor) for tensor in tensors):
            first_on_cpu = isinstance(args[0], torch.Tensor) and not isinstance(args[0], GpuTensor)
            if name in ("__getitem__", "__setitem__"):
                refused = first_on_cpu or any(value is tensor for tensor in on_cpu for value in args[2:])
            else:
                changes_first = name.startswith("__i") or re.fullmatch("[a-z].*_", name)
                refused = name == "numpy" or (on_cpu or first_on_cpu and changes_first) and name not in (
                    "copy_", "to", "__set__")
            assert not refused or self.in_backward, f"{name}: a tensor is on the CPU, another on the GPU"
        self.in_backward |= name == "backward"
        with torch._C.DisableTorchFunctionSubclass():
            results = function(*args, **kwargs)
        self.in_backward &= name != "backward"
        on_gpu = wanted[-1].type == "cuda" if wanted else name != "cpu" and (on_gpu or self.in_backward)

        def placed(tensor):
            if isinstance(tensor, GpuTensor) == on_gpu:
                return tensor
            with torch._C.DisableTorchFunctionSubclass():
                return tensor.as_subclass(GpuTensor if on_gpu else torch.Tensor)
        return tree_map_only(torch.Tensor, placed, results)


def put_on_gpu(model, device):
    """Replace a model's parameters and buffers by GpuTensors."""
    moved = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                copy = torch.nn.Parameter(parameter.data.as_subclass(GpuTensor), parameter.requires_grad)
                module._parameters[name] = moved.setdefault(parameter, copy)  # tied weights stay tied
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.as_subclass(GpuTensor)
    return model


class FakeRun(common.Run):
    """A Run without an output directory, to test single methods."""

    def __init__(self, cfg, **trained):
        self.cfg, self.trained, self.bad_steps, self.failing = cfg, trained, dict.fromkeys(trained, 0), False
        self.layout, self.training = {}, []
        self.flags = vars(cfg) if cfg else {}


def read_metrics(directory) -> list[dict]:
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


# ------------------------------------------------- a run against the plain algorithm, one completion at a time

def record_run(monkeypatch, script: str, directory, *flags) -> list:
    """Run a script in this process and record each of its steps:

    states    for each update, the weights and optimizer states that the one before and it began with: see `begin_with`
    batches   the data that it drew
    rollouts  what it sampled
    orders    what `torch.randperm` returned: the order in which rows were dealt out
    updates   what each `Run.optimizer_step` returned
    metrics   its line of metrics.jsonl
    """
    module, steps, states = importlib.import_module(script.removesuffix(".py")), [], []
    run_steps, optimizer_step = common.Run.steps, common.Run.optimizer_step

    def recorded(name, function):
        """Wrap `function` to append its results to the list `name` of the current step."""
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            if steps:  # false before the first step
                getattr(steps[-1], name).append(result)
            return result
        return call

    def recorded_steps(run):
        for step in run_steps(run):
            steps.append(SimpleNamespace(states=[], batches=[], rollouts=[], orders=[], updates=[]))
            yield step

    def recorded_update(run, model, *args):
        if model is next(iter(run.trained.values()))[0]:  # the critic's follows in the same update
            state = [(m.state_dict(), optimizer.state_dict()["state"]) for m, optimizer, _ in run.trained.values()]
            states.append(copy.deepcopy(state))
            steps[-1].states.append(states[-2:])
        return optimizer_step(run, model, *args)

    monkeypatch.setattr(common.Run, "steps", recorded_steps)
    monkeypatch.setattr(common.Shuffled, "next", recorded("batches", common.Shuffled.next))
    monkeypatch.setattr(torch, "randperm", recorded("orders", torch.randperm))
    monkeypatch.setattr(common.Run, "optimizer_step", recorded("updates", recorded_update))
    if hasattr(module, "sample"):  # reward_model.py samples nothing
        monkeypatch.setattr(module, "sample", recorded("rollouts", module.sample))
    run_script(script, "--output_dir", directory, *on_few_problems(Path(directory).parent), *flags)
    for step, metrics in zip(steps, read_metrics(directory)[1:], strict=True):
        step.metrics = metrics
    return steps


def begin_with(step, update: int, *plain) -> None:
    """Give each plain (model, optimizer) the state that the run's own one had before that update of the step. The plain
    update before it must have led there, up to rounding.

    Without this the two would drift apart: AdamW turns rounding in a gradient near 0 into an update of size lr, and a
    ratio at its bound would be clipped in one of them alone.
    """
    *before, now = step.states[update]  # before the run's first update there was none
    for (model, optimizer), (weights, moments), *earlier in zip(plain, now, *before, strict=True):
        for start, _ in earlier:
            assert_moved_alike(model.state_dict(), weights, start, tolerance=0.03)
        model.load_state_dict(weights)
        optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})


def assert_moved_alike(plain: dict, ours: dict, start: dict, tolerance: float) -> None:
    """Check that two state dicts are the same up to rounding, which AdamW amplifies for gradients near 0: that they
    differ by at most this share of what training has changed since `start`."""
    plain, ours, start = (torch.cat([state[name].flatten() for name in ours]) for state in (plain, ours, start))
    assert (ours - plain).norm() <= tolerance * (ours - start).norm()


def load_tiny_model():
    return transformers.AutoModelForCausalLM.from_pretrained(common.build_tiny_model("arithmetic")).eval()


def row_alone(rollout, i: int):
    """Row i without padding -> (ids of prompt and completion, number of completion tokens)."""
    return rollout.input_ids[i][rollout.attention_mask[i].bool()], int(rollout.lengths[i])


def distributions(model, ids, n: int, temperature: float = 1.0) -> torch.distributions.Categorical:
    """π(· | the tokens before) for each of the last n tokens of `ids`, from the model's full logits."""
    logits = model(ids[None]).logits[0, -n - 1:-1]  # the logits at a position predict the next token
    return torch.distributions.Categorical(logits=logits / temperature)


def plain_logprobs(model, rollout, i: int, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [|o_i|] of the tokens of completion i, from a forward pass of that row alone."""
    ids, n = row_alone(rollout, i)
    return distributions(model, ids, n, temperature).log_prob(ids[-n:])


def plain_entropies(model, rollout, i: int, temperature: float = 1.0) -> torch.Tensor:
    """Entropies [|o_i|] of the distributions that the tokens of completion i were drawn from."""
    return distributions(model, *row_alone(rollout, i), temperature).entropy()


def plain_finished(rollout) -> torch.Tensor:
    """Whether each completion ends with EOS: bool [N]."""
    return torch.tensor([row_alone(rollout, i)[0][-1] == common.tiny_tokenizer().eos_token_id
                         for i in range(len(rollout.mask))])


def is_right(rollout, i: int) -> bool:
    """Whether completion i gives the sum that its prompt asks for: "12+34=?" and "…<answer>46</answer>"."""
    prompt = common.tiny_tokenizer().decode(rollout.input_ids[i][:-rollout.mask.shape[1]], skip_special_tokens=True)
    answers = re.findall("<answer>(.*?)</answer>", rollout.completions[i])
    return answers[-1:] == [str(sum(map(int, prompt.removesuffix("=?").split("+"))))]


def assert_same_gradient(models, ours, plain, atol: float = 1e-5) -> None:
    """Check that the backward passes of `ours()` and of `plain()` leave the same gradients in the models."""
    gradients = []
    for add_losses in (ours, plain):
        for model in models:
            model.zero_grad()
        add_losses()
        gradients.append([p.grad for model in models for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=atol)


def plain_update(optimizer, loss, lr: float, max_grad_norm: float) -> dict[str, float]:
    """Backward, clip, step -> what `Run.optimizer_step` returns, with the gradient norm before clipping."""
    [group] = optimizer.param_groups
    group["lr"] = lr
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(group["params"], max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr}


def assert_metrics(step, updates, expected: dict) -> None:
    """Check that the step logged the means of loss, grad_norm and lr over `updates`, and the values in `expected`."""
    expected = expected | {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
    assert {name: step.metrics[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=2e-3, abs=1e-5)


def assert_same_weights(directory, policy, start=None) -> None:
    """Check that the run's saved model, trained from `start` or the tiny model, is the plain one (up to rounding)."""
    trained = type(policy).from_pretrained(Path(directory) / "model")
    assert_moved_alike(policy.state_dict(), trained.state_dict(), (start or load_tiny_model()).state_dict(), 3e-3)
