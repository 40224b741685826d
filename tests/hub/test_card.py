"""Cards: valid metadata, nothing that the adapter's files do not say, and every figure where it belongs."""

import ast
import json
import math
import re
import shutil
from itertools import chain
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from peft import LoraConfig, get_peft_model

from elastic_peft.card import render_card


DEMO = Path(__file__).parents[2] / "hub_cards" / "demo" / "metrics.json"
WAYS = ("full", "all sparse", "routed")
HEADINGS = {"MSR": "msr", "ESR": "esr"}
NASTY = "a|b\n<img src=x>\n| c | & d"
ONE_LINE = "a&#124;b &lt;img src=x&gt; &#124; c &#124; &amp; d"


def ruler_row(task, length, mode_pair="FA-SSA", n=20, **score):
    return {"task": task, "length": length, "mode_pair": mode_pair, "score": score, "msr": 0.5, "esr": 0.25, "n": n}


def spread(value):
    return {"mean": value, "std": value / 40}


@pytest.fixture
def results():
    """The demo's measured figures as a `results.json` with every part."""
    rows = [
        {
            "task": row["task"],
            "set": f"{row['task']} of the standard library",
            "t": 0.7,
            "msr": spread(row["MSR"]),
            "esr": row["ESR"],
            "nll": {way.replace(" ", "_"): spread(row[f"NLL {way}"]) for way in WAYS},
            "accuracy": {way.replace(" ", "_"): math.exp(-row[f"NLL {way}"]) for way in WAYS},
        }
        for row in json.loads(DEMO.read_text())["tasks"]
    ]
    return {
        "hardware": "one NVIDIA H200",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "commit": "d6b27fe",
        "command": "python recipes/train_sft.py --seed 17",
        "seeds": [17, 18, 19],
        "datasets": ["nvidia/ChatQA2-Long-SFT-data"],
        "ways": {"full": "every head attends everything", "all_sparse": "every head streams"},
        "tasks": rows,
        "ruler": [
            ruler_row("niah_single_1", 8192, full=99.0, routed=97.5, static_random=11.0),
            ruler_row("niah_single_1", 4096, full=100.0, routed=98.5, static_random=13.5),
            ruler_row("vt", 4096, full=80.0, routed=70.25, static_random=20.25),
        ],
        "ablations": [{"pool size": 50, "NLL": 2.345678}, {"pool size": 400, "NLL": 2.333333}],
        "sets": {"code of the standard library": "modules, and how they go on"},
        "generalisation": [{"prompts": "unseen phrasings", "follows the task": "6 of 7"}],
        "notes": {
            "tasks": "chosen on these prompts",
            "ruler": "own wording",
            "ablations": "one change a row",
            "generalisation": "**bold**: it strayed",
        },
    }


@pytest.fixture
def save(make_routed, tmp_path):
    """Saves an adapter, with figures beside it when given, and returns its folder."""

    def build(results=None, base_model="user/base", **config):
        make_routed(task_type="CAUSAL_LM", **config).save_pretrained(tmp_path)
        file = tmp_path / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base_model}))
        if results is not None:
            (tmp_path / "results.json").write_text(json.dumps(results))
        return tmp_path

    return build


def tables(card):
    """Every table of a card whose first columns are a task and a set: (task, set) to heading to cell, merged."""
    merged = {}
    for block in re.findall(r"(?:^\|.*\n?)+", card.text, flags=re.MULTILINE):
        heading, _, *lines = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in block.splitlines())
        if heading[:2] == ["task", "set"]:
            for cells in lines:
                merged.setdefault(tuple(cells[:2]), []).append(dict(zip(heading[2:], cells[2:])))
    return merged


def shown(figure):
    if isinstance(figure, dict):
        return f"{figure['mean']:.3f} ± {figure['std']:.3f}"
    return f"{figure:.3f}"


def test_metadata_says_what_the_hub_asks_for(save, results):
    data = render_card(save(results), repo_id="user/tiny", license="apache-2.0").data
    assert data.base_model == "user/base"
    assert data.library_name == "peft"
    assert data.pipeline_tag == "text-generation"
    assert data.license == "apache-2.0"
    assert data.datasets == ["nvidia/ChatQA2-Long-SFT-data"]
    assert {"elastic-attention", "fa-ssa", "base_model:adapter:user/base"} <= set(data.tags)


def test_a_saved_card_reads_back_the_same(save, results, tmp_path):
    card = render_card(save(results))
    card.save(tmp_path / "README.md")
    assert ModelCard.load(tmp_path / "README.md").data.to_dict() == card.data.to_dict()


def test_the_model_index_holds_the_adapters_own_figures(save, results):
    _, indexed = model_index_to_eval_results(render_card(save(results)).data.to_dict()["model-index"])
    expected = {
        ("RULER", "RULER, 4096 tokens", "mean score of 2 tasks, routed", 84.38),
        ("RULER", "RULER, 8192 tokens", "mean score of 1 tasks, routed", 97.5),
    }
    for row in results["tasks"]:
        figures = {"MSR": row["msr"], "ESR": row["esr"]}
        figures |= {"NLL, routed": row["nll"]["routed"], "accuracy, routed": row["accuracy"]["routed"]}
        for name, value in figures.items():
            mean = value["mean"] if isinstance(value, dict) else value
            expected.add((row["task"], row["set"], name, float(f"{mean:.4g}")))
    assert {(r.task_name, r.dataset_name, r.metric_name, r.metric_value) for r in indexed} == expected


def test_one_seed_is_no_mean(save, results):
    text = render_card(save({**results, "seeds": [17]})).content
    assert "One training seed." in text
    assert "Means over" not in text


def test_every_cell_of_the_tables_is_the_figure_of_its_row_and_column(save, results):
    found = tables(render_card(save(results)))
    assert len(found) == len(results["tasks"])
    for row in results["tasks"]:
        sparsity, nll, accuracy = found[row["task"], row["set"]]
        assert sparsity == {"t": "0.7", "MSR": shown(row["msr"]), "ESR": shown(row["esr"])}
        assert nll == {way.replace("_", " "): shown(value) for way, value in row["nll"].items()}
        assert accuracy == {way.replace("_", " "): shown(value) for way, value in row["accuracy"].items()}


def numbers(text):
    return set(re.findall(r"(?<![\w.])\d+(?:\.\d+)*(?![\w])", text))


def leaves(value):
    if isinstance(value, dict):
        yield from chain(value, *map(leaves, value.values()))
    elif isinstance(value, list):
        yield from chain(*map(leaves, value))
    else:
        yield from [f"{value:.3f}", f"{value:g}"] if isinstance(value, float) else [str(value)]


def test_no_number_of_the_results_comes_from_elsewhere(save, results):
    text = render_card(save(results)).text
    text = text[text.index("## Results") : text.index("On an NVIDIA GPU")]
    known = set().union(*(numbers(leaf) for leaf in leaves(results))) | {str(len(results["seeds"]))}
    known |= {"90.00", "84.38", "16.88", "2", "1", "40"}  # RULER's means, tasks and prompts at 4096 tokens
    known |= {"99.00", "97.50", "11.00", "0.50", "0.25"}  # and at 8192
    known |= {"0", "100"}  # bounds of its scores
    assert numbers(text) <= known, sorted(numbers(text) - known)


@pytest.mark.parametrize(
    "part", ["nll", "accuracy", "ruler", "ablations", "hardware", "command", "seeds", "ways", "sets", "generalisation"]
)
def test_a_part_that_was_not_measured_is_not_mentioned(save, results, part):
    mention = {"nll": "NLL:", "accuracy": "Accuracy:", "ruler": "RULER:", "ablations": "Ablations:"}
    mention |= {"hardware": "Measured on", "command": "```bash", "seeds": "Means over", "sets": "The sets:"}
    mention |= {"generalisation": "Prompts unlike those trained on:"}
    mention |= {"ways": "\n- full: every head attends everything\n- all sparse: every head streams\n"}
    whole = render_card(save(results)).text
    results.pop(part, None)
    for row in results["tasks"]:
        row.pop(part, None)
    assert mention[part] in whole
    assert mention[part] not in render_card(save(results)).text


@pytest.mark.parametrize("part", ["tasks", "ruler", "ablations", "generalisation"])
def test_a_note_stands_before_its_table(save, results, part):
    text = render_card(save(results)).text
    first = {
        "tasks": "| task | set |",
        "ruler": "| length |",
        "ablations": "| pool size |",
        "generalisation": "| prompts | follows",
    }
    assert results["notes"][part] in text[: text.index(first[part])].split("\n|")[-1]


def test_a_note_without_its_table_is_not_shown(save, results):
    del results["ablations"]
    assert results["notes"]["ablations"] not in render_card(save(results)).text


def test_accuracy_is_defined_where_it_is_shown(save, results):
    defined = "accuracy is the share of answer tokens"
    assert defined in render_card(save(results)).text
    for row in results["tasks"]:
        del row["accuracy"]
    assert defined not in render_card(save(results)).text


@pytest.mark.parametrize(
    ("figure", "cell"),
    [
        (12345.678, "12345.678"),
        (-0.25, "-0.250"),
        (50, "50"),
        (1.25e-4, "0.00013"),
        (-5e-4, "-0.0005"),
        (-0.0, "0.000"),
        (None, "-"),
        ("a|b", "a&#124;b"),
        ({"mean": -1e-4, "std": 1e-4}, "0.000 ± 0.000"),
    ],
)
@pytest.mark.parametrize("part", ["ablations", "generalisation"])
def test_a_figure_is_shown_whatever_its_size(save, results, part, figure, cell):
    results[part] = [{"changed": "something", "x": figure}]
    assert f"| something | {cell} |" in render_card(save(results)).text


def test_paragraphs_of_a_note_stay_apart(save, results):
    results["notes"]["generalisation"] = "One\nline.\n\n\n<b>Two</b>.\n"
    assert "\n\nOne line.\n\n&lt;b&gt;Two&lt;/b&gt;.\n\n|" in render_card(save(results)).text


def test_without_figures_the_card_says_so(save):
    card = render_card(save())
    assert "No figures were published" in card.text
    assert "model-index" not in card.data.to_dict()


@pytest.mark.parametrize("pair", ["FA-SSA", "FA-XA", "XA-SSA"])
def test_the_configuration_is_the_adapters(save, pair):
    folder = save(mode_pair=pair, sink_size=3, window_size=11, xattn_block_size=16, xattn_stride=4)
    text = render_card(folder).text
    assert f"| mode pair | {pair}:" in text
    assert ("| sink, window | 3, 11 tokens |" in text) == ("SSA" in pair)
    assert ("| XAttention block, stride, threshold | 16 tokens, 4 tokens, 0.9 |" in text) == ("XA" in pair)
    assert ("Prompts up to 14 tokens" in text) == (pair == "FA-SSA")
    assert "| routed layers | 2 |" in text


def test_the_targets_are_the_adapters(save):
    text = render_card(save(t_values={"poetry": 0.35, "law": 1.0}, target_sparsity=0.45)).text
    assert "| law | 1 |\n| poetry | 0.35 |\n| none named | 0.45 |" in text


def test_a_base_model_in_a_folder_is_not_named(save, tmp_path):
    card = render_card(save(base_model=str(tmp_path)))
    assert card.data.base_model is None
    assert str(tmp_path) not in str(card)


def test_the_picture_is_shown_when_it_is_there(save):
    folder = save()
    assert "routing.png" not in render_card(folder).text
    (folder / "routing.png").touch()
    assert "](routing.png)" in render_card(folder).text


@pytest.mark.parametrize("number", ["2601.17367", "2503.16428"])
def test_the_papers_are_cited(save, number):
    assert f"https://arxiv.org/abs/{number}" in render_card(save(mode_pair="FA-XA")).text


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`directory` must hold a saved adapter, got"):
        render_card(tmp_path)


def test_another_kind_of_adapter_is_refused(make_base, tmp_path):
    get_peft_model(make_base(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`adapter` must be an ELASTIC adapter, got one of type LORA"):
        render_card(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: [r.pop(part) for part in ("tasks", "ruler")],
            r"at least one row under `tasks` or `ruler`, got none",
        ),
        (lambda r: r.update(tasks={}), r"`tasks` of `results\.json` must be a list, got {}"),
        (lambda r: r.update(versions="2.11"), r"`versions` of `results\.json` must be a dict, got '2\.11'"),
        (lambda r: r["ways"].update(routed=4), r"`ways` of `results\.json` must describe each in words, got 4"),
        (lambda r: r.update(command="a\n```\nb"), r"`command` of `results\.json` must not hold ```"),
        (lambda r: r["tasks"].append(4), r"`tasks\[\d\]` of `results\.json` must hold names and figures, got 4"),
        (lambda r: r["tasks"].append(r["tasks"][0]), r"must not measure what another row does, got row 0 again"),
        (lambda r: r["tasks"][1].pop("esr"), r"`tasks\[1\]` of `results\.json` must hold .*, got none for esr"),
        (lambda r: r["tasks"][0].update(msr=math.nan), r"must hold finite numbers, got nan for MSR"),
        (lambda r: r["tasks"][0]["nll"].update(full="low"), r"must hold finite numbers, got 'low' for NLL, full"),
        (lambda r: r["tasks"][0]["nll"].update(full={"mean": 2.0}), r"must hold finite numbers, got {'mean': 2.0}"),
        (lambda r: r["tasks"][0].update(msr={"mean": 0.5, "std": math.nan}), r"must hold finite numbers, got .*nan"),
        (lambda r: r["tasks"][0].update(msr=True), r"must hold finite numbers, got True for MSR"),
        (lambda r: r["tasks"][0].update(set=4), r"must name its task and its set, got .* and 4"),
        (lambda r: r["tasks"][0].update(set="?!"), r"must name its task and its set, got .* and '\?!'"),
        (
            lambda r: r["tasks"][0].update(nll=2.0),
            r"`tasks\[0\]` of `results\.json` must map ways of running to figures",
        ),
        (lambda r: r["ruler"][1].update(score=70.0), r"`ruler\[1\]` of .* must hold a dict as score, got 70\.0"),
        (lambda r: r["ruler"][1]["score"].update(full=None), r"must hold finite scores, got None for full"),
        (lambda r: r["ruler"][1].update(length="4K"), r"must hold a int as length, got '4K'"),
        (lambda r: r["ruler"][1].update(esr=math.inf), r"must hold a float as esr, got inf"),
        (lambda r: r["ruler"].append(r["ruler"][2]), r"`ruler\[3\]` of .* got row 2 again"),
        (
            lambda r: r["generalisation"][0].update(NLL=math.nan),
            r"must hold texts and finite numbers, got nan for NLL",
        ),
        (lambda r: r["sets"].update(code=4), r"`sets` of `results\.json` must describe each in words, got 4 for code"),
        (
            lambda r: r["notes"].update(tasks=4),
            r"`notes` of `results\.json` must describe each in words, got 4 for tasks",
        ),
        (lambda r: r["notes"].update(sets="x"), r"`notes` of `results\.json` must be about tasks, .*, got sets"),
        (lambda r: r["ablations"][0].update(NLL=math.nan), r"must hold texts and finite numbers, got nan for NLL"),
    ],
    ids=[
        *("no-rows", "no-list", "versions", "ways", "fence", "no-row", "twice"),
        *(
            "no-column",
            "not-finite",
            "no-number",
            "no-spread",
            "nan-spread",
            "bool",
            "set",
            "set-of-signs",
            "flat-nll",
        ),
        *("flat-score", "no-score", "length", "infinite-esr", "ruler-twice", "unlike", "sets"),
        *("note", "note-of-nothing", "ablation"),
    ],
)
def test_figures_of_another_form_are_refused(save, results, change, message):
    change(results)
    with pytest.raises(ValueError, match=message):
        render_card(save(results))


def table_after(card, words):
    """The lines of the table that follows `words`, as lists of cells."""
    block = re.search(r"(?:^\|.*\n?)+", card.text[card.text.index(words) :], flags=re.MULTILINE)[0]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in block.splitlines()]


def test_ruler_is_shown_by_length_as_means_over_its_tasks(save, results):
    assert table_after(render_card(save(results)), "RULER:") == [
        ["length", "tasks", "prompts", "full", "routed", "static random", "MSR", "ESR"],
        ["---"] * 8,
        ["4096", "2", "40", "90.00", "84.38", "16.88", "0.50", "0.25"],
        ["8192", "1", "20", "99.00", "97.50", "11.00", "0.50", "0.25"],
    ]


def test_a_way_that_ran_some_tasks_only_has_no_ruler_mean(save, results):
    del results["ruler"][2]["score"]["static_random"]
    heading, _, row, _ = table_after(render_card(save(results)), "RULER:")
    assert dict(zip(heading, row, strict=True))["static random"] == "-"


def test_ruler_rows_of_another_mode_pair_are_left_out(save, results):
    results["ruler"].append(ruler_row("vt", 16384, mode_pair="FA-XA", full=1.0, routed=2.0))
    assert "16384" not in str(render_card(save(results)))


def test_ruler_may_be_all_that_was_measured(save, results):
    card = render_card(save({"ruler": results["ruler"]}))
    assert "RULER:" in card.text
    assert {result.dataset_config for result in card.data.eval_results} == {"4096", "8192"}


@pytest.mark.parametrize("place", ["task", "set", "way", "target", "ablation", "hardware", "version", "licence"])
def test_names_cannot_leave_their_line(save, results, place):
    first = results["tasks"][0]
    if place in ("task", "set"):
        first[place] = NASTY
    elif place == "way":
        first["nll"] = {NASTY: 2.0}
    elif place == "ablation":
        results["ablations"][0] = {NASTY: "x"}
    elif place == "hardware":
        results["hardware"] = NASTY
    elif place == "version":
        results["versions"] = {"torch": NASTY}
    folder = save(results, t_values={NASTY: 0.5} if place == "target" else {"qa": 0.5})
    text = render_card(folder, license=NASTY if place == "licence" else None).text
    assert ONE_LINE in text
    assert "<img" not in text


UNPRINTABLE = "a\udcff\x00b\x1b\x9fc\u202a\u202ed\u2066\u2069"
PRINTED = r"a\udcff\x00b\x1b\x9fc\u202a\u202ed\u2066\u2069"


@pytest.mark.parametrize(
    "place", ["task", "set", "way", "ablation", "note", "hardware", "version", "commit", "command", "licence"]
)
def test_characters_that_no_file_or_reader_takes_come_as_escapes(save, results, tmp_path, place):
    first = results["tasks"][0]
    if place in ("task", "set"):
        first[place] = UNPRINTABLE
    elif place == "way":
        first["nll"] = {UNPRINTABLE: 2.0}
    elif place == "ablation":
        results["ablations"][0] = {UNPRINTABLE: "x"}
    elif place == "note":
        results["notes"]["tasks"] = UNPRINTABLE
    elif place == "version":
        results["versions"] = {"torch": UNPRINTABLE}
    elif place != "licence":
        results[place] = UNPRINTABLE
    card = render_card(save(results), license=UNPRINTABLE if place == "licence" else None)
    card.save(tmp_path / "README.md")
    text = ModelCard.load(tmp_path / "README.md").text
    assert PRINTED in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("first \\\n    --second", "first \\\n    --second"),
        ("first \\\n\t--second\n", "first \\\n\t--second"),
        ("first\u2028second", "first\u2028second"),
        ("first\x0bsecond", r"first\x0bsecond"),
    ],
    ids=["spaces", "tab", "line-separator", "vertical-tab"],
)
def test_a_command_keeps_its_lines(save, results, command, shown):
    results["command"] = command
    assert f"```bash\n{shown}\n```" in render_card(save(results)).text


@pytest.mark.parametrize(
    ("given", "named"),
    [("out/adapter", "out/adapter"), (".", "adapter"), ("../adapter", "adapter")],
    ids=["below", "here", "above"],
)
def test_an_adapter_in_a_folder_is_loaded_by_a_path_from_here(save, tmp_path, monkeypatch, given, named):
    folder = shutil.copytree(save(), tmp_path / "out" / "adapter")
    monkeypatch.chdir({"out/adapter": tmp_path}.get(given, folder))
    card = render_card(given)
    assert f'PeftModel.from_pretrained(base, "{named}")  # or its repository on the Hub\n' in card.text
    assert "\n# adapter\n" in card.text


def test_an_adapter_of_a_repository_is_loaded_from_there(save):
    assert 'PeftModel.from_pretrained(base, "user/tiny")\n' in render_card(save(), repo_id="user/tiny").text


def test_an_absolute_path_is_not_named(save):
    folder = save()
    assert str(folder.parent) not in str(render_card(folder))


def test_the_lines_to_load_it_are_python_whatever_the_folder_is_called(save, tmp_path, make_routed):
    folder = tmp_path / 'it"s ```a\nname'
    make_routed(task_type="CAUSAL_LM").save_pretrained(folder)
    text = render_card(folder, subfolder='b"c').text
    code = text.split("```python\n")[1].split("```\n")[0]
    constants = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert {folder.name, 'b"c'} <= set(constants)


def test_a_set_without_latin_letters_has_an_identifier(save, results):
    results["tasks"] = [dict(results["tasks"][0], set=name) for name in ("中文", "日本語")]
    card = render_card(save({"tasks": results["tasks"]}))
    assert {(r.dataset_type, r.dataset_name) for r in card.data.eval_results} == {
        ("中文", "中文"),
        ("日本語", "日本語"),
    }


@pytest.mark.parametrize("start", ["out/adapter", "", "elsewhere"], ids=["adapter", "above-it", "here"])
def test_a_base_model_in_a_folder_by_a_relative_path_is_not_named(save, tmp_path, monkeypatch, start):
    folder = shutil.copytree(save(base_model="models/base"), tmp_path / "out" / "adapter")
    assert render_card(folder).data.base_model == "models/base"
    (tmp_path / start / "models" / "base").mkdir(parents=True)
    if start == "elsewhere":
        monkeypatch.chdir(tmp_path / start)
    card = render_card(folder)
    assert card.data.base_model is None
    assert "models/base" not in str(card)


def test_a_repository_that_cannot_be_is_refused(save):
    with pytest.raises(ValueError, match="Repo id must be in the form"):
        render_card(save(), repo_id="a/b/c")


def test_a_broken_results_file_is_refused(save):
    folder = save()
    (folder / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"`results\.json` must be JSON, got"):
        render_card(folder)
