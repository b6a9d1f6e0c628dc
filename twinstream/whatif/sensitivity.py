"""How throughput answers to each property, by planning again; beside the prices of the bound."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import NonNegativeFloat

from twinstream.measures.metrics import Summary
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest
from twinstream.planner.warm_start import fits
from twinstream.schedule.document import Schedule, StepBound
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.sweep.workers import in_processes
from twinstream.whatif.properties import (
    Property,
    changed,
    properties_of,
    value_of,
    yield_of,
)

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

    request: PlanRequest
    one: Property
    changes: Sequence[float]
    known: tuple[Schedule, ...] = ()
    beat_tokens_per_s: float | None = None


@dataclass(frozen=True)
class _Unchanged:
    """The plan to start from, run as it is with a property changed."""

    request: PlanRequest
    one: Property
    change: float
    plan: Schedule


@dataclass(frozen=True)
class _Answered:
    changes: list[Change]
    faster: Schedule | None


def what_if(
    planner: Planner,
    request: PlanRequest,
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
    schedule = planner.plan(request)
    request = request.with_tokens(schedule.workload.tokens_per_step)  # so that answers compare
    base = yield_of(schedule, request)
    properties = properties_of(request)
    orders = {
        better: [(one, _from_the_worst(one, changes, better=better)) for one in properties]
        for better in (False, True)
    }
    answers: dict[tuple[str, float], Change] = {}

    def answer(series: list[_Series]) -> list[Schedule]:
        """Plans that beat what they were to."""
        faster = []
        for one, outcome in in_processes(_answer, series, max(1, num_jobs)):
            if isinstance(outcome, BaseException):
                raise outcome
            for change in outcome.changes:
                answers[one.one.name, change.change] = change
                on_plan()
            faster += [outcome.faster] if outcome.faster is not None else []
        return faster

    worse = [
        _Series(request, one, order, beat_tokens_per_s=base.tokens_per_s)
        for one, order in orders[False]
        if order
    ]
    schedule = planner.fastest_of(schedule, answer(worse), request)
    base = yield_of(schedule, request)
    answers |= _faster_unchanged(worse, schedule, answers, max(1, num_jobs))
    answer([_Series(request, one, order, (schedule,)) for one, order in orders[True] if order])
    found = [
        _sensitivity(request, schedule, base, one, [answers[one.name, c] for c in changes])
        for one in properties
    ]
    return WhatIf(
        base=base,
        policy=request.policy,
        tokens_per_step=schedule.workload.tokens_per_step,
        sensitivities=tuple(sorted(found, key=lambda s: -effect(s, base))),
        uncertainty=uncertainty_of(request.machine, schedule),
    )


def _faster_unchanged(
    worse: Sequence[_Series],
    plan: Schedule,
    answers: Mapping[tuple[str, float], Change],
    num_jobs: int,
) -> dict[tuple[str, float], Change]:
    """Where the plan to start from, as it is, is faster than what was planned for a worse value."""
    unchanged = [_Unchanged(s.request, s.one, change, plan) for s in worse for change in s.changes]
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


def num_plans(request: PlanRequest, changes: Sequence[float]) -> int:
    """How many plans `what_if` makes beyond the first."""
    return len(properties_of(request)) * len(changes)


def effect(one: Sensitivity, base: Summary) -> float:
    """The largest change of tokens/s either way; a plan that does not fit loses all of them."""
    return max(abs((c.tokens_per_s or 0.0) - base.tokens_per_s) for c in one.changes)


def _answer(series: _Series, planner: Planner) -> _Answered:
    found: list[Change] = []
    known = series.known
    for change in series.changes:
        request = changed(series.request, series.one, 1 + change)
        try:
            known = (planner.plan(request, known),)
        except TwinstreamError as error:
            found.append(Change(change=change, tokens_per_s=None, reason=str(error)))
            continue
        speed = yield_of(known[0], request).tokens_per_s
        found.append(Change(change=change, tokens_per_s=speed))
    beat = series.beat_tokens_per_s
    if not known or beat is None or yield_of(known[0], series.request).tokens_per_s <= beat:
        return _Answered(found, None)
    return _Answered(found, known[0])


def _yield_unchanged(unchanged: _Unchanged, planner: Planner) -> float | None:
    """Tokens/s; None where the plan does not fit."""
    request = changed(unchanged.request, unchanged.one, 1 + unchanged.change)
    fitting = fits(unchanged.plan, request.caps)
    return yield_of(unchanged.plan, request).tokens_per_s if fitting else None


def _sensitivity(
    request: PlanRequest,
    schedule: Schedule,
    base: Summary,
    one: Property,
    answers: Sequence[Change],
) -> Sensitivity:
    saves_s = _saved_s(request, schedule.bound, one)
    return Sensitivity(
        name=one.name,
        unit=one.unit,
        value=value_of(request, one) / one.unit_size,
        price_tokens_per_s=None
        if saves_s is None
        else max(0.0, saves_s) * base.tokens_per_s / base.step_time_s,
        lower_is_better=one.lower_is_better,
        changes=tuple(answers),
    )


def _saved_s(request: PlanRequest, bound: StepBound | None, one: Property) -> float | None:
    """Seconds of the step that one more unit saves, by the bound.

    The bound's prices of links are for what they reach; the profile's numbers are nominal.
    """
    if bound is None or one.price_of is None:
        return None
    if one.price_of not in bound.link_s_per_gb_per_s:
        prices = {"device": bound.device_s_per_gib, "host": bound.host_s_per_gib}
        return prices.get(one.price_of)
    (field,) = one.fields
    reached = request.machine.rate(field) / request.machine.number(field)
    return bound.link_s_per_gb_per_s[one.price_of] * reached
