"""The benchmarks are scripts that import each other by their bare names."""

import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "kernels" / "benchmarks"))


@pytest.fixture(scope="session")
def root():
    """The checkout's folder."""
    return ROOT
