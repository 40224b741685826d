"""A Hub that runs beside the tests, and a process that uses it."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from hub.client import run
from hub.fake_hub import TOKEN, FakeHub


@pytest.fixture(scope="session")
def running_hub():
    with FakeHub() as server:
        yield server


@pytest.fixture(scope="session")
def hub_environment(running_hub, tmp_path_factory):
    """Environment of a user's process."""
    return {
        "HF_ENDPOINT": running_hub.url,
        "HF_HOME": str(tmp_path_factory.mktemp("hf_home")),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def client(hub_environment):
    """Runs a function of `hub.client` by its name, in one process for all tests; it has pushed the base model."""
    executor = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def call(*args, **kwargs):
        return executor.submit(run, *args, **kwargs).result(timeout=120)

    with executor:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in hub_environment.items():
                patch.setenv(name, value)
            call("push_base")  # starts the process, with this environment
        yield call


@pytest.fixture
def hub(running_hub):
    """The Hub, without faults and with nothing in its log."""
    running_hub.faults.clear()
    running_hub.requests.clear()
    return running_hub
