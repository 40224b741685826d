"""Cards: valid metadata, nothing that the adapter's files do not say, and every figure where it belongs."""

import json
import math
import re
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
        "tasks": rows,
        "ruler": [{"task": "niah_single", "length": 4096, "full": 0.991234, "routed": 0.985678}],
        "ablations": [{"pool size": 50, "NLL": 2.345678}, {"pool size": 400, "NLL": 2.333333}],
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
        return f"{figure['mean']:.4g} ± {figure['std']:.2g}"
    return f"{figure:.4g}"


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


def test_the_model_index_holds_every_measured_figure(save, results):
    _, indexed = model_index_to_eval_results(render_card(save(results)).data.to_dict()["model-index"])
    expected = set()
    for row in results["tasks"]:
        figures = {"MSR": row["msr"], "ESR": row["esr"]}
        figures |= {f"NLL, {way.replace('_', ' ')}": value for way, value in row["nll"].items()}
        figures |= {f"accuracy, {way.replace('_', ' ')}": value for way, value in row["accuracy"].items()}
        for name, value in figures.items():
            expected.add((row["task"], row["set"], name, value["mean"] if isinstance(value, dict) else value))
    assert {(r.task_name, r.dataset_name, r.metric_name, r.metric_value) for r in indexed} == expected


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
        # A spread is shown with two digits, everything else with four.
        yield from [f"{value['mean']:.4g}", f"{value['std']:.2g}"] if "std" in value else []
        yield from chain(value, *map(leaves, value.values()))
    elif isinstance(value, list):
        yield from chain(*map(leaves, value))
    else:
        yield f"{value:.4g}" if isinstance(value, float) else str(value)


def test_no_number_of_the_results_comes_from_elsewhere(save, results):
    text = render_card(save(results)).text
    text = text[text.index("## Results") : text.index("On an NVIDIA GPU")]
    known = set().union(*(numbers(leaf) for leaf in leaves(results))) | {str(len(results["seeds"]))}
    assert numbers(text) <= known, sorted(numbers(text) - known)


@pytest.mark.parametrize("part", ["nll", "accuracy", "ruler", "ablations", "hardware", "command", "seeds"])
def test_a_part_that_was_not_measured_is_not_mentioned(save, results, part):
    mention = {"nll": "NLL:", "accuracy": "Accuracy:", "ruler": "RULER:", "ablations": "Ablations:"}
    mention |= {"hardware": "Measured on", "command": "```bash", "seeds": "Means over"}
    whole = render_card(save(results)).text
    results.pop(part, None)
    for row in results["tasks"]:
        row.pop(part, None)
    assert mention[part] in whole
    assert mention[part] not in render_card(save(results)).text


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
    with pytest.raises(ValueError, match="`directory` must hold an ELASTIC adapter, got a LoraConfig"):
        render_card(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("tasks"), r"a list of at least one row under `tasks`, got None"),
        (lambda r: r["tasks"][1].pop("esr"), r"`tasks\[1\]` of `results\.json` must hold .*, got none for esr"),
        (lambda r: r["tasks"][0].update(msr=math.nan), r"must hold finite numbers, got nan for MSR"),
        (lambda r: r["tasks"][0]["nll"].update(full="low"), r"must hold finite numbers, got 'low' for NLL, full"),
        (lambda r: r["tasks"][0]["nll"].update(full={"mean": 2.0}), r"must hold finite numbers, got {'mean': 2.0}"),
        (lambda r: r["tasks"][0].update(msr={"mean": 0.5, "std": math.nan}), r"must hold finite numbers, got .*nan"),
        (lambda r: r["tasks"][0].update(msr=True), r"must hold finite numbers, got True for MSR"),
        (lambda r: r["tasks"][0].update(set=4), r"must name its task and its set, got .* and 4"),
        (lambda r: r["tasks"][0].update(nll=2.0), r"`tasks` of `results\.json` must hold rows of names and figures"),
    ],
    ids=["no-rows", "no-column", "not-finite", "no-number", "no-spread", "nan-spread", "bool", "set", "flat-nll"],
)
def test_figures_of_another_form_are_refused(save, results, change, message):
    change(results)
    with pytest.raises(ValueError, match=message):
        render_card(save(results))


def test_a_broken_results_file_is_refused(save):
    folder = save()
    (folder / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"`results\.json` must be JSON, got"):
        render_card(folder)
