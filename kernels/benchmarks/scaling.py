"""Rows `train_step/.../fsdp2`: training steps of a whole model on two GPUs, sharded by FSDP2, against one GPU."""

import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from benchmark import Times, compare, peak_memory, wall_milliseconds
from inputs import label
from train_step import make_step
from whole_model import make_model


ROUNDS = 3
CONDITIONS = (
    "Llama-3.1-8B shapes, random bf16 weights, frozen but for the routers, FA-SSA at MSR 0.70, one sequence a GPU and "
    "step, non-reentrant gradient checkpointing, forward and backward; two GPUs: FSDP2 by accelerate, each decoder "
    "layer sharded; against the same step on one GPU; host's clock, median of the slower GPU; "
    "speedup: tokens a second of both GPUs over those of one"
)


def rows(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of each length."""
    for length in lengths:
        alone, together = (run(length, processes) for processes in (1, 2))
        (one, one_peak), (two, two_peak) = (
            (slowest(results), max(result["peak"] for result in results)) for results in (alone, together)
        )
        row = compare(f"train_step/{label(length)}/fsdp2", Times(two, "wall"), "one GPU", Times(one, "wall"))
        rates = [count * length / row[f"{side}_ms"] * 1e3 for count, side in ((2, "ours"), (1, "baseline"))]
        row |= {"ours_tokens_per_s": rates[0], "baseline_tokens_per_s": rates[1], "speedup": rates[0] / rates[1]}
        yield row | {"peak_bytes": two_peak, "baseline_peak_bytes": one_peak}


def run(length: int, processes: int) -> list[dict[str, Any]]:
    """What each of `processes` processes measured, one GPU each."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
        probe.close()
        torch.multiprocessing.spawn(work, (length, processes, port, folder), nprocs=processes)
        return [torch.load(file, weights_only=True) for file in sorted(Path(folder).iterdir())]


def slowest(results: Sequence[dict[str, Any]]) -> list[float]:
    """Milliseconds of each step: those of the process that took longest."""
    return [max(times) for times in zip(*(result["times"] for result in results))]


def work(rank: int, length: int, processes: int, port: int, folder: str) -> None:
    """One process: measures its steps into a file."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.cuda.set_device(rank)
    model = make_model(["FA-SSA"]).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if processes > 1:
        model = shard(model)
    step = make_step(model, length, None)
    step()
    times: list[float] = []
    for _ in range(ROUNDS):
        peak = peak_memory(lambda: times.append(wall_milliseconds(step)))
    torch.save({"times": times, "peak": peak}, Path(folder, str(rank)))
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(model: torch.nn.Module) -> torch.nn.Module:
    """The model cut over the processes as `recipes/accelerate/fsdp2.yaml` has accelerate cut it."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    # accelerate shards a model with its optimizer only.
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    return Accelerator(fsdp_plugin=plugin, mixed_precision="bf16").prepare(model, optimizer)[0]
