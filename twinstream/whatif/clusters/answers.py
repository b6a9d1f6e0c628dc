"""A step on a cluster with something changed: with the layout as it was, and searched anew."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinstream.clusters.job import Job
from twinstream.clusters.layout import Layout
from twinstream.clusters.predict import Prediction, predict
from twinstream.clusters.refusals import require_possible
from twinstream.clusters.search.question import Question, Value
from twinstream.clusters.search.space import told
from twinstream.cost.bill import Bill
from twinstream.planner.planner import Planner
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.sweep.workers import in_processes
from twinstream.whatif.clusters.changes import ClusterChange, kept_job

Billing = Callable[[float, int, float | None], Bill | None]  # of tokens/s, GPUs, another price
_GIB = 2**30


class LaidOut(Node):
    """A step of a layout, simulated whole; `told` is the layout in words."""

    layout: Layout
    told: str
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    memory_bytes: int
    shares: Mapping[str, float]
    bill: Bill | None = None


class ClusterAnswer(Node):
    """A change, and the step with the layout from before and with the fastest one.

    Each is None where there is none; its reason says why.
    """

    name: str
    now: str
    then: str
    values: Mapping[str, Value]
    kept: LaidOut | None
    kept_reason: str
    anew: LaidOut | None
    reason: str


class ClusterWhatIf(Node):
    """Answers, those with the largest effect first, and the step that all start from."""

    model: str
    cluster: str
    num_gpus: int
    tokens_per_step: int
    base: LaidOut
    gap: float
    answers: tuple[ClusterAnswer, ...]


Simulated = tuple[Job, Prediction]  # of a layout


@dataclass(frozen=True)
class _Asked:
    """`layout` is the one to keep; `anew` is None where the fastest one is still to be searched."""

    question: Question
    change: ClusterChange
    layout: Layout
    keep: int
    anew: Simulated | str | None = None


@dataclass(frozen=True)
class _Found:
    """Two steps, or the reasons why there is none."""

    kept: Simulated | str
    anew: Simulated | str


def what_if_on_cluster(
    question: Question,
    changes: Sequence[ClusterChange],
    billing: Billing,
    keep: int = 3,
    num_jobs: int = 1,
    on_answer: Callable[[], None] = lambda: None,
) -> ClusterWhatIf:
    """Search the layout to start from, then again with each change.

    The layout to start from is among the answers of every search, and theirs are tried with nothing
    changed, so that no change is said to bring or to cost what another layout does.

    Args:
        keep: of each search, how many layouts are simulated whole.

    Raises:
        TwinstreamError: there is no layout to start from, or a change names what is not there.
    """
    for change in changes:
        question.changed(change.values)
    searched = question.answer(keep)
    best = searched.best[0]
    base: Simulated = question.job.model_copy(update={"layout": best.layout}), best.prediction
    asked = [_Asked(question, change, best.layout, keep) for change in changes]
    found = _found(asked, num_jobs, on_answer)
    while (rival := _rival(question, base, found)) is not None:
        base = rival
        asked = [
            replace(one, layout=base[0].layout, anew=known.anew)
            for one, known in zip(asked, found, strict=True)
        ]
        found = _found(asked, num_jobs)
    start = laid_out(*base, billing, None)
    answers = [_answered(c, one, billing) for c, one in zip(changes, found, strict=True)]
    return ClusterWhatIf(
        model=question.job.shape.name,
        cluster=question.cluster.name,
        num_gpus=question.num_gpus,
        tokens_per_step=question.job.tokens_per_step,
        base=start,
        gap=start.step_s / searched.least_bound_s - 1,
        answers=tuple(sorted(answers, key=lambda one: -gain(one.anew, start))),
    )


def _found(
    asked: Sequence[_Asked], num_jobs: int, on_answer: Callable[[], None] = lambda: None
) -> list[_Found]:
    """In the order of what is asked."""
    found: dict[str, _Found] = {}
    for one, outcome in in_processes(_find, asked, max(1, num_jobs)):
        if isinstance(outcome, BaseException):
            raise outcome
        found[one.change.name] = outcome
        on_answer()
    return [found[one.change.name] for one in asked]


def _rival(question: Question, base: Simulated, found: Sequence[_Found]) -> Simulated | None:
    """The fastest of the layouts found, with nothing changed; None where it is the base's."""
    layouts = {one.anew[0].layout: None for one in found if not isinstance(one.anew, str)}
    rivals = [
        rival
        for layout in layouts
        if layout != base[0].layout and not isinstance(rival := kept_step(question, layout), str)
    ]
    best = min(rivals, key=lambda one: one[1].step_s, default=base)
    return best if best[1].step_s < base[1].step_s else None


def gain(one: LaidOut | None, base: LaidOut) -> float:
    """Change of tokens/s as a share; -1 where there is no layout."""
    return -1.0 if one is None else one.tokens_per_s / base.tokens_per_s - 1


def _find(asked: _Asked, _: Planner) -> _Found:
    question = asked.question.changed(asked.change.values)
    kept = kept_step(question, asked.layout)
    anew = fastest_step(question, asked.keep) if asked.anew is None else asked.anew
    if not isinstance(kept, str) and (isinstance(anew, str) or kept[1].step_s < anew[1].step_s):
        anew = kept
    return _Found(kept, anew)


def fastest_step(question: Question, keep: int) -> Simulated | str:
    """Of all layouts, or why there is none."""
    try:
        best = question.answer(keep).best[0]
    except TwinstreamError as error:
        return str(error)
    return question.job.model_copy(update={"layout": best.layout}), best.prediction


def kept_step(question: Question, layout: Layout) -> Simulated | str:
    """Of a layout from before, or why it cannot be or does not fit."""
    job = kept_job(question, layout)
    try:
        require_possible(job, question.num_gpus)
        prediction = predict(job, question.cluster)
    except TwinstreamError as error:
        return str(error)
    if not prediction.fits:
        needs, room = prediction.memory_bytes / _GIB, prediction.room_bytes / _GIB
        return f"{told(job.layout)} needs {needs:.1f} GiB of a GPU's {room:.1f}"
    return job, prediction


def _answered(change: ClusterChange, found: _Found, billing: Billing) -> ClusterAnswer:
    sides: dict[str, Any] = {}
    for name, reason, side in (
        ("kept", "kept_reason", found.kept), ("anew", "reason", found.anew),
    ):  # fmt: skip
        why = side if isinstance(side, str) else ""
        one = None if isinstance(side, str) else laid_out(*side, billing, change.price)
        sides |= {name: one, reason: why}
    return ClusterAnswer(
        name=change.name, now=change.now, then=change.then, values=dict(change.values), **sides
    )


def laid_out(job: Job, prediction: Prediction, billing: Billing, price: float | None) -> LaidOut:
    """A step as people and programs read it."""
    speed, num_gpus = prediction.tokens_per_s, prediction.num_gpus
    return LaidOut(
        layout=job.layout,
        told=told(job.layout),
        step_s=prediction.step_s,
        tokens_per_s=speed,
        tokens_per_s_per_gpu=speed / num_gpus,
        mfu=prediction.mfu,
        memory_bytes=prediction.memory_bytes,
        shares=dict(prediction.shares),
        bill=billing(speed, num_gpus, price),
    )
