"""The whole model that rows measure: Llama-3.1-8B shapes with random weights, and a routing of it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from inputs import HEAD_DIM, HEADS, KV_HEADS
from peft import PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from elastic_peft import ElasticConfig


LAYERS = 32
MODE_PAIRS = ("FA-SSA", "FA-XA", "XA-SSA")


def make_model(mode_pairs: Sequence[str]) -> PeftModel:
    """The routed model, bfloat16 on the GPU, with an adapter for each mode pair; the first is active."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2**20,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        base = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    first, *others = (
        ElasticConfig(mode_pair=pair, standardize_input=False, task_type="CAUSAL_LM") for pair in mode_pairs
    )
    model = get_peft_model(base, first, adapter_name=first.mode_pair)
    for other in others:
        model.add_adapter(other.mode_pair, other)
    return model.eval()


@contextmanager
def compiled_parts() -> Iterator[None]:
    """Context in which norms, rotary embeddings and MLPs are compiled: they are dozens of launches otherwise."""
    parts = (
        (modeling_llama.LlamaRMSNorm, "forward"),
        (modeling_llama.LlamaMLP, "forward"),
        (modeling_llama, "apply_rotary_pos_emb"),
    )
    with ExitStack() as stack:
        for owner, name in parts:
            stack.enter_context(mock.patch.object(owner, name, torch.compile(getattr(owner, name))))
        yield


def make_decisions() -> torch.Tensor:
    """Decisions `[LAYERS, KV_HEADS]`, 70% sparse: six heads in three of five layers, five in the others."""
    sparse = torch.tensor([6 if layer % 5 < 3 else 5 for layer in range(LAYERS)])
    return torch.arange(KV_HEADS) < sparse[:, None]
