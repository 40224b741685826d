"""Tiny random-weight models of every supported family, and of families that must be refused."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM

from elastic_peft.router import RouterLinear


SMALL = {
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
    "eos_token_id": 2,
}
NO_HEAD_DIM = {"head_dim": 8}  # families that always take hidden_size / num_attention_heads
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# model_type -> (overrides, indices of the layers that are routed)
SUPPORTED: dict[str, tuple[dict, list[int]]] = {
    "llama": ({}, [0, 1]),
    "qwen2": ({}, [0, 1]),
    "qwen3": ({}, [0, 1]),
    "qwen3_moe": (MOE, [0, 1]),
    "mistral": ({"sliding_window": None}, [0, 1]),
    "phi3": ({**NO_HEAD_DIM, "sliding_window": None}, [0, 1]),
    "olmo2": ({**NO_HEAD_DIM}, [0, 1]),
    "granite": ({**NO_HEAD_DIM}, [0, 1]),
    "smollm3": ({"no_rope_layers": [1, 0]}, [0, 1]),
    "phimoe": ({**NO_HEAD_DIM, "num_local_experts": 4, "sliding_window": None}, [0, 1]),
    "starcoder2": ({**NO_HEAD_DIM, "sliding_window": None}, [0, 1]),
    "cohere": ({**NO_HEAD_DIM, "use_qk_norm": True}, [0, 1]),
    "glm4": ({"partial_rotary_factor": 0.5}, [0, 1]),
    "ernie4_5": ({}, [0, 1]),
    "seed_oss": ({"attention_dropout": 0.0}, [0, 1]),
    "gemma2": ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, [1]),
    "gemma3_text": ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, [1]),
    "gpt_oss": (
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        [1],
    ),
    "qwen3_next": (
        {
            **MOE,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "partial_rotary_factor": 0.5,
        },
        [1],
    ),
    "qwen3_5_text": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        [1],
    ),
    "minimax": (
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "block_size": 16},
        [1],
    ),
    "llama4_text": (
        {
            "intermediate_size_mlp": 32,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 64,
        },
        [1],
    ),
    "cohere2": (
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
        [1],
    ),
    "exaone4": ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, [1]),
}

# name -> (model_type, overrides, words of the reason)
REFUSED: dict[str, tuple[str, dict, str]] = {
    "mistral-sliding": ("mistral", {"sliding_window": 64}, "sliding window of 64 tokens"),
    "deepseek-mla": (
        "deepseek_v3",
        {
            "head_dim": "drop",
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "num_key_value_heads": 4,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
        "multi-head latent attention",
    ),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "rotary attention layers"),
    "gpt-neox": ("gpt_neox", {}, "no `self_attn`"),
    "falcon": ("falcon", {"head_dim": "drop"}, "rotary attention layers"),
    "nemotron": ("nemotron", {}, "drops keyword arguments"),
    "stablelm": ("stablelm", {**NO_HEAD_DIM}, "drops keyword arguments"),
    "doge": ("doge", {"attention_dropout": 0.0}, "it makes its own"),
    "not-causal": ("llama", {"is_causal": False}, "its attention is not causal"),
    "hunyuan": ("hunyuan_v1_dense", {}, "changed between the rotary embedding and the attention"),
}


def build(model_type: str, **overrides):
    """A tiny random model in evaluation mode with eager attention, the same at every call."""
    fields = {name: value for name, value in {**SMALL, **overrides}.items() if value != "drop"}
    config = transformers.AutoConfig.for_model(model_type, **fields)
    transformers.set_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        # The default initialisation is so small that attention is uniform: sharper projections make the modes differ.
        if parameter.ndim >= 2 and "router" not in name and "embed" not in name:
            parameter.data.mul_(8.0)
    return model


def perturb_routers(model, seed: int = 0):
    """Gives every router large random weights without biases, so that both modes occur and inputs decide which."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, RouterLinear):
            noise = torch.randn(module.weight.shape, generator=generator)
            module.weight.data.copy_(noise * 2 / module.in_features**0.5)
            module.bias.data.zero_()
    return model
