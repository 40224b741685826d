"""Sparsity ratios, the regulariser that pulls them to their targets, and its multipliers. Torch only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file


SPARSITY_CONSTRAINTS = ("absolute", "signed")


def streaming_sparsity(lengths: torch.Tensor, sink_size: int, window_size: int) -> torch.Tensor:
    """Share of a sequence's causal query-key pairs that a streaming head does not compute.

    Args:
        lengths: integer `[N]`, tokens of each sequence.
        sink_size: leading tokens that every query attends, in tokens.
        window_size: most recent tokens, the query's own included, that every query attends, in tokens.

    Returns:
        float32 `[N]` in [0, 1); 0 for an empty sequence.

    Numerics: pairs are counted in int64, exact up to lengths of 2**31.
    """
    length = lengths.long()
    pairs = length * (length + 1) // 2
    windowed = _capped_sum(length, window_size)
    sinks = _capped_sum((length - window_size).clamp(min=0), sink_size)
    return (pairs - windowed - sinks).float() / pairs.clamp(min=1).float()


def _capped_sum(count: torch.Tensor, cap: int) -> torch.Tensor:
    """Sum of min(m, cap) over m = 1 ... count."""
    ramp = count.clamp(max=cap)
    return ramp * (ramp + 1) // 2 + (count - ramp) * cap


def model_sparsity(gates: Sequence[torch.Tensor]) -> torch.Tensor:
    """Model sparsity ratio of each sequence: the share of its routed key-value heads that are sparse.

    Args:
        gates: one `[N, H_l]` tensor per routed layer, 1 or True = sparse.

    Returns:
        float32 `[N]` on the first layer's device, differentiable through float gates.
    """
    device = gates[0].device
    return torch.cat([gate.to(device=device, dtype=torch.float32) for gate in gates], dim=1).mean(dim=1)


def task_counts(task_id: torch.Tensor, num_tasks: int) -> torch.Tensor:
    """Number of sequences of each task.

    Args:
        task_id: int64 `[N]`; a negative value marks padding that belongs to no task.
        num_tasks: T.

    Returns:
        int64 `[T]`.
    """
    return _membership(task_id, num_tasks).sum(dim=0)


def task_weights(task_id: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Weight of each sequence in the mean over the tasks present of the mean over each task's sequences.

    Args:
        task_id: int64 `[N]`, the sequences at hand; a negative value gets weight 0.
        counts: `[T]`, sequences of each task in the whole optimizer step, those at hand included.

    Returns:
        float32 `[N]`; over a whole step they sum to 1.
    """
    present = (counts > 0).sum()
    weights = 1.0 / (present * counts[task_id.clamp(min=0)]).float()
    return torch.where(task_id >= 0, weights, 0.0)


def regularizer(
    msr: torch.Tensor,
    task_id: torch.Tensor,
    targets: torch.Tensor,
    lambda1: torch.Tensor,
    lambda2: torch.Tensor,
    constraint: str,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum over sequences of `lambda1 * c + lambda2 * (MSR - t)**2`, the `lambda`s and `t` being its task's.

    `c` is `|MSR - t|` for the `"absolute"` constraint and `MSR - t` for the `"signed"` one.

    Args:
        msr: `[N]`, model sparsity ratio of each sequence.
        task_id: int64 `[N]`; a negative value marks padding, which needs weight 0.
        targets: `[T]`, t of each task.
        lambda1: `[T]`, multiplier of the linear term.
        lambda2: `[T]`, multiplier of the quadratic term.
        constraint: `"absolute"` or `"signed"`.
        weights: `[N]`, see `task_weights`.

    Returns:
        Scalar, differentiable through `msr`.

    Source: Elastic Attention, arXiv 2601.17367 (signed); its authors' reference code (absolute).
    """
    task = task_id.clamp(min=0)
    linear, quadratic = _constraint_terms(msr, targets[task], constraint)
    return (weights * (lambda1[task] * linear + lambda2[task] * quadratic)).sum()


def task_sums(msr: torch.Tensor, task_id: torch.Tensor, targets: torch.Tensor, constraint: str) -> torch.Tensor:
    """Sums over each task's sequences from which its means and its multipliers' gradients follow.

    They add over micro-batches and over processes.

    Args:
        msr: `[N]`, model sparsity ratio of each sequence.
        task_id: int64 `[N]`; negative values are left out.
        targets: `[T]`, t of each task.
        constraint: `"absolute"` or `"signed"`.

    Returns:
        float32 `[T, 4]`: number of sequences, sum of MSR, of the linear and of the quadratic constraint term.
    """
    msr = msr.detach()
    linear, quadratic = _constraint_terms(msr, targets[task_id.clamp(min=0)], constraint)
    values = torch.stack([torch.ones_like(msr), msr, linear, quadratic], dim=1)
    # A product rather than index_add_, whose order of summation is not fixed on every device.
    return _membership(task_id, targets.shape[0]).to(values.dtype).T @ values


def regularizer_of_sums(sums: torch.Tensor, lambda1: torch.Tensor, lambda2: torch.Tensor) -> torch.Tensor:
    """Value of the regulariser over all the sequences that `sums` covers.

    Args:
        sums: `[T, 4]`, see `task_sums`.
        lambda1: `[T]`, multiplier of the linear term.
        lambda2: `[T]`, multiplier of the quadratic term.

    Returns:
        Scalar: mean over the tasks present; 0 without any.
    """
    count, _, linear, quadratic = sums.unbind(dim=1)
    present = (count > 0).sum().clamp(min=1)
    return ((lambda1 * linear + lambda2 * quadratic) / count.clamp(min=1)).sum() / present


def _membership(task_id: torch.Tensor, num_tasks: int) -> torch.Tensor:
    return task_id[:, None] == torch.arange(num_tasks, device=task_id.device)


def _constraint_terms(msr: torch.Tensor, target: torch.Tensor, constraint: str) -> tuple[torch.Tensor, torch.Tensor]:
    difference = msr - target
    linear = difference.abs() if constraint == "absolute" else difference
    return linear, difference.square()


class Multipliers:
    """The two multipliers of each task, trained by gradient ascent on the regulariser.

    The gradients are closed forms: the task's mean linear constraint term for lambda1, its mean squared difference
    for lambda2. The loss divides both by the number of tasks present; that factor is left out, so that a task's
    ascent does not depend on which others share its step. A task without sequences in a step keeps its multipliers
    and their momentum.

    Multipliers are not clamped. lambda2's gradient is never negative, nor is lambda1's under `"absolute"`, so these
    never fall below their start in [0, 0.5). Under `"signed"` lambda1 is the multiplier of an equality constraint and
    may turn negative: it then rewards sparsity while MSR is below its target.

    Args:
        tasks: task names, in the order of `task_id`.
        learning_rate: peak learning rate of the ascent.
        seed: of the initial values, uniform in [0, 0.5).
        device: where the multipliers live.

    Source: Elastic Attention, arXiv 2601.17367.
    """

    def __init__(
        self, tasks: Sequence[str], *, learning_rate: float, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.tasks = tuple(tasks)
        self.learning_rate = learning_rate
        # Drawn on the CPU, so that every rank and every kind of device starts from the same values.
        initial = torch.rand(len(self.tasks), 2, generator=torch.Generator().manual_seed(seed)) / 2
        # One tensor a task: the optimizer then skips absent tasks and counts each task's own steps.
        self._values = [row.clone().to(device) for row in initial]
        self._optimizer = torch.optim.AdamW(
            self._values, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, maximize=True
        )

    @property
    def lambda1(self) -> torch.Tensor:
        """float32 `[T]`, multiplier of each task's linear term."""
        return torch.stack(self._values)[:, 0]

    @property
    def lambda2(self) -> torch.Tensor:
        """float32 `[T]`, multiplier of each task's quadratic term."""
        return torch.stack(self._values)[:, 1]

    def step(self, sums: torch.Tensor, lr_factor: float) -> None:
        """Takes one step of ascent.

        Args:
            sums: `[T, 4]`, `task_sums` of the whole optimizer step, reduced over processes.
            lr_factor: the learning rate schedule's factor at this step.

        Raises:
            ValueError: a task's sums are not finite; nothing has been changed then.
        """
        for task, (count, *values) in zip(self.tasks, sums.tolist(), strict=True):
            if count and not all(map(math.isfinite, values)):
                raise ValueError(
                    f"`msr` must be finite, got {values[0] / count} for task {task!r}: the routers' inputs or weights "
                    "are not finite. The multipliers were left as they were."
                )
        means = sums[:, 2:] / sums[:, :1].clamp(min=1)
        present = (sums[:, 0] > 0).tolist()
        for value, mean, is_present in zip(self._values, means, present, strict=True):
            value.grad = mean.to(value) if is_present else None
        self._optimizer.param_groups[0]["lr"] = self.learning_rate * lr_factor
        self._optimizer.step()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Values and optimizer state of every task, `{task}.{value, step, exp_avg, exp_avg_sq}`."""
        state = {}
        for task, value in zip(self.tasks, self._values, strict=True):
            state[f"{task}.value"] = value.detach().clone()
            for name, tensor in self._optimizer.state.get(value, {}).items():
                state[f"{task}.{name}"] = tensor.clone()
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: `state` belongs to other tasks; nothing has been changed then.
        """
        saved = {key.rpartition(".")[0] for key in state}
        if saved != set(self.tasks):
            raise ValueError(
                f"`state` must hold the multipliers of the tasks {', '.join(self.tasks)}, "
                f"got those of {', '.join(sorted(saved)) or 'none'}."
            )
        for task, value in zip(self.tasks, self._values, strict=True):
            value.copy_(state[f"{task}.value"])
            self._optimizer.state[value] = {
                # The step count stays on the CPU, where AdamW keeps it.
                name: state[f"{task}.{name}"].clone().to("cpu" if name == "step" else value.device)
                for name in ("step", "exp_avg", "exp_avg_sq")
                if f"{task}.{name}" in state
            }

    def save(self, path: str | Path) -> None:
        """Writes `state_dict` to a safetensors file."""
        save_file(self.state_dict(), path)

    def load(self, path: str | Path) -> None:
        """Reads what `save` wrote.

        Raises:
            ValueError: no readable file there, or as `load_state_dict`.
        """
        try:
            state = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"`path` must be a complete safetensors file of multipliers, got {path}: {error}"
            ) from error
        self.load_state_dict(state)
