"""Run schedules one after the other to measure them: memory taken once, random weights in place.

A 48 GB state beside a pinned arena of 100 GiB would not fit the host, and to make it, pin memory
and read the state back for every schedule would take longer than the runs.
"""

import gc
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from twinstream.executor.arenas import Arenas
from twinstream.executor.execute import BackendName, RunOptions, execute_in
from twinstream.executor.pinned import PinnedArena, check_host_memory, host_limits
from twinstream.executor.random_weights import RandomWeights
from twinstream.executor.training import Training
from twinstream.models.spec import ModelSpec
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.tensors import DEVICE, HOST, Tier
from twinstream.schedule.timeline import Timeline

_SEED = 17
_LEARNING_RATE = 1e-5
_NUM_CHUNKS = 64  # of random tokens, used around and around


@dataclass(frozen=True)
class Measured:
    """A run's timeline and losses, and what it took.

    `device_used_bytes` is the driver's own figure of the whole device while the arena was held,
    None on a CPU; `fill_s` is what preparing the state took.
    """

    timeline: Timeline
    losses: tuple[float, ...]
    device_used_bytes: int | None
    host_ns_per_op: float | None
    fill_s: float
    run_s: float


class MeasuringSession:
    """Holds the host arena from the first schedule on; a device slab for each."""

    def __init__(self, backend: BackendName, host_bytes: int = 0) -> None:
        """`host_bytes` is the least to take of the host, so that later schedules find room."""
        self._backend = backend
        self._host_bytes = host_bytes
        self._pinned: PinnedArena | None = None
        self._host: torch.Tensor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def measure(self, schedule: Schedule, num_passes: int) -> Measured:
        """Run so many steps, the first of them cold, on random tokens.

        Raises:
            TwinstreamError: the schedule is unsafe, or memory is short.
        """
        sizes = Arenas.sizes(schedule)
        host = self._host_arena(sizes.get(HOST, 0))
        device = self._slab(sizes[DEVICE])
        memory: dict[Tier, torch.Tensor] = {DEVICE: device, HOST: host}
        spec = ModelSpec.model_validate(schedule.model.spec)
        tokens = random_tokens(spec.vocab_size, schedule.workload.chunk_tokens)
        loop = Training(lambda step, index: tokens[index % _NUM_CHUNKS], _LEARNING_RATE, _SEED)
        start_s = time.perf_counter()
        filled_s = [start_s]

        def fill(arenas: Arenas) -> None:
            fill_random(schedule, arenas, spec)
            filled_s[0] = time.perf_counter()

        options = RunOptions(backend=self._backend, num_passes=num_passes)
        try:
            timeline = execute_in(schedule, memory, fill, loop.host_work(schedule), options)
            used = _device_used_bytes(self._backend)
        finally:
            del device, memory
            self._release_device()
        return Measured(
            timeline=timeline,
            losses=tuple(loop.losses),
            device_used_bytes=used,
            host_ns_per_op=None,
            fill_s=filled_s[0] - start_s,
            run_s=time.perf_counter() - filled_s[0],
        )

    def close(self) -> None:
        self._host = None
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def take_host(self, size_bytes: int) -> None:
        """Take the host arena now.

        Raises:
            HostMemoryError: so much cannot be had, or not pinned.
        """
        self._host_arena(size_bytes)

    def _host_arena(self, size_bytes: int) -> torch.Tensor:
        if self._host is None or self._host.numel() < size_bytes:
            self.close()
            wanted = max(size_bytes, self._host_bytes)
            if self._backend == "cpu":
                check_host_memory(wanted, host_limits(), pinned=False)
                self._host = torch.empty(wanted, dtype=torch.uint8)
            else:
                self._pinned = PinnedArena(wanted)
                self._host = self._pinned.bytes
        return self._host

    def _slab(self, size_bytes: int) -> torch.Tensor:
        if self._backend == "cpu":
            return torch.empty(size_bytes, dtype=torch.uint8)
        free = torch.cuda.mem_get_info()[0]
        if size_bytes > free:
            raise TwinstreamError(
                f"the schedule's device arena is {size_bytes / 2**30:.2f} GiB, and the device has "
                f"{free / 2**30:.2f} GiB free; plan with a smaller --device-mem"
            )
        return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")

    def _release_device(self) -> None:
        if self._backend != "cpu":
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()


def fill_random(schedule: Schedule, arenas: Arenas, spec: ModelSpec) -> None:
    """Random parameters and a zero optimizer state in every carried slot."""
    weights = RandomWeights(spec, _SEED)
    tensors = {tensor.tensor_id: tensor for tensor in schedule.tensors}
    for item in schedule.carried:
        tensor = tensors[item.tensor]
        root = tensor.parent or item.tensor
        destination = arenas.view(item.tensor, item.slot)
        if root.startswith("param."):
            weights.write(root.removeprefix("param."), tensor.offset_bytes, destination)
        else:
            destination.zero_()


def random_tokens(vocab_size: int, chunk_tokens: int) -> torch.Tensor:
    """Uniform ids and labels, int32 [64 chunks, 2, chunk_tokens]; the same for every schedule."""
    generator = torch.Generator().manual_seed(_SEED)
    shape = (_NUM_CHUNKS, 2, chunk_tokens)
    return torch.randint(0, vocab_size, shape, generator=generator, dtype=torch.int32)


def _device_used_bytes(backend: BackendName) -> int | None:
    if backend == "cpu":
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
