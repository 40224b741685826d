"""What was judged of generalisation, as tables and in words."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from reproduction.examples import TASKS
from reproduction.generalisation import (
    CROSSED,
    LEFT_OUT,
    RECIPE,
    TOLERATED,
    UNSEEN,
    VARIED,
    Figures,
    Judgement,
    Training,
)


#: Prompts that training did not hold, as a clause.
_WHERE = {LEFT_OUT: "their set was left out", UNSEEN: "the phrasing is new"}


def long_rows(judged: Sequence[Judgement]) -> dict[str, list[dict[str, Any]]]:
    """A row for each set, by prompts and training in words."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for one in judged:
        title = one.prompts if one.training is RECIPE else f"{one.prompts}, {one.training.words} in training"
        row = {
            "set": one.set,
            "MSR trained": one.trained.msr,
            "MSR": one.measured.msr,
            "NLL over full, trained": one.trained.rise,
            "NLL over full": one.measured.rise,
            "routing follows": one.follows,
            "NLL": "lost" if one.loses else "kept",
        }
        tables.setdefault(title, []).append(row)
    return tables


def pivot(judged: Sequence[Judgement]) -> list[dict[str, str | None]]:
    """A row for each set by the recipe's training, a column for each kind of prompts; `explain` says what is in it."""
    judged = [one for one in judged if one.training is RECIPE]
    prompts = dict.fromkeys(one.prompts for one in judged)
    cells = {(one.set, one.prompts): _cell(one.measured, one.follows != "task", one.loses) for one in judged}
    trained = {one.set: _cell(one.trained) for one in judged}
    return [
        {"set": name, "as trained": trained[name], **{column: cells.get((name, column)) for column in prompts}}
        for name in TASKS
        if name in trained
    ]


def _cell(figures: Figures, strays: bool = False, loses: bool = False) -> str:
    msr, over_full = f"{figures.msr:.2f}", f"{figures.rise:+z.2f}"
    return f"{f'**{msr}**' if strays else msr}, {f'**{over_full}**' if loses else over_full}"


def explain(judged: Sequence[Judgement]) -> str:
    """What the judgements say, of other trainings too, and what the cells of `pivot` are.

    Paragraphs of Markdown; empty without judgements.
    """
    if not judged:
        return ""
    sentences = []
    by_prompts: dict[str, list[Judgement]] = {}
    for one in _of(judged, RECIPE):
        by_prompts.setdefault(one.prompts, []).append(one)
    if without := by_prompts.pop(LEFT_OUT, []):
        sentences.append(
            f"Of sets left out of training, the routing of {_strayed(without)} follows the template of the prompts, "
            "their fixed wording and kind of document, and not the task; "
            f"{_lost(without)} lose NLL."
        )
    if by_prompts:
        follow = (
            f"{prompts}, {_share([one.follows == 'task' for one in members])}"
            for prompts, members in by_prompts.items()
        )
        lost = sum(one.loses for members in by_prompts.values() for one in members)
        sentences.append(
            f"Sets whose routing follows the task: {'; '.join(follow)}. {lost or 'None'} of these lose NLL."
        )
    others = [_compare(judged, training) for training in (VARIED, CROSSED) if _of(judged, training)]
    cells = (
        "Each cell: MSR, and NLL above full attention in nats a token; as trained the mean of the training seeds, "
        "elsewhere one training. Bold MSR: over half way to that of the other kind of sets, question answering or "
        f"not, so routing has left the task. Bold NLL: lost, more than {TOLERATED:g} above full "
        "attention and grown by more than that."
    )
    return "\n\n".join([" ".join(sentences), *others, cells])


def _compare(judged: Sequence[Judgement], training: Training) -> str:
    """What another training changed, in the sets that both it and the recipe's have figures of.

    It helped if sets left out of training lose over `TOLERATED` nats less, mean of the sets.
    """
    sentences, helped = [], False
    for prompts in (LEFT_OUT, UNSEEN):
        changed = [one for one in _of(judged, training) if one.prompts == prompts]
        before = [one for one in _of(judged, RECIPE) if one.prompts == prompts]
        shared = {one.set for one in changed} & {one.set for one in before}
        if shared:
            changed, before = ([one for one in members if one.set in shared] for members in (changed, before))
            if prompts == LEFT_OUT:
                helped = _mean_rise(before) - _mean_rise(changed) > TOLERATED
            sentences.append(
                f"Where {_WHERE[prompts]}, {_strayed(changed)} sets follow the template ({_strayed(before)}) and "
                f"{_lost(changed)} lose NLL ({_lost(before)}); NLL over full, mean of these sets, is "
                f"{_mean_rise(changed):+z.2f} ({_mean_rise(before):+z.2f})."
            )
    verdict = "helped" if helped else "did not help"
    return f"Training with {training.words}, one seed, {verdict}; in brackets without it. {' '.join(sentences)}"


def _mean_rise(members: Sequence[Judgement]) -> float:
    return mean(one.measured.rise for one in members)


def _of(judged: Sequence[Judgement], training: Training) -> list[Judgement]:
    return [one for one in judged if one.training is training]


def _strayed(members: Sequence[Judgement]) -> str:
    return _share([one.follows != "task" for one in members])


def _lost(members: Sequence[Judgement]) -> str:
    return _share([one.loses for one in members])


def _share(are: Sequence[bool]) -> str:
    return f"{sum(are)} of {len(are)}"
