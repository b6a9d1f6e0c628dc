"""The smallest value of a property with which a step reaches a throughput."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import log

from twinstream.measures.uncertainty import Uncertainty
from twinstream.planner.planner import Planner
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.study.answer import Answer, Step, StudyError
from twinstream.study.processes import answers_of
from twinstream.study.query import Property, Query, Subject

_CLOSE = 1.02
_NEAR = _CLOSE**0.75  # beside an end: where it moves the other end, that is the answer
_MOST_DOUBLINGS = 5
_MOST_HALVINGS = 6
_TARGET = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*(%|(?:tok|tokens)/s)")


class Reached(Node):
    """The smallest value of a property that reaches the target, everything else as it is.

    It lies within 2 % above the smallest that is found with the least search; of GPUs it is doubled
    and halved. Where `less_may_do`, every smaller value that was tried reached the target, too.
    `value` is None where the property alone never reaches it; `tokens_per_s` is then the most that
    was found, at `tried` of `unit`. `layout_text` is the layout then, "" of one device.
    """

    name: str
    unit: str
    now: float
    value: float | None
    tried: float
    tokens_per_s: float
    layout_text: str
    less_may_do: bool = False


class TargetFound(Subject):
    """What reaches a throughput; `compute_limit_tokens_per_s` is what percentages are of.

    `is_confirmed`: values were searched with the least effort, and planned with the usual one.
    """

    target_tokens_per_s: float
    compute_limit_tokens_per_s: float
    base: Step
    found: tuple[Reached, ...]
    uncertainty: Uncertainty
    is_confirmed: bool


def check_target(text: str) -> None:
    """Raise StudyError where `target_of` would."""
    target_of(text, 1.0)


def target_of(text: str, limit_tokens_per_s: float) -> float:
    """Tokens/s of `12000tok/s`, or of `95%` of a limit.

    >>> target_of("12,000 tok/s", 1.0), target_of("95%", 1000.0)
    (12000.0, 950.0)

    Raises:
        StudyError: the text is neither.
    """
    match = _TARGET.fullmatch(text.strip())
    number = float(re.sub("[_,]", "", match[1])) if match else 0.0
    if match is None or number <= 0 or (match[2] == "%" and number >= 100):
        raise StudyError(
            f"cannot read the target '{text}'; write it as 12000tok/s, or as 95% of what the "
            "machine's compute could do without waits and recompute (less than 100%)"
        )
    return number / 100 * limit_tokens_per_s if match[2] == "%" else number


@dataclass(frozen=True)
class _Search:
    query: Query
    one: Property
    target_tokens_per_s: float
    base: Answer


def searched_properties(query: Query) -> list[Property]:
    """Those that `search_target` searches."""
    return [one for one in query.properties if one.for_target]


def search_target(
    query: Query, text: str, num_jobs: int = 1, on_found: Callable[[], None] = lambda: None
) -> TargetFound:
    """Search the smallest value of each memory, link and number of GPUs, each alone, for a target.

    The search is with the least effort; what it finds is confirmed with the query's own.

    Args:
        text: the target, as `target_of` reads it.
        num_jobs: processes.
        on_found: called after each property.

    Raises:
        TwinstreamError: the target cannot be read, or there is no plan to start from.
    """
    base = query.answer()
    query = query.following(base)
    limit = base.compute_limit()
    target = target_of(text, limit)
    searches = [_Search(query, one, target, base) for one in searched_properties(query)]
    found = answers_of(_searched, searches, num_jobs, lambda one: on_found())
    return TargetFound(
        **dict(query.subject),
        target_tokens_per_s=target,
        compute_limit_tokens_per_s=limit,
        base=base.step(whole=True),
        found=tuple(found),
        uncertainty=base.uncertainty,
        is_confirmed=query.quick != query,
    )


class _Tried:
    """What throughput came of which factor, and the answers; less is known to more."""

    def __init__(self, search: _Search, query: Query, planner: Planner) -> None:
        self._search, self._query, self._planner = search, query, planner
        self.speeds = {1.0: search.base.tokens_per_s}
        self.answers = {1.0: search.base}

    def reaches(self, factor: float) -> bool:
        if factor not in self.speeds:
            self.speeds[factor] = self._answered(factor)
        return self.speeds[factor] >= self._search.target_tokens_per_s

    @property
    def best(self) -> float:
        """The factor of the most throughput."""
        return max(self.answers, key=lambda factor: self.speeds.get(factor, 0.0))

    def _answered(self, factor: float) -> float:
        search = self._search
        if not search.one.can_be(factor):
            return 0.0
        query = self._query.changed(search.one.times(factor))
        less = max((known for known in self.answers if known <= factor), default=None)
        known = [] if less is None else [self.answers[less]]
        try:
            answer = query.answer(
                known, self._planner, enough_tokens_per_s=search.target_tokens_per_s, advises=False
            )
        except TwinstreamError:
            return 0.0
        self.answers[factor] = answer
        return answer.tokens_per_s


def _searched(search: _Search, planner: Planner) -> Reached:
    """Double or halve until the target lies between, and close in on it; then confirm it."""
    quick, one = search.query.quick, search.one
    tried = _Tried(search, quick, planner)
    low, high = bracket(tried.reaches, tried.reaches(1.0))
    if low is not None and high is not None and not one.is_count:
        high = _closed_in(tried, search.target_tokens_per_s, low, high)
    if quick != search.query:
        best = high if high is not None else tried.best
        confirmed = _Tried(search, search.query, planner)
        confirmed.answers |= tried.answers
        high, tried = (best if confirmed.reaches(best) else None), confirmed
    best = high if high is not None else tried.best
    return Reached(
        name=one.name,
        unit=one.unit,
        now=one.now,
        value=None if high is None else one.now * high,
        tried=one.now * best,
        tokens_per_s=tried.speeds[best],
        layout_text=tried.answers[best].layout_text,
        less_may_do=low is None,
    )


def _closed_in(tried: _Tried, target: float, low: float, high: float) -> float:
    """The factor that reaches the target, within `_CLOSE` of one that does not.

    Looked for where the speeds at both ends put it, and in the middle where that has twice moved
    the same end.
    """
    moved: list[bool] = []
    while high / low > _CLOSE:
        middle = (low * high) ** 0.5
        slow, fast = tried.speeds[low], tried.speeds[high]
        if slow > 0 and moved[-2:] not in ([True, True], [False, False]):
            guess = low * (high / low) ** (log(target / slow) / log(fast / slow))
            middle = min(max(guess, low * _NEAR), high / _NEAR)
        moved.append(tried.reaches(middle))
        low, high = (low, middle) if moved[-1] else (middle, high)
    return high


def bracket(
    reaches: Callable[[float], bool], reached_now: bool
) -> tuple[float | None, float | None]:
    """(a factor that does not reach, one that does), doubled or halved; None: none was found."""
    factor = 1.0
    if reached_now:
        for _ in range(_MOST_HALVINGS):
            if not reaches(factor / 2):
                return factor / 2, factor
            factor /= 2
        return None, factor
    for _ in range(_MOST_DOUBLINGS):
        if reaches(factor * 2):
            return factor, factor * 2
        factor *= 2
    return factor, None
