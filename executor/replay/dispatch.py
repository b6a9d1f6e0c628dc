"""The dispatch loop: replay a program, enqueue each op, let streams wait on events."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns

import torch

from twinstream.executor.backends.protocol import Backend, EventT, MeasuredPass
from twinstream.executor.program.compiled import Launch, Program
from twinstream.executor.program.options import Between
from twinstream.executor.replay.host_cost import CostMeter
from twinstream.schedule.timeline import HostCost

Events = list[EventT | None]
"""By position, the event of every op of a pass that some op waits for."""
Replay = Callable[[int, Events[EventT], CostMeter], Events[EventT]]
"""Enqueues a whole pass in another way, with the same events; given those of the pass before."""


@dataclass(frozen=True)
class Passes:
    """When every pass ended, the spans of those that were timed, and what enqueueing cost.

    `clock_error_ns`: how far the device's clock may be from the host's, where it has its own.
    `rests_ns`: before which passes nothing ran, and for how long.
    """

    times: tuple[MeasuredPass, ...]
    host_cost: HostCost | None
    clock_error_ns: int | None = None
    rests_ns: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PassOptions:
    """How many passes, and of how many of the last ones, beside the first, every op is timed.

    None times all of them. `between` is asked before every pass but the first.
    """

    num_passes: int
    timed_passes: int | None = None
    between: Between | None = None

    def is_timed(self, number: int) -> bool:
        """Whether pass `number` records when its ops start and end."""
        if self.timed_passes is None or number == 0:
            return True
        return number >= self.num_passes - self.timed_passes

    def times_all(self) -> bool:
        """Whether there is no pass but timed ones."""
        return all(self.is_timed(number) for number in range(self.num_passes))


def run_passes(
    program: Program,
    backend: Backend[EventT],
    options: PassOptions,
    replay: Replay[EventT] | None = None,
) -> Passes:
    """Run so many passes, one after the other with no barrier between them.

    Passes that are not timed go through `replay` where there is one. Events are kept for this
    pass and the one before, and nothing else: a wait on an op of the pass before finds its event
    recorded, and the first pass has none to wait for. Whatever goes wrong, Ctrl-C included,
    nothing runs any more when this returns or raises.
    """
    meter = CostMeter()
    events: Events[EventT] = []
    rests_ns: dict[int, int] = {}
    # The schedule's hundreds of thousands of objects stay; the collector need not visit them.
    gc.freeze()
    try:
        with torch.no_grad():
            for number in range(options.num_passes):
                if number and options.between is not None:
                    before_ns = perf_counter_ns()
                    synchronize = _TimedSynchronize(backend.synchronize)
                    goes_on = options.between(number, synchronize)
                    after_ns = perf_counter_ns()
                    backend.waited_ns += after_ns - before_ns
                    if synchronize.since_ns is not None:
                        rests_ns[number] = after_ns - synchronize.since_ns
                    if not gc.get_freeze_count():  # another run in between has thawed it
                        gc.freeze()
                    if not goes_on:
                        break
                timed = options.is_timed(number)
                waited_ns = backend.waited_ns
                backend.begin_pass(number, timed=timed)
                if timed or replay is None:
                    events = _issue(program, backend, events, meter)
                else:
                    events = replay(number, events, meter)
                meter.end_pass(backend.waited_ns - waited_ns, timed=timed)
            cost = meter.result(len(program.launches))
            return Passes(tuple(backend.finish()), cost, rests_ns=rests_ns)
    except BaseException:
        backend.abort()
        raise
    finally:
        gc.unfreeze()


class _TimedSynchronize:
    """Waits until nothing runs, and notes when that is."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self.since_ns: int | None = None

    def __call__(self) -> None:
        self._synchronize()
        self.since_ns = perf_counter_ns()


def _issue(
    program: Program, backend: Backend[EventT], previous: Events[EventT], meter: CostMeter
) -> Events[EventT]:
    """Enqueue one pass, op by op; `previous` is empty in the first."""
    done: Events[EventT] = [None] * len(program.launches)
    waited_ns, now_ns = backend.waited_ns, perf_counter_ns()
    for launch in program.launches:
        enqueue(backend, launch, done, previous)
        before_ns, now_ns = now_ns, perf_counter_ns()
        before_waited_ns, waited_ns = waited_ns, backend.waited_ns
        meter.add(launch.op.kind, now_ns - before_ns - (waited_ns - before_waited_ns))
    return done


def enqueue(
    backend: Backend[EventT], launch: Launch, done: Events[EventT], previous: Events[EventT]
) -> None:
    """Enqueue an op behind what it waits for, and note its event in `done`."""
    events = [done[wait] for wait in launch.waits]
    if previous:
        events += [previous[wait] for wait in launch.waits_previous]
    for event in events:
        assert event is not None, "awaited ops record"
        backend.wait(launch, event)
    backend.launch(launch)
    if launch.records:
        done[launch.position] = backend.record(launch)
