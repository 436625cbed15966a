"""Paths, and the tiny model that most tests start from. Nothing is downloaded."""
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

if os.environ.get("TEST_CUDA") != "1":  # see test_cuda.py
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the other tests' numbers are a CPU's
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several small processes: one thread each is quicker than two that wait
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
pytest.register_assert_rewrite("helpers")

WITHOUT_TINY_MODEL = {"test_common.py", "test_data.py", "test_run_details.py", "test_verifiers.py"}


def pytest_collection_modifyitems(items):
    """First the tests that do without the tiny model, which is being built; last those whose job is being done."""
    items.sort(key=lambda item: (hasattr(item.function, "job"), item.path.name not in WITHOUT_TINY_MODEL))


@pytest.fixture(scope="session", autouse=True)
def builder(request):
    """Builds the tiny model under runs/, once: 40 s of one core."""
    os.chdir(ROOT)  # runs/ is looked for in the working directory
    build = "import common; common.setup_device(); common.build_tiny_model('arithmetic')"
    wanted = any(item.path.name not in WITHOUT_TINY_MODEL for item in request.session.items)
    with subprocess.Popen([sys.executable, "-c", build if wanted else ""]) as process:
        yield process


@pytest.fixture(autouse=True)
def tiny_model(request, builder):
    if request.path.name not in WITHOUT_TINY_MODEL:
        assert builder.wait() == 0, "the tiny model cannot be built"


@pytest.fixture(scope="session", autouse=True)
def jobs(request, builder, tmp_path_factory):
    """{job: what comes of it}, one done after another once the tiny model is there."""
    parameters = {}
    for item in request.session.items:
        if job := getattr(item.function, "job", None):
            parameters.setdefault(job, []).extend(item.callspec.params.values() if hasattr(item, "callspec") else ())
    pool = ThreadPoolExecutor(1)
    pool.submit(builder.wait)
    yield {job: pool.submit(job, tmp_path_factory.mktemp("job"), selected) for job, selected in parameters.items()}
    builder.kill()  # the tests may have ended first: -x, Ctrl-C
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def job(request, jobs):
    """What the test's own job returned (see `beside`)."""
    return jobs[request.function.job].result()
