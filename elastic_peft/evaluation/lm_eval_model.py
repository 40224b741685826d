"""The model `elastic` of lm_eval: a model with an ELASTIC adapter that routes by each request's prompt alone.

    python -m elastic_peft.run lm_eval --model elastic --model_args pretrained=MODEL,peft=ADAPTER --tasks longbench_e

LongBench is `longbench`, LongBench-E `longbench_e` and LongBench-v2 `longbench2`. Needs lm_eval.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from statistics import mean
from typing import Any

import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ..context import last_routing, routed_decoder


logger = logging.getLogger(__name__)

Request = tuple[Any, list[int], list[int]]


@register_model("elastic")
class ElasticLM(HFLM):
    """lm_eval's Hugging Face model for ELASTIC adapters; the arguments are those of `HFLM`, `peft` among them.

    A likelihood's context is its prompt: what follows it does not reach the routers. Rows of a batch are routed one by
    one, so the batch size changes no result beyond rounding.

    Raises:
        ValueError: the model has no ELASTIC adapter.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        routed_decoder(self.model)
        #: Task to the MSR and ESR of each prompt that this process ran.
        self.ratios: dict[str, list[tuple[float, float]]] = {}
        self._task = ""

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one; see `lm_eval.api.model.LM`."""
        return self._task_by_task(super().loglikelihood, requests, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context; see `lm_eval.api.model.LM`."""
        return self._task_by_task(super().generate_until, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refused: whole texts have no prompt to route by."""
        raise ValueError(
            "`tasks` must score answers to prompts, got a likelihood of whole texts, which have no prompt."
        )

    def routing(self) -> dict[str, dict[str, float]]:
        """Mean MSR and ESR over the prompts of each task."""
        return {
            task: dict(zip(("msr", "esr"), map(mean, zip(*ratios)))) for task, ratios in self.ratios.items() if ratios
        }

    def get_model_info(self) -> dict:
        """What lm_eval writes into its results about the model, and `routing`."""
        return {**super().get_model_info(), "routing": self.routing()}

    def _task_by_task(self, run: Callable, requests: list[Instance], disable_tqdm: bool) -> list:
        """`run` on the requests of one task after the other, so that each prompt's routing belongs to a task."""
        answers: list = [None] * len(requests)
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(request.task_name or "", []).append(place)
        for self._task, of_task in places.items():
            results = run([requests[place] for place in of_task], disable_tqdm=disable_tqdm)
            for place, result in zip(of_task, results, strict=True):
                answers[place] = result
        return answers

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        rows = _rows(requests, self.max_length)
        if self.batch_size == "auto":
            batch_size = self._detect_batch_size([requests[rows[0].requests[0]]]) if rows else 1
        else:
            batch_size = int(self.batch_size)
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for first in range(0, len(rows), batch_size):
                batch = rows[first : first + batch_size]
                for row, log_probs in zip(batch, self._log_probs(batch)):
                    for index in row.requests:
                        key, _, continuation = requests[index]
                        answers[index] = _score(log_probs, continuation)
                        if key is not None:
                            self.cache_hook.add_partial("loglikelihood", key, answers[index])
                    bar.update(len(row.requests))
        return [answers[index] for index in range(len(requests))]

    @torch.inference_mode()
    def _log_probs(self, rows: list[_Row]) -> list[torch.Tensor]:
        """For each row the log-probabilities of the tokens that follow its prompt, `[n, vocabulary]`."""
        tokens = [torch.tensor(row.tokens) for row in rows]
        input_ids = pad_sequence(tokens, batch_first=True).to(self.device)
        mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True).to(self.device)
        prompt_end = torch.tensor([row.prompt_end for row in rows], device=self.device)
        # Logits of all places would take gigabytes. Indices on the CPU reach the head on whichever device it is.
        places = torch.tensor(sorted({place for row in rows for place in row.predicting}))
        dtype = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            logits = self.model(
                input_ids=input_ids,
                attention_mask=mask,
                prompt_end=prompt_end,
                use_cache=False,
                logits_to_keep=places,
            ).logits
        self._keep_routing()
        kept = [torch.searchsorted(places, torch.tensor(row.predicting)) for row in rows]
        dtype = self.softmax_dtype or torch.float32
        return [logits[index, of_row].log_softmax(-1, dtype=dtype) for index, of_row in enumerate(kept)]

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        sequences = super()._model_generate(context, max_length, stop, **kwargs)
        self._keep_routing()
        return sequences

    def _keep_routing(self) -> None:
        record = last_routing(self.model)
        assert record is not None
        self.ratios.setdefault(self._task, []).extend(zip(record.msr.tolist(), record.esr.tolist()))


@dataclass(frozen=True)
class _Row:
    """One sequence to run: its tokens, where its prompt ends, and the requests that it answers."""

    tokens: list[int]
    prompt_end: int
    requests: list[int]

    @property
    def predicting(self) -> range:
        """The places whose logits predict the tokens after the prompt."""
        return range(self.prompt_end - 1, len(self.tokens))


def _rows(requests: list[Request], max_length: int) -> list[_Row]:
    """Rows for requests, the longest first; continuations of one prompt that differ in their last token share one.

    Raises:
        ValueError: a continuation does not fit into the model.
    """
    shared: dict[tuple[tuple[int, ...], int], list[int]] = {}
    longest = max((len(context) + len(continuation) - 1 for _, context, continuation in requests), default=0)
    if longest > max_length:
        logger.warning("Contexts lose their beginning: %d tokens, of which %d fit.", longest, max_length)
    for index, (_, context, continuation) in enumerate(requests):
        if len(continuation) > max_length:
            raise ValueError(f"`max_length` must be at least {len(continuation)} for this answer, got {max_length}.")
        # The last token is only predicted; a context that does not fit loses its beginning.
        tokens = (context + continuation)[-max_length - 1 : -1]
        shared.setdefault((tuple(tokens), len(tokens) + 1 - len(continuation)), []).append(index)
    rows = [_Row(list(tokens), prompt_end, indices) for (tokens, prompt_end), indices in shared.items()]
    return sorted(rows, key=lambda row: -len(row.tokens))


def _score(log_probs: torch.Tensor, continuation: list[int]) -> tuple[float, bool]:
    """Log-likelihood of a continuation, and whether each of its tokens is the likeliest."""
    tokens = torch.tensor(continuation, device=log_probs.device)
    likelihood = log_probs.gather(1, tokens[:, None]).sum().item()
    return likelihood, bool((log_probs.argmax(-1) == tokens).all())


def report_routing() -> None:
    """Makes `lm_eval.simple_evaluate` put the mean MSR and ESR of `elastic` models beside each task's scores."""
    evaluate = lm_eval.simple_evaluate

    @wraps(evaluate)
    def evaluate_and_report(*args: Any, **kwargs: Any):
        results = evaluate(*args, **kwargs)
        if results is not None:
            for task, ratios in results["config"].get("routing", {}).items():
                results["results"][task].update({f"{name},none": value for name, value in ratios.items()})
        return results

    lm_eval.simple_evaluate = evaluate_and_report
