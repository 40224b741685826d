"""Rows of two GPUs: what is divided by what."""

import pytest
import scaling


RESULTS = {
    1: [{"times": [1000.0, 1100.0, 1200.0], "peak": 7}],
    2: [{"times": [1150.0, 1000.0, 1250.0], "peak": 4}, {"times": [900.0, 1200.0, 1200.0], "peak": 5}],
}


def test_the_speed_up_is_that_of_all_tokens_on_the_slower_gpu(monkeypatch):
    monkeypatch.setattr(scaling, "run", lambda length, processes: RESULTS[processes])
    (row,) = scaling.rows([65_536])
    assert row["name"] == "train_step/64K/fsdp2"
    assert (row["ours_ms"], row["baseline_ms"]) == (1200.0, 1100.0)
    assert row["speedup"] == pytest.approx(2 * 1100 / 1200)
    assert (row["peak_bytes"], row["baseline_peak_bytes"]) == (5, 7)
