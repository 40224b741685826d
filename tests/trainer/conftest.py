import datasets
import pytest


@pytest.fixture(autouse=True, scope="session")
def _quiet():
    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "1")  # keeps TRL from sending telemetry
        yield
    datasets.enable_progress_bars()
