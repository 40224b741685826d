"""The README's performance section and its picture are made from the committed rows."""

import json

import pytest
import report
from picture import draw


ROW = {"ours_ms": 2.0, "baseline_ms": 250.0, "speedup": 125.0}


def test_readme_shows_the_committed_rows():
    text = report.ROOT.joinpath("README.md").read_text(encoding="utf-8")
    found = text.partition(report.BEGIN)[2].partition(report.END)[0].strip()
    assert found == report.performance_section(report.RESULTS), "run `python kernels/benchmarks/report.py`"


@pytest.mark.parametrize("file", ["prefill", "model_prefill"])
def test_committed_rows_name_their_environment(file):
    header = json.loads(report.RESULTS.joinpath(f"{file}.json").read_text())
    assert {"hardware", "versions", "commit", "rows"} <= header.keys()


def test_lengths_that_were_not_measured_are_left_out():
    table = report.prefill_table({"prefill/8K/msr0.5/cudnn": ROW})
    assert table.splitlines()[2:] == [f"| 8K |  | 125.0{report.TIMES} |  |  |  |"]


def test_further_rows_carry_their_notes():
    table = report.further_table({"decode/128K/msr0.75/batch8": ROW | {"bandwidth_share": 0.81}})
    (line,) = table.splitlines()[2:]
    assert line.split(" | ")[1:] == ["dense decode", "2", "250", f"125.0{report.TIMES}", "81% of the copy bandwidth |"]


def test_generation_rows_show_both_sides():
    amounts = {"ours_bytes": 5.3e9, "baseline_bytes": 17.2e9, "ratio": 0.308}
    steps = ROW | {"batch": 6, "ours_tokens_per_s": 430.4, "baseline_tokens_per_s": 195.0, "eager_speedup": 1.06}
    table = report.generation_table({"kv_bytes/128K": amounts, "decode_tokens_per_s/128K/batchmax": steps})
    memory, speed = (line.split(" | ")[1:] for line in table.splitlines()[2:])
    assert memory == ["5.3 GB", "17.2 GB", f"0.31{report.TIMES}", " |"]
    assert speed == ["430", "195", f"125.0{report.TIMES}", f"1.06{report.TIMES} |"]


def test_no_further_rows_make_no_table():
    assert report.further_table({}) == ""


def test_the_same_rows_draw_the_same_picture(tmp_path):
    rows, _ = report.load(report.RESULTS)
    for name in ("one.svg", "other.svg"):
        draw(rows, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()
