"""What was judged of generalisation, as tables and in words."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from reproduction.examples import ROBUST, SENSITIVE, TASKS
from reproduction.generalisation import (
    LEFT_OUT,
    ONE_TASK,
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
#: Training to what it holds that training on one task a document does not.
_MORE = {
    RECIPE: "other tasks over the same documents, and the recipe's pool, steps and targets",
    VARIED: "more wordings of the instructions, still one task a document",
}


def long_rows(judged: Sequence[Judgement]) -> dict[str, list[dict[str, Any]]]:
    """A row for each set, by prompts and training in words."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for one in judged:
        title = one.prompts if one.training is RECIPE else f"{one.prompts}; training had {one.training.words}"
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
            f"Of the {len(TASKS)} sets, {len(without)} were left out of training, one at a time. The routing of "
            f"{_strayed(without)} then follows the template of the prompts, their fixed wording and kind of document, "
            f"and not the task; {_lost(without)} lose NLL."
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
    comparisons = filter(None, (_compare(judged, training, ONE_TASK) for training in (RECIPE, VARIED)))
    cells = (
        "Each cell: MSR, and NLL above full attention in nats a token; as trained the mean of the training seeds, "
        "elsewhere one training. Bold MSR: moved towards that of the other kind of sets, question answering or not, "
        "by more than half of what is between the means of the kinds, so routing has left the task; a set whose MSR "
        f"lies between the kinds as trained hardly can. Bold NLL: lost, more than {TOLERATED:g} above full attention "
        "and grown by more than that."
    )
    return "\n\n".join([" ".join(sentences), *comparisons, cells])


def _compare(judged: Sequence[Judgement], training: Training, without: Training) -> str:
    """What a training changed, in the sets that both it and the one without have figures of.

    It helped if sets left out of training lose over `TOLERATED` nats less, mean of the sets; empty without such sets.
    """
    sentences, gains = [], {}
    for prompts in (LEFT_OUT, UNSEEN):
        sides = [[one for one in _of(judged, side) if one.prompts == prompts] for side in (training, without)]
        shared = set.intersection(*({one.set for one in members} for members in sides))
        if shared:
            changed, before = ([one for one in members if one.set in shared] for members in sides)
            gains[prompts] = _mean_rise(before) - _mean_rise(changed)
            sentences.append(
                f"Where {_WHERE[prompts]}, {_strayed(changed)} sets follow the template ({_strayed(before)}) and "
                f"{_lost(changed)} lose NLL ({_lost(before)}); NLL over full, mean of these sets, is "
                f"{_mean_rise(changed):+z.2f} ({_mean_rise(before):+z.2f})."
            )
            if prompts == LEFT_OUT:
                sentences.append(f"The sets left out: {', '.join(one.set for one in changed)}.")
    if LEFT_OUT not in gains:
        return ""
    verdict = "helped" if gains[LEFT_OUT] > TOLERATED else "did not help"
    begin = f"Training with {_MORE[training]}, one seed each, {verdict}; in brackets without them."
    trained = [{one.set: one.trained.msr for one in _of(judged, side)} for side in (training, without)]
    if training is RECIPE and all(shares.keys() == TASKS.keys() for shares in trained):
        apart = (_apart(shares) for shares in trained)
        sentences.append("On sets that training held, the kinds are {:.2f} of MSR apart ({:.2f}).".format(*apart))
    return " ".join([begin, *sentences])


def _apart(msr: Mapping[str, float]) -> float:
    """How far the MSR of the robust sets is above that of the sensitive ones."""
    return mean(msr[name] for name in ROBUST) - mean(msr[name] for name in SENSITIVE)


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
