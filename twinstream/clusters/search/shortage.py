"""What memory there is, and what is said where no layout fits it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twinstream.clusters.predict import Prepared
from twinstream.clusters.search.bounds import Bounds, BoundTables
from twinstream.clusters.search.space import NoLayoutError, SearchSpace
from twinstream.hardware_profiles.clusters.published_memory import memory_of_runs
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.layouts.layout import Layout
from twinstream.schedule.document import Caps
from twinstream.schedule.sizes import gib

_MOST_TIMES = 64  # as many GPUs are tried, in doublings


@dataclass(frozen=True)
class Memory:
    """What tensors may take of a GPU's: `room_bytes` of its own, beside the `reserve_bytes`;
    `most_bytes` with its share of the host's."""

    room_bytes: float
    reserve_bytes: float
    most_bytes: float
    h2d_bytes_per_s: float
    offload: bool

    @staticmethod
    def of(caps: Caps, machine: Machine, *, offload: bool) -> "Memory":
        """Within caps of a GPU; without `offload` only its own."""
        reserve = caps.device_reserve_bytes
        room = (np.inf if caps.device_bytes is None else caps.device_bytes) - reserve
        if not offload:
            return Memory(room, reserve, room, np.inf, offload)
        host_bytes = np.inf if caps.host_bytes is None else caps.host_bytes
        most = room + host_bytes if room > 0 else room  # nothing runs in the host memory alone
        return Memory(room, reserve, most, machine.rate("pcie_h2d_bytes_per_s"), offload)

    def away_s(self, memory_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """What there is no room for where memory is fullest is copied back in every step."""
        return np.maximum(0.0, memory_bytes - self.room_bytes) / self.h2d_bytes_per_s


def none_fits(
    asked: SearchSpace, possible: Sequence[Layout], bounds: Bounds, memory: Memory
) -> NoLayoutError:
    """Which layout needs least, its bytes by class of tensor, and what would do."""
    least = int(np.argmin(bounds.memory_bytes))
    layout = possible[least]
    on_device = layout.model_copy(update={"offload": False})
    classes = Prepared(asked.job.model_copy(update={"layout": on_device}), asked.cluster).memory()
    total = sum(classes.values())
    parts = ", ".join(
        f"{kind.replace('_', ' ')} {gib(size)}"
        for kind, size in sorted(classes.items(), key=lambda item: -item[1])
        if size >= total / 100
    )
    needs = f"the leanest, {layout.text}, needs {gib(total)} ({parts})"
    if memory.room_bytes <= 0:
        return NoLayoutError(
            f"none of {len(possible):,} layouts on {asked.num_gpus:,} GPUs fits: {needs}, and of "
            f"a GPU's {gib(memory.room_bytes + memory.reserve_bytes)} what is no tensor takes "
            f"{gib(memory.reserve_bytes)}; a larger --device-mem would do"
        )
    do = ["--offload"] if asked.fixed.get("offload") is False else []
    if (gpus := _gpus_that_would_do(asked, memory)) is not None:
        do.insert(0, f"{gpus:,} GPUs (by the least bytes)")
    would = f"; {', or '.join(do)}, would do" if do else ""
    error = memory_of_runs().over
    if (over := total / memory.most_bytes - 1) <= error:
        would += (
            f". That is {over:.1%} too much, within the error of such predictions, {error:.1%}: it "
            "may fit, and a larger --device-mem plans it"
        )
    return NoLayoutError(
        f"none of {len(possible):,} layouts on {asked.num_gpus:,} GPUs fits: {needs}, and "
        f"there are {_has_text(memory)}{would}"
    )


def _has_text(memory: Memory) -> str:
    """What there is for tensors."""
    own = f"{gib(memory.room_bytes)} of a GPU beside a reserve of {gib(memory.reserve_bytes)}"
    if not memory.offload:
        return own
    return f"{own}, and {gib(memory.most_bytes - memory.room_bytes)} of its host's"


def _gpus_that_would_do(asked: SearchSpace, memory: Memory) -> int | None:
    """The first doubling of the GPUs on which the least bytes of some layout fit."""
    times = 2
    while times <= _MOST_TIMES:
        more = replace(asked, num_gpus=asked.num_gpus * times)
        try:
            possible = more.possible()
        except NoLayoutError:
            return None
        least = BoundTables(asked.job, asked.pricing).of(possible).memory_bytes.min()
        if least <= memory.most_bytes:
            return more.num_gpus
        times *= 2
    return None
