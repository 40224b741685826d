"""Rows of prefill attention: names, inputs, baselines."""

import itertools

import baselines
import pytest
import torch
from benchmark import Times
from inputs import HEAD_DIM, KV_HEADS, label, make_gate, make_inputs
from numerics import make_qkv
from prefill import SHARES, attention_rows, baseline_names, check, choose_repeats
from registry import OPERATORS

from elastic_kernels import routed_attention


PREFILL_NAMES = {
    f"prefill/{length}/msr{share}/{name}"
    for length, share, name in itertools.product(
        ("2K", "4K", "8K", "16K", "32K", "64K", "128K", "256K"),
        ("0", "0.5", "0.75", "0.875", "1"),
        ("cudnn", "fa2", "fa4", "flex", "serial", "serial-fa4"),
    )
}
PROMISED = {
    "prefill/32K/msr0/fa4",
    "prefill/128K/msr0/fa4",
    "prefill/32K/msr0.75/serial-fa4",
    "prefill/128K/msr0.75/serial-fa4",
    "prefill/16K/msr0.875/serial",
    "prefill/64K/msr0.875/serial",
    "prefill/256K/msr0.875/serial",
    "prefill/128K/msr0.75/flex",
}


def all_prefill_names(*, has_flash_attn_4):
    return {
        f"prefill/{label(length)}/msr{share:g}/{name}"
        for length in OPERATORS["prefill"].lengths
        for share in SHARES
        for name in baseline_names(length, share, has_flash_attn_4=has_flash_attn_4)
    }


@pytest.mark.parametrize(
    ("length", "name"), [(512, "512"), (2048, "2K"), (131_072, "128K"), (2**20, "1M")], ids=["512", "2K", "128K", "1M"]
)
def test_label_of_a_length(length, name):
    assert label(length) == name


def test_prefill_rows_have_legal_names():
    assert all_prefill_names(has_flash_attn_4=True) <= PREFILL_NAMES


def test_prefill_rows_include_the_promised():
    assert all_prefill_names(has_flash_attn_4=True) >= PROMISED


def test_prefill_rows_without_flash_attn_4():
    expected = {name for name in all_prefill_names(has_flash_attn_4=True) if not name.endswith("fa4")}
    assert all_prefill_names(has_flash_attn_4=False) == expected


def test_prefill_rows_compare_with_the_right_candidate(monkeypatch):
    monkeypatch.setattr("prefill.flash_attn_4_version", lambda: "4.0")
    times = {("ours", share): Times([1.0 + share] * 3, "events") for share in SHARES}
    dense = {"cudnn": 10.0, "fa2": 20.0, "fa4": 5.0}
    times |= {(name,): Times([value] * 3, "events") for name, value in dense.items()}
    serial = {("serial", 0.75): 7.0, ("serial", 0.875): 6.0, ("serial-fa4", 0.75): 4.0, ("flex", 0.75): 3.0}
    times |= {key: Times([value] * 3, "events") for key, value in serial.items()}
    times["flex-mask", 0.75] = Times([30.0] * 3, "events")
    rows = {row["name"]: row for row in attention_rows(131_072, times, "hopper")}
    found = {name: (row["ours_ms"], row["baseline_ms"]) for name, row in rows.items() if "/msr0.75/" in name}
    prefix = "prefill/128K/msr0.75/"
    expected = dense | {"serial": 7.0, "serial-fa4": 4.0, "flex": 33.0}
    assert found == {prefix + name: (1.75, value) for name, value in expected.items()}
    assert rows[prefix + "fa4"]["baseline_version"] == "4.0"
    assert rows[prefix + "flex"]["baseline_mask_ms"] == 30.0


def test_a_baseline_that_computes_something_else_is_not_timed():
    output = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    runs = {("ours", 0.0): lambda: output, ("ours", 0.75): lambda: output + 1, ("cudnn",): lambda: output}
    check(runs | {("serial", 0.75): lambda: output + 1})
    with pytest.raises(RuntimeError, match="not timed: serial"):
        check(runs | {("serial", 0.75): lambda: output})


@pytest.mark.parametrize(
    ("length", "launches", "repeats"), [(2048, 10, 20), (32_768, 1, 11), (262_144, 1, 1)], ids=str
)
def test_repeats_follow_the_length(length, launches, repeats):
    assert choose_repeats(length, launches) == repeats


def test_inputs_lie_in_memory_as_projections_leave_them():
    query, key, _ = make_inputs(5, batch=2, device="cpu")
    assert query.transpose(1, 2).is_contiguous()
    assert key.shape == (2, KV_HEADS, 5, HEAD_DIM)


def test_gate_has_the_share_of_sparse_heads():
    assert make_gate(0.75, batch=3, device="cpu").sum(1).tolist() == [6, 6, 6]


def test_serial_dispatch_computes_routed_attention(monkeypatch):
    sizes = {"mode_pair": "FA-SSA", "sink_size": 3, "window_size": 20}
    monkeypatch.setattr(baselines, "SIZES", sizes)
    query, key, value = make_qkv(heads=4, kv_heads=2, length=50, dtype=torch.float32)
    gate = torch.tensor([[True, False]])
    actual = baselines.serial_dispatch(query, key, value, gate, baselines.DENSE["fa2"])()
    torch.testing.assert_close(actual, routed_attention(query, key, value, gate, **sizes))


def test_flash_attn_4_is_optional():
    assert baselines.flash_attn_4_version() is None
