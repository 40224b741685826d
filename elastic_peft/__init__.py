"""Long-context sparsity that adapts to the input, as an ordinary PEFT adapter.

Importing this package registers the ELASTIC method with PEFT; import it before loading an ELASTIC adapter.
"""

from .calibration import Calibration, calibrate
from .config import ElasticConfig
from .context import RoutingRecord, RoutingTape, forced_routing, last_routing
from .registration import register
from .standardization import calibrate_standardization


register()

__all__ = [
    "Calibration",
    "ElasticConfig",
    "ElasticSFTConfig",
    "ElasticSFTTrainer",
    "RoutingRecord",
    "RoutingTape",
    "calibrate",
    "calibrate_standardization",
    "forced_routing",
    "last_routing",
    "push_to_hub",
]


def __getattr__(name: str):
    # Training pulls in trl and datasets, which inference does not need.
    if name == "ElasticSFTConfig":
        from .trainer_config import ElasticSFTConfig

        return ElasticSFTConfig
    if name == "ElasticSFTTrainer":
        from .trainer import ElasticSFTTrainer

        return ElasticSFTTrainer
    if name == "push_to_hub":
        from .hub import push_to_hub

        return push_to_hub
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
