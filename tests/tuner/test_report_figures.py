"""What the pictures draw for names and logs that users bring."""

import io
import re

import pytest
import torch

from elastic_peft.report import routing_png, similarity_figure, training_figure
from elastic_peft.report_figures import COLORS


pytest.importorskip("matplotlib")

#: matplotlib would take it for a formula, and refuse to draw it.
FORMULA = r"$\nosuchsymbol$"
SPARSE = torch.ones(1, 2, 2, dtype=torch.bool)
STAGES = ("keys", "input", "task_mlp")
STEPS = {"step": 1, "lm_loss": 2.0, "msr/code": 0.5}


def routing_of_task(name, file):
    routing_png({name: SPARSE}, file)


def routing_with_title(name, file):
    routing_png({"code": SPARSE}, file, title=name)


def training(name, file):
    training_figure([{"step": 1, f"msr/{name}": 0.5}], targets={name: 0.7}).savefig(file)


def similarity(name, file):
    similarity_figure(dict.fromkeys(STAGES, torch.eye(2)), [name, "code"]).savefig(file)


@pytest.fixture(params=[routing_of_task, routing_with_title, training, similarity], ids=lambda draw: draw.__name__)
def drawn(request):
    """Draws a name; the PNG's bytes."""

    def draw(name):
        request.param(name, file := io.BytesIO())
        return file.getvalue()

    return draw


def test_a_name_with_dollar_signs_is_no_formula(drawn):
    assert drawn(FORMULA).startswith(b"\x89PNG")


def test_a_lone_surrogate_is_drawn_as_its_escape(drawn):
    assert drawn("\udcff") == drawn(r"\udcff")


# Training


def msr_panel(figure):
    return figure.axes[0]


@pytest.mark.parametrize(
    ("targets", "title", "dotted"),
    [
        ({"code": 0.9, "single_qa": 0.6}, "MSR, sampled; dotted: targets", [0.9]),
        ({"single_qa": 0.6}, "MSR, sampled", []),
    ],
    ids=["own-and-other", "other-alone"],
)
def test_training_announces_the_targets_that_it_draws(targets, title, dotted):
    panel = msr_panel(training_figure([STEPS], targets=targets))
    assert panel.get_title(loc="left") == title
    assert [line.get_ydata()[0] for line in panel.lines if line.get_linestyle() == ":"] == dotted


def test_training_skips_a_line_without_step_that_is_not_drawn():
    panel = msr_panel(training_figure([STEPS, {"train_runtime": 1.0}]))
    assert panel.lines[0].get_xydata().tolist() == [[1, 0.5]]


@pytest.mark.parametrize("name", ["msr/code", "lambda1/code", "eval_msr/code", "lm_loss"])
def test_training_refuses_a_drawn_line_without_step(name):
    with pytest.raises(ValueError, match=f"`log_history` must give the `step` of each line with '{name}', got"):
        training_figure([STEPS, {name: 0.5}])


def test_training_tells_more_tasks_apart_than_there_are_colours():
    tasks = [f"msr/task{index}" for index in range(3 * len(COLORS))]
    drawn = msr_panel(training_figure([{"step": 1, **dict.fromkeys(tasks, 0.5)}])).lines[::2]  # each second: evaluated
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == len(tasks)


# Similarity


def similarity_of(*rows):
    """The texts in the cells of a matrix, row by row, and their colours."""
    matrix = torch.tensor(rows)
    figure = similarity_figure(dict.fromkeys(STAGES, matrix), [f"task{index}" for index in range(len(rows))])
    return [(text.get_text(), text.get_color()) for text in figure.axes[0].texts]


def test_similarity_has_no_negative_zero():
    assert [text for text, _ in similarity_of((1.0, -0.001), (-0.001, 1.0))] == ["1.00", ".00", ".00", "1.00"]


def test_similarity_is_written_light_where_cells_are_dark():
    assert similarity_of((1.0, -0.95), (0.1, -0.1)) == [
        ("1.00", "white"),
        ("-.95", "white"),
        (".10", "black"),
        ("-.10", "black"),
    ]


@pytest.mark.parametrize(
    ("stages", "tasks", "message"),
    [
        ({}, [], "`tasks` must name at least one task, got none."),
        ({"input": None}, ["qa", "code"], "`similarity` must hold 'keys', 'input', 'task_mlp', got none of 'input'."),
        ({"keys": torch.ones(2, 3)}, ["qa", "code"], "`similarity['keys']` must be [2, 2] as `tasks`, got [2, 3]."),
        ({}, ["qa", "code", "sum"], "`similarity['keys']` must be [3, 3] as `tasks`, got [2, 2]."),
        (
            {"task_mlp": [[1.0, 0.0], [1.0]]},
            ["qa", "code"],
            "`similarity['task_mlp']` must be a matrix of numbers, got [[1.0, 0.0], [1.0]].",
        ),
        ({"keys": "ab"}, ["qa", "code"], "`similarity['keys']` must be a matrix of numbers, got 'ab'."),
        ({"keys": {}}, ["qa", "code"], "`similarity['keys']` must be a matrix of numbers, got {}."),
    ],
    ids=["no-tasks", "no-stage", "not-square", "other-size", "ragged", "text", "mapping"],
)
def test_similarity_refuses(stages, tasks, message):
    given = dict.fromkeys(STAGES, torch.eye(2)) | stages
    with pytest.raises(ValueError, match=re.escape(message)):
        similarity_figure({stage: matrix for stage, matrix in given.items() if matrix is not None}, tasks)
