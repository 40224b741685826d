"""Shared fixtures: a tiny random decoder, adapters that send its heads both ways, and inputs long enough to differ."""

import os

import torch


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which peft and transformers do

import pytest
import torch.distributed as dist
from peft import get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from elastic_peft import ElasticConfig, calibrate_standardization, last_routing
from elastic_peft.layer import ElasticLayer


torch.set_num_threads(1)


def build_base(**overrides):
    set_seed(0)
    fields = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,  # random models stop early otherwise
        "initializer_range": 0.2,  # attention sharp enough for the modes to differ
        **overrides,
    }
    return LlamaForCausalLM(LlamaConfig(**fields)).eval()


def build_config(**overrides):
    return ElasticConfig(**{"sink_size": 2, "window_size": 6, "pool_size": 4, **overrides})


def split_heads(model, adapter_name, inputs, seed):
    """Calibrates an adapter and gives it random routers that send half of each layer's heads to either mode."""
    calibrate_standardization(model, [inputs])
    generator = torch.Generator().manual_seed(seed)
    outputs = [m.elastic_router_out[adapter_name] for m in model.modules() if isinstance(m, ElasticLayer)]
    with torch.no_grad():
        for output in outputs:
            output.weight.copy_(torch.randn(output.weight.shape, generator=generator))
        for layer, output in enumerate(outputs):
            model(**inputs)
            retrieval, sparse = last_routing(model).logits[:, layer].flatten(0, 1).unbind(-1)
            preference = (sparse - retrieval).sort().values
            middle = len(preference) // 2
            output.bias[1] -= preference[middle - 1 : middle + 1].mean()


@pytest.fixture
def make_base():
    """Builds the tiny Llama, with the same weights at every call; keyword arguments change its configuration."""
    return build_base


@pytest.fixture
def make_config():
    """Builds an `ElasticConfig` whose sink and window are far shorter than `inputs`."""
    return build_config


@pytest.fixture
def inputs():
    """Two rows of 40 tokens, the second with 5 slots of left padding."""
    input_ids = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(7))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, :5] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@pytest.fixture
def make_routed(inputs):
    """Builds a `PeftModel` with a calibrated adapter named "default" that routes `inputs` to both modes."""

    def build(base=None, adapter_name="default", seed=1, **config):
        set_seed(seed)
        model = get_peft_model(base or build_base(), build_config(**config), adapter_name=adapter_name)
        model.eval()
        split_heads(model, adapter_name, inputs, seed)
        return model

    return build


@pytest.fixture
def set_routers(inputs):
    """Makes an adapter that was injected into a model route `inputs` to both modes."""
    return lambda model, adapter_name: split_heads(model, adapter_name, inputs, seed=1)


@pytest.fixture
def logits(inputs):
    """Runs a model on `inputs`; `[2, 40, vocab]`."""

    def run(model):
        with torch.no_grad():
            return model(**inputs).logits

    return run


@pytest.fixture
def one_process_mesh(tmp_path):
    """A device mesh of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
