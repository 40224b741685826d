"""What the reproduction runs, in the order of importance."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reproduction.examples import ROBUST, SENSITIVE, TASKS
from reproduction.recipe import RECIPES, read_recipe


SEEDS = (0, 1, 2)
#: The adapter whose mean MSR the static masks are given.
REFERENCE = "fa-ssa-seed0"
STATIC = "static-gates"
#: The ablation that changes nothing, which the others compare with.
UNCHANGED = "ablation-nothing"
#: Ways of choosing the same heads for every prompt: the job that measured them, and how its masks' names begin.
ONE_MASK = {
    "static_random": ("masks-random", "random"),
    "static_retrieval": ("masks-retrieval", "retrieval"),
    "static_loss": ("masks-loss", "loss"),
    "static_learned": ("masks-learned", "learned"),
}
#: Tokens of RULER's prompts, answers included.
RULER_LENGTHS = (2048, 4096, 8192)


@dataclass(frozen=True)
class Job:
    """One entry of the reproduction.

    Args:
        name: of its files.
        kind: `"train"`: train an adapter and measure it; `"masks"`: measure static masks; `"adapter"`: measure a
            trained adapter in other conditions; `"ruler"`: score its answers to RULER's prompts.
        what: which masks or conditions, see `reproduction.masks` and `reproduction.kinds`; tokens of RULER's prompts.
        needs: jobs whose results it reads.
        config: fields of `ElasticConfig` that differ from the recipe.
        arguments: fields of `ElasticSFTConfig` that differ from the recipe.
        sets: sets that are trained on.
        phrasing: phrasings that are trained on: one of `reproduction.examples.PHRASINGS`, or `"varied"`: those seen,
            and the words of `reproduction.phrasings`.
        is_crossed: train on other tasks over the same documents too, see `reproduction.crossed`.
        answer_tokens: tokens of an answer that are trained on at most; `None`: all. The loss is a mean over tokens,
            so long answers outweigh short ones.
        seed: of the training.
        is_blind: train static gates.
    """

    name: str
    kind: str
    what: str = ""
    needs: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = tuple(TASKS)
    phrasing: str = "all"
    is_crossed: bool = False
    answer_tokens: int | None = 32
    seed: int = 0
    is_blind: bool = False


def all_jobs() -> list[Job]:
    """Every job, the most important first."""
    return [
        *_main(),
        *_schedules(),
        *_statics(),
        *_other_pairs(),
        *_conditions(),
        *_generalisation(),
        *_ruler(),
        *_ablations(),
    ]


def _t_values(sensitive: float = 0.7, robust: float = 0.9, **others: float) -> dict[str, dict[str, float]]:
    targets = {task: sensitive if name in SENSITIVE else robust for name, task in TASKS.items()}
    return {"t_values": {**targets, **others}}


def _by_recipe(name: str, **fields: Any) -> Job:
    """A training by the recipe, with what it changes."""
    return Job(name, "train", is_crossed=True, **fields)


def _one_task(name: str, kind: str = "train", **fields: Any) -> Job:
    """A job of the recipe that came before: one task a document, and longer ends of the prompt read."""
    config = {"pool_size": 75, **_t_values()}
    return Job(name, kind, config=config, arguments={"max_steps": 450}, **fields)


def _main() -> list[Job]:
    seeds = [_by_recipe(f"fa-ssa-seed{seed}", seed=seed) for seed in SEEDS]
    return [*seeds[:1], Job("bounds", "masks", what="bounds"), *seeds[1:]]


def _schedules() -> list[Job]:
    """Other trades between sparsity and loss than the recipe's, which they led to."""
    wide: dict[str, Any] = {"window_size": 512}
    half: dict[str, Any] = {**wide, "pool_size": 50}
    reachable = _t_values()
    code = _t_values(robust=1.0, code=0.85)
    longer, gentle = {"max_steps": 450}, {"multiplier_learning_rate": 5e-3}
    return [
        *(_trade(f"window256-seed{seed}", seed=seed) for seed in SEEDS[:2]),
        *(_trade(f"counterfactual{f}", arguments={"counterfactual_fraction": f}) for f in (0.25, 0.125)),
        _trade("longer", arguments=longer),
        _trade("robust0.9", config=reachable),
        _trade("longer-robust0.9", config=reachable, arguments=longer),
        _trade("window512", config=wide),
        _trade("longer-window512", config=wide, arguments=longer),
        _trade("window512-robust0.9", config={**wide, **reachable}),
        _trade("longer-window512-robust0.9", config={**wide, **reachable}, arguments=longer),
        _trade("window512-multiplier-lr5e-3", config=wide, arguments=gentle),
        _trade("longer-robust0.9-pool50-seed0", config={**half, **reachable}, arguments=longer),
        _trade("gentle-answer32-seed0", config=half, arguments=gentle, answer_tokens=32),
        *(
            _trade(f"{name}-answer32-seed{seed}", config, arguments, 32, seed)
            for seed in SEEDS[:2]
            for name, config, arguments in (
                ("pool50", half, {}),
                ("code0.85", {**half, **code}, {}),
                ("longer-robust0.9", {**half, **reachable}, longer),
                ("longer-robust0.9-gentle", {**half, **reachable}, {**longer, **gentle}),
            )
        ),
        _by_recipe("trade-crossed-robust0.9-seed0", config=_t_values(continuation=0.9)),
    ]


def _trade(
    name: str,
    config: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    answer_tokens: int | None = None,
    seed: int = 0,
) -> Job:
    """A training by what it changes of the first recipe."""
    first = {"window_size": 256, "pool_size": 100, **_t_values(robust=1.0)}
    return Job(
        f"trade-{name}",
        "train",
        config={**first, **(config or {})},
        arguments={"max_steps": 300, **(arguments or {})},
        answer_tokens=answer_tokens,
        seed=seed,
    )


def _statics() -> list[Job]:
    category = {"sensitive": SENSITIVE, "robust": ROBUST}

    def gates(name: str, sets: tuple[str, ...] = tuple(TASKS), seed: int = 0) -> Job:
        return _by_recipe(name, needs=(f"fa-ssa-seed{seed}",), is_blind=True, sets=sets, seed=seed)

    by_category = [gates(f"{STATIC}-{name}", sets) for name, sets in category.items()]
    more = [gates(f"{STATIC}-seed{seed}", seed=seed) for seed in SEEDS[1:]]
    return [
        Job("masks-random", "masks", what="random", needs=(REFERENCE,)),
        Job("masks-retrieval", "masks", what="retrieval", needs=(REFERENCE,)),
        gates(STATIC),
        Job("masks-learned", "masks", what="learned", needs=(REFERENCE, STATIC)),
        Job("masks-loss", "masks", what="loss", needs=(REFERENCE,)),
        *more,
        *(Job(f"masks-learned-seed{job.seed}", "masks", what="learned", needs=(*job.needs, job.name)) for job in more),
        *by_category,
        Job("masks-category", "masks", what="category", needs=(REFERENCE, *(job.name for job in by_category))),
        Job("masks-curve", "masks", what="curve", needs=("masks-retrieval", "masks-loss", STATIC)),
    ]


def _other_pairs() -> list[Job]:
    jobs = []
    for pair in ("FA-XA", "XA-SSA"):
        config = {"mode_pair": pair}
        jobs.append(Job(f"bounds-{pair.lower()}", "masks", what="bounds", config=config))
        jobs += [_by_recipe(f"{pair.lower()}-seed{seed}", config=config, seed=seed) for seed in SEEDS]
    return jobs


def _conditions() -> list[Job]:
    """The same adapter in other conditions."""
    whats = ("crossed", "mixed", "lengths", "bias", "sampled", "similarity")
    return [Job(f"{REFERENCE}-{what}", "adapter", what=what, needs=(REFERENCE,)) for what in whats]


def _generalisation() -> list[Job]:
    left_out = {name: tuple(other for other in TASKS if other != name) for name in TASKS}
    strayed = ("sqa_foldoc", "sqa_pkg", "mhop_wordnet")
    return [
        *(_by_recipe(f"without-{name}", sets=sets) for name, sets in left_out.items()),
        _by_recipe("unseen-phrasings", phrasing="seen"),
        *(_one_task(f"one-task-seed{seed}", seed=seed) for seed in SEEDS),
        *(_one_task(f"one-task-without-{name}", sets=sets) for name, sets in left_out.items()),
        _one_task("one-task-phrasings", phrasing="seen"),
        _one_task("one-task-seed0-crossed", "adapter", what="crossed", needs=("one-task-seed0",)),
        _one_task("varied-phrasings", phrasing="varied"),
        *(_one_task(f"varied-without-{name}", sets=left_out[name], phrasing="varied") for name in strayed),
    ]


def _ruler() -> list[Job]:
    """RULER by the first seed of each pair, and with the same heads sparse for every prompt."""
    masks = tuple(name for name, _ in ONE_MASK.values())
    return [
        Job(
            f"{pair.lower()}-seed0-ruler-{length}",
            "ruler",
            what=str(length),
            needs=(f"{pair.lower()}-seed0", *masks),
            config={"mode_pair": pair},
        )
        for pair in ("FA-SSA", "FA-XA", "XA-SSA")
        for length in RULER_LENGTHS
    ]


def _ablations() -> list[Job]:
    """One change of the recipe each, in trainings of half its length, after one that changes nothing."""
    targets = read_recipe(RECIPES, "FA-SSA").config["t_values"]
    sensitive = {TASKS[name] for name in SENSITIVE}
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "raw-input": {"config": {"standardize_input": False}},
        "signed": {"arguments": {"sparsity_constraint": "signed"}},
        **{f"pool{size or '-all'}": {"config": {"pool_size": size}} for size in (50, 100, 200, 400, None)},
        **{f"expansion{factor}": {"config": {"router_expansion": factor}} for factor in (2, 6, 8)},
        **{
            f"sensitive{t}": {"config": {"t_values": {**targets, **dict.fromkeys(sensitive, t)}}}
            for t in (0.4, 0.5, 0.6)
        },
        "whole-answers": {"answer_tokens": None},
        "cosine": {"arguments": {"temperature_schedule": "cosine", "temperature_end": 1.0}},
    }
    return [
        _by_recipe(f"ablation-{name}", **{**fields, "arguments": {"max_steps": 300, **fields.get("arguments", {})}})
        for name, fields in changes.items()
    ]
