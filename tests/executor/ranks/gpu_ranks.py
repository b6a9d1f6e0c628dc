"""Ranks on GPUs of the tests, each with a thread that dispatches; messages as NCCL has them.

Both ends of a message wait on their streams for one another. The nth that a rank has enqueued of a
pair meets the nth of the other: there are no tags.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from tests.helpers.fake_gpu import FakeGpu, Refused
from tests.helpers.runs import training
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.device_memory import DeviceMeter, MemoryReading
from twinstream.executor.program.compiled import Program, Work, compile_program
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.cuda_run import CudaJob, run_on_gpu
from twinstream.executor.run.work import bind_works
from twinstream.executor.state.training_state import State, fill_carried, read_carried
from twinstream.schedule.cluster.projecting import Channel, RankPart, rank_part
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Communicate

LIMIT_S = 30


class RankGpu(FakeGpu):
    """Where nothing can go on, another rank may have to come first."""

    def step(self) -> None:
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            try:
                super().step()
            except AssertionError:
                time.sleep(0.001)
            else:
                return
        raise AssertionError("the ranks are stuck")


@dataclass
class _Message:
    ends: dict[str, torch.Tensor] = field(default_factory=dict)  # by send and recv
    arrived: bool = False


class Link:
    """All messages between the ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[tuple[Channel, int], _Message] = {}
        self._enqueued: Counter[tuple[int, Channel]] = Counter()

    def enqueued(self, part: RankPart, op: Communicate, values: torch.Tensor) -> Callable[[], bool]:
        """Whether it is through; it has begun when that is asked first."""
        channel = part.channels[op.op_id]
        number = self._enqueued[part.rank, channel]
        self._enqueued[part.rank, channel] += 1

        def through() -> bool:
            with self._lock:
                message = self._messages.setdefault((channel, number), _Message())
                message.ends[op.collective] = values
                if len(message.ends) == 2 and not message.arrived:
                    message.ends["recv"].copy_(message.ends["send"])
                    message.arrived = True
                return message.arrived

        return through


@dataclass(frozen=True)
class Ran:
    """Of one rank; `graphs` says how many there were."""

    losses: tuple[float, ...]
    state: State
    graphs: str


def train_on_gpus(schedule: Schedule, state: State, options: RunOptions, seed: int) -> list[Ran]:
    """A pipeline's ranks, by rank."""
    link = Link()
    parts = [rank_part(schedule, rank) for rank in range(schedule.mesh.size)]
    with ThreadPoolExecutor(len(parts)) as pool:
        found = [pool.submit(_train, part, state, options, link, seed) for part in parts]
        return [one.result(LIMIT_S * 4) for one in found]


def _train(part: RankPart, state: State, options: RunOptions, link: Link, seed: int) -> Ran:
    schedule, gpu = part.schedule, RankGpu(seed * 100 + part.rank)
    loop = training(schedule)
    memory = {
        tier: torch.zeros(size, dtype=torch.uint8) for tier, size in Arenas.sizes(schedule).items()
    }
    arenas = Arenas(schedule, memory)
    program = compile_program(schedule)
    works = bind_works(
        schedule, arenas, loop.host_work(schedule), communications=lambda op, arenas: _never
    )
    works = _with_messages(part, program, gpu.works(program, works, arenas), arenas, gpu, link)
    held = {name: flat for name, flat in state.items() if name in _carried(part)}
    job = CudaJob(schedule, program, arenas, works, lambda: fill_carried(schedule, arenas, held))
    meter = DeviceMeter(Caps(), 0, lambda: MemoryReading(0, 0))
    _, graphs = run_on_gpu(gpu, job, options, meter)
    return Ran(tuple(loop.losses), read_carried(schedule, arenas, held), graphs)


def _with_messages(
    part: RankPart, program: Program, works: list[Work], arenas: Arenas, gpu: FakeGpu, link: Link
) -> list[Work]:
    def message(op: Communicate) -> Work:
        (operand,) = arenas.in_order(op)

        def enqueue(pass_index: int) -> None:
            stream = gpu.current
            assert stream is not None
            if stream.captured is not None:
                raise Refused("a message was to be captured")
            with gpu.lock:
                gpu.put(stream, link.enqueued(part, op, operand.bytes))

        return enqueue

    return [
        message(launch.op) if isinstance(launch.op, Communicate) else work
        for launch, work in zip(program.launches, works, strict=True)
    ]


def _carried(part: RankPart) -> set[str]:
    tensors = {tensor.tensor_id: tensor for tensor in part.schedule.tensors}
    return {tensors[item.tensor].parent or item.tensor for item in part.schedule.carried}


def _never(pass_index: int) -> None:
    raise AssertionError("messages are put on streams")
