"""Tables and lines of the command line; none is wider than 100 columns.

A title is a line of its own: rich would wrap it at the width of its table.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group

from twinstream.hardware_profiles.collectives.fitting import FittedCurve
from twinstream.hardware_profiles.link import DUPLEX_SHARE
from twinstream.hardware_profiles.schema import NUMBER_FIELDS, Machine, Number
from twinstream.measures.metrics import Summary
from twinstream.measures.uncertainty import Uncertainty
from twinstream.models.kernel_costs.attention_limits import nondeterministic_kernels
from twinstream.models.kernel_costs.attention_shape import lengths_text
from twinstream.schedule.analysis.comparison import Comparison, GroupComparison, Pair
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.sizes import gib, rate_text
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import Workload
from twinstream.screens.fitted_table import FittedTable

_NAMES = {
    "h2d": "H2D",
    "d2h": "D2H",
    "h2d_inputs": "H2D inputs",
    "h2d_updates": "H2D of updates",
    "h2d_context": "H2D context",
    "d2h_loss": "D2H loss",
    "host_compute": "host CPU",
    "disk_read": "disk",
    "disk_write": "disk, written",
    "d2h_disk": "D2H to disk",
    "hbm": "HBM",
    "host_dram": "host DRAM",
    "pcie": "PCIe, both ways",
}

_CAUSE_NAMES = {
    "transfer": "message under way",
    "bubble": "bubble of the pipeline",
    "all_ranks": "all ranks (norm of gradients)",
    "late_ranks": "other ranks are late",
    "latency": "latency of launches and waits",
}


def readable(name: str) -> str:
    """How people call a queue, a resource, a role or a kind of task.

    >>> readable("optimizer_step"), readable("h2d")
    ('optimizer step', 'H2D')
    """
    return _NAMES.get(name, name.replace("_", " "))


def cause_name(cause: str) -> str:
    """
    >>> cause_name("bubble"), cause_name("dp")
    ('bubble of the pipeline', 'dp')
    """
    return _CAUSE_NAMES.get(cause, readable(cause))


def speed_text(summary: Summary, uncertainty: Uncertainty) -> str:
    """Predicted tokens/s with the expected error."""
    return f"{rate_text(summary.tokens_per_s)} tokens/s ({uncertainty.short})"


def curves_table(fitted: Sequence[FittedCurve]) -> Group:
    """Each curve that was made, with how far it is off on its points and on sizes left out."""
    table = listing_table(
        ("collective", "ranks", "a node", "dtype", "form"), ("points", "error", "left out")
    )
    for one in fitted:
        curve = one.curve
        unseen = "-" if one.left_out_error is None else f"{one.left_out_error:.1%}"
        table.add_row(
            curve.collective.replace("_", "-"),
            str(curve.ranks),
            str(curve.ranks_per_node),
            curve.dtype or "any",
            curve.form,
            str(one.num_points),
            f"{one.error:.1%}",
            unseen,
        )
    told = "Left out: each size but the least and the most, by a curve made of the others."
    return Group("Curves of collectives", table, told)


def probed_table(machine: Machine) -> Group:
    """Numbers and efficiency curves of one machine; what their sources share is said once."""
    numbers: dict[str, Number] = {
        field: number for field in NUMBER_FIELDS if (number := getattr(machine, field)) is not None
    }
    shared = next(iter(numbers.values())).source
    table = listing_table(["number"], ["value"])
    table.add_column("", overflow="fold")
    for field, number in numbers.items():
        note = number.source.removeprefix(shared).lstrip(", ")
        table.add_row(field, number_text(number, 1), note)
    if (share := machine.duplex_h2d_share) is not None:
        note = share.source.removeprefix(shared).lstrip(",; ")
        table.add_row(DUPLEX_SHARE, number_text(share, 1), note)
    for key, curve in machine.efficiency.items():
        reached = f"{curve.max:.1%}, half at {curve.half:.3g} {curve.of}"
        note = curve.source.removeprefix(shared).lstrip(", ")
        table.add_row(f"efficiency.{key}", reached, note)
    return Group(f"{machine.name}: {machine.description}", f"Source: {shared}", table)


def planned_rows(summary: Summary, schedule: Schedule) -> dict[str, str]:
    """What follows from a schedule alone, run or not."""
    caps = schedule.caps
    return {
        "device memory": _of_cap(summary.device_peak_bytes, caps.device_bytes),
        "host memory": _of_cap(summary.host_peak_bytes, caps.host_bytes),
        "copied per step": f"{gib(summary.h2d_bytes)} H2D, {gib(summary.d2h_bytes)} D2H",
        "recomputed": f"{summary.recompute_fraction:.1%} of the FLOPs",
    }


def workload_line(workload: Workload) -> str:
    """
    >>> from twinstream.schedule.workload import Packing
    >>> workload_line(Workload(
    ...     seq_len=512, chunk_tokens=256, chunks_per_round=4, rounds_per_step=1))
    '1 round of 4 chunks of 256 tokens, sequences of 512'
    >>> workload_line(Workload(
    ...     seq_len=300, chunk_tokens=512, chunks_per_round=1, rounds_per_step=2,
    ...     packing=Packing.of((300, 106, 106))))
    '2 rounds of 1 chunk of 512 tokens, sequences of 300, 2 x 106'
    """
    return (
        f"{_counted(workload.rounds_per_step, 'round')} of "
        f"{_counted(workload.chunks_per_round, 'chunk')} of {workload.chunk_tokens:,} tokens, "
        f"sequences of {sequences_text(workload)}"
    )


def sequences_text(workload: Workload) -> str:
    """Tokens of a sequence, or of those that a chunk is expected to pack."""
    if workload.packing is None:
        return f"{workload.seq_len:,}"
    return lengths_text(workload.packing.expected_lengths)


def utilization_table(timeline: Timeline) -> Group:
    table = listing_table(["resource"], ["used"])
    for resource, share in sorted(timeline.utilization.items(), key=lambda item: -item[1]):
        table.add_row(resource, f"{share:.1%}")
    return Group("Utilization of the machine's resources", table)


def comparison_tables(
    found: Comparison, summaries: tuple[Summary, Summary] | None, peak_of: str = ""
) -> list[Group]:
    """Predicted against measured: headline figures, task kinds, streams or ranks, the worst ops.

    Args:
        summaries: of the prediction and the measurement, where the machine is known.
        peak_of: the name of that machine.
    """
    if summaries is None:
        headlines, title = _comparison_table([""]), "Predicted against measured"
        headlines.add_row("step time", *pair_ns(found.step_ns))
        headlines.add_row("cold step", *pair_ns(found.cold_ns))
    else:
        headlines = headline_table(*summaries, (*SPEEDS, *SHARES, *MEMORIES))
        title = f"Predicted against measured; MFU and HFU of the peak of {peak_of}"
    worst = _comparison_table([*(["rank"] if found.ranks else []), "op", "stream"])
    for op in found.worst_ops:
        rank = [op.rank] if found.ranks else []
        worst.add_row(*rank, op.op_id, op.stream, *pair_ns(op.duration_ns))
    what = "; what is said from when it came" if found.ranks else ""
    return [
        Group(title, headlines),
        groups_table("Busy time by kind of op", found.kinds),
        _ranks_table(found) if found.ranks else groups_table("Busy time by stream", found.streams),
        Group(f"Ops that differ most (mean of the passes{what})", worst),
    ]


def _ranks_table(found: Comparison) -> Group:
    """Of each rank its compute, and what it waited for others and said."""
    table = _comparison_table(["rank", "time of"])
    for one in found.ranks:
        compute = [g.busy_ns for g in one.comparison.streams if g.name.endswith(":compute")]
        busy = Pair(
            predicted=sum(pair.predicted for pair in compute),
            measured=sum(pair.measured for pair in compute),
            core_share=min((pair.core_share for pair in compute), default=1.0),
        )
        table.add_row(one.name, "compute", *pair_ns(busy))
        for group in one.said:
            table.add_row("", group.name, *pair_ns(group.busy_ns))
    clocks = f"Clocks of ranks are right within {found.clock_error_ns / 1e3:.0f} us."
    return Group("Time of each rank in a step", table, clocks)


def nondeterminism_notes(schedule: RankSchedule) -> list[str]:
    """What to know of a schedule whose runs do not repeat to the bit; mostly nothing."""
    return [
        f"{name.capitalize()} does not give the same bits from run to run."
        for name in nondeterministic_kernels(schedule)
    ]


def side_by_side_table(trials: Mapping[str, tuple[Schedule, Summary, Summary]]) -> FittedTable:
    """Memory, traffic, recompute and step times of several (schedule, predicted, measured)."""
    table = listing_table([""], list(trials))
    rows: dict[str, list[str]] = {}
    for schedule, predicted, measured in trials.values():
        pair = _pair_of(predicted, measured, "step_time_s")
        for name, value in (
            ("device memory", gib(predicted.device_peak_bytes)),
            ("device cap", _cap(schedule.caps.device_bytes)),
            ("host memory", gib(predicted.host_peak_bytes)),
            ("host cap", _cap(schedule.caps.host_bytes)),
            ("H2D per step", gib(predicted.h2d_bytes)),
            ("D2H per step", gib(predicted.d2h_bytes)),
            ("recomputed", f"{predicted.recompute_fraction:.1%} of the FLOPs"),
            ("lower bound", seconds(schedule.bound.step_s) if schedule.bound else "-"),
            ("step, predicted", seconds(pair.predicted)),
            ("step, measured", seconds(pair.measured)),
            ("error", _error(pair)),
        ):
            rows.setdefault(name, []).append(value)
    for name, values in rows.items():
        table.add_row(name, *values)
    return table


def headline_table(
    predicted: Summary | None, measured: Summary, rows: Sequence["Row"]
) -> FittedTable:
    """Predicted beside measured; a dash where nothing is predicted."""
    table = _comparison_table([""])
    for name, field, shown in rows:
        after = getattr(measured, field)
        if predicted is None:
            table.add_row(name, "-", shown(after), "-")
        else:
            pair = _pair_of(predicted, measured, field)
            table.add_row(name, shown(pair.predicted), shown(after), _error(pair))
    return table


def headline_errors(predicted: Summary, measured: Summary) -> dict[str, float]:
    """The relative error of each headline."""
    fields = [field for _, field, _ in (*SPEEDS, *SHARES)]
    return {name: _pair_of(predicted, measured, name).error for name in fields}


def _pair_of(predicted: Summary, measured: Summary, field: str) -> Pair:
    """Of times the error is of the share with a core, of rates of what they then would be."""
    share = measured.core_share if field in _TIMES else 1.0
    share = 1.0 / measured.core_share if field in _RATES else share
    return Pair(
        predicted=getattr(predicted, field), measured=getattr(measured, field), core_share=share
    )


def groups_table(title: str, groups: Sequence[GroupComparison]) -> Group:
    """Predicted against measured busy time, by kind of op or by stream."""
    table = _comparison_table(["", "ops"])
    for group in groups:
        table.add_row(group.name, f"{group.num_ops:,}", *pair_ns(group.busy_ns))
    return Group(title, table)


def _comparison_table(left: list[str]) -> FittedTable:
    return listing_table(left, ["predicted", "measured", "error"])


def listing_table(left: Sequence[str], right: Sequence[str]) -> FittedTable:
    """Columns of text on the left, of numbers on the right."""
    table = FittedTable(box=box.SIMPLE_HEAD)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def pair_ns(pair: Pair) -> tuple[str, str, str]:
    """Predicted, measured and the error, as cells."""
    return seconds(pair.predicted / 1e9), seconds(pair.measured / 1e9), _error(pair)


def _error(pair: Pair) -> str:
    return f"{pair.error:+.1%}" if pair.measured else "-"


def seconds(duration_s: float) -> str:
    """
    >>> seconds(12.3), seconds(0.0456), seconds(7.8e-6)
    ('12.300 s', '45.60 ms', '7.80 us')
    """
    if duration_s >= 1.0:
        return f"{duration_s:,.3f} s"
    return f"{duration_s * 1e3:.2f} ms" if duration_s >= 1e-3 else f"{duration_s * 1e6:.2f} us"


def _of_cap(used_bytes: int, cap_bytes: int | None) -> str:
    return f"{gib(used_bytes)}, cap {_cap(cap_bytes)}"


def _cap(cap_bytes: int | None) -> str:
    return "none" if cap_bytes is None else gib(cap_bytes)


def number_text(number: Number | None, unit: float) -> str:
    """In a unit; a dash where a profile does not state it."""
    if number is None:
        return "-"
    return "no limit" if number.value is None else f"{number.value / unit:,.4g}"


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


Row = tuple[str, str, Callable[[Any], str]]  # a name, a field of `Summary`, and how it is shown
SPEEDS: tuple[Row, ...] = (
    ("step time", "step_time_s", seconds),
    ("cold step", "cold_step_time_s", seconds),
    ("throughput, tokens/s", "tokens_per_s", rate_text),
)
SHARES: tuple[Row, ...] = (("MFU", "mfu", "{:.1%}".format), ("HFU", "hfu", "{:.1%}".format))
_TIMES, _RATES = ("step_time_s", "cold_step_time_s"), ("tokens_per_s", "mfu", "hfu")
MEMORIES: tuple[Row, ...] = (
    ("device memory", "device_peak_bytes", gib),
    ("host memory", "host_peak_bytes", gib),
)
