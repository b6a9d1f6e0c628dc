"""What a run came to, for people: predicted beside measured, host time, device memory."""

from collections.abc import Sequence

from rich import box
from rich.console import Group

from twinstream.measures.metrics import Summary
from twinstream.measures.uncertainty import Uncertainty
from twinstream.schedule.analysis.comparison import disturbed
from twinstream.schedule.document import Schedule
from twinstream.schedule.sizes import gib
from twinstream.schedule.timeline import DeviceMemory, HostCost, Provenance
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.tables import (
    SHARES,
    SPEEDS,
    headline_errors,
    headline_table,
    planned_rows,
    seconds,
    workload_line,
)

_MAX_LOSSES = 20


def run_table(
    schedule: Schedule,
    predicted: Summary | None,
    measured: Summary,
    peak_of: str | None,
    uncertainty: Uncertainty | None,
) -> Group:
    """Predicted beside measured, then what the plan fixed; MFU only where the peak is known.

    Args:
        predicted: None where no profile of this machine is known.
        peak_of: the machine whose profile predicts, and whose peak counts.
    """
    speeds = headline_table(predicted, measured, (*SPEEDS, *(SHARES if peak_of else ())))
    what = (
        f"{schedule.only.model.name} planned for {schedule.machine.name}, policy {schedule.policy}"
    )
    notes = [] if uncertainty is None else [uncertainty.sentence]
    if peak_of is not None:
        notes.append(
            f"MFU and HFU are of the {schedule.only.model.spec['dtype']} peak of {peak_of}."
        )
    return Group(f"{what}: {workload_line(schedule.workload)}", speeds, *notes,
                 "Planned:", _planned_table(schedule, measured))  # fmt: skip


def _planned_table(schedule: Schedule, summary: Summary) -> FittedTable:
    """What was fixed before the run."""
    table = FittedTable(box=box.SIMPLE, show_header=False)
    for name, value in planned_rows(summary, schedule).items():
        table.add_row(name, value)
    if schedule.bound is not None:
        table.add_row("lower bound", seconds(schedule.bound.step_s))
    if summary.plan_seconds is not None:
        table.add_row("planned in", seconds(summary.plan_seconds))
    return table


def prediction_json(
    predicted: Summary | None, measured: Summary, uncertainty: Uncertainty | None
) -> dict[str, object]:
    """The prediction, the relative error of each headline, and what error was expected."""
    errors = None if predicted is None else headline_errors(predicted, measured)
    return {"predicted": predicted, "error": errors, "uncertainty": uncertainty}


def provenance_lines(provenance: Provenance) -> list[str]:
    """A line for each thing that was measured beside the steps."""
    busy = disturbed(provenance.processor_share)
    lines = [] if busy is None else [busy]
    if provenance.host_cost is not None:
        lines.append(_host_line(provenance.host_cost))
    if provenance.device_memory is not None:
        lines.append(_memory_line(provenance.device_memory))
    return lines


def _host_line(cost: HostCost) -> str:
    calls = ", ".join(
        f"{cost.calls_per_pass[kind]:.0f} {kind} at {ns / 1e3:.1f} us"
        for kind, ns in sorted(cost.ns_per_call.items())
    )
    timed = ", every op timed" if cost.ops_timed else ""
    return (
        f"Host: {cost.ns_per_op / 1e3:.1f} us to enqueue an op (a step: {calls}{timed}); it was "
        f"blocked {cost.waited_ns_per_pass / 1e6:.1f} ms of a step, waiting for the device or for "
        "data."
    )


def _memory_line(memory: DeviceMemory) -> str:
    beside = memory.peak_bytes - memory.arena_bytes
    line = (
        f"Device memory by the driver: peak {gib(memory.peak_bytes)}, of which {gib(beside)} "
        f"beside the arena ({gib(memory.libraries_bytes)} of them workspaces and temporaries of "
        f"libraries); the plan reserves {gib(memory.reserve_bytes)}."
    )
    if memory.undeclared_bytes:
        greediest = max(memory.temporary_bytes, key=lambda call: memory.temporary_bytes[call])
        line += (
            f" '{greediest}' allocates {gib(memory.temporary_bytes[greediest])} for itself, "
            f"{gib(memory.undeclared_bytes)} more than the plan declares; the reserve must hold it."
        )
    if memory.excess_bytes:
        line += (
            f" The cap is exceeded by {gib(memory.excess_bytes)}: raise device_reserve_bytes in "
            "the machine's profile and plan again, or give a smaller --device-mem."
        )
    return line


def losses_line(losses: Sequence[float]) -> str:
    """Losses of the steps, the middle ones left out where there are many."""
    shown = [f"{loss:.4f}" for loss in losses]
    if len(shown) > _MAX_LOSSES:
        half = _MAX_LOSSES // 2
        shown = [*shown[:half], "...", *shown[-half:]]
    return f"loss of {len(losses):,} step{'' if len(losses) == 1 else 's'}: {' '.join(shown)}"
