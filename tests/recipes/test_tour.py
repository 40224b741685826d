"""The tour runs from its first cell to its last."""

import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from peft import PeftConfig


TOUR = Path(__file__).parents[2] / "recipes" / "tour.py"


def run(output, *arguments):
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(sys, "argv", ["tour.py", "--output-dir", str(output), *arguments])
        names = runpy.run_path(str(TOUR), run_name="__main__")
    return names, printed.getvalue()


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """Folder, names and output of a run on the tiny random model."""
    output = tmp_path_factory.mktemp("out")
    return output / "tour", *run(output)


def test_one_step_was_trained(tour):
    _, names, _ = tour
    assert names["trainer"].state.global_step == 1
    assert {"msr/single_qa", "msr/summarization"} <= set(names["log"])


def test_modes_of_the_heads_make_a_difference(tour):
    _, names, _ = tour
    assert len(set(names["losses"].values())) == 3


def test_adapter_is_saved_with_the_calibrated_bias(tour):
    folder, _, printed = tour
    bias = PeftConfig.from_pretrained(folder / "adapter").sparsity_bias
    assert f"sparsity_bias={bias}" in printed


def test_card_shows_the_picture_beside_it(tour):
    adapter = tour[0] / "adapter"
    assert "(routing.png)" in (adapter / "README.md").read_text(encoding="utf-8")
    assert (adapter / "routing.png").read_bytes().startswith(b"\x89PNG")


def test_page_shows_the_routing(tour):
    assert "data:image/png;base64," in (tour[0] / "routing.html").read_text(encoding="utf-8")


def test_another_base_model_can_be_given(tour, tmp_path):
    _, names, _ = tour
    base = names["load_base"]()
    base.save_pretrained(tmp_path / "base")
    names["tokenizer"].save_pretrained(tmp_path / "base")
    again, _ = run(tmp_path / "out", "--model", str(tmp_path / "base"))
    assert again["model"].config.name_or_path == str(tmp_path / "base")
