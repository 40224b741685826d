import sys

import pytest
import torch

from elastic_peft import last_routing
from elastic_peft.report import (
    html_page,
    html_table,
    layer_rows,
    routing_html,
    routing_png,
    routing_table,
    sequence_rows,
    training_figure,
)


def decisions(sequences=3, layers=4, heads=2):
    return torch.rand(sequences, layers, heads, generator=torch.Generator().manual_seed(0)) > 0.5


def test_table_aligns_numbers_right_and_text_left():
    rows = [{"task": "single_qa", "n": 8, "MSR": 0.68125}, {"task": "code", "n": 128, "MSR": 1.0}]
    assert routing_table(rows) == (
        "task         n    MSR\n---------  ---  -----\nsingle_qa    8  0.681\ncode       128  1.000"
    )


def test_table_shows_a_missing_value_as_a_dash():
    table = routing_table([{"task": "code", "ESR": 0.5}, {"task": "qa", "ESR": None}, {"task": "sum", "NLL": 2.0}])
    assert [line.split() for line in table.splitlines()[2:]] == [
        ["code", "0.500", "-"],
        ["qa", "-", "-"],
        ["sum", "-", "2.000"],
    ]


def test_a_zero_has_no_sign():
    assert routing_table([{"NLL over full": -0.0001}]).split()[-1] == "0.000"


@pytest.mark.parametrize("table", [routing_table, html_table], ids=lambda function: function.__name__)
def test_table_without_rows_is_refused(table):
    with pytest.raises(ValueError, match="`rows` must hold at least one row, got none"):
        table([])


def test_page_of_one_text_is_refused():
    with pytest.raises(ValueError, match="`parts` must be a sequence of texts, got the text '<p>routed</p>'"):
        html_page("Routing", "<p>routed</p>")


@pytest.mark.parametrize(("layers", "heads"), [(4, 2), (1, 1), (36, 8)], ids=["4x2", "1x1", "36x8"])
def test_png_is_a_picture_with_more_than_one_colour(tmp_path, layers, heads):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "routing.png"
    routing_png({"code": decisions(3, layers, heads), "qa": decisions(1, layers, heads)}, path, title="tiny")
    pixels = image.imread(path)
    assert pixels.shape[2] == 4
    assert pixels.min() < pixels.max()


@pytest.fixture
def figures(monkeypatch):
    """The figures that `routing_png` saves."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    saved = []
    monkeypatch.setattr(figure, "savefig", lambda self, *args, **kwargs: saved.append(self))
    return saved


def test_png_panel_shows_the_share_of_sequences_that_are_sparse(figures):
    given = decisions(5)
    routing_png({"code": given, "qa": ~given}, "unused.png")
    panels = [ax.images[0] for ax in figures[0].axes if ax.images]
    expected = given.double().mean(dim=0).T
    torch.testing.assert_close(torch.tensor(panels[0].get_array().data).double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.tensor(panels[1].get_array().data).double(), 1 - expected, atol=1e-6, rtol=0)
    assert {panel.get_clim() for panel in panels} == {(0, 1)}, "panels must share one colour scale"


def test_png_labels_the_given_layers(figures):
    routing_png({"code": decisions(layers=4)}, "unused.png", layers=[3, 7, 11, 15])
    assert [label.get_text() for label in figures[0].axes[0].get_xticklabels()] == ["3", "7", "11", "15"]


@pytest.mark.parametrize(
    ("given", "layers", "message"),
    [
        ({}, None, "must hold at least one task"),
        ({"qa": decisions().float()}, None, r"`decisions_by_task\['qa'\]` must be bool"),
        ({"qa": [[True]]}, None, r"`decisions_by_task\['qa'\]` must be bool \[N, L, H\], got \[\[True\]\]"),
        ({"qa": decisions()[0]}, None, r"must be bool \[N, L, H\], got torch.bool \(4, 2\)"),
        ({"qa": decisions()[:0]}, None, r"must be bool \[N, L, H\], got torch.bool \(0, 4, 2\)"),
        (
            {"qa": decisions(), "code": decisions(heads=1)},
            None,
            r"`decisions_by_task\['code'\]` must have the 4",
        ),
        ({"qa": decisions()}, [1, 2], "`layers` must name the 4 routed layers, got 2"),
    ],
    ids=["no-task", "float", "list", "two-dimensional", "no-sequence", "other-heads", "other-layers"],
)
def test_png_refuses(tmp_path, given, layers, message):
    with pytest.raises(ValueError, match=message):
        routing_png(given, tmp_path / "routing.png", layers=layers)


def test_png_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"elastic_peft\[report\]"):
        routing_png({"code": decisions()}, tmp_path / "routing.png")


@pytest.fixture
def record(make_routed, inputs):
    """Of two sequences, 40 and 35 tokens long."""
    model = make_routed()
    with torch.no_grad():
        model(**inputs)
    return last_routing(model)


def test_rows_of_sequences_hold_their_ratios(record):
    rows = sequence_rows(record)
    assert [row["tokens"] for row in rows] == [40, 35]
    torch.testing.assert_close(torch.tensor([row["MSR"] for row in rows]), record.msr)
    torch.testing.assert_close(torch.tensor([row["ESR"] for row in rows]), record.esr)


def test_rows_of_layers_hold_their_share_of_sparse_heads(record):
    rows = layer_rows(record)
    assert [(row["layer"], row["heads"]) for row in rows] == [(0, 2), (1, 2)]
    expected = record.decisions.double().mean(dim=(0, 2))
    torch.testing.assert_close(torch.tensor([row["MSR"] for row in rows]).double(), expected)


def test_page_holds_its_tables_and_needs_no_other_file(record):
    page = routing_html(record)
    cells = [f"{row['MSR']:.3f}" for row in sequence_rows(record)] + [
        f"{row['MSR']:.3f}" for row in layer_rows(record)
    ]
    assert all(f"<td>{cell}</td>" in page for cell in cells)
    assert page.count("<img") == page.count('src="data:image/png;base64,') == 1
    assert "http" not in page


def test_rows_of_named_records_are_told_apart(record):
    named = {"qa": record, "code": record}
    assert [row["task"] for row in sequence_rows(named)] == ["qa", "qa", "code", "code"]
    shares = [row["MSR"] for row in layer_rows(record)]
    assert [(row["MSR, qa"], row["MSR, code"]) for row in layer_rows(named)] == list(zip(shares, shares))


@pytest.mark.parametrize("name", ["layer", "heads"])
def test_a_record_named_as_a_column_takes_no_columns_place(record, name):
    rows = layer_rows({name: record})
    assert [(row["layer"], row["heads"], row[f"MSR, {name}"]) for row in rows] == [
        (row["layer"], row["heads"], row["MSR"]) for row in layer_rows(record)
    ]


def test_page_of_named_records_has_a_panel_each(record, figures):
    page = routing_html({"qa": record, "<code>": record})
    assert [ax.get_title(loc="left").split(":")[0] for ax in figures[0].axes if ax.images] == ["qa", "<code>"]
    assert "<td>&lt;code&gt;</td>" in page


@pytest.mark.parametrize("table", [routing_table, html_table], ids=lambda function: function.__name__)
def test_table_shows_lone_surrogates_as_escapes(table):
    assert table([{"\udcff": "\ud800"}]) == table([{r"\udcff": r"\ud800"}])


def test_page_shows_lone_surrogates_as_escapes():
    assert html_page("\udcff", ["\ud800"]) == html_page(r"\udcff", [r"\ud800"])


@pytest.mark.parametrize("show", [layer_rows, routing_html], ids=lambda function: function.__name__)
def test_no_records_are_refused(show):
    with pytest.raises(ValueError, match="`routing` must hold at least one record"):
        show({})


# Training

LOG = [
    {"step": 10, "lm_loss": 3.0, "sparsity_loss": 0.2, "msr/code": 0.5, "lambda1/code": 0.1, "lambda2/code": 0.3},
    {"step": 20, "lm_loss": 2.5, "sparsity_loss": 0.1, "msr/code": 0.7, "lambda1/code": 0.2, "lambda2/code": 0.4},
    {"step": 20, "eval_msr/code": 0.75, "eval_lm_loss": 2.4},
    {"train_runtime": 1.0, "step": 20},
]


def lines(figure):
    """The points of each line by its panel's title."""
    return {
        ax.get_title(loc="left"): [line.get_xydata().tolist() for line in ax.lines if len(line.get_xdata())]
        for ax in figure.axes
    }


def test_training_shows_every_logged_figure():
    pytest.importorskip("matplotlib")
    assert lines(training_figure(LOG)) == {
        "MSR, sampled; large: evaluated": [[[10, 0.5], [20, 0.7]], [[20, 0.75]]],
        "multiplier λ1": [[[10, 0.1], [20, 0.2]]],
        "multiplier λ2": [[[10, 0.3], [20, 0.4]]],
        "losses": [[[10, 3.0], [20, 2.5]], [[10, 0.2], [20, 0.1]]],
    }


def test_training_without_tasks_is_refused():
    with pytest.raises(ValueError, match="`log_history` must hold lines with the MSR of tasks"):
        training_figure([{"step": 1, "loss": 2.0}])
