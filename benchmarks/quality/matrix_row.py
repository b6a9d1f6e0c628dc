"""One row of the quality matrix: a cell planned by `optimal`, and by others on its chain.

Bounds. `bound_s` is of the chain that was chosen. `family_bound_s` is the smallest over all
admissible chunkings, rounds and optimizer placements, and the chain's own where the planner states
none. A gap is step time / bound - 1.

The other policies plan the chain that `optimal` chose, within the same caps. `others_commit` is the
commit that they planned with, empty if they did not; a policy without a step time then does not
fit.

Arena extents. `extent_issue` is the device arena / the most bytes alive at once if ops ran one by
one in issue order; `extent_timed` is the same for the simulated steady pass, where copies take
time. Content is alive from the op that makes it to the last that touches it.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.quality.matrix_cells import GIB, Cell
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import summarize
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.limits import LIMITS, SearchLimits
from twinstream.planner.planner import Planner
from twinstream.planner.policies import compared_names, optimizer_place, plan_by_rule
from twinstream.planner.request import DEFAULT_POLICY, PlanRequest, TrainingStep
from twinstream.schedule.analysis.occupancy import memory_over_time
from twinstream.schedule.document import Caps, RankSchedule, Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.timeline import PassSpans, Timeline
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate, simulate_rank, steady_state

KEY_COLUMNS = ("machine", "model", "seq_len", "device_gib", "host_gib")
COLUMNS = (
    *KEY_COLUMNS,
    *("commit", "status", "message", "tokens_per_step"),
    *("chunk_tokens", "chunks_per_round", "rounds_per_step"),
    *("step_s", "spread_s", "tokens_per_s", "mfu", "hfu"),
    *("bound_s", "gap", "family_bound_s", "gap_family", "limits"),
    *("extent_gib", "extent_issue", "extent_timed"),
    *("recompute_fraction", "h2d_gib", "d2h_gib", "plan_seconds", "ops", "others_commit"),
)
Row = dict[str, str]


def other_policies() -> tuple[str, ...]:
    return tuple(name for name in compared_names() if name != DEFAULT_POLICY)


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


def planned(cell: Cell, limits: SearchLimits = LIMITS) -> Schedule:
    """By a new planner, with the kernels of the older files: torch's own ops, on every machine.

    Raises:
        InfeasiblePlan: the caps are too small.
    """
    machine, recipe = load_machine(cell.machine), Recipe(kernels=KernelChoice())
    request = PlanRequest(
        load_preset(cell.model),
        TrainingStep(cell.seq_len, cell.tokens_per_step, recipe=recipe),
        machine,
        _caps(machine, cell.device_gib, cell.host_gib),
    )
    return Planner(steady_state, limits).plan(request)


def _caps(machine: Machine, device_gib: int, host_gib: int) -> Caps:
    """Also more of the host than the profile states."""
    reserve = round(machine.number("device_reserve_bytes"))
    return Caps(
        device_bytes=device_gib * GIB, host_bytes=host_gib * GIB, device_reserve_bytes=reserve
    )


def _parts(cell: Cell) -> Iterator[Row]:
    machine = load_machine(cell.machine)
    begun = time.perf_counter()
    try:
        schedule = planned(cell)
        seconds = time.perf_counter() - begun
    except InfeasiblePlan as error:
        yield _failure("infeasible", error, time.perf_counter() - begun)
        return
    except (TwinstreamError, AssertionError) as error:  # a fault of ours is a finding
        yield _failure("error", error, time.perf_counter() - begun)
        return
    yield _figures(schedule, simulate(schedule, machine), machine, seconds)


def live_peak_bytes(schedule: RankSchedule, spans: PassSpans | None = None) -> int:
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
    family_s = bound.family_step_s or bound.step_s
    extent, cut = arena_bytes(schedule.only, DEVICE), schedule.workload
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
        "extent_issue": extent / live_peak_bytes(schedule.only),
        "extent_timed": extent / max(live_peak_bytes(schedule.only, p) for p in timeline.passes),
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
    caps = _caps(machine, int(row["device_gib"]), int(row["host_gib"]))
    steps = {}
    for policy in other_policies():
        chain = lower(spec, workload, Recipe(optimizer=optimizer_place(policy)))
        try:
            plan = plan_by_rule(chain, machine, caps, policy)
        except InfeasiblePlan:
            steps[policy] = ""
        else:
            steps[policy] = f"{simulate_rank(plan, machine).step_ns / 1e9:.9g}"
    return {"others_commit": commit, **steps}
