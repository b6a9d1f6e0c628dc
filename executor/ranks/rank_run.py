"""Run one rank's part of a cluster's schedule in this process."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from time import perf_counter_ns

import torch

from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.program.host_work import HostWork
from twinstream.executor.program.options import BackendName, Between, RunOptions
from twinstream.executor.ranks.clocks import ClockOffset, clock_offset
from twinstream.executor.ranks.communications import RankCommunications
from twinstream.executor.ranks.device_waiting import waiting_on
from twinstream.executor.ranks.groups import open_groups, rank_pool
from twinstream.executor.ranks.resident import ResidentRank
from twinstream.executor.ranks.waiting import Waiting
from twinstream.executor.ranks.world import DEFAULT_START_S, Patience, World, world_of_environment
from twinstream.executor.run.execute import execute_proven, execute_resident, require_runnable
from twinstream.executor.state.training_state import State, carried_names
from twinstream.schedule.cluster.projecting import RankPart, rank_part
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.derived.flush import flush_of
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import ArgumentError, TwinstreamError
from twinstream.schedule.ops import Feed, Fetch
from twinstream.schedule.proof.verify import require_safe_rank
from twinstream.schedule.timeline import RankTimeline


@dataclass(frozen=True)
class RankInputs:
    """The state that a rank begins with, and the work of its host.

    `state` has what the rank's schedule carries; what else is in it is left alone. `between` is as
    in `RunOptions`. With `fill` there is no `state`, and none in the outcome; nor is what was
    fetched: it is given the rank before the first pass, to put its state there, and may keep it.
    """

    host_work: HostWork
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    between: Between | None = None
    fill: Callable[[ResidentRank], None] | None = None

    @classmethod
    def of_feed(cls, feed: Callable[[Feed, int], torch.Tensor]) -> "RankInputs":
        """Inputs alone; what is fetched is in the outcome."""
        return cls(HostWork(feed, lambda op, number, taken: None))


@dataclass(frozen=True)
class Fetched:
    """A result that the host took in a pass, 1-D uint8."""

    op_id: str
    sink: str
    pass_number: int
    values: torch.Tensor


@dataclass(frozen=True)
class RankOutcome:
    """The result of a rank: its timeline, the state it ends with, what was fetched.

    `timeline` counts from one moment on all ranks, by rank 0's clock, within `clock.error_ns`.
    `state` is what the rank carries. `scratch_bytes` were taken beside the arenas, for sums.
    """

    rank: int
    class_name: str
    coordinates: Mapping[str, int]
    timeline: RankTimeline
    state: State
    fetched: tuple[Fetched, ...]
    clock: ClockOffset
    scratch_bytes: int


class RankRun:
    """This process's rank among others that have met and opened their groups.

    All ranks make it, and call its methods, at the same time.

    Args:
        schedule: the same on all ranks; proven safe, as `require_safe_cluster` does it.

    Raises:
        ArgumentError: the mesh has another number of ranks than there are.
        RanksDifferError: a rank has another schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        world: World,
        waiting: Waiting | None = None,
    ) -> None:
        if schedule.mesh.size != world.size:
            raise ArgumentError(
                f"the schedule is of {schedule.mesh.size} ranks, and {world.size} have been started"
            )
        self.world = world
        self._num_runs = 0
        world.require_same("schedule", {"a schedule of hash": schedule_hash(schedule)})
        self.part: RankPart = rank_part(schedule, world.rank)
        self._waiting = waiting or waiting_on(
            world.device, world.patience.timeout_s, None if self.backend == "cpu" else _give_up
        )
        with self._waiting.opening(world.rank, DEFAULT_START_S):
            self._groups = open_groups(schedule, world.rank, world.device, world.group_timeout)
        self._pool = rank_pool(schedule, self._groups, world.device)
        self.communications = self._communications_of(self.part)

    @classmethod
    @contextlib.contextmanager
    def joined(
        cls,
        schedule: Schedule,
        backend: BackendName = "cpu",
        patience: Patience | None = None,
    ) -> "Iterator[RankRun]":
        """Join the ranks that torchrun has started (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

        Raises:
            UnsafeSchedule: the proof fails; nobody has been met.
            RendezvousError: the port is taken, or a rank did not come.
            TwinstreamError: as `RankRun`.
        """
        require_safe(schedule)
        with world_of_environment(backend, patience or Patience()) as world:
            try:
                yield cls(schedule, world)
            except TwinstreamError as error:
                if world.device.type == "cuda":
                    _give_up(error)
                raise

    @property
    def backend(self) -> BackendName:
        return "cuda" if self.world.device.type == "cuda" else "cpu"

    def execute(self, inputs: RankInputs, options: RunOptions) -> RankOutcome:
        """Run the passes; returns when all ranks are through.

        Raises:
            RanksDifferError: a rank runs another number of passes.
            CommunicationError: a rank is lost, or kept others waiting for too long.
            TwinstreamError: as `execute` of an ordinary schedule.
        """
        schedule = self.part.schedule
        require_runnable(schedule, self.backend)
        if (flush := flush_of(schedule)) is not None:
            require_safe_rank(flush)
        self._num_runs += 1
        world = self.world.for_run(self._num_runs)
        world.require_same("passes", {"a run of passes": str(options.num_passes)})
        zero_ns = world.broadcast("zero", perf_counter_ns())
        clock = clock_offset(world.rank, world.size)
        found: list[Fetched] = []
        options = replace(
            options, backend=self.backend, zero_ns=zero_ns - clock.offset_ns,
            between=inputs.between or options.between, on_filled=partial(self._all_begin, world),
            pool=self._pool,
        )  # fmt: skip
        with self._waiting.watched_over(self.part):
            timeline, state = self._executed(inputs, options, found)
        with self._waiting.at_the_end(world.size):
            world.shutdown()
        return RankOutcome(
            rank=self.part.rank, class_name=self.part.class_name,
            coordinates=self.part.coordinates, timeline=timeline, state=state,
            fetched=tuple(found), clock=clock, scratch_bytes=self.communications.scratch_bytes,
        )  # fmt: skip

    def _all_begin(self, world: World) -> None:
        """Wait until all ranks are warm and have their state: no op is to wait for that."""
        world.barrier("begins", world.patience.start_s)

    def _communications_of(self, part: RankPart) -> RankCommunications:
        return RankCommunications(part, self._groups, self._waiting, self.world.device)

    def _executed(
        self, inputs: RankInputs, options: RunOptions, found: list[Fetched]
    ) -> tuple[RankTimeline, State]:
        schedule, communications = self.part.schedule, self.communications
        if (fill := inputs.fill) is not None:

            def fill_rank(arenas: Arenas) -> None:
                fill(ResidentRank(self.part, arenas, options, work, self._communications_of))

            work = inputs.host_work
            return execute_resident(schedule, fill_rank, work, options, communications), {}
        work = _noting(inputs.host_work, found)
        held = {
            name: inputs.state[name] for name in carried_names(schedule) if name in inputs.state
        }
        execution = execute_proven(schedule, held, work, options, communications)
        return execution.timeline, execution.state


def _give_up(error: TwinstreamError) -> None:
    """End the process: on a GPU nothing else ends a wait for other ranks."""
    print(error, file=sys.stderr, flush=True)
    os._exit(2)


def schedule_hash(schedule: Schedule) -> str:
    """Return a hash that is equal for equal documents."""
    return sha256(schedule.model_dump_json(exclude_none=True).encode()).hexdigest()[:16]


def _noting(host_work: HostWork, found: list[Fetched]) -> HostWork:
    """Return the same work, which also keeps what is fetched."""

    def fetch(op: Fetch, number: int, taken: torch.Tensor) -> None:
        found.append(Fetched(op.op_id, op.sink, number, taken))
        host_work.fetch(op, number, taken)

    return replace(host_work, fetch=fetch)
