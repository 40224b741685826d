"""What the reproduction says of RULER."""

import pytest
from recipes.reproduction_results import all_results
from reproduction import collect, readme
from reproduction.ruler_tables import mean_rows, ruler_note, ruler_table


def rows(length=2048, **scores):
    ratios = {"msr": 0.7, "esr": 0.5, "n": 20}
    return [
        {
            "task": task,
            "length": length,
            "mode_pair": "FA-SSA",
            "score": {w: s[i] for w, s in scores.items()},
            **ratios,
        }
        for i, task in enumerate(("vt", "cwe"))
    ]


def test_without_static_choices_the_note_compares_none():
    assert ruler_note(rows(routed=(10.0, 20.0))).endswith("like RULER's needles.")


@pytest.mark.parametrize(
    ("learned", "said"),
    [
        (
            (0.0, 40.0),
            "above routing at 2 of 2.",
        ),
        ((15.0, 15.0), "above routing at 1 of 2."),
    ],
)
def test_the_note_compares_means_over_the_tasks_at_each_length(learned, said):
    """Routing's means are 15 and 5, the random choice's 0; the best choice counts, and a tie is not above."""
    scored = [
        *rows(routed=(10.0, 20.0), static_random=(0.0, 0.0), static_learned=learned),
        *rows(4096, routed=(10.0, 0.0), static_random=(0.0, 0.0), static_learned=learned),
    ]
    assert ruler_note(scored).endswith(said)


def test_the_table_has_each_task_by_length():
    table = ruler_table([*rows(4096, routed=(3.0, 4.0)), *rows(2048, routed=(1.0, 2.0))], "fa-ssa")
    assert [(row["length"], row["task"], row["routed"]) for row in table.rows] == [
        (2048, "vt", 1.0),
        (2048, "cwe", 2.0),
        (4096, "vt", 3.0),
        (4096, "cwe", 4.0),
    ]


def test_means_are_of_each_pair_and_length():
    records = {
        "fa-ssa": {"ruler": [*rows(routed=(10.0, 20.1)), *rows(4096, routed=(0.0, 1.0))]},
        "fa-xa": {"ruler": []},
    }
    assert mean_rows(records) == [
        {"pair": "FA-SSA", "tokens": "2048", "routed": "15.1", "MSR": "0.70", "ESR": "0.50"},
        {"pair": "FA-SSA", "tokens": "4096", "routed": "0.5", "MSR": "0.70", "ESR": "0.50"},
    ]


def test_tables_and_section_show_the_scores():
    results = all_results()
    titles = [table.title for table in collect.all_tables(results)]
    assert titles[-3:] == ["RULER, FA-SSA", "RULER, FA-XA", "RULER, XA-SSA"]
    record = collect.pair_results(results, "fa-ssa", None)
    section = readme.section({"fa-ssa": record})
    assert "| FA-SSA | 8192 | 50.0 | 49.0 | 0.70 | 0.50 |" in section
    assert record["notes"]["ruler"] in section
    assert "| FA-SSA |" not in readme.section({"fa-ssa": {**record, "ruler": []}})
