"""The smallest link, memory, compute or number of GPUs with which a step reaches a throughput."""

from collections.abc import Callable
from dataclasses import dataclass

from twinstream.clusters.search.question import Question
from twinstream.clusters.search.space import told
from twinstream.planner.planner import Planner
from twinstream.schedule.node import Node
from twinstream.sweep.workers import in_processes
from twinstream.whatif.clusters.answers import (
    LaidOut,
    Simulated,
    fastest_step,
    kept_step,
    laid_out,
)
from twinstream.whatif.clusters.changes import ClusterProperty, properties_of
from twinstream.whatif.target import bracket, closed_in, target_of


class ClusterReached(Node):
    """The smallest value of a property that reaches the target, everything else as it is.

    Found to 2 %, of GPUs by doubling and halving. `value` is None where the property alone never
    reaches it; `tokens_per_s` is then the most that was found, at `tried` of `unit`. Where
    `less_may_do`, all less that was tried reached it, too.
    """

    name: str
    unit: str
    now: float
    value: float | None
    tried: float
    tokens_per_s: float
    told: str
    less_may_do: bool


class ClusterTarget(Node):
    """What reaches a throughput; percentages are of `compute_limit_tokens_per_s`.

    That is what the fastest layout would do if compute never waited.
    """

    model: str
    cluster: str
    num_gpus: int
    tokens_per_step: int
    target_tokens_per_s: float
    compute_limit_tokens_per_s: float
    base: LaidOut
    found: tuple[ClusterReached, ...]


@dataclass(frozen=True)
class _Search:
    question: Question
    one: ClusterProperty
    target_tokens_per_s: float
    base: Simulated
    keep: int


def search_cluster_target(
    question: Question,
    text: str,
    keep: int = 3,
    num_jobs: int = 1,
    on_found: Callable[[], None] = lambda: None,
) -> ClusterTarget:
    """Search each property alone; every value that is tried is a search of layouts.

    Args:
        text: the target, as `target_of` reads it.

    Raises:
        TwinstreamError: the target cannot be read, or there is no layout to start from.
    """
    best = question.answer(keep).best[0]
    base = question.job.model_copy(update={"layout": best.layout}), best.prediction
    limit = best.prediction.tokens_per_s / best.prediction.shares["compute"]
    target = target_of(text, limit)
    searches = [_Search(question, one, target, base, keep) for one in properties_of(question)]
    found: dict[str, ClusterReached] = {}
    for search, outcome in in_processes(_reached, searches, max(1, num_jobs)):
        if isinstance(outcome, BaseException):
            raise outcome
        found[search.one.name] = outcome
        on_found()
    return ClusterTarget(
        model=question.job.shape.name,
        cluster=question.cluster.name,
        num_gpus=question.num_gpus,
        tokens_per_step=question.job.tokens_per_step,
        target_tokens_per_s=target,
        compute_limit_tokens_per_s=limit,
        base=laid_out(*base, lambda speed, gpus, price: None, None),
        found=tuple(found[search.one.name] for search in searches),
    )


class _Tried:
    """What throughput came of which factor, and with which layout."""

    def __init__(self, search: _Search) -> None:
        self._search = search
        self.steps = {1.0: search.base}
        self.speeds = {1.0: search.base[1].tokens_per_s}

    def reaches(self, factor: float) -> bool:
        if factor not in self.speeds:
            step = self._fastest(factor)
            self.speeds[factor] = 0.0 if step is None else step[1].tokens_per_s
            if step is not None:
                self.steps[factor] = step
        return self.speeds[factor] >= self._search.target_tokens_per_s

    def _fastest(self, factor: float) -> Simulated | None:
        """Of the layouts of less and one searched; that only where theirs do not reach it."""
        search = self._search
        values = search.one.times(factor)
        if search.one.counts and list(values.values()) != [search.one.now * factor]:
            return None  # no whole number
        question = search.question.changed(values)
        layouts = {step[0].layout: None for less, step in self.steps.items() if less <= factor}
        steps = [kept_step(question, layout) for layout in layouts]
        found = [step for step in steps if not isinstance(step, str)]
        if not any(step[1].tokens_per_s >= search.target_tokens_per_s for step in found):
            anew = fastest_step(question, search.keep)
            found += [] if isinstance(anew, str) else [anew]
        return max(found, key=lambda step: step[1].tokens_per_s, default=None)


def _reached(search: _Search, _: Planner) -> ClusterReached:
    tried, one, target = _Tried(search), search.one, search.target_tokens_per_s
    low, high = bracket(tried.reaches, tried.reaches(1.0))
    if low is not None and high is not None and not one.counts:
        high = closed_in(tried, target, low, high)
    best = high if high is not None else max(tried.steps, key=tried.speeds.__getitem__)
    return ClusterReached(
        name=one.name,
        unit=one.unit,
        now=one.now,
        value=None if high is None else one.now * high,
        tried=one.now * best,
        tokens_per_s=tried.speeds[best],
        told=told(tried.steps[best][0].layout),
        less_may_do=low is None,
    )
