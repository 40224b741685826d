"""The reproduction's jobs, each run once on a tiny model; what they select, and how workers share them."""

import json
import shutil
import time
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from recipes.reproduction_place import make_place, make_tokenizer
from recipes.reproduction_results import PLACE
from reproduction import kinds, run
from reproduction.examples import CROSSED, SENSITIVE, TASKS, choose_phrasing, interleave, load_examples, user_text
from reproduction.jobs import ONE_MASK, REFERENCE, UNCHANGED, Job, all_jobs
from reproduction.kinds import run_job
from reproduction.lengths import resize
from reproduction.masks import CURVE
from reproduction.measuring import measure
from reproduction.results import mean_msr, result_file, write_result

from elastic_peft.evaluation.ruler import build_examples


JOBS = {job.name: job for job in all_jobs()}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A workplace where the reference and the static gates have been trained for two steps."""
    place = make_place(tmp_path_factory.mktemp("reproduction"))
    for name in (REFERENCE, "static-gates", "static-gates-sensitive", "static-gates-robust"):
        write_result(place.output, name, run_job(JOBS[name], place))
    return place


def sets(result):
    return [row["set"] for row in result["tasks"]]


# Jobs


def test_a_training_saves_an_adapter_and_measures_every_set(place):
    result = json.loads((place.output / "jobs" / f"{REFERENCE}.json").read_text())
    assert (place.adapter(REFERENCE) / "adapter_model.safetensors").is_file()
    assert [line["step"] for line in result["log"]] == [1, 2]
    assert sets(result) == list(TASKS)


@pytest.mark.parametrize("pair", ["fa-xa", "xa-ssa"])
def test_other_mode_pairs_train(place, pair):
    assert sets(run_job(JOBS[f"{pair}-seed0"], place)) == list(TASKS)


def test_a_set_left_out_of_training_is_still_measured(place):
    assert "summ_rfc" in sets(run_job(JOBS["without-summ_rfc"], place))


@pytest.mark.parametrize("name", ["unseen-phrasings", "one-task-phrasings", "varied-phrasings"])
def test_unseen_phrasings_are_measured_apart(place, name):
    result = run_job(replace(JOBS[name], arguments={}), place)  # as short as the recipe here
    assert sets(result["unseen"]["routed"]) == sets(result["unseen"]["full"]) == list(TASKS)


@pytest.mark.parametrize(
    ("name", "masks"),
    [
        ("masks-random", [f"random{seed}" for seed in range(5)]),
        ("masks-retrieval", ["retrieval"]),
        ("masks-loss", ["loss"]),
        ("masks-learned", ["learned"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_static_masks_have_the_routed_adapters_mean_sparsity(place, name, masks):
    result = run_job(JOBS[name], place)["masks"]
    reference = mean_msr(json.loads((place.output / "jobs" / f"{REFERENCE}.json").read_text()), tuple(TASKS))
    assert list(result) == masks
    # Of 4 heads.
    assert {row["msr"] for entry in result.values() for row in entry["tasks"]} == {round(4 * reference) / 4}


def test_masks_of_a_category_apply_to_its_sets(place):
    entry = run_job(JOBS["masks-category"], place)["masks"]["category"]
    for row in entry["tasks"]:
        mask = entry["mask"]["sensitive" if row["set"] in SENSITIVE else "robust"]
        assert row["frequency"] == mask, row["set"]


def test_rankings_are_measured_at_several_sparsities(place):
    for name in ("masks-retrieval", "masks-loss"):
        write_result(place.output, name, run_job(JOBS[name], place))
    result = run_job(JOBS["masks-curve"], place)["masks"]
    assert {name: {row["msr"] for row in entry["tasks"]} for name, entry in result.items() if "loss" in name} == {
        f"masks-loss {share}": {round(4 * share) / 4} for share in CURVE
    }


def test_bounds_are_all_full_and_all_sparse(place):
    result = run_job(JOBS["bounds"], place)["masks"]
    assert {way: {row["msr"] for row in entry["tasks"]} for way, entry in result.items()} == {
        "full": {0.0},
        "all_sparse": {1.0},
    }


def test_a_mixed_batch_decides_as_single_rows_do(place):
    assert run_job(JOBS[f"{REFERENCE}-mixed"], place)["same_decisions"] == 1


def test_the_bias_moves_sparsity(place):
    result = run_job(JOBS[f"{REFERENCE}-bias"], place)["bias"]
    assert mean_msr(result["-4.0"], tuple(TASKS)) == 0
    assert mean_msr(result["4.0"], tuple(TASKS)) == 1


def test_other_lengths_are_measured_in_every_way(place):
    result = run_job(JOBS[f"{REFERENCE}-lengths"], place)["lengths"]
    assert {length: list(ways) for length, ways in result.items()} == {
        "170": ["routed", "full", "all_sparse"],
        "340": ["routed", "full", "all_sparse"],
    }
    assert "summ_rfc" not in sets(result["340"]["routed"])


def test_other_tasks_over_the_same_documents_are_trained_on(place, monkeypatch):
    trained = []

    def crossed(tokenizer, examples, seed):
        trained.append(list(examples))
        return examples

    monkeypatch.setattr(kinds, "crossed", crossed)
    run_job(JOBS["without-summ_rfc"], place)
    run_job(replace(JOBS["one-task-without-summ_rfc"], arguments={}), place)
    assert trained == [[name for name in TASKS if name != "summ_rfc"]]


def test_other_tasks_over_the_same_documents_are_measured(place):
    ways = run_job(JOBS[f"{REFERENCE}-crossed"], place)["crossed"]
    assert sets(ways["routed"]) == sets(ways["full"]) == sets(ways["all_sparse"])
    assert set(sets(ways["routed"])) <= set(CROSSED)


def test_sampled_decisions_are_measured(place):
    assert sets(run_job(JOBS[f"{REFERENCE}-sampled"], place)["sampled"]) == list(TASKS)


def test_similarities_are_cosines_between_sets(place):
    result = run_job(JOBS[f"{REFERENCE}-similarity"], place)["similarity"]
    assert result["sets"] == list(TASKS)
    for stage in ("keys", "input", "task_mlp"):
        matrix = torch.tensor(result[stage])
        torch.testing.assert_close(matrix.diagonal(), torch.ones(len(TASKS)))
        torch.testing.assert_close(matrix, matrix.T)


@pytest.mark.parametrize("pair", ["fa-ssa", "fa-xa"])
def test_answers_to_ruler_are_scored_in_every_way(place, tmp_path, monkeypatch, pair):
    monkeypatch.setattr(kinds, "build_examples", partial(build_examples, tasks=["vt"]))
    place = replace(place, output=shutil.copytree(place.output, tmp_path / "output"))
    for name in (f"{pair}-seed0", "masks-random", "masks-retrieval", "masks-loss", "masks-learned"):
        if not result_file(place.output, name).exists():
            write_result(place.output, name, run_job(JOBS[name], place))
    job = replace(JOBS[f"{pair}-seed0-ruler-2048"], what="700")
    (row,) = run_job(job, place)["ruler"]
    assert (row["task"], row["length"], row["mode_pair"], row["n"]) == ("vt", 700, pair.upper(), 1)
    assert set(row["score"]) == {"full", "all_sparse", "routed", *ONE_MASK}


# Measuring


def test_a_rows_figures_do_not_depend_on_its_batch(place):
    model = place.load(REFERENCE)
    examples = interleave(place.evaluation, 7, seed=0)
    together, alone = measure(model, examples, 7), measure(model, examples, 1)
    assert [row.nll for row in together.rows] == pytest.approx([row.nll for row in alone.rows], abs=1e-4)
    assert [row.esr for row in together.rows] == pytest.approx([row.esr for row in alone.rows], abs=1e-6)


# Examples


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_unseen_instructions_appear_in_no_seen_example(place, tokenizer):
    def instructions(phrasing):
        chosen = choose_phrasing(tokenizer, place.training, phrasing)
        return {user_text(tokenizer, example).split("\n")[0] for members in chosen.values() for example in members}

    assert instructions("seen").isdisjoint(instructions("unseen"))


def test_interleaving_takes_one_of_each_set_in_turn(place):
    chosen = interleave(place.training, 15, seed=0)
    assert [example.set for example in chosen] == [*TASKS, *TASKS, next(iter(TASKS))]
    assert chosen != interleave(place.training, 15, seed=1)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [170, 340])
def test_resized_examples_keep_question_and_answer(place, tokenizer, name, length):
    example, *others = load_examples(place.data, "eval")[name]
    resized = resize(tokenizer, example, length, others)
    if name == "summ_rfc" and length > len(example.ids):
        assert resized is None
        return
    assert length - 30 < len(resized.ids) <= length
    assert resized.ids[resized.prompt_end :] == example.ids[example.prompt_end :]
    question, asked = (ids.ids[ids.prompt_end - 12 : ids.prompt_end] for ids in (resized, example))
    assert question == asked


@pytest.mark.parametrize("name", ["sqa_foldoc", "sqa_pkg", "niah_single"])
def test_a_shorter_example_keeps_its_evidence(place, tokenizer, name):
    example, *others = load_examples(place.data, "eval")[name]
    resized = resize(tokenizer, example, 170, others)
    answer = tokenizer.decode(example.ids[example.prompt_end : -1])
    assert answer in tokenizer.decode(resized.ids[: resized.prompt_end])


# Workers


JOB, NEXT = Job("first", "train"), Job("second", "train", needs=("first",))


@pytest.fixture
def elsewhere(place, tmp_path):
    """The same workplace with an output folder of its own, where no job has run."""
    for name in ("jobs", "failed", "adapters", "claims"):
        (tmp_path / name).mkdir()
    return replace(place, output=tmp_path)


def finish(place, job, seconds=1.0):
    write_result(place.output, job.name, {"job": asdict(job), "seconds": seconds, "log": [{"step": 100}]})


LATER = float("inf")


def test_a_worker_takes_the_first_job_and_claims_it(elsewhere):
    assert run._next(elsewhere, [JOB, NEXT], LATER) == JOB
    assert (elsewhere.output / "claims" / "first").exists()


def test_a_finished_job_is_not_run_again(elsewhere):
    finish(elsewhere, JOB)
    assert run._next(elsewhere, [JOB], LATER) is None


def test_a_worker_waits_for_what_another_computes(elsewhere):
    run._next(elsewhere, [JOB, NEXT], LATER)
    assert run._next(elsewhere, [JOB, NEXT], LATER) == run.WAIT
    finish(elsewhere, JOB)
    assert run._next(elsewhere, [JOB, NEXT], LATER) == NEXT


def test_nobody_waits_for_a_job_that_failed(elsewhere):
    run._next(elsewhere, [JOB, NEXT], LATER)
    (elsewhere.output / "failed" / "first.txt").touch()
    assert run._next(elsewhere, [JOB, NEXT], LATER) is None


def test_no_job_starts_that_outlasts_the_deadline(elsewhere):
    finish(elsewhere, JOB, seconds=4000)  # 40 s a step: the next one's two take 80
    assert run._next(elsewhere, [JOB, NEXT], time.time() + 79) is None
    assert run._next(elsewhere, [JOB, NEXT], time.time() + 90) == NEXT


def test_a_failure_is_kept_and_the_next_job_runs(elsewhere, monkeypatch):
    ran = []

    def fail_first(job, place):
        ran.append(job.name)
        if job.name == "first":
            raise ValueError("no luck")
        return {"log": [{"step": 1}]}

    monkeypatch.setattr(run, "run_job", fail_first)
    assert run.work(elsewhere, [JOB, Job("other", "train")], LATER) == 1
    assert ran == ["first", "other"]
    assert "no luck" in (elsewhere.output / "failed" / "first.txt").read_text()
    assert (elsewhere.output / "jobs" / "other.json").exists()


def test_a_result_holds_the_recipe_that_ran(elsewhere, monkeypatch):
    monkeypatch.setattr(run, "run_job", lambda job, place: {"log": [{"step": 1}]})
    run.work(elsewhere, [Job("first", "train", config={"window_size": 16}, arguments={"max_steps": 9})], LATER)
    recipe = json.loads((elsewhere.output / "jobs" / "first.json").read_text())["recipe"]
    assert list(recipe) == ["config", "arguments"]
    assert (recipe["config"]["sink_size"], recipe["config"]["window_size"]) == (4, 16)
    assert (recipe["arguments"]["calibration_batches"], recipe["arguments"]["max_steps"]) == (1, 9)


# The command


def options(place, *more):
    folders = ("--model", str(place.model), "--data", str(place.data), "--output", str(place.output))
    return [*folders, "--device", "cpu", *more]


@pytest.fixture
def no_worker(monkeypatch):
    """Fails the test if a worker is started."""

    def start(*args, **kwargs):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(run.subprocess, "Popen", start)


def write_made_by(place, name, recipe):
    write_result(place.output, name, {"job": asdict(JOBS[name]), **recipe})


OTHER = {"recipe": {"config": {"window_size": 7}, "arguments": {}}}


@pytest.mark.parametrize("recipe", [OTHER, {}], ids=["another", "none"])
@pytest.mark.parametrize("chosen", [REFERENCE, "masks-random"], ids=["chosen", "read by the chosen"])
def test_nothing_starts_beside_results_of_another_recipe(elsewhere, no_worker, recipe, chosen):
    write_made_by(elsewhere, REFERENCE, recipe)
    with pytest.raises(SystemExit, match=f"Another recipe made .*{REFERENCE}.json; remove them"):
        run.main(options(elsewhere, "--only", chosen))


@pytest.mark.parametrize(
    "change",
    [{"answer_tokens": 8}, {"sets": ["summ_rfc"]}, {"phrasing": "all"}, {"is_crossed": False}],
    ids=lambda change: next(iter(change)),
)
def test_nothing_starts_beside_results_of_a_job_that_was_another(elsewhere, no_worker, change):
    job = JOBS["unseen-phrasings"]
    recipe = elsewhere.recipe(job)._asdict()
    write_result(elsewhere.output, job.name, {"job": asdict(replace(job, **change)), "recipe": recipe})
    with pytest.raises(SystemExit, match=f"Another recipe made .*{job.name}.json; remove them"):
        run.main(options(elsewhere, "--only", job.name))


def test_a_job_that_had_fewer_fields_then_is_the_same_job(elsewhere):
    job = JOBS["bounds"]
    then = {name: value for name, value in asdict(job).items() if name != "is_crossed"}
    write_result(elsewhere.output, job.name, {"job": then, "recipe": elsewhere.recipe(job)._asdict()})
    run.refuse_other_recipes(elsewhere, [job])


def test_results_of_another_recipe_that_no_chosen_job_reads_do_not_matter(elsewhere):
    write_made_by(elsewhere, "masks-random", OTHER)
    run.refuse_other_recipes(elsewhere, [JOBS["bounds"]])


def test_results_of_the_same_recipe_are_kept(elsewhere):
    write_made_by(elsewhere, "bounds", {"recipe": elsewhere.recipe(JOBS["bounds"])._asdict()})
    run.refuse_other_recipes(elsewhere, [JOBS["bounds"]])


@pytest.mark.parametrize(("statuses", "expected"), [((0, 0), 0), ((0, 1), 1), ((-9, 0), 1)], ids=str)
def test_the_exit_status_says_whether_a_worker_failed(elsewhere, monkeypatch, statuses, expected):
    left = list(statuses)

    class Worker:
        def __init__(self, *args, **kwargs):
            self.status = left.pop(0)

        def wait(self):
            return self.status

    monkeypatch.setattr(run.subprocess, "Popen", Worker)
    with pytest.raises(SystemExit) as stopped:
        run.main(options(elsewhere, "--workers", "2"))
    assert stopped.value.code == expected


def test_a_worker_whose_job_failed_exits_with_1(elsewhere, monkeypatch):
    monkeypatch.setattr(run, "work", lambda *args: 1)
    with pytest.raises(SystemExit) as stopped:
        run.main(options(elsewhere, "--deadline", "0"))
    assert stopped.value.code == 1


@pytest.mark.parametrize(
    ("option", "value"), [("--workers", "0"), ("--device", "cuda"), ("--model", "nowhere"), ("--data", "nowhere.npz")]
)
def test_what_cannot_run_is_refused_before_it_starts(elsewhere, no_worker, monkeypatch, option, value):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=f"`{option}` must be .*, got {value}"):
        run.main(options(elsewhere, option, value))


def test_chosen_jobs_run_in_the_order_given_each_once():
    names = ["masks-random", REFERENCE, "masks-random"]
    assert [job.name for job in run._chosen(names)] == ["masks-random", REFERENCE]


@pytest.mark.parametrize(
    ("name", "steps", "is_crossed"),
    [(REFERENCE, 600, True), ("static-gates", 600, True), ("one-task-seed0", 450, False), (UNCHANGED, 300, True)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_trainings_have_their_steps_and_their_tasks(name, steps, is_crossed):
    job = JOBS[name]
    assert (PLACE.recipe(job).arguments["max_steps"], job.is_crossed) == (steps, is_crossed)


def test_an_ablation_changes_one_setting_of_the_one_that_changes_nothing():
    def settings(job):
        return {**asdict(job), **PLACE.recipe(job).config, **PLACE.recipe(job).arguments}

    unchanged = settings(JOBS[UNCHANGED])
    for job in (job for job in all_jobs() if job.name.startswith("ablation-") and job.name != UNCHANGED):
        changed = {key for key, value in settings(job).items() if value != unchanged.get(key)}
        ways = changed - {"name", "config", "arguments"}
        assert len(ways) == 1 or ways == {"temperature_schedule", "temperature_end"}, job.name


def test_every_job_has_a_name_of_its_own_and_needs_only_earlier_ones():
    seen = set()
    for job in all_jobs():
        assert job.name not in seen
        assert set(job.needs) <= seen, job.name
        seen.add(job.name)
