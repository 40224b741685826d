"""`train_sft.py` as a launcher starts it; `DIES_AT_STEP` ends the second process at that step.

accelerate shards a model on accelerators only, and leaves FSDP out without a word on CPUs: here it takes it there too.
Older versions of transformers resume with the optimizer's state on the process's own device: torch knows `cpu:1` here.
"""

import os
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.serialization import register_package


sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import train_sft

from elastic_peft import ElasticSFTTrainer


make_state = AcceleratorState.__init__
ascend = ElasticSFTTrainer.ascend_multipliers


def make_state_with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
    make_state(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def load_on_numbered_cpu(storage, location):
    return storage if location.startswith("cpu:") else None


def ascend_or_die(trainer):
    step = os.environ.get("DIES_AT_STEP")
    if trainer.args.process_index == 1 and step is not None and trainer.state.global_step == int(step):
        os._exit(3)
    ascend(trainer)


if __name__ == "__main__":
    register_package(0, tagger=lambda storage: None, deserializer=load_on_numbered_cpu)
    AcceleratorState.__init__ = make_state_with_fsdp
    ElasticSFTTrainer.ascend_multipliers = ascend_or_die
    train_sft.main(sys.argv[1:])
