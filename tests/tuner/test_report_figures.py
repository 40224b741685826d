"""What the pictures draw for names and logs that users bring."""

import io

import pytest
import torch

from elastic_peft.report import routing_png, similarity_figure, training_figure


pytest.importorskip("matplotlib")

#: matplotlib would take it for a formula, and refuse to draw it.
FORMULA = r"$\nosuchsymbol$"
SPARSE = torch.ones(1, 2, 2, dtype=torch.bool)
STAGES = ("keys", "input", "task_mlp")


def routing_of_task(name, file):
    routing_png({name: SPARSE}, file)


def routing_with_title(name, file):
    routing_png({"code": SPARSE}, file, title=name)


def training(name, file):
    training_figure([{"step": 1, f"msr/{name}": 0.5}], targets={name: 0.7}).savefig(file)


def similarity(name, file):
    similarity_figure(dict.fromkeys(STAGES, torch.eye(2)), [name, "code"]).savefig(file)


@pytest.mark.parametrize(
    "draw", [routing_of_task, routing_with_title, training, similarity], ids=lambda function: function.__name__
)
def test_a_name_with_dollar_signs_is_no_formula(draw):
    draw(FORMULA, file := io.BytesIO())
    assert file.getvalue().startswith(b"\x89PNG")
