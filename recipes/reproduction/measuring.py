"""Answer likelihood, accuracy and sparsity of examples under a routed model or under given masks."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from reproduction.examples import Example
from torch import nn

from elastic_peft import forced_routing, last_routing


@dataclass(frozen=True)
class Measurement:
    """One example's figures.

    Args:
        nll: nats per answer token.
        accuracy: share of the answer tokens that are the most likely ones, given those before.
        msr: share of sparse heads.
        esr: share of causal query-key pairs that are not computed, mean over layers.
        esr_last_layer: the same of the last layer.
    """

    nll: float
    accuracy: float
    msr: float
    esr: float
    esr_last_layer: float


@dataclass(frozen=True)
class Measured:
    """Measurements of some examples, in order; their decisions, bool `[N, L, H]`; what computed the prompts."""

    examples: Sequence[Example]
    rows: list[Measurement]
    decisions: torch.Tensor
    implementations: tuple[str, ...]

    def table(self) -> list[dict]:
        """Means over each set's examples, their NLL one by one, and how often each head was sparse, `[L, H]`."""
        table = []
        for name in dict.fromkeys(example.set for example in self.examples):
            members = [index for index, example in enumerate(self.examples) if example.set == name]
            figures = torch.tensor([list(asdict(self.rows[index]).values()) for index in members]).mean(dim=0)
            frequency = self.decisions[members].float().mean(dim=0)
            table.append(
                {
                    "task": self.examples[members[0]].task,
                    "set": name,
                    "n": len(members),
                    **dict(zip(Measurement.__dataclass_fields__, figures.tolist())),
                    "nll_by_example": [round(self.rows[index].nll, 4) for index in members],
                    "frequency": [[round(share, 4) for share in heads] for heads in frequency.tolist()],
                }
            )
        return table


@torch.inference_mode()
def measure(
    model: nn.Module, examples: Sequence[Example], batch_size: int, forced: torch.Tensor | str | None = None
) -> Measured:
    """Runs examples in batches and measures each.

    Args:
        model: with an ELASTIC adapter, in evaluation mode.
        examples: in the order in which they are batched.
        batch_size: rows of a batch.
        forced: decisions instead of the routers', as for `forced_routing`; `[N, L, H]` gives each example its own.

    Raises:
        RuntimeError: the model is on a GPU and something else than the fused kernels computed a prompt.
    """
    rows: list[Measurement] = []
    decisions, implementations = [], set()
    for first in range(0, len(examples), batch_size):
        members = slice(first, first + batch_size)
        own = isinstance(forced, torch.Tensor) and forced.ndim == 3
        chosen = forced[members] if own else forced  # type: ignore[index]
        with nullcontext() if chosen is None else forced_routing(model, chosen):
            likelihoods = list(_likelihoods(model, examples[members]))
        record = last_routing(model)
        assert record is not None
        if model.device.type == "cuda" and record.implementation == "reference":
            raise RuntimeError("A prompt on a GPU must run the fused kernels, got the reference.")
        implementations.add(str(record.implementation))
        decisions.append(record.decisions.cpu())
        ratios = zip(record.msr.tolist(), record.esr.tolist(), record.esr_last_layer.tolist())
        rows += [Measurement(*likelihood, *ratio) for likelihood, ratio in zip(likelihoods, ratios)]
    return Measured(examples, rows, torch.cat(decisions), tuple(sorted(implementations)))


def _likelihoods(model: nn.Module, examples: Sequence[Example]) -> Iterator[tuple[float, float]]:
    """NLL and accuracy of each example of a batch. Rows end together, so that the answers are the last columns."""
    lengths = torch.tensor([len(example.ids) for example in examples])
    answers = torch.tensor([len(example.ids) - example.prompt_end for example in examples])
    width, kept = int(lengths.max()), int(answers.max())
    ids = torch.zeros(len(examples), width, dtype=torch.int64)
    for row, example in zip(ids, examples):
        row[width - len(example.ids) :] = torch.tensor(example.ids)
    mask = torch.arange(width) >= (width - lengths)[:, None]
    inputs = {"input_ids": ids, "attention_mask": mask.long(), "prompt_end": width - answers}
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    logits = model(**inputs, logits_to_keep=kept + 1, use_cache=False).logits[:, :-1].float()
    targets = inputs["input_ids"][:, -kept:]
    counted = (torch.arange(kept) >= (kept - answers)[:, None]).to(model.device)
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    hits = (logits.argmax(dim=-1) == targets).float()
    means = [(values * counted).sum(dim=1) / counted.sum(dim=1) for values in (losses, hits)]
    return zip(*(values.tolist() for values in means))
