"""Set-up of the tests: CPU only, offline, and the tiny model that most of them start from."""
import multiprocessing
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

if os.environ.get("TEST_CUDA") != "1":  # see test_cuda.py
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all other tests expect a CPU's numbers
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # several small processes run at once: more threads would wait
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
pytest.register_assert_rewrite("helpers")

WITHOUT_TINY_MODEL = {"test_common.py", "test_data.py", "test_run_details.py", "test_verifiers.py"}
BESIDE = {"test_dapo.py", "test_ppo.py"}  # a second process runs these, on the other core


def pytest_collection_modifyitems(config, items):
    """Put tests without the tiny model first, while it is being built, and those that wait for a job last."""
    files = {item.path.name for item in items}
    here = files <= BESIDE or config.option.usepdb or config.option.capture == "no" or hasattr(config, "workerinput")
    for item in items:
        item.beside = item.path.name in BESIDE and not here and "TESTS_BESIDE" not in os.environ
    items.sort(key=lambda item: (item.beside or hasattr(item.function, "job"),
                                 item.path.name not in WITHOUT_TINY_MODEL))


@pytest.fixture(scope="session", autouse=True)
def jobs(request, tmp_path_factory):
    """{job: Future of its result}: what runs in the background, one after another. The first job builds the tiny model
    under runs/, if it is not there yet (35 s of one core)."""
    import helpers
    os.chdir(ROOT)  # runs/ is relative to the working directory
    parameters = {helpers.build_tiny_model: [], helpers.run_tests: []}
    for item in request.session.items:
        if item.beside:
            parameters[helpers.run_tests].append(item.nodeid)
        elif job := getattr(item.function, "job", None):
            parameters.setdefault(job, []).extend(item.callspec.params.values() if hasattr(item, "callspec") else ())
    if all(item.path.name in WITHOUT_TINY_MODEL for item in request.session.items):
        parameters = {}
    pool = ThreadPoolExecutor(1)
    yield {job: pool.submit(job, tmp_path_factory.mktemp("job"), given) for job, given in parameters.items()}
    for process in multiprocessing.active_children():  # with -x or Ctrl-C the tests may end before the jobs
        process.kill()
    pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True)
def tiny_model(request, jobs):
    if request.path.name not in WITHOUT_TINY_MODEL:
        import helpers
        jobs[helpers.build_tiny_model].result()


@pytest.fixture
def job(request, jobs):
    """Wait for the test's own job (see `beside`), and return its result."""
    return jobs[request.function.job].result()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that the second process runs has that one's outcome."""
    if pyfuncitem.beside:
        import helpers
        outcomes = pyfuncitem.funcargs["jobs"][helpers.run_tests].result()
        if failure := outcomes[pyfuncitem.nodeid]:
            pytest.fail(failure, pytrace=False)
        return True


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """What `common.launch` sets in one test does not stay for the next, nor does `common.leave` end what a test or job
    beside it has started."""
    import common
    monkeypatch.setattr(common.Run, "catches_signals", False)
    monkeypatch.setattr(common.multiprocessing, "active_children", list)


@pytest.fixture
def one_gpu(monkeypatch):
    """Let a CPU do what one GPU does: FSDP2 in a single process, bfloat16, and GraphStep (`use_graph_steps`)."""
    import common
    import helpers
    import torch
    import torch.distributed as dist
    set_up = common.setup_device

    def setup_device():
        if not dist.is_initialized():  # the end of a run destroys the process group
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return set_up()
    monkeypatch.setattr(common, "setup_device", setup_device)
    monkeypatch.setattr(common, "compute_dtype", lambda device: torch.bfloat16)
    shard = common.shard
    monkeypatch.setattr(common, "shard", lambda model, device: common.fuse_norms(model) or shard(model, device))
    yield helpers.use_graph_steps(monkeypatch)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def tensors_on_gpu(monkeypatch):
    """Run scripts with tensors that say they are on a GPU (`TensorsOnGpu`), without FSDP and in float32, and with
    GraphStep (`use_graph_steps`). Checkpoints and models are not written."""
    import common
    import helpers
    import torch
    from torch.overrides import _pop_mode_temporarily
    load_model, can_use_graph = common.load_model, common.can_use_graph

    def load(*args, **kwargs):  # transformers sets modes of its own to load a model
        with _pop_mode_temporarily():
            return load_model(*args, **kwargs)
    monkeypatch.setattr(common, "load_model", load)
    monkeypatch.setattr(common, "shard", helpers.put_on_gpu)
    monkeypatch.setattr(common, "setup_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(common, "compute_dtype", lambda device: torch.float32)
    monkeypatch.setitem(common.SHARED_TOKENS, "cuda", 1)  # so that prefixes are shared and the head is sliced
    monkeypatch.setitem(common.HEAD_SLICE, "cuda", 500)
    monkeypatch.setattr(common.Run, "save_checkpoint", lambda run: None)
    monkeypatch.setattr(common, "save_model", lambda *args: None)
    for name, value in (("reset_peak_memory_stats", None), ("max_memory_allocated", 0), ("memory_reserved", 0),
                        ("memory_allocated", 0), ("mem_get_info", (2 ** 34, 2 ** 35))):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    steps = helpers.use_graph_steps(monkeypatch)
    monkeypatch.setattr(common, "can_use_graph", can_use_graph)
    with helpers.TensorsOnGpu():
        yield steps
