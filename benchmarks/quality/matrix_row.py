"""One row of the quality matrix: a cell planned by `optimal`, and by others on its chain.

Bounds. `bound_s` is of the chain that was chosen. `family_bound_s` is the smallest over all
admissible chunkings, rounds and optimizer placements, and the chain's own where the planner states
none. A gap is step time / bound - 1.

The other policies plan the chain that `optimal` chose, within the same caps. `others_commit` is the
commit that they planned with, empty if they did not; a policy without a step time then does not
fit.

Arena extents. `extent_issue` is the device arena / the most bytes alive at once if ops ran one by
one in issue order; `extent_timed` is the same for the simulated steady pass, where copies take
time. Content is alive from the op that makes it to the last that touches it. `extent_held` is the
arena / the most bytes that the plan's stays hold at once, with the time that was left for their
copies: what packing wastes.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import twinstream as ts
from benchmarks.quality.matrix_cells import GIB, Cell
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import summarize
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipe import Recipe
from twinstream.planner.decide import decider as deciding
from twinstream.planner.emit.emission import Emitted
from twinstream.planner.emit.unrolling import of_all_rounds
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.lifetimes.stays import stay_intervals
from twinstream.planner.pack.live_bytes import live_peak
from twinstream.planner.pack.placement import Placement
from twinstream.planner.plan import optimizer_place, plan_chain, policies
from twinstream.planner.request import caps_of
from twinstream.planner.search import family, optimal
from twinstream.planner.search.chunking import TrainingStep
from twinstream.schedule.analysis.occupancy import memory_over_time
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Schedule
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.timeline import PassSpans, Timeline
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate

POLICY = "optimal"
KEY_COLUMNS = ("machine", "model", "seq_len", "device_gib", "host_gib")
COLUMNS = (
    *KEY_COLUMNS,
    *("commit", "status", "message", "tokens_per_step"),
    *("chunk_tokens", "chunks_per_round", "rounds_per_step"),
    *("step_s", "spread_s", "tokens_per_s", "mfu", "hfu"),
    *("bound_s", "gap", "family_bound_s", "gap_family", "limits"),
    *("extent_gib", "extent_held", "extent_issue", "extent_timed"),
    *("recompute_fraction", "h2d_gib", "d2h_gib", "plan_seconds", "ops", "others_commit"),
)
Row = dict[str, str]


def other_policies() -> tuple[str, ...]:
    return tuple(name for name in policies() if name != POLICY)


def columns() -> tuple[str, ...]:
    """The header: a column per other policy holds its step time, nothing where it cannot fit."""
    return (*COLUMNS, *other_policies())


def measure(cell: Cell, commit: str, *, others: bool, limit_s: int | None = None) -> Row:
    """Plan and simulate a cell, in a process's main thread. `status` says what came of it.

    Args:
        commit: of the code that runs, for the file.
        others: plan by the other policies too.
        limit_s: then it is cut off; what was there by then stands.
    """
    row: Row = dict.fromkeys(columns(), "") | dict(zip(KEY_COLUMNS, cell.key, strict=True))
    row |= {"commit": commit, "tokens_per_step": str(cell.tokens_per_step)}
    try:
        with _cut_off_after(limit_s):
            for part in _parts(cell):
                row |= part
            if others and row["status"] == "ok":
                row |= _steps_of_others(row, commit)
    except TimeoutError:
        row |= {"status": row["status"] or "timeout", "message": f"cut off after {limit_s} s"}
    return row


def compare(row: Row, commit: str, limit_s: int | None = None) -> Row:
    """The row of a planned cell, with the other policies' step times; as it was if cut off."""
    try:
        with _cut_off_after(limit_s):
            return row | _steps_of_others(row, commit)
    except TimeoutError:
        return row


@contextmanager
def _cut_off_after(limit_s: int | None) -> Iterator[None]:
    def stop(_number: int, _frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit_s or 0)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _parts(cell: Cell) -> Iterator[Row]:
    machine = load_machine(cell.machine)
    begun = time.perf_counter()
    try:
        with _last_placed() as placed:
            schedule = ts.plan(
                cell.model,
                machine,
                step=TrainingStep(cell.seq_len, cell.tokens_per_step),
                device_mem=cell.device_gib * GIB,
                host_mem=cell.host_gib * GIB,
                policy=POLICY,
            )
        seconds = time.perf_counter() - begun
        yield {"extent_held": f"{_extent_held(schedule, placed[-1]):.9g}"}
    except InfeasiblePlan as error:
        yield _failure("infeasible", error, time.perf_counter() - begun)
        return
    except (ts.TwinstreamError, AssertionError) as error:  # a fault of ours is a finding
        yield _failure("error", error, time.perf_counter() - begun)
        return
    yield _figures(schedule, simulate(schedule, machine), machine, seconds)


@contextmanager
def _last_placed() -> Iterator[list[Placement]]:
    """The placement of the last schedule that is made inside, or of its judged rounds."""
    last: list[Placement] = []

    def recorded(few: Emitted, make: Callable[[Chain], Emitted], chain: Chain) -> Schedule:
        def made(rounds: Chain) -> Emitted:
            found = make(rounds)
            last[:] = [found.placement]
            return found

        last[:] = [few.placement]
        return of_all_rounds(few, made, chain)

    with ExitStack() as patches:
        for module in (deciding, optimal, family):
            patches.enter_context(patch.object(module, "of_all_rounds", recorded))
        yield last


def _extent_held(schedule: Schedule, placement: Placement) -> float:
    extent = arena_bytes(schedule, DEVICE)
    stays, units = placement.stays, placement.units.units
    sizes = [units[stay.unit].tensor.size_bytes for stay in stays]
    ends = [offset + size for offset, size in zip(placement.offsets, sizes, strict=True)]
    assert extent == max(ends), "another schedule came later"
    return extent / live_peak(stay_intervals(placement.units, stays))[0]


def live_peak_bytes(schedule: Schedule, spans: PassSpans | None = None) -> int:
    """Most bytes alive on the device at once: by the spans, or one op after the other as issued."""
    count = len(schedule.ops)
    in_order = PassSpans(start_ns=tuple(range(count)), end_ns=tuple(range(1, count + 1)))
    samples = memory_over_time(schedule, spans or in_order, DEVICE)
    return max((sample.total_bytes for sample in samples), default=0)


def _failure(status: str, error: Exception, seconds: float) -> Row:
    lines = str(error).splitlines() or [repr(error)]
    return {"status": status, "message": lines[0], "plan_seconds": f"{seconds:.2f}"}


def _figures(schedule: Schedule, timeline: Timeline, machine: Machine, seconds: float) -> Row:
    told = summarize(schedule, timeline, machine, seconds)
    bound, step_s = schedule.bound, told.step_time_s
    assert bound is not None, "a chain that has a plan has a bound"
    family_s = getattr(bound, "family_step_s", None) or bound.step_s
    extent, cut = arena_bytes(schedule, DEVICE), schedule.workload
    numbers = {
        "chunk_tokens": cut.chunk_tokens,
        "chunks_per_round": cut.chunks_per_round,
        "rounds_per_step": cut.rounds_per_step,
        "step_s": step_s,
        "spread_s": timeline.spread_ns / 1e9,
        "tokens_per_s": told.tokens_per_s,
        "mfu": told.mfu,
        "hfu": told.hfu,
        "bound_s": bound.step_s,
        "gap": step_s / bound.step_s - 1,
        "family_bound_s": family_s,
        "gap_family": step_s / family_s - 1,
        "extent_gib": extent / GIB,
        "extent_issue": extent / live_peak_bytes(schedule),
        "extent_timed": extent / max(live_peak_bytes(schedule, p) for p in timeline.passes),
        "recompute_fraction": told.recompute_fraction,
        "h2d_gib": told.h2d_bytes / GIB,
        "d2h_gib": told.d2h_bytes / GIB,
        "plan_seconds": round(seconds, 2),
        "ops": len(schedule.ops),
    }
    texts = {"status": "ok", "limits": "+".join(bound.limits)}
    return texts | {name: f"{number:.9g}" for name, number in numbers.items()}


def _steps_of_others(row: Row, commit: str) -> Row:
    """Step seconds of the other policies for the chain and the caps of a row."""
    cut = {name: int(row[name]) for name in Workload.model_fields if name in row}
    machine, spec = load_machine(row["machine"]), load_preset(row["model"])
    workload = Workload.model_validate(cut)
    caps = caps_of(machine, int(row["device_gib"]) * GIB, int(row["host_gib"]) * GIB)
    steps = {}
    for policy in other_policies():
        chain = lower(spec, workload, Recipe(optimizer=optimizer_place(policy)))
        try:
            plan = plan_chain(chain, machine, caps, policy)
        except InfeasiblePlan:
            steps[policy] = ""
        else:
            steps[policy] = f"{simulate(plan, machine).step_ns / 1e9:.9g}"
    return {"others_commit": commit, **steps}
