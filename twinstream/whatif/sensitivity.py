"""How throughput answers to each property, by planning again; beside the prices of the bound."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import NonNegativeFloat

from twinstream.measures.metrics import Summary
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of
from twinstream.schedule.document import Schedule, StepBound
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.sweep.workers import in_processes
from twinstream.whatif.question import Property, Question, changed, properties_of, value_of

DEFAULT_CHANGES = (-0.5, -0.1, 0.1, 1.0)


class Change(Node):
    """A property times 1 + `change`; tokens/s are None where no plan fits, `reason` says why."""

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
    changes: tuple[Change, ...]


class WhatIf(Node):
    """Sensitivities, those with the largest effect first, and the plan that all start from."""

    base: Summary
    policy: str
    tokens_per_step: int
    sensitivities: tuple[Sensitivity, ...]
    uncertainty: Uncertainty


@dataclass(frozen=True)
class _Series:
    """Changes of a property to plan, the worst first.

    `known` has the plan of what is worse still, if there is one. With `beat_tokens_per_s` the last
    plan is wanted back if it yields more than that with nothing changed.
    """

    question: Question
    one: Property
    changes: Sequence[float]
    known: tuple[Schedule, ...] = ()
    beat_tokens_per_s: float | None = None


@dataclass(frozen=True)
class _Unchanged:
    """The plan to start from, run as it is with a property changed."""

    question: Question
    one: Property
    change: float
    plan: Schedule


@dataclass(frozen=True)
class _Answered:
    changes: list[Change]
    faster: Schedule | None


def what_if(
    question: Question,
    changes: Sequence[float] = DEFAULT_CHANGES,
    num_jobs: int = 1,
    on_plan: Callable[[], None] = lambda: None,
) -> WhatIf:
    """Plan again for every property and change; `on_plan` is called for each of these plans.

    A property's plans are made from its worst value to its best, the one to start from among them,
    and each is the one before if that is faster there; so is, with a worse value, the one to start
    from, so that nothing is said to cost more than it takes.

    Raises:
        TwinstreamError: the plan to start from cannot be made.
    """
    schedule, base = question.planned()
    properties = properties_of(question)
    orders = {
        better: [(one, _from_the_worst(one, changes, better=better)) for one in properties]
        for better in (False, True)
    }
    answers: dict[tuple[str, float], Change] = {}

    def answer(series: list[_Series]) -> list[Schedule]:
        """Plans that beat what they were to."""
        faster = []
        for one, outcome in in_processes(_answer, series, max(1, min(num_jobs, len(series)))):
            if isinstance(outcome, BaseException):
                raise outcome
            for change in outcome.changes:
                answers[one.one.name, change.change] = change
                on_plan()
            faster += [outcome.faster] if outcome.faster is not None else []
        return faster

    worse = [
        _Series(question, one, order, beat_tokens_per_s=base.tokens_per_s)
        for one, order in orders[False]
        if order
    ]
    schedule, base = question.best_of(schedule, answer(worse))
    answers |= _faster_unchanged(worse, schedule, answers, max(1, num_jobs))
    answer([_Series(question, one, order, (schedule,)) for one, order in orders[True] if order])
    found = [
        _sensitivity(question, schedule, base, one, [answers[one.name, c] for c in changes])
        for one in properties
    ]
    return WhatIf(
        base=base,
        policy=question.policy,
        tokens_per_step=schedule.workload.tokens_per_step,
        sensitivities=tuple(sorted(found, key=lambda s: -effect(s, base))),
        uncertainty=uncertainty_of(question.machine, schedule),
    )


def _faster_unchanged(
    worse: Sequence[_Series],
    plan: Schedule,
    answers: Mapping[tuple[str, float], Change],
    num_jobs: int,
) -> dict[tuple[str, float], Change]:
    """Where the plan to start from, as it is, is faster than what was planned for a worse value."""
    unchanged = [_Unchanged(s.question, s.one, change, plan) for s in worse for change in s.changes]
    faster = {}
    for one, tokens_per_s in in_processes(_yield_unchanged, unchanged, num_jobs):
        if isinstance(tokens_per_s, BaseException):
            raise tokens_per_s
        key = one.one.name, one.change
        if tokens_per_s is not None and tokens_per_s > (answers[key].tokens_per_s or 0.0):
            faster[key] = Change(change=one.change, tokens_per_s=tokens_per_s)
    return faster


def _from_the_worst(one: Property, changes: Sequence[float], *, better: bool) -> list[float]:
    """The changes of a property that make it better, or worse, the worst of them first."""
    sign = -1 if one.lower_is_better else 1
    return sorted((c for c in changes if (c * sign > 0) == better), key=lambda c: c * sign)


def num_plans(question: Question, changes: Sequence[float]) -> int:
    """How many plans `what_if` makes beyond the first."""
    return len(properties_of(question)) * len(changes)


def effect(one: Sensitivity, base: Summary) -> float:
    """The largest change of tokens/s either way; a plan that does not fit loses all of them."""
    return max(abs((c.tokens_per_s or 0.0) - base.tokens_per_s) for c in one.changes)


def _answer(series: _Series) -> _Answered:
    found: list[Change] = []
    known = series.known
    for change in series.changes:
        try:
            schedule, summary = changed(series.question, series.one, 1 + change).planned(known)
        except TwinstreamError as error:
            found.append(Change(change=change, tokens_per_s=None, reason=str(error)))
            continue
        found.append(Change(change=change, tokens_per_s=summary.tokens_per_s))
        known = (schedule,)
    last, beat = (known[0] if known else None), series.beat_tokens_per_s
    if last is None or beat is None or series.question.tokens_per_s(last) <= beat:
        return _Answered(found, None)
    return _Answered(found, last)


def _yield_unchanged(unchanged: _Unchanged) -> float | None:
    """Tokens/s; None where the plan does not fit."""
    question = changed(unchanged.question, unchanged.one, 1 + unchanged.change)
    return question.tokens_per_s(unchanged.plan) if question.fits(unchanged.plan) else None


def _sensitivity(
    question: Question,
    schedule: Schedule,
    base: Summary,
    one: Property,
    answers: Sequence[Change],
) -> Sensitivity:
    saves_s = _saved_s(question, schedule.bound, one)
    return Sensitivity(
        name=one.name,
        unit=one.unit,
        value=value_of(question, one) / one.unit_size,
        price_tokens_per_s=None
        if saves_s is None
        else max(0.0, saves_s) * base.tokens_per_s / base.step_time_s,
        lower_is_better=one.lower_is_better,
        changes=tuple(answers),
    )


def _saved_s(question: Question, bound: StepBound | None, one: Property) -> float | None:
    """Seconds of the step that one more unit saves, by the bound.

    The bound's prices of links are for what they reach; the profile's numbers are nominal.
    """
    if bound is None or one.price_of is None:
        return None
    if one.price_of not in bound.link_s_per_gb_per_s:
        prices = {"device": bound.device_s_per_gib, "host": bound.host_s_per_gib}
        return prices.get(one.price_of)
    (field,) = one.fields
    reached = question.machine.rate(field) / question.machine.number(field)
    return bound.link_s_per_gb_per_s[one.price_of] * reached
