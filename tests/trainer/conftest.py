import datasets
import pytest


@pytest.fixture(autouse=True, scope="session")
def _quiet_datasets():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
