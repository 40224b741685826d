"""The pictures of the reproduction, by name."""

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure
from reproduction.charts_generalisation import generalisation, lengths, one_task
from reproduction.charts_quality import POOLS, dial, pareto, pools, trades
from reproduction.charts_routing import routing_frequency, sampled, similarity, training
from reproduction.charts_speed import router_latency
from reproduction.jobs import REFERENCE
from reproduction.results import Results


CURVES = (REFERENCE, f"{REFERENCE}-bias", "bounds", "masks-curve")
#: Picture to the jobs that it needs and what draws it.
CHARTS: dict[str, tuple[Sequence[str], Callable[[Results], Figure]]] = {
    "routing": ((REFERENCE,), routing_frequency),
    "similarity": ((f"{REFERENCE}-similarity",), similarity),
    "training": ((REFERENCE,), training),
    "sampled": ((REFERENCE, f"{REFERENCE}-sampled"), sampled),
    "dial": (CURVES, dial),
    "pareto": (CURVES, pareto),
    "generalisation": ((REFERENCE, "bounds", "unseen-phrasings"), generalisation),
    "one_task": (("one-task-seed0", "bounds"), one_task),
    "lengths": ((REFERENCE, f"{REFERENCE}-lengths", "bounds"), lengths),
    "pools": (("bounds", *POOLS), pools),
    "trades": ((REFERENCE, "bounds"), trades),
    "router_latency": ((), router_latency),
}
