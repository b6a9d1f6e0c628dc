"""What the results come to: one row a cell, one a peer, times by kind against their floors."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.gpu.jobs.campaign import (
    FACTS,
    KERNELS,
    PROBE,
    SMOKE,
    TESTS,
    Cell,
    Peer,
    Plan,
    WholeStep,
)
from benchmarks.gpu.jobs.results import (
    CellFound,
    FactsFound,
    KernelsFound,
    KindTime,
    Outcome,
    PeerFound,
    ProbeFound,
    Results,
    SuiteFound,
    WholeFound,
)
from twinstream.executor.run.device_state import DeviceState, mean_state
from twinstream.schedule.node import Node

_BOUND_GOAL = 0.95
_ABOVE_BOUND = 1.005  # further than noise
_GIB = 2**30


class CellRow(Node):
    """A cell's figures. `error` is predicted / measured - 1 of the step time, `of_bound` bound /
    measured.

    `extension_error` is what extending the predictions of the short passes gives, over the
    prediction of the step, - 1; `whole_error` is the same of measurements, where there is one.
    `state` is the device's over all passes.
    """

    cell: str
    workload: str
    policy: str
    predicted_tokens_per_s: float
    measured_tokens_per_s: float
    error: float
    bound_tokens_per_s: float
    of_bound: float
    goal_tokens_per_s: float | None = None
    mfu: float
    hfu: float
    device_cap_gib: float | None = None
    device_used_gib: float | None = None
    host_arena_gib: float
    host_us_per_op: float | None = None
    extension_error: float
    whole_error: float | None = None
    loss: float
    kinds: tuple[KindTime, ...]
    state: DeviceState | None = None


class PeerRow(Node):
    """A peer's figures; `ours_over_peer` is of the cell beside, where that was measured."""

    peer: str
    tokens_per_s: float
    beside: str
    ours_over_peer: float | None = None
    device_used_gib: float | None = None
    micro_batch_s: float
    update_s: float
    loss: float


class JobRow(Node):
    """A job without figures, and why."""

    job: str
    status: str
    reason: str


class Table(Node):
    """Everything there is to say about a campaign."""

    cells: tuple[CellRow, ...]
    peers: tuple[PeerRow, ...]
    without: tuple[JobRow, ...]
    facts: FactsFound | None = None
    smoke: SuiteFound | None = None
    tests: SuiteFound | None = None
    kernels: KernelsFound | None = None
    probe: ProbeFound | None = None


def table_of(results: Results, plan: Plan) -> Table:
    """Rows in the plan's order; jobs that have not run are listed as waiting."""
    outcomes = results.outcomes
    cells = [
        _cell_row(cell, found, _found(outcomes, WholeStep(cell).key))
        for cell in plan.cells
        if isinstance(found := _found(outcomes, cell.key), CellFound)
    ]
    measured = {row.cell: row.measured_tokens_per_s for row in cells}
    peers = [
        _peer_row(peer, found, measured.get(peer.beside))
        for peer in plan.peers
        if isinstance(found := _found(outcomes, peer.key), PeerFound)
    ]
    whole = [WholeStep(cell).key for cell in plan.cells if cell.whole]
    cell_keys, peer_keys = [c.key for c in plan.cells], [p.key for p in plan.peers]
    keys = [FACTS, SMOKE, KERNELS, PROBE, *cell_keys, *whole, *peer_keys, TESTS]
    without = [_job_row(key, outcomes.get(key)) for key in keys if _found(outcomes, key) is None]
    singles = {key: _found(outcomes, key) for key in (FACTS, SMOKE, KERNELS, PROBE, TESTS)}
    return Table.model_validate(
        {"cells": tuple(cells), "peers": tuple(peers), "without": tuple(without), **singles}
    )


def _found(outcomes: Mapping[str, Outcome], key: str) -> object:
    return outcomes[key].found if key in outcomes else None


def _job_row(key: str, outcome: Outcome | None) -> JobRow:
    if outcome is None:
        return JobRow(job=key, status="waiting", reason="for time, or for what comes before it")
    if outcome.status == "started":
        reason = f"its call ended before it did ({outcome.attempts} start(s))"
        return JobRow(job=key, status="cut off", reason=reason)
    return JobRow(job=key, status=outcome.status, reason=outcome.reason)


def _cell_row(cell: Cell, found: CellFound, whole: object) -> CellRow:
    step_s, tokens = found.measured_step_s, found.tokens_per_step
    used, cap = found.device_used_bytes, found.device_cap_bytes
    host_ns = found.host_ns_per_op
    whole_s = whole.step_s if isinstance(whole, WholeFound) else None
    return CellRow(
        cell=cell.key,
        workload=found.workload,
        policy=found.policy,
        predicted_tokens_per_s=tokens / found.predicted_step_s,
        measured_tokens_per_s=tokens / step_s,
        error=found.predicted_step_s / step_s - 1.0,
        bound_tokens_per_s=tokens / found.bound_step_s,
        of_bound=found.bound_step_s / step_s,
        goal_tokens_per_s=cell.goal_tokens_per_s,
        mfu=found.model_flops / step_s / found.peak_flop_per_s,
        hfu=found.executed_flops / step_s / found.peak_flop_per_s,
        device_cap_gib=None if cap is None else cap / _GIB,
        device_used_gib=None if used is None else used / _GIB,
        host_arena_gib=found.host_arena_bytes / _GIB,
        host_us_per_op=None if host_ns is None else host_ns / 1e3,
        extension_error=found.predicted_extended_s / found.predicted_step_s - 1.0,
        whole_error=None if whole_s is None else step_s / whole_s - 1.0,
        loss=found.losses[0],
        kinds=found.kinds,
        state=mean_state([state for state in found.states if state is not None]),
    )


def _peer_row(peer: Peer, found: PeerFound, ours_tokens_per_s: float | None) -> PeerRow:
    rate = found.tokens_per_step / found.step_s
    used = found.device_used_bytes
    return PeerRow(
        peer=peer.key,
        tokens_per_s=rate,
        beside=peer.beside,
        ours_over_peer=None if ours_tokens_per_s is None else ours_tokens_per_s / rate,
        device_used_gib=None if used is None else used / _GIB,
        micro_batch_s=found.micro_batch_s,
        update_s=found.update_s,
        loss=found.loss,
    )


def markdown_of(results: Results, table: Table) -> str:
    """The table as a page of documentation."""
    where = results.where
    lines = [
        f"# Campaign on {where.device}, {where.date}",
        "",
        f"Driver {where.driver}, torch {where.torch}, commit {where.commit or 'not given'}, size "
        f"`{results.size}`. `{where.command}`",
        "",
        *_probe_lines(table),
        *_cell_lines(table.cells),
        *_peer_lines(table.peers),
        *_kind_lines(table.cells),
        *_without_lines(table.without),
    ]
    return "\n".join(lines) + "\n"


def _probe_lines(table: Table) -> list[str]:
    lines = [f"- {name}: {told}" for name, told in table.facts.facts.items()] if table.facts else []
    lines += [""] if lines else []
    for what, tests in (("First tests", table.smoke), ("Tests", table.tests)):
        if tests is None:
            continue
        left = "" if tests.complete else "; not all were reached"
        lines += [f"{what} marked gpu: {tests.passed} passed, {tests.failed} failed, "
                  f"{tests.skipped} skipped{left}.", ""]  # fmt: skip
        lines += [f"- {failure}" for failure in tests.failures]
        lines += [""] if tests.failures else []
    if table.kernels is not None:
        notes = table.kernels.notes
        lines += [f"- {note}" for note in notes] + ([""] if notes else [])
    if table.probe is not None:
        probe = table.probe
        off = sorted(abs(sample.ratio - 1.0) for sample in probe.samples)
        median, worst = (off[len(off) // 2], off[-1]) if off else (0.0, 0.0)
        fit = f", median error of the fit {median:.1%}, worst {worst:.1%}" if off else ""
        bits = "" if probe.kernels.deterministic else " (not deterministic)"
        lines += [f"Profile `{probe.machine}` ({probe.content_hash}): {len(probe.samples)} kernels "
                  f"timed{fit}; kernels: vector {probe.kernels.vector}, attention "
                  f"{probe.kernels.attention}{bits}.", ""]  # fmt: skip
        if probe.sustained_flop_per_s is not None:
            rate = probe.sustained_flop_per_s / 1e12
            lines += [f"Sustained: {rate:.0f} TFLOP/s, at {_state(probe.sustained)}.", ""]
    return lines


def _cell_lines(rows: Sequence[CellRow]) -> list[str]:
    if not rows:
        return ["No cell has been measured.", ""]
    head = ("cell", "rounds", "predicted tok/s", "measured", "error", "bound", "of bound", "goal",
            "MFU", "HFU", "device GiB (driver / cap)", "host GiB", "host us/op", "extension",
            "clock, power", "loss")  # fmt: skip
    body = [
        (
            row.cell,
            row.workload.split(",")[0],
            f"{row.predicted_tokens_per_s:,.0f}",
            f"{row.measured_tokens_per_s:,.0f}",
            f"{row.error:+.1%}",
            f"{row.bound_tokens_per_s:,.0f}",
            _of_bound(row),
            _goal(row),
            f"{row.mfu:.1%}",
            f"{row.hfu:.1%}",
            f"{_gib(row.device_used_gib)} / {_gib(row.device_cap_gib)}",
            f"{row.host_arena_gib:.1f}",
            "-" if row.host_us_per_op is None else f"{row.host_us_per_op:.0f}",
            _extension(row),
            _state(row.state),
            f"{row.loss:.3f}",
        )
        for row in rows
    ]
    return [
        "## Cells",
        "",
        "Predicted by the simulator on the profile above, before the run. Error is predicted / "
        "measured - 1 of the step time. Bound is the plan's own lower bound on that profile; the "
        "goal is 95 % of it, and more than 100 % says that the profile has the device too slow. "
        "Extension is what extending short passes gives over the whole step, - 1: of "
        "predictions, and of measurements where the whole step was run.",
        "",
        *_table(head, body),
        "",
    ]


def _state(state: DeviceState | None) -> str:
    if state is None:
        return "not read"
    known = (("MHz", state.sm_clock_mhz), ("W", state.power_w), ("C", state.temperature_c))
    told = [f"{value:.0f} {unit}" for unit, value in known if value is not None]
    return ", ".join([*told, *state.held_back])


def _of_bound(row: CellRow) -> str:
    """Nothing is faster than the bound, but a device may be faster than its profile."""
    told = f"{row.of_bound:.1%}"
    if row.of_bound > _ABOVE_BOUND:
        return f"{told} (profile too slow)"
    return f"{told} ✓" if row.of_bound >= _BOUND_GOAL else told


def _goal(row: CellRow) -> str:
    if row.goal_tokens_per_s is None:
        return "-"
    reached = row.measured_tokens_per_s >= row.goal_tokens_per_s
    return f"{row.goal_tokens_per_s:,.0f}{' ✓' if reached else ''}"


def _extension(row: CellRow) -> str:
    whole = "" if row.whole_error is None else f"; measured {row.whole_error:+.1%}"
    return f"{row.extension_error:+.1%}{whole}"


def _peer_lines(rows: Sequence[PeerRow]) -> list[str]:
    if not rows:
        return []
    head = ("peer", "tok/s", "our cell", "ours / peer", "device GiB (driver)", "micro-batch s",
            "update s", "loss")  # fmt: skip
    body = [
        (
            row.peer,
            f"{row.tokens_per_s:,.0f}",
            row.beside,
            "-" if row.ours_over_peer is None else f"{row.ours_over_peer:.2f}",
            _gib(row.device_used_gib),
            f"{row.micro_batch_s:.3f}",
            f"{row.update_s:.3f}",
            f"{row.loss:.3f}",
        )
        for row in rows
    ]
    return ["## Peers", "", "The same sizes, tokens and dtype in plain PyTorch "
            "(`benchmarks/gpu/peers/`).", "", *_table(head, body), ""]  # fmt: skip


def _kind_lines(rows: Sequence[CellRow]) -> list[str]:
    body = [
        (
            row.cell,
            kind.name,
            f"{kind.num_ops:,}",
            f"{kind.floor_ns / 1e6:,.1f}",
            f"{kind.predicted_ns / 1e6:,.1f}",
            f"{kind.measured_ns / 1e6:,.1f}",
            f"{kind.measured_ns / kind.floor_ns:.2f}" if kind.floor_ns else "-",
        )
        for row in rows
        for kind in row.kinds
    ]
    if not body:
        return []
    head = ("cell", "kind", "ops", "floor ms", "predicted ms", "measured ms", "measured / floor")
    told = (
        "Of the longer short pass. The floor is FLOPs at the best matrix rate probed or bytes at "
        "the probed rate of HBM or link, whichever is longer."
    )
    return ["## Times by kind", "", told, "", *_table(head, body), ""]


def _without_lines(rows: Sequence[JobRow]) -> list[str]:
    if not rows:
        return []
    body = [(row.job, row.status, row.reason.replace("|", "/").replace("\n", " ")) for row in rows]
    return ["## Without figures", "", *_table(("job", "status", "why"), body), ""]


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(row) + " |" for row in rows]
