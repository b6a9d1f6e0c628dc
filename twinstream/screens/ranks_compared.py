"""Predicted against measured of a cluster's ranks, for people."""

from rich.console import Group

from twinstream.measures.cluster_comparison import ClusterComparison
from twinstream.measures.cluster_summary import ClusterSummary
from twinstream.measures.metrics import rate_text
from twinstream.schedule.analysis.comparison import Pair
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.tables import groups_table, listing_table, pair_ns, seconds

_MOST_OPS = 10


def ranks_compared_tables(found: ClusterComparison) -> tuple[Group, ...]:
    """The step, kinds of ops over all ranks, each rank's compute and talk, the worst ops of all."""
    heads = ("predicted", "measured", "error")
    steps = listing_table(("",), heads)
    steps.add_row("step time", *pair_ns(found.step_ns))
    steps.add_row("cold step", *pair_ns(found.cold_ns))
    ranks = listing_table(("rank", "time of"), heads)
    for one in found.ranks:
        compute = [g for g in one.comparison.streams if _is_compute(g.name)]
        busy = Pair(
            predicted=sum(g.busy_ns.predicted for g in compute),
            measured=sum(g.busy_ns.measured for g in compute),
        )
        ranks.add_row(one.name, "compute", *pair_ns(busy))
        for group in one.said:
            ranks.add_row("", group.name, *pair_ns(group.busy_ns))
    worst = listing_table(("rank", "op", "stream"), heads)
    ops = [(op, one.name) for one in found.ranks for op in one.comparison.worst_ops]
    ops.sort(key=lambda item: -abs(item[0].duration_ns.predicted - item[0].duration_ns.measured))
    for op, name in ops[:_MOST_OPS]:
        worst.add_row(name, op.op_id, op.stream, *pair_ns(op.duration_ns))
    clocks = f"Clocks of ranks are right within {found.clock_error_ns / 1e3:.0f} us."
    return (
        Group("Predicted against measured", steps),
        groups_table("Busy time of all ranks by kind of op", found.kinds),
        Group("Time of each rank in a step", ranks, clocks),
        Group("Ops that differ most (mean of the passes; what is said from when it came)", worst),
    )


def speeds_table(
    predicted: ClusterSummary | None, measured: ClusterTimeline, tokens_per_step: int
) -> FittedTable:
    """Step, cold step and tokens/s; predicted beside measured where there is a prediction."""
    step_s, cold_s = measured.step_ns / 1e9, measured.cold_ns / 1e9
    after = (seconds(step_s), seconds(cold_s), rate_text(tokens_per_step / step_s))
    names = ("step time", "cold step", "tokens/s")
    if predicted is None:
        table = listing_table(("",), ("measured",))
        for name, shown in zip(names, after, strict=True):
            table.add_row(name, shown)
        return table
    before_s = predicted.step_time_s, predicted.cold_step_time_s
    before = (*map(seconds, before_s), rate_text(predicted.tokens_per_s))
    errors = [f"{a / b - 1:+.1%}" for a, b in zip(before_s, (step_s, cold_s), strict=True)]
    errors.append(f"{predicted.tokens_per_s * step_s / tokens_per_step - 1:+.1%}")
    table = listing_table(("",), ("predicted", "measured", "error"))
    for row in zip(names, before, after, errors, strict=True):
        table.add_row(*row)
    return table


def _is_compute(stream: str) -> bool:
    return stream.partition(":")[2].startswith("compute")
