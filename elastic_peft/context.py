"""What one forward pass of the decoder knows: its sequences, how to decide, and the record of what was decided."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from .counterfactual import check_fraction
from .sequences import Sequences
from .sparsity import model_sparsity, streaming_sparsity


class RoutingTape:
    """What a training step tells the routers, and the decisions it gets back.

    Pass it as `model(..., elastic_tape=tape)`. No dataclass: FSDP's mixed precision would rebuild it.

    Args:
        temperature: Gumbel-softmax temperature, positive.
        seeds: one noise seed per sequence of this forward pass; `None` draws them from torch's default generator.
        counterfactual_fraction: share of queries for which the mode that a head does not run is computed, for the
            gates' gradients; 1 over an integer, see `elastic_kernels.routed_attention`.

    Attributes:
        gates: layer index to `[N, H]`; float32, 1.0 = sparse, and differentiable where decisions were sampled, else
            bool.
        lengths: int64 `[N]`, valid tokens of each sequence; `None` before the forward pass.

    Raises:
        ValueError: `temperature` is not positive, or `counterfactual_fraction` not 1 over an integer.
    """

    def __init__(
        self, temperature: float = 1.0, seeds: Sequence[int] | None = None, counterfactual_fraction: float = 1.0
    ):
        if not temperature > 0:
            raise ValueError(f"`temperature` must be positive, got {temperature}.")
        check_fraction(counterfactual_fraction)
        self.temperature = temperature
        self.seeds = seeds
        self.counterfactual_fraction = counterfactual_fraction
        self.gates: dict[int, torch.Tensor] = {}
        self.lengths: torch.Tensor | None = None

    def msr(self) -> torch.Tensor:
        """Model sparsity ratio of each sequence, float32 `[N]`, differentiable through the gates."""
        return model_sparsity(list(self.gates.values()))


@dataclass
class RoutingRecord:
    """What the routers decided for one prompt or training batch. Tensors stay on the model's devices until read.

    Args:
        mode_pair: kernel mode pair.
        sink_size: tokens.
        window_size: tokens.
        lengths: int64 `[B]`, valid tokens of each sequence.
        kv_bytes_per_token: bytes of one token's key and value in one head.
    """

    mode_pair: str
    sink_size: int
    window_size: int
    lengths: torch.Tensor
    kv_bytes_per_token: int = 0
    #: What computed the prompt: `"reference"`, `"triton"` or `"hopper"`; `"dense"` where both modes coincide.
    implementation: str | None = None
    logits_by_layer: dict[int, torch.Tensor] = field(default_factory=dict)
    decision_by_layer: dict[int, torch.Tensor] = field(default_factory=dict)
    xattn_share_by_layer: dict[int, torch.Tensor] = field(default_factory=dict)
    #: Slots of the cache of each sequence, int64 `[B]`, where it frees keys and values.
    slots_by_layer: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        """Indices of the routed layers."""
        return sorted(self.decision_by_layer)

    @property
    def decisions(self) -> torch.Tensor:
        """bool `[B, L, H]`, True = sparse."""
        return _stack(self.decision_by_layer)

    @property
    def logits(self) -> torch.Tensor:
        """float32 `[B, L, H, 2]`, order (retrieval, sparse)."""
        return _stack(self.logits_by_layer)

    @property
    def msr(self) -> torch.Tensor:
        """Model sparsity ratio, float32 `[B]`."""
        return model_sparsity(list(self.decision_by_layer.values()))

    @property
    def esr(self) -> torch.Tensor:
        """Effective sparsity ratio, mean over the routed layers, float32 `[B]`."""
        per_layer = [self._layer_sparsity(index) for index in self.layers]
        return torch.stack([esr.to(per_layer[0].device) for esr in per_layer]).mean(dim=0)

    @property
    def esr_last_layer(self) -> torch.Tensor:
        """Effective sparsity ratio of the last routed layer, float32 `[B]`."""
        return self._layer_sparsity(self.layers[-1])

    @property
    def kv_bytes_dense(self) -> torch.Tensor:
        """Bytes of keys and values that the routed layers hold for each sequence without routing, int64 `[B]`."""
        return self.kv_bytes_per_token * sum(self._whole_slots(index) for index in self.layers)

    @property
    def kv_bytes(self) -> torch.Tensor:
        """Bytes of keys and values that are held for each sequence, room for later tokens included, int64 `[B]`."""
        held = (self.slots_by_layer.get(index, self._whole_slots(index)) for index in self.layers)
        return self.kv_bytes_per_token * sum(slots.to(self.lengths.device) for slots in held)

    def _whole_slots(self, index: int) -> torch.Tensor:
        """Slots that a layer needs for each sequence without routing, int64 `[B]`."""
        return self.lengths * self.decision_by_layer[index].shape[1]

    def _layer_sparsity(self, index: int) -> torch.Tensor:
        """Share of causal query-key pairs that one layer does not compute, mean over its heads, float32 `[B]`."""
        decisions = self.decision_by_layer[index]
        skipped = {"FA": torch.zeros(decisions.shape, device=decisions.device)}
        streaming = streaming_sparsity(self.lengths.to(decisions.device), self.sink_size, self.window_size)
        skipped["SSA"] = streaming[:, None].expand(decisions.shape).float()
        # A head without a measured share kept every block: its sequence is no longer than two of them.
        skipped["XA"] = 1 - self.xattn_share_by_layer[index] if index in self.xattn_share_by_layer else skipped["FA"]
        retrieval, sparse = self.mode_pair.split("-")
        return torch.where(decisions, skipped[sparse], skipped[retrieval]).mean(dim=1)


def _stack(by_layer: dict[int, torch.Tensor]) -> torch.Tensor:
    tensors = [by_layer[index] for index in sorted(by_layer)]
    return torch.stack([tensor.to(tensors[0].device) for tensor in tensors], dim=1)


@dataclass
class ForwardState:
    """Travels with one forward pass from the decoder to each attention layer.

    Args:
        sequences: the sequences of a prompt or training batch; `None` when the pass continues a routed cache.
        sampling: sample decisions (training) instead of taking the most likely ones.
        tape: collects the gates of a training step.
        noise: layer index to uniform noise `[N, H, 2]`, when sampling.
        counterfactual_noise: layer index to noise `[N, H, strata]`, when sampling at a fraction below 1.
        forced: layer index to bool `[N or 1, H]`, when decisions are given.
        record: the record that this pass fills.
        pooled: layer index to pooled keys, filled inside `elastic_peft.similarity.pooled_keys`.
        keeps_keys: whether the cache must hold every token.
    """

    sequences: Sequences | None = None
    sampling: bool = False
    tape: RoutingTape | None = None
    noise: dict[int, torch.Tensor] | None = None
    counterfactual_noise: dict[int, torch.Tensor] | None = None
    forced: dict[int, torch.Tensor] | None = None
    record: RoutingRecord | None = None
    pooled: dict[int, torch.Tensor] | None = None
    keeps_keys: bool = False
    #: (Pool size, device) to (positions, valid): the same for every layer there, so worked out once.
    pooling: dict[tuple[int | None, torch.device], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def counterfactual(self, index: int, device: torch.device) -> tuple[float, torch.Tensor | None]:
        """`counterfactual_fraction` and `counterfactual_noise` of a layer's `routed_attention`, without a wait."""
        if self.tape is None or self.counterfactual_noise is None:
            return 1.0, None
        return self.tape.counterfactual_fraction, self.counterfactual_noise[index].to(device, non_blocking=True)


class DecoderScope:
    """What one thread has set for one decoder."""

    def __init__(self):
        self.forced: list[torch.Tensor | str] = []
        #: Prompt length of the running `generate`, so that no later forward pass pools generated tokens.
        self.prompt_end: int | None = None
        #: Whether the running `generate` may take back more tokens than a freed cache can.
        self.keeps_keys = False
        #: Layer index to pooled keys of the last forward pass, inside `elastic_peft.similarity.pooled_keys`.
        self.pooled: dict[int, torch.Tensor] | None = None
        self.record: RoutingRecord | None = None


class DecoderScopes(threading.local):
    """Each thread's scope for the decoder it sits on; never copied or saved with the decoder."""

    # torch.compile loses what is written to a thread-local itself, so it holds an ordinary object.
    def __init__(self):
        self.current = DecoderScope()

    def __deepcopy__(self, memo):
        return DecoderScopes()

    def __reduce__(self):
        return DecoderScopes, ()


def decoder_scope(decoder: nn.Module) -> DecoderScope:
    """The calling thread's scope for `decoder`."""
    return decoder.elastic_scopes.current


def routed_decoder(model: nn.Module) -> nn.Module:
    """The decoder inside `model` that an ELASTIC adapter routes.

    Args:
        model: a model with an ELASTIC adapter.

    Returns:
        The module whose `layers` hold the routed attention.

    Raises:
        ValueError: `model` has no ELASTIC adapter.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if hasattr(module, "elastic_handles") and hasattr(module, "layers"):
            return module
    raise ValueError(f"`model` must have an ELASTIC adapter, got {type(model).__name__} without one.")


def last_routing(model: nn.Module) -> RoutingRecord | None:
    """What the routers decided for the last prompt that this thread ran through `model`.

    Args:
        model: a model with an ELASTIC adapter.

    Returns:
        The record, or `None` before the first prompt. Decoding steps keep their prompt's record.

    Raises:
        ValueError: `model` has no ELASTIC adapter.
    """
    return decoder_scope(routed_decoder(model)).record


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Runs `model` in evaluation mode and gives each of its modules back the mode that it had.

    Args:
        model: any module.
    """
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in was_training.items():
            module.training = training


@contextmanager
def forced_routing(model: nn.Module, decisions: torch.Tensor | str) -> Iterator[None]:
    """Runs `model` with given decisions instead of the routers', in the calling thread.

    A cache that already holds decisions keeps them.

    Args:
        model: a model with an ELASTIC adapter.
        decisions: bool `[L, H]` or `[B, L, H]`, True = sparse, L counting the routed layers in order; or
            `"retrieval"` / `"sparse"` for every head.

    Raises:
        ValueError: `model` has no ELASTIC adapter; decisions of another shape or dtype.
    """
    decoder = routed_decoder(model)
    if isinstance(decisions, str):
        if decisions not in ("retrieval", "sparse"):
            raise ValueError(f"`decisions` must be 'retrieval', 'sparse' or a bool tensor, got {decisions!r}.")
    elif not isinstance(decisions, torch.Tensor) or decisions.dtype != torch.bool or decisions.ndim not in (2, 3):
        raise ValueError(f"`decisions` must be a bool tensor [L, H] or [B, L, H], got {_describe(decisions)}.")
    scope = decoder_scope(decoder)
    scope.forced.append(decisions)
    try:
        yield
    finally:
        scope.forced.pop()


def forced_by_layer(
    decisions: torch.Tensor | str, heads: dict[int, int], num_sequences: int
) -> dict[int, torch.Tensor]:
    """Forced decisions, as a forward pass looks them up.

    Args:
        decisions: as in `forced_routing`.
        heads: layer index to key-value heads, of the routed layers.
        num_sequences: sequences of the forward pass.

    Returns:
        Layer index to bool `[B or 1, H]`, True = sparse.

    Raises:
        ValueError: `decisions` has other sequences, layers or heads.
    """
    if isinstance(decisions, str):
        return {index: torch.full((1, count), decisions == "sparse") for index, count in heads.items()}
    if decisions.shape[-2] != len(heads) or any(count != decisions.shape[-1] for count in heads.values()):
        raise ValueError(
            f"`decisions` must cover {len(heads)} routed layers with {sorted(set(heads.values()))} heads each, "
            f"got {_describe(decisions)}."
        )
    by_row = decisions if decisions.ndim == 3 else decisions[None]
    if by_row.shape[0] not in (1, num_sequences):
        raise ValueError(f"`decisions` must cover {num_sequences} sequences, got {_describe(decisions)}.")
    return {index: by_row[:, position] for position, index in enumerate(sorted(heads))}


def _describe(value) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
