"""What the process that owns the device is asked to do, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.jobs.campaign import Peer
from benchmarks.gpu.jobs.results import CheckFound, SampleRatio
from twinstream.executor.probe.chosen import Chosen
from twinstream.executor.run.device_state import DeviceState
from twinstream.hardware_profiles.schema import Machine

if TYPE_CHECKING:
    from twinstream.schedule.timeline import RankTimeline


@dataclass(frozen=True)
class DescribeDevice:
    """Name the device, its driver and torch."""


@dataclass(frozen=True)
class DeviceDescription:
    """Who measures, and with what."""

    name: str
    driver: str
    torch: str


@dataclass(frozen=True)
class NoteFacts:
    """Note what there is to know of the machine, and time pinning so much of its memory."""

    pinned_bytes: int


@dataclass(frozen=True)
class Facts:
    """By name."""

    facts: dict[str, str]


@dataclass(frozen=True)
class CheckDevice:
    """Time links, and try attention in slices of queries beside the same called whole."""


@dataclass(frozen=True)
class ProbeDevice:
    """Measure the device with the kernels chosen, on these presets' shapes, writing samples."""

    chosen: Chosen
    presets: tuple[str, ...]
    commit: str
    samples: Path | None = None


@dataclass(frozen=True)
class ProbedDevice:
    """The profile, and what it was fitted to: copies as (direction, bytes, GB/s), kernels."""

    machine: Machine
    links: tuple[tuple[str, int, float], ...]
    samples: tuple[SampleRatio, ...]
    sustained_flop_per_s: float | None = None
    sustained: DeviceState | None = None


@dataclass(frozen=True)
class TakeHostMemory:
    """Take the pinned arena now, while plans are being made."""

    size_bytes: int


@dataclass(frozen=True)
class Taken:
    """Seconds it took; `note` is what was unusual about it."""

    seconds: float
    note: str = ""


@dataclass(frozen=True)
class RunSchedules:
    """Run schedules in files, each for so many passes.

    `host_bytes` is the least of pinned memory to take where none is held yet, as in a process that
    has just been started.
    """

    runs: tuple[tuple[Path, int], ...]
    host_bytes: int = 0


@dataclass(frozen=True)
class ScheduleRun:
    """What one schedule's run measured."""

    timeline: RankTimeline
    losses: tuple[float, ...]
    states: tuple[DeviceState | None, ...] = ()


@dataclass(frozen=True)
class RanSchedules:
    """One run for each schedule, in their order."""

    runs: tuple[ScheduleRun, ...]


@dataclass(frozen=True)
class RunPeer:
    """Time a peer."""

    peer: Peer


@dataclass(frozen=True)
class RanPeer:
    """Seconds of a micro-batch and of an update; the driver's figure of the device."""

    micro_batch_s: float
    update_s: float
    loss: float
    device_used_bytes: int | None


Request = (
    DescribeDevice | NoteFacts | CheckDevice | ProbeDevice | TakeHostMemory | RunSchedules | RunPeer
)
Answer = DeviceDescription | Facts | CheckFound | ProbedDevice | Taken | RanSchedules | RanPeer
