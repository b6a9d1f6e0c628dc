"""Measured rows as schedules of the seed system: made once, simulated on many profiles.

Rounds are alike: the schedule has the first, one in the middle and the last, and a step of more
rounds takes as much longer as the middle one takes (`step_s` tells how).
"""

from dataclasses import dataclass, fields
from itertools import groupby

from twinstream.fidelity.seed_system.classes import MachineClass, machine_class
from twinstream.fidelity.seed_system.kernels import with_its_kernels
from twinstream.fidelity.seed_system.policy import emit_seed, seed_chain
from twinstream.fidelity.seed_system.sizing import RoundsRule, Sizing, size_step, sizes_of_round
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.models.flops import SavedLevel
from twinstream.models.presets import load_preset
from twinstream.models.spec import ModelSpec
from twinstream.planner.planner import gc_paused
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.workload import MachineRef

SIMULATED_ROUNDS = 3
_GIB = 2**30


@dataclass(frozen=True)
class PlanKey:
    """The columns by which published plans are told apart: equal ones are one schedule."""

    machine: str
    model: str
    seq_len: int
    chunk_tokens: int
    chunks_per_round: int
    rounds_per_step: int
    home_acts: int
    device_acts: int
    input_acts: int
    attention_acts: int
    full_acts: int
    param_blocks: int
    grad_blocks: int


@dataclass(frozen=True)
class CellKey:
    """All that decides the schedule: the plan, how many layers of Adam state fit, and levels."""

    plan: PlanKey
    num_optimizer_blocks: int
    level_runs: str


@dataclass(frozen=True)
class Cell:
    """One schedule of the seed system, of at most three rounds; nothing fitted is in it.

    `timed` is the same schedule with the demands of its kernels, which the recorded times are of.
    """

    key: CellKey
    schedule: RankSchedule
    timed: RankSchedule
    rounds_per_step: int
    tokens_per_step: int


def sizing_of(row: MeasuredRow) -> Sizing:
    """The seed system's plan of a row.

    Recorded rounds are taken, else those of the rule that is named, else those that step time and
    throughput amount to, else those of rule v2.

    Raises:
        SizingRefused: it would not run.
        UnknownMachineClass, UnknownModelError, UnknownTarget, UnsuitableModel: the row is beyond
            what is known.
    """
    spec, machine = load_preset(row.preset), machine_class(row.machine)
    return size_step(
        spec,
        row.seq_len,
        machine,
        host_bytes=round(row.host_mem_gib * _GIB),
        device_bytes=round(row.dev_mem_gib * _GIB),
        rounds=_rounds(row, spec, machine),
    )


def _rounds(row: MeasuredRow, spec: ModelSpec, machine: MachineClass) -> RoundsRule | int:
    if row.rounds_per_step is not None:
        return row.rounds_per_step
    if row.rounds_rule:
        return row.rounds_rule
    if row.step_time_s is None or row.tokens_per_s is None:
        return "v2"
    cut = sizes_of_round(spec, row.seq_len, machine)
    round_tokens = cut.chunk_tokens * cut.chunks_per_round
    return max(1, round(row.tokens_per_s * row.step_time_s / round_tokens))


def key_of(row: MeasuredRow) -> CellKey:
    """What the row's schedule is decided by; raises as `sizing_of`."""
    return _key(machine_class(row.machine), row.preset, sizing_of(row))


def cell_of(row: MeasuredRow) -> Cell:
    """The row's schedule; takes seconds for long sequences. Raises as `sizing_of`."""
    spec, machine, sizing = load_preset(row.preset), machine_class(row.machine), sizing_of(row)
    workload = sizing.workload
    few = min(SIMULATED_ROUNDS, workload.rounds_per_step)
    # Not the hash of a profile: the plan is made from constants of the class alone.
    ref = MachineRef(name=machine.name, content_hash="ml_dataflow")
    with gc_paused():
        chain = seed_chain(spec, workload.model_copy(update={"rounds_per_step": few}))
        schedule = emit_seed(spec, chain, sizing, ref)
    return Cell(
        key=_key(machine, row.preset, sizing),
        schedule=schedule,
        timed=with_its_kernels(schedule, spec),
        rounds_per_step=workload.rounds_per_step,
        tokens_per_step=workload.tokens_per_step,
    )


def _key(machine: MachineClass, preset: str, sizing: Sizing) -> CellKey:
    names = {field.name for field in fields(PlanKey)}
    decided = {name: value for name, value in vars(sizing).items() if name in names}
    plan = PlanKey(
        machine=machine.name,
        model=preset,
        home_acts=sizing.home_acts,
        input_acts=sizing.count(SavedLevel.INPUT),
        attention_acts=sizing.count(SavedLevel.ATTENTION),
        full_acts=sizing.count(SavedLevel.FULL),
        **decided,
    )
    runs = "".join(f"{level.name[0]}{len(list(run))}" for level, run in groupby(sizing.levels))
    return CellKey(plan, sizing.num_optimizer_blocks, runs)
