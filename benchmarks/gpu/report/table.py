"""What the results come to: one row a cell, one a peer."""

from benchmarks.gpu.jobs.campaign import (
    CHECK,
    FACTS,
    KERNELS,
    PROBE,
    SMOKE,
    STAGES_OF,
    TESTS,
    TRAIN,
    Cell,
    Peer,
    Plan,
    WholeStep,
)
from benchmarks.gpu.jobs.results import (
    CellFound,
    CheckFound,
    FactsFound,
    KernelsFound,
    KindTime,
    Outcome,
    PeerFound,
    ProbeFound,
    Results,
    SuiteFound,
    TrainFound,
    WholeFound,
)
from twinstream.executor.run.device_state import DeviceState, mean_state
from twinstream.schedule.node import Node

_GIB = 2**30


class CellRow(Node):
    """A cell's figures. `error` is predicted / measured - 1 of the step time, `of_bound` bound /
    measured.

    What is measured is the whole step where it was run, else extended from short passes, with
    `spread` the standard deviation of that over it. `extension_error` is what extending the
    predictions of the short passes gives, over the prediction of the step, - 1; `whole_error` is
    the same of measurements, where the whole step was run.
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
    spread: float | None = None
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
    check: CheckFound | None = None
    smoke: SuiteFound | None = None
    tests: SuiteFound | None = None
    kernels: KernelsFound | None = None
    probe: ProbeFound | None = None
    train: TrainFound | None = None


def table_of(results: Results, plan: Plan) -> Table:
    """Rows in the plan's order; jobs that have not run are listed as waiting."""
    rows = [
        _cell_row(cell, found, results.found(WholeStep(cell).key))
        for cell in plan.cells
        if isinstance(found := results.found(cell.key), CellFound)
    ]
    cells = [row for row in rows if row is not None]
    measured = {row.cell: row.measured_tokens_per_s for row in cells}
    peers = [
        _peer_row(peer, found, measured.get(peer.beside))
        for peer in plan.peers
        if isinstance(found := results.found(peer.key), PeerFound)
    ]
    stages = [s for s in STAGES_OF[results.size] if s not in ("cells", "peers", TESTS)]
    before = [one for stage in stages for one in ((KERNELS, PROBE) if stage == PROBE else (stage,))]
    cell_keys = [cell.key for cell in plan.cells]
    named = [WholeStep(cell).key for cell in plan.cells if cell.whole]
    named += [peer.key for peer in plan.peers]
    if plan.by_name:
        named = [key for key in named if key in results.outcomes]
    without = [
        _job_row(key, results.outcomes.get(key))
        for key in (*before, *cell_keys, *named, TESTS)
        if results.found(key) is None
    ]
    singles = {
        key: results.found(key) for key in (FACTS, CHECK, SMOKE, KERNELS, PROBE, TRAIN, TESTS)
    }
    return Table.model_validate(
        {"cells": tuple(cells), "peers": tuple(peers), "without": tuple(without), **singles}
    )


def _job_row(key: str, outcome: Outcome | None) -> JobRow:
    if outcome is None:
        return JobRow(job=key, status="waiting", reason="for time, or for what comes before it")
    if outcome.status == "started":
        reason = f"its call ended before it did ({outcome.attempts} start(s))"
        return JobRow(job=key, status="cut off", reason=reason)
    return JobRow(job=key, status=outcome.status, reason=outcome.reason)


def _cell_row(cell: Cell, found: CellFound, whole: object) -> CellRow | None:
    """None where the step was to be run whole, and has not been yet."""
    extended_s, spread_s, tokens = (
        found.extended_step_s, found.extended_spread_s, found.tokens_per_step,
    )  # fmt: skip
    whole_s = whole.step_s if isinstance(whole, WholeFound) else None
    step_s = whole_s or extended_s
    if step_s is None:
        return None
    used, cap = found.device_used_bytes, found.device_cap_bytes
    host_ns = found.host_ns_per_op
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
        whole_error=extended_s / whole_s - 1.0 if whole_s and extended_s else None,
        spread=spread_s / step_s if spread_s and not whole_s else None,
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
