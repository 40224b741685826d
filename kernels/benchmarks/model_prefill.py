"""Times the prefill of a whole routed model against the same model with its adapter disabled.

    python kernels/benchmarks/model_prefill.py --lengths 32768 131072 --output rows.json

Llama-3.1-8B shapes with random weights; FA-SSA with default sink and window, decisions forced to a mean model sparsity
ratio of 0.70 over the layers. The baseline is causal cuDNN SDPA. Runs of both alternate.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from peft import get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from elastic_peft import ElasticConfig, forced_routing, last_routing


LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
ROUNDS = 3


def make_model() -> torch.nn.Module:
    """The routed model, bfloat16 on the GPU."""
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
        base = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    torch.set_default_dtype(torch.float32)
    return get_peft_model(base, ElasticConfig(standardize_input=False, task_type="CAUSAL_LM"))


def make_decisions() -> torch.Tensor:
    """Decisions `[LAYERS, KV_HEADS]`: six sparse heads in three of five layers, five in the others."""
    sparse = torch.tensor([6 if layer % 5 < 3 else 5 for layer in range(LAYERS)])
    return (torch.arange(KV_HEADS) < sparse[:, None]).cuda()


def measure(model: torch.nn.Module, decisions: torch.Tensor, length: int) -> dict:
    """One row: medians in milliseconds, and peak memory of the routed over that of the dense run."""
    ids = torch.randint(3, 512, (1, length), device="cuda")

    def routed():
        with forced_routing(model, decisions):
            model(ids, use_cache=False, logits_to_keep=1)

    def dense():
        with model.disable_adapter(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            model(ids, use_cache=False, logits_to_keep=1)

    peak = {run: peak_memory(run) for run in (routed, dense)}
    times = [(milliseconds(routed), milliseconds(dense)) for _ in range(ROUNDS)]
    ours, baseline = (statistics.median(column) for column in zip(*times))
    return {
        "name": f"model_prefill/{length // 1024}K/fa-ssa",
        "ours_ms": ours,
        "baseline": "cudnn",
        "baseline_ms": baseline,
        "speedup": baseline / ours,
        "msr": decisions.float().mean().item(),
        "peak_memory_ratio": peak[routed] / peak[dense],
        "implementation": last_routing(model).implementation,
    }


def peak_memory(run: Callable[[], None]) -> int:
    """Bytes at most allocated during a run, which is also the warm-up."""
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def milliseconds(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--output", help="file for the rows as JSON")
    arguments = parser.parse_args()
    model, decisions, rows = make_model(), make_decisions(), []
    for length in arguments.lengths:
        rows.append(measure(model, decisions, length))
        print(rows[-1], flush=True)
        if arguments.output:
            with open(arguments.output, "w", encoding="utf-8") as file:
                json.dump({"hardware": torch.cuda.get_device_name(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
