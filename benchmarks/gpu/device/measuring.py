"""Run schedules one after the other to measure them: memory taken once, random weights in place.

A 48 GB state beside a pinned arena of 100 GiB would not fit the host, and to make it, pin memory
and read the state back for every schedule would take longer than the runs.
"""

import contextlib
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch

from twinstream.executor.kernels.attention.canary import check_attention
from twinstream.executor.memory.arena_memory import arena_pinning, device_slab
from twinstream.executor.memory.arenas import ArenaMemory, Arenas, Piece, PieceMemory
from twinstream.executor.memory.device_memory import check_device_memory
from twinstream.executor.memory.host_limits import (
    AvailableMemoryError,
    HostMemoryError,
    check_host_memory,
    host_limits,
)
from twinstream.executor.memory.pinned import pinned_arena
from twinstream.executor.memory.pinned_pieces import (
    MAX_PIECE_BYTES,
    NoBoundaryError,
    host_ranges,
    piece_ends,
)
from twinstream.executor.program.host_work import HostWork
from twinstream.executor.program.options import BackendName, RunOptions
from twinstream.executor.run.device_state import (
    NO_READER,
    DeviceState,
    StateReader,
    StateWatch,
    cuda_reader,
)
from twinstream.executor.run.execute import execute_in, prove
from twinstream.executor.run.training import Training
from twinstream.executor.state.random_weights import RandomWeights
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Fetch
from twinstream.schedule.tensors import DEVICE, HOST, Tier
from twinstream.schedule.timeline import RankTimeline

_SEED = 17
_LEARNING_RATE = 1e-5
_NUM_CHUNKS = 64  # of random tokens, used around and around
# Schedules cut the arena where their slots end, a little before the end of a pinned piece.
_PIECE_SLACK_BYTES = 3 * 2**30


@dataclass(frozen=True)
class Measured:
    """A run's timeline and losses, seconds to prepare it (proof, warm kernels, state) and to run.

    The timeline's provenance has the driver's figure of device memory and the host's cost.
    `states` has the device's clock and power of each pass, from the loss before it to its own.
    """

    timeline: RankTimeline
    losses: tuple[float, ...]
    prepared_s: float
    run_s: float
    states: tuple[DeviceState | None, ...] = ()


class MeasuringSession:
    """Holds the host arena from the first schedule on; a device slab for each.

    Where context and libraries take more of the device than a schedule's cap leaves them, the run
    goes on, and the excess is in its timeline's provenance.
    """

    def __init__(self, backend: BackendName, host_bytes: int = 0) -> None:
        """`host_bytes` is the least to take of the host, so that later schedules find room."""
        self._backend = backend
        self._host_bytes = host_bytes
        self._pinned = contextlib.ExitStack()
        self._pieces: list[torch.Tensor] = []
        self._reader = _reader(backend)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def measure(self, schedule: RankSchedule, num_passes: int) -> Measured:
        """Run so many steps, the first of them cold, on random tokens.

        Raises:
            TwinstreamError: the schedule is unsafe, or memory is short.
        """
        prove(schedule, self._backend)
        check_attention(schedule, self._backend)  # it takes a call's memory beside the arena
        sizes = Arenas.sizes(schedule)
        memory = {HOST: self._host_arena(schedule), DEVICE: self._slab(sizes[DEVICE])}
        try:
            return self._measure(schedule, memory, num_passes)
        finally:
            del memory
            self._release_device()

    def take_host(self, size_bytes: int, *, heeds_available: bool = True) -> None:
        """Take the host arena now, in place of the one there is; a little more than asked for
        where it is in pieces, since every schedule cuts it elsewhere.

        Without `heeds_available` it is tried whatever the system says is available.

        Raises:
            HostMemoryError: so much cannot be had, or not pinned.
        """
        self.close()
        limits = host_limits()
        if not heeds_available:
            limits = replace(limits, available_bytes=None)
        check_host_memory(size_bytes, limits)
        if self._backend == "cpu":
            self._pieces = [torch.empty(size_bytes, dtype=torch.uint8)]
            return
        if size_bytes > MAX_PIECE_BYTES:
            size_bytes += _PIECE_SLACK_BYTES
        memory = self._pinned.enter_context(pinned_arena(size_bytes, (), arena_pinning()))
        self._pieces = [piece.bytes for piece in memory.pieces]

    def take_host_anyway(self, size_bytes: int) -> str:
        """As `take_host`, but where the system says that less is available, try all the same.

        The memory of some virtual machines grows as it is used. Returns what was said, or "".

        Raises:
            HostMemoryError: so much cannot be had, or not pinned.
        """
        try:
            self.take_host(size_bytes)
        except AvailableMemoryError as error:
            self.take_host(size_bytes, heeds_available=False)
            return f"{error} Tried all the same, and there was enough."
        return ""

    def close(self) -> None:
        """Give the host arena back."""
        self._pieces = []
        self._pinned.close()

    def _measure(
        self, schedule: RankSchedule, memory: Mapping[Tier, ArenaMemory], num_passes: int
    ) -> Measured:
        spec = ModelSpec.model_validate(schedule.model.spec)
        tokens = random_tokens(spec.vocab_size, schedule.workload.chunk_tokens)
        loop = Training(lambda step, index: tokens[index % _NUM_CHUNKS], _LEARNING_RATE, _SEED)
        start_s = time.perf_counter()
        filled_s = [start_s]
        ends_ns: list[int] = []

        def fill(arenas: Arenas) -> None:
            fill_random(schedule, arenas, spec)
            filled_s[0] = time.perf_counter()
            ends_ns.append(time.perf_counter_ns())

        options = RunOptions(backend=self._backend, num_passes=num_passes, refuses_excess=False)
        work = _noting(loop.host_work(schedule), ends_ns)
        with StateWatch(self._reader) as watch:
            timeline = execute_in(schedule, memory, fill, work, options)
        end_s = time.perf_counter()
        return Measured(
            timeline=timeline,
            losses=tuple(loop.losses),
            prepared_s=filled_s[0] - start_s,
            run_s=end_s - filled_s[0],
            states=tuple(watch.between(ends_ns)),
        )

    def _host_arena(self, schedule: RankSchedule) -> ArenaMemory:
        """The arena there is, seen as the schedule cuts it; a larger one where it does not fit."""
        size_bytes = Arenas.sizes(schedule).get(HOST, 0)
        found = self._cut(schedule, size_bytes)
        if found is None:
            self._take_for(size_bytes)
            found = self._cut(schedule, size_bytes)
        if found is None:
            raise NoBoundaryError(
                f"the schedule's {size_bytes / 2**30:.2f} GiB of host memory hang together over "
                f"the ends of the {len(self._pieces)} pinned pieces; plan with "
                "another --host-mem"
            )
        return found

    def _take_for(self, size_bytes: int) -> None:
        """As much as later schedules may need; where that cannot be had, what this one needs."""
        if size_bytes < self._host_bytes:
            try:
                self.take_host_anyway(self._host_bytes)
            except HostMemoryError:
                self._host_bytes = 0
            else:
                return
        self.take_host_anyway(size_bytes)

    def _cut(self, schedule: RankSchedule, size_bytes: int) -> ArenaMemory | None:
        """The pieces there are as the schedule's arena; None where they are too small for it."""
        held = [piece.numel() for piece in self._pieces]
        if len(held) == 1 and size_bytes <= held[0]:
            return self._pieces[0]
        if not size_bytes and held:
            return self._pieces[0]
        if sum(held) < size_bytes or not held:
            return None
        pieces, start = [], 0
        ends = piece_ends(size_bytes, host_ranges(schedule), max(held))
        for number, end in enumerate(ends):
            if number >= len(held) or end - start > held[number]:
                return None
            pieces.append(Piece(start, self._pieces[number][: end - start]))
            start = end
        return PieceMemory(pieces)

    def _slab(self, size_bytes: int) -> torch.Tensor:
        if self._backend == "cpu":
            return torch.empty(size_bytes, dtype=torch.uint8)
        check_device_memory(size_bytes, *torch.cuda.mem_get_info())
        return device_slab(size_bytes)

    def _release_device(self) -> None:
        """Workspaces too: torch keeps one for each stream that ever multiplied."""
        if self._backend != "cpu":
            torch.cuda.synchronize()
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def _reader(backend: BackendName) -> StateReader:
    if backend == "cpu":
        return NO_READER
    return cuda_reader()


def _noting(work: HostWork, ends_ns: list[int]) -> HostWork:
    """The work, which also notes when the last result of each pass was taken."""

    def fetch(op: Fetch, pass_index: int, taken: torch.Tensor) -> None:
        work.fetch(op, pass_index, taken)
        del ends_ns[pass_index + 1 :]
        ends_ns.append(time.perf_counter_ns())

    return HostWork(work.feed, fetch)


def fill_random(schedule: RankSchedule, arenas: Arenas, spec: ModelSpec) -> None:
    """Random parameters and a zero optimizer state in every carried slot."""
    weights = RandomWeights(spec, _SEED, recipe=Recipe.model_validate(schedule.recipe))
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
