"""The kernels compile for GPUs that are not there, within each one's shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("target", "limit"), [(80, 163), (89, 99), (90, 227)], ids=["sm80", "sm89", "sm90"])
def test_kernels_compile(target, limit):
    script = Path(__file__).parent / "compile_kernels.py"
    # A process of its own: this one interprets.
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, script, str(target)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    needed = json.loads(run.stdout.splitlines()[-1])
    assert max(needed) <= limit * 1024, f"shared memory of {max(needed)} bytes, sm{target} has {limit} KiB"
