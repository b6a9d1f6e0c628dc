"""A step with something changed: with the plan as it was, and planned anew."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import NonNegativeFloat

from twinstream.cost.bill import Bill
from twinstream.measures.uncertainty import Uncertainty
from twinstream.planner.planner import Planner
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.study.answer import Answer, Step
from twinstream.study.processes import answers_of
from twinstream.study.query import Property, Query, Subject
from twinstream.study.values import PRICE, Value, Values, written_values

Billing = Callable[[float, int, float | None], Bill | None]  # of tokens/s, GPUs, another price


@dataclass(frozen=True)
class Change:
    """What changes, as people read it and as values of a query; `price` is of a GPU-hour.

    `factor` is that of a property, where the change is one.
    """

    name: str
    values: Values
    now: str = ""
    then: str = ""
    price: float | None = None
    one: Property | None = None
    factor: float = 1.0

    @property
    def goodness(self) -> float:
        """The larger, the better the property is with it."""
        less = self.one is not None and self.one.lower_is_better
        return -self.factor if less else self.factor


class ChangedStep(Node):
    """A change, and the step with the plan or layout from before and with the fastest one.

    Each is None where there is none; its reason says why.
    """

    name: str
    now: str
    then: str
    values: Mapping[str, Value]
    kept: Step | None
    kept_reason: str
    anew: Step | None
    reason: str


class Gain(Node):
    """A property times 1 + `change`; tokens/s are None where nothing fits, `reason` says why."""

    change: float
    tokens_per_s: float | None
    reason: str = ""


class Sensitivity(Node):
    """What a property is worth.

    `value` and `price_tokens_per_s` are for `unit`; the price is what one more unit would bring by
    the lower bound, to first order. It is None where the bound has no price of the property.
    """

    name: str
    unit: str
    value: NonNegativeFloat
    price_tokens_per_s: float | None
    lower_is_better: bool
    changes: tuple[Gain, ...]


class WhatIf(Subject):
    """The step that all start from, and what each change does, the largest gain first.

    `sensitivities` are of properties that were changed one at a time, the largest effect first.
    """

    base: Step
    gap: float | None
    uncertainty: Uncertainty
    answers: tuple[ChangedStep, ...]
    sensitivities: tuple[Sensitivity, ...]


def usual_changes(query: Query, factors: Sequence[float] = ()) -> list[Change]:
    """Every property of the query, one at a time; those that profiles do not state are left out.

    Args:
        factors: of every number, instead of each property's own; counts where they come out whole.
    """
    found = []
    for one in query.properties:
        for factor in factors or one.factors:
            if not one.can_be(factor):
                continue
            now, then = (_shown(one, one.now * times) for times in (1.0, factor))
            unit = f" {one.unit}" if one.unit else ""
            name = f"{one.name} x {factor:g}"
            found.append(Change(name, one.times(factor), now, then + unit, None, one, factor))
    return found


def _shown(one: Property, value: float) -> str:
    return f"{value:,.0f}" if one.is_count else f"{value:,.4g}"


def written_change(texts: Sequence[str], query: Query) -> Change:
    """One change of all that is written as `nic_bytes_per_s=1e11`, `gpus=1024`, `tp=open`.

    Raises:
        StudyError: a text is none, names nothing that is known, or something twice.
    """
    values = dict(written_values(texts, query.kind))
    price = values.pop(PRICE, None)
    told = ", ".join(text.replace(" ", "") for text in texts)
    return Change(told, values, price=None if price is None else float(price))


@dataclass(frozen=True)
class _Series:
    """Changes to answer, the worst first; `found` has the fastest steps, where they are known."""

    query: Query
    changes: tuple[Change, ...]
    base: Answer
    found: tuple[Step | str, ...] = ()


@dataclass(frozen=True)
class _Answered:
    """The steps with the plan kept and with the fastest, or why there is none.

    `rival` is the fastest of the plans found, with nothing changed, where it beats the base's.
    """

    kept: tuple[Step | str, ...]
    anew: tuple[Step | str, ...]
    rival: Answer | None


def whatif(
    query: Query,
    changes: Sequence[Change] = (),
    billing: Billing = lambda tokens_per_s, num_gpus, price: None,
    num_jobs: int = 1,
    on_answer: Callable[[], None] = lambda: None,
) -> WhatIf:
    """Answer the query, then again with each change; those of one property the worst first.

    A plan or layout that is known of less is among the answers of more, the one to start from among
    those of every change, and theirs are tried with nothing changed: no change is said to bring or
    to cost what another plan does.

    Args:
        changes: by default `usual_changes`.
        billing: what a run is charged at tokens/s, on so many GPUs, at another price if any.
        num_jobs: processes.
        on_answer: called for each change when it was answered.

    Raises:
        TwinstreamError: there is no plan to start from, or a change names what is not there.
    """
    changes = changes or usual_changes(query)
    for change in changes:
        query.changed(change.values)
    base = query.answer()
    query, bound_s = query.following(base), base.bound_s
    groups: dict[str, list[Change]] = {}
    for change in changes:
        groups.setdefault(change.one.name if change.one else change.name, []).append(change)
    series = [
        _Series(query, tuple(sorted(group, key=lambda change: change.goodness)), base)
        for group in groups.values()
    ]

    def tell(answered: _Answered) -> None:
        for _ in answered.anew:
            on_answer()

    found = answers_of(_answer, series, num_jobs, tell)
    if rivals := [one.rival for one in found if one.rival is not None]:
        base = query.adopted(min(rivals, key=lambda one: one.step_s))
        series = [
            replace(one, base=base, found=known.anew)
            for one, known in zip(series, found, strict=True)
        ]
        found = answers_of(_answer, series, num_jobs)
    steps = {
        change.name: (change, kept, anew)
        for one, known in zip(series, found, strict=True)
        for change, kept, anew in zip(one.changes, known.kept, known.anew, strict=True)
    }
    answers = [_changed_step(*steps[change.name], billing) for change in changes]
    start = base.step(billing(base.tokens_per_s, base.num_gpus, None), whole=True)
    return WhatIf(
        **dict(query.subject),
        base=start,
        gap=base.gap if base.gap is not None or not bound_s else base.step_s / bound_s - 1,
        uncertainty=base.uncertainty,
        answers=tuple(sorted(answers, key=lambda one: -gain(one.anew, start))),
        sensitivities=_sensitivities(query, base, list(zip(changes, answers, strict=True))),
    )


def gain(one: Step | None, base: Step) -> float:
    """Change of tokens/s as a share; -1 where nothing fits."""
    return -1.0 if one is None else one.tokens_per_s / base.tokens_per_s - 1


def _answer(series: _Series, planner: Planner) -> _Answered:
    """Of each change in turn; the fastest plan of one is known to the next."""
    kept: list[Step | str] = []
    anew: list[Step | str] = []
    known: list[Answer] = []
    rival: Answer | None = None
    for number, change in enumerate(series.changes):
        query = series.query.changed(change.values)
        here = _or_reason(query.kept, series.base)
        kept.append(_step(here))
        fresh: Answer | Step | str
        if series.found:
            fresh = series.found[number]
        else:
            fresh = _or_reason(query.answer, known, planner, advises=isinstance(here, str))
        if not isinstance(here, str) and (isinstance(fresh, str) or here.step_s < fresh.step_s):
            fresh = here
        anew.append(fresh if isinstance(fresh, Step) else _step(fresh))
        if isinstance(fresh, Answer):
            known = [fresh]
            unchanged = series.base if fresh is here else _or_reason(series.query.kept, fresh)
            best_s = series.base.step_s if rival is None else rival.step_s
            if not isinstance(unchanged, str) and unchanged.step_s < best_s:
                rival = unchanged
    return _Answered(tuple(kept), tuple(anew), rival)


def _or_reason(ask: Callable[..., Answer], *given: Any, **named: Any) -> Answer | str:
    """An answer, or why there is none."""
    try:
        return ask(*given, **named)
    except TwinstreamError as error:
        return str(error)


def _step(found: Answer | str) -> Step | str:
    return found if isinstance(found, str) else found.step()


def _changed_step(
    change: Change, kept: Step | str, anew: Step | str, billing: Billing
) -> ChangedStep:
    def charged(one: Step | str) -> Step | None:
        if isinstance(one, str):
            return None
        bill = billing(one.tokens_per_s, one.num_gpus, change.price)
        return one.model_copy(update={"bill": bill})

    return ChangedStep(
        name=change.name, now=change.now, then=change.then, values=dict(change.values),
        kept=charged(kept), kept_reason=kept if isinstance(kept, str) else "",
        anew=charged(anew), reason=anew if isinstance(anew, str) else "",
    )  # fmt: skip


def _sensitivities(
    query: Query, base: Answer, answers: Sequence[tuple[Change, ChangedStep]]
) -> tuple[Sensitivity, ...]:
    """Of the properties that were changed, the largest effect first."""
    gains: dict[str, tuple[Property, list[Gain]]] = {}
    for change, found in answers:
        if change.one is None:
            continue
        _, mine = gains.setdefault(change.one.name, (change.one, []))
        speed = None if found.anew is None else found.anew.tokens_per_s
        factor = round(change.factor - 1, 12)
        mine.append(Gain(change=factor, tokens_per_s=speed, reason=found.reason))
    made = []
    for one, mine in gains.values():
        saved_s = query.saved_s(base, one)
        price = None if saved_s is None else max(0.0, saved_s) * base.tokens_per_s / base.step_s
        made.append(
            Sensitivity(
                name=one.name, unit=one.unit, value=one.now, price_tokens_per_s=price,
                lower_is_better=one.lower_is_better, changes=tuple(mine),
            )
        )  # fmt: skip
    return tuple(sorted(made, key=lambda one: -_effect(one, base)))


def _effect(one: Sensitivity, base: Answer) -> float:
    """The largest change of tokens/s either way; what does not fit loses all of them."""
    return max(abs((c.tokens_per_s or 0.0) - base.tokens_per_s) for c in one.changes)
