"""Measured rows as schedules of the seed system: made once, simulated on many profiles.

Rounds are alike: the schedule has the first, one in the middle and the last, and a step of more
rounds takes as much longer as the middle one takes.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from itertools import groupby

from twinstream.fidelity.measured import Predicted
from twinstream.fidelity.seed_system.classes import MachineClass, machine_class
from twinstream.fidelity.seed_system.kernels import with_its_kernels
from twinstream.fidelity.seed_system.policy import emit_seed, seed_chain, timed_ns
from twinstream.fidelity.seed_system.sizing import RoundsRule, Sizing, size_step, sizes_of_round
from twinstream.hardware_profiles.link import LINK_FIELDS
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.overrides import override
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.flops import SavedLevel
from twinstream.models.presets import load_preset
from twinstream.models.spec import ModelSpec
from twinstream.planner.planner import gc_paused
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.timeline import PassSpans
from twinstream.schedule.workload import MachineRef
from twinstream.simulator.costs import MachineCosts
from twinstream.simulator.replay import replay_passes

SIMULATED_ROUNDS = 3
_GIB = 2**30
_FREE = (*LINK_FIELDS, "host_dram_bytes_per_s")  # where a step waits for no copy


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


class TimedCell(ABC):
    """A row's schedule, timed on any profile."""

    tokens_per_step: int

    @abstractmethod
    def step_s(self, machine: Machine) -> float:
        """Return the seconds of a step."""

    def free_link_step_s(self, machine: Machine) -> float:
        """Return the seconds with infinitely fast links and host memory."""
        return self.step_s(override(machine, dict.fromkeys(_FREE, math.inf)))

    def predicted(self, machine: Machine) -> Predicted:
        """Predict a step, and how much slower it is than with infinite links; two simulations."""
        seconds = self.step_s(machine)
        return Predicted(
            step_s=seconds,
            tokens_per_s=self.tokens_per_step / seconds,
            stall=seconds / self.free_link_step_s(machine) - 1.0,
        )


@dataclass(frozen=True)
class Cell(TimedCell):
    """One schedule of the seed system, of at most three rounds; nothing fitted is in it.

    `timed` is the same schedule with the demands of its kernels, which the recorded times are of.
    """

    key: CellKey
    schedule: RankSchedule
    timed: RankSchedule
    rounds_per_step: int
    tokens_per_step: int

    def step_s(self, machine: Machine) -> float:
        """Return the seconds from compute's start to the end of the last outbound copy.

        Steps are apart from each other by a barrier, so that one pass from empty queues is a step.
        Its rounds but the first and the last repeat exactly: each further one adds the middle one's
        time.
        """
        (spans,) = replay_passes(self.timed, MachineCosts(self.timed, machine), 1)
        step_ns = timed_ns(self.schedule, spans)
        if more := self.rounds_per_step - self.schedule.workload.rounds_per_step:
            starts_ns = self._round_starts_ns(spans)
            step_ns += more * (starts_ns[-1] - starts_ns[-2])
        return step_ns / 1e9

    def _round_starts_ns(self, spans: PassSpans) -> list[int]:
        found: dict[int | None, int] = {}
        for op, start_ns in zip(self.schedule.ops, spans.start_ns, strict=True):
            if isinstance(op, Compute) and op.label.kind == "embed_forward":
                found.setdefault(op.label.round, start_ns)
        return list(found.values())


def sizing_of(row: MeasuredRow) -> Sizing:
    """Size a row as the seed system plans it.

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
    """Return what decides the row's schedule; raises as `sizing_of`."""
    return _key(machine_class(row.machine), row.preset, sizing_of(row))


def cell_of(row: MeasuredRow) -> Cell:
    """Make the row's schedule; takes seconds for long sequences. Raises as `sizing_of`."""
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
