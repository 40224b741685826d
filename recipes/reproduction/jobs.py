"""What the reproduction runs, in the order of importance."""

from dataclasses import dataclass, field
from typing import Any

from reproduction.examples import ROBUST, SENSITIVE, TASKS


SEEDS = (0, 1, 2)
#: The adapter whose mean MSR the static masks are given.
REFERENCE = "fa-ssa-seed0"
STATIC = "static-gates"


@dataclass(frozen=True)
class Job:
    """One entry of the reproduction.

    Args:
        name: of its files.
        kind: `"train"`: train an adapter and measure it; `"masks"`: measure static masks; `"adapter"`: measure a
            trained adapter in other conditions.
        what: which masks or conditions, see `reproduction.masks` and `reproduction.kinds`.
        needs: jobs whose results it reads.
        config: fields of `ElasticConfig` that differ from the recipe.
        arguments: fields of `ElasticSFTConfig` that differ from the recipe.
        sets: sets that are trained on.
        phrasing: phrasings that are trained on.
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
    answer_tokens: int | None = None
    seed: int = 0
    is_blind: bool = False


def all_jobs() -> list[Job]:
    """Every job, the most important first."""
    return [*_main(), *_schedules(), *_statics(), *_other_pairs(), *_conditions(), *_generalisation(), *_ablations()]


def _t_values(sensitive: float = 0.7, robust: float = 1.0) -> dict[str, dict[str, float]]:
    return {"t_values": {task: sensitive if name in SENSITIVE else robust for name, task in TASKS.items()}}


def _main() -> list[Job]:
    bounds = Job("bounds", "masks", what="bounds")
    return [Job(REFERENCE, "train"), bounds, *(Job(f"fa-ssa-seed{seed}", "train", seed=seed) for seed in SEEDS[1:])]


def _schedules() -> list[Job]:
    """Other trades between sparsity and loss than the recipe's."""
    start = {"window_size": 256, "pool_size": 100}
    wide = {**start, "window_size": 512}
    reachable = _t_values(robust=0.9)
    longer = {"max_steps": 450}
    two_hops = {"t_values": {**_t_values(sensitive=0.68)["t_values"], "multihop_qa": 0.76}}
    gentle = {"multiplier_learning_rate": 5e-3}
    code = {"t_values": {**reachable["t_values"], "code": 0.85, "summarization": 1.0, "in_context_learning": 1.0}}
    short = {"answer_tokens": 32}
    return [
        Job("bounds-window256", "masks", what="bounds", config=start),
        *(Job(f"trade-window256-seed{seed}", "train", config=start, seed=seed) for seed in SEEDS[:2]),
        *(Job(f"trade-window512-seed{seed}", "train", config=wide, seed=seed) for seed in SEEDS),
        Job("trade-two-hops-sparser", "train", config=two_hops),
        Job("trade-longer", "train", config=start, arguments=longer),
        Job("trade-longer-window512", "train", config=wide, arguments=longer),
        Job("trade-robust0.9", "train", config={**start, **reachable}),
        Job("trade-longer-robust0.9", "train", config={**start, **reachable}, arguments=longer),
        Job("trade-window512-robust0.9", "train", config={**wide, **reachable}),
        Job("trade-longer-window512-robust0.9", "train", config={**wide, **reachable}, arguments=longer),
        Job("trade-window512-multiplier-lr5e-3", "train", config=wide, arguments=gentle),
        *(
            Job(f"trade-{name}-seed{seed}", "train", seed=seed, **fields)
            for seed in SEEDS[:2]
            for name, fields in {
                "longer-robust0.9-answer32": {"config": reachable, "arguments": longer, **short},
                "longer-robust0.9-gentle-answer32": {"config": reachable, "arguments": {**longer, **gentle}, **short},
                "longer-robust0.9-pool50": {"config": reachable, "arguments": longer},
                "answer32": short,
                "gentle-answer32": {"arguments": gentle, **short},
                "code0.85-answer32": {"config": code, **short},
                "longer-robust0.9-pool75-answer32": {
                    "config": {**reachable, "pool_size": 75},
                    "arguments": longer,
                    **short,
                },
            }.items()
        ),
    ]


def _statics() -> list[Job]:
    category = {"sensitive": SENSITIVE, "robust": ROBUST}
    learned = [Job(STATIC, "train", needs=(REFERENCE,), is_blind=True)]
    learned += [
        Job(f"{STATIC}-{name}", "train", needs=(REFERENCE,), is_blind=True, sets=sets)
        for name, sets in category.items()
    ]
    return [
        Job("masks-random", "masks", what="random", needs=(REFERENCE,)),
        Job("masks-retrieval", "masks", what="retrieval", needs=(REFERENCE,)),
        learned[0],
        Job("masks-learned", "masks", what="learned", needs=(REFERENCE, STATIC)),
        Job("masks-loss", "masks", what="loss", needs=(REFERENCE,)),
        *learned[1:],
        Job("masks-category", "masks", what="category", needs=(REFERENCE, *(job.name for job in learned[1:]))),
        Job("masks-curve", "masks", what="curve", needs=("masks-retrieval", "masks-loss", STATIC)),
    ]


def _other_pairs() -> list[Job]:
    jobs = []
    for pair in ("FA-XA", "XA-SSA"):
        config = {"mode_pair": pair}
        jobs.append(Job(f"bounds-{pair.lower()}", "masks", what="bounds", config=config))
        jobs += [Job(f"{pair.lower()}-seed{seed}", "train", config=config, seed=seed) for seed in SEEDS]
    return jobs


def _conditions() -> list[Job]:
    """The same adapter in other conditions."""
    whats = ("mixed", "lengths", "bias", "sampled", "similarity")
    return [Job(f"{REFERENCE}-{what}", "adapter", what=what, needs=(REFERENCE,)) for what in whats]


def _generalisation() -> list[Job]:
    left_out = {name: tuple(other for other in TASKS if other != name) for name in TASKS}
    return [
        Job("unseen-phrasings", "train", phrasing="seen"),
        *(Job(f"without-{name}", "train", sets=sets) for name, sets in left_out.items()),
    ]


def _ablations() -> list[Job]:
    changes: dict[str, dict[str, dict[str, Any]]] = {
        "raw-input": {"config": {"standardize_input": False}},
        "signed": {"arguments": {"sparsity_constraint": "signed"}},
        **{f"pool{size or '-all'}": {"config": {"pool_size": size}} for size in (50, 200, 400, None)},
        **{f"expansion{factor}": {"config": {"router_expansion": factor}} for factor in (2, 6, 8)},
        **{f"sensitive{t}": {"config": _t_values(sensitive=t)} for t in (0.4, 0.5, 0.6)},
        "cosine": {"arguments": {"temperature_schedule": "cosine", "temperature_end": 1.0}},
        **{f"counterfactual{f}": {"arguments": {"counterfactual_fraction": f}} for f in (0.25, 0.125)},
    }
    return [Job(f"ablation-{name}", "train", **fields) for name, fields in changes.items()]  # type: ignore[arg-type]
