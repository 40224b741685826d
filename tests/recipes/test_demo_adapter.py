"""The shipped adapter that the demo loads: it fits the demo's model and is calibrated."""

import json
import warnings

import demo
import pytest
import torch
from demo_model import MODEL_ID
from demo_shipped import TEXT_TOKENS
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

from elastic_peft import last_routing


@pytest.fixture(scope="module")
def config():
    return json.loads((demo.SHIPPED / "adapter_config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model():
    """The adapter on a random model that has SmolLM2-135M's layers and heads, and is small in everything else."""
    shape = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=36, intermediate_size=32, **shape))
    return PeftModel.from_pretrained(base, demo.SHIPPED).eval()


def test_shipped_adapter_names_the_demo_model(config):
    assert config["base_model_name_or_path"] == MODEL_ID


def test_shipped_adapter_routes_between_full_and_streaming(config):
    assert config["mode_pair"] == "FA-SSA"


def test_shipped_adapter_leaves_keys_out_on_the_demo_prompts(config):
    assert config["sink_size"] + config["window_size"] < TEXT_TOKENS


def test_shipped_adapter_fits_the_layers_and_heads_of_the_demo_model(model):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The input standardisation")  # of the next test
        model(input_ids=torch.arange(64)[None])
    assert last_routing(model).decisions.shape == (1, 30, 3)


def test_shipped_adapter_is_calibrated(model):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", "The input standardisation")
        model(input_ids=torch.arange(64)[None])
