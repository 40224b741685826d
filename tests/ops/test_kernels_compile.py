"""The kernels compile for GPUs that are not there, within each one's shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic_kernels import _launch


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


def test_another_maker_s_capability_is_none_of_nvidia_s(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))  # an MI200's
    assert _launch.compute_capability.__wrapped__(0) == 0
