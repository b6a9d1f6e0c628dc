"""Make a placement of decisions: what is kept is reduced until both memories hold it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.decide.decisions import Decisions
from twinstream.planner.decide.filling import Pressure, filled
from twinstream.planner.decide.margins import Allowances, QueueModel, alive_bytes
from twinstream.planner.decide.task_sequence import TaskSequence
from twinstream.planner.lifetimes.residencies import Residency, TaskClock
from twinstream.planner.lifetimes.view import ChainView
from twinstream.planner.limits import SearchLimits
from twinstream.planner.pack.disk_homes import Drive
from twinstream.planner.pack.folded_packing import pack_folded
from twinstream.planner.pack.placement import Placement
from twinstream.schedule.document import Caps

_SHARES_OF_COPIES = (0.5, 0.5, 0.25, 0.0)  # ever less time for copies, where all else failed


@dataclass(frozen=True)
class Packed:
    """Decisions that fit the device, the time for their copies, and their placement.

    `over` has by how many bytes the placement sticks out of the device at which task, where it
    does; `missing_host_bytes` what it takes of the host beyond its cap.
    """

    decisions: Decisions
    allowances: Allowances
    placement: Placement
    over: Mapping[int, int]
    missing_host_bytes: int = 0

    @property
    def fits(self) -> bool:
        return not self.over and not self.missing_host_bytes


@dataclass(frozen=True)
class Packer:
    """Packs the decisions of one chain: decides on the program's rounds, places the simulated ones.

    `queues` says how long copies take.
    """

    small: ChainView
    simulated: ChainView
    machine: Machine
    caps: Caps
    queues: QueueModel
    limits: SearchLimits

    def pack(self, decisions: Decisions, pressure: Pressure, room_bytes: int) -> Packed | None:
        """Place the decisions; where bytes cannot be packed, keep less on the device.

        First at the tasks where something sticks out; if that does not help and no room was asked
        for copies in flight, everywhere. None where nothing fits the device. What does not fit the
        host comes back as it is, perhaps not packed.
        """
        device = self.caps.arena_bytes("device")
        sequence, simulated = self._sequences(decisions)
        if device is None:
            return self._placed(sequence, simulated, decisions)
        free = np.full(len(sequence.tasks), device, dtype=np.int64)
        shortage = 0
        for _ in range(self.limits.tries):
            fitting = filled(sequence, decisions, free - room_bytes, pressure)
            fitting = fitting or filled(sequence, decisions, free, pressure)
            if fitting is None:
                break
            packed = self._placed(sequence, simulated, fitting)
            if not packed.over:
                return packed
            decisions = fitting
            # at least doubled each time, for tries are few
            shortage = max(2 * shortage, max(packed.over.values()))
            for task in packed.over:
                free[task] = min(free[task], device - shortage)
        return None if room_bytes else self._packed_with_less(decisions, pressure, device)

    def reclocked(self, packed: Packed, clock: TaskClock) -> Packed:
        """Place the same decisions, with time for copies by when tasks ran in a simulated pass."""
        sequence = TaskSequence.of(self.simulated, packed.decisions, self._call_ns)
        sequence = replace(sequence, clock=clock)
        return self._placed(sequence, sequence, packed.decisions)

    def with_all_rounds(self, packed: Packed, view: ChainView) -> Packed:
        """Place the same decisions, with as much time for copies, for any number of rounds."""
        sequence = TaskSequence.of(view, packed.decisions, self._call_ns)
        return self._at_offsets(sequence, packed.decisions, packed.allowances)

    def _packed_with_less(
        self, decisions: Decisions, pressure: Pressure, device: int
    ) -> Packed | None:
        """Keep ever less, with ever less time for copies, until it can be packed."""
        sequence, simulated = self._sequences(decisions)
        most_alive = device
        for share in _SHARES_OF_COPIES:
            free = np.full(len(sequence.tasks), most_alive, dtype=np.int64)
            fitting = filled(sequence, decisions, free, pressure)
            if fitting is None:
                return None
            alive = int(alive_bytes(sequence, sequence.residencies(fitting)).max())
            most_bytes = alive + round(share * (device - alive))
            packed = self._placed(sequence, simulated, fitting, most_bytes)
            if not packed.over:
                return packed
            most_alive = round(self.limits.less_kept * alive)
        return None

    @property
    def _call_ns(self) -> dict[str, float]:
        return self.simulated.call_ns(self.machine)

    def _sequences(self, decisions: Decisions) -> tuple[TaskSequence, TaskSequence]:
        call_ns = self._call_ns
        return (
            TaskSequence.of(self.small, decisions, call_ns),
            TaskSequence.of(self.simulated, decisions, call_ns),
        )

    def _placed(
        self,
        sequence: TaskSequence,
        simulated: TaskSequence,
        decisions: Decisions,
        most_bytes: int | None = None,
    ) -> Packed:
        """Place decisions with time for copies; do not pack what overruns the host anyway."""
        bare = self._placement(simulated, simulated.residencies(decisions), ())
        if missing := self._missing_host_bytes(bare):
            return Packed(decisions, Allowances({}, {}), bare, {}, missing)
        most = self.caps.arena_bytes("device") if most_bytes is None else most_bytes
        allowances = self.queues.allowances(sequence, sequence.residencies(decisions), most)
        return self._at_offsets(simulated, decisions, allowances)

    def _at_offsets(
        self, sequence: TaskSequence, decisions: Decisions, allowances: Allowances
    ) -> Packed:
        residencies = allowances.widened(sequence, sequence.residencies(decisions))
        cap = self.caps.arena_bytes("device")
        packing = pack_folded(residencies, sequence.units, sequence.folding, cap, self.limits.moves)
        placement = self._placement(sequence, packing.residencies, packing.offsets)
        missing = self._missing_host_bytes(placement)
        return Packed(decisions, allowances, placement, packing.over_bytes, missing)

    def _missing_host_bytes(self, placement: Placement) -> int:
        cap = self.caps.arena_bytes("host")
        return 0 if cap is None else max(0, placement.host_bytes - cap)

    def _placement(
        self, sequence: TaskSequence, residencies: Sequence[Residency], offsets: Sequence[int]
    ) -> Placement:
        chain, tasks, units = sequence.chain, sequence.tasks, sequence.units
        return Placement(
            chain, tasks, units, residencies, offsets, Drive.of(self.machine, self.caps)
        )
