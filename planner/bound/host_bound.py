"""The lower bound of a chain whose optimizer runs on the host CPU."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from twinstream.hardware_profiles.cost import call_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound.interval_columns import alone_ms_and_gib
from twinstream.planner.lifetimes.host_tasks import HostContent, host_tasks
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import StepBound

_RATES = {
    "h2d": "pcie_h2d_bytes_per_s",
    "d2h": "pcie_d2h_bytes_per_s",
    "pcie": "pcie_duplex_bytes_per_s",
    "hbm": "hbm_bytes_per_s",
    "host_dram": "host_dram_bytes_per_s",
}


def raised_by_host(bound: StepBound, chain: Chain, machine: Machine) -> StepBound:
    """Return `bound`, which counts the device's tasks alone, or what the host adds if that is more.

    No schedule of the chain is faster in the steady state than any of these, seconds per step:

    - the program's optimum for the chain without the host's tasks (`bound`): what the host makes
      is there by itself;
    - what must cross the link, over its rate each way and both ways: content that the device makes
      and the host reads, and the reverse;
    - the same bytes and those of the host's tasks, over the rate of host DRAM;
    - the host's tasks alone, one after the other;
    - a circle of what waits for what: the device's tasks from the first that reads a parameter to
      the last that adds to a gradient, the gradient's copy to the host, the host's tasks from the
      one that reads it to the one that makes the parameter, and the parameter's copy back.

    Contention, latencies and rounding only add time. Prices are those of the one that is largest.

    Raises:
        MissingNumberError: the profile lacks a rate or a number of the host CPU.
    """
    floors = _Floors(chain, machine)
    largest = max(floors.all(), key=lambda floor: floor.step_s)
    if largest.step_s <= bound.step_s:
        return bound
    prices = dict.fromkeys(bound.link_s_per_gb_per_s, 0.0)
    for name, seconds in largest.copying_s.items():
        prices[name] = seconds / (machine.rate(_RATES[name]) / 1e9)
    return bound.model_copy(
        update={
            "step_s": largest.step_s,
            "device_s_per_gib": 0.0,
            "host_s_per_gib": 0.0,
            "link_s_per_gb_per_s": prices,
            "limits": (*largest.computing_s, *largest.copying_s),
        }
    )


@dataclass(frozen=True)
class _Floor:
    """Seconds that have to be spent one after the other, by resource."""

    computing_s: dict[str, float] = field(default_factory=dict)
    copying_s: dict[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return sum(self.computing_s.values()) + sum(self.copying_s.values())


@dataclass(frozen=True)
class _Crossing:
    """A leaf that one processor makes and the other reads: the positions of both tasks."""

    maker: int
    reader: int
    size_bytes: int


class _Floors:
    def __init__(self, chain: Chain, machine: Machine) -> None:
        self._chain, self._machine = chain, machine
        self._units = UnitMap(chain)
        self._host = HostContent.of(chain, self._units)
        self._hosts = {task.task_id for task in host_tasks(chain)}
        self._down, self._up = self._crossings()
        self._device_s, self._host_s = [0.0], [0.0]
        for task in chain.tasks:
            on_host, call = task.task_id in self._hosts, chain.calls[task.call]
            device_s = 0.0 if on_host else alone_ms_and_gib(call.cost, machine)[0] / 1e3
            host_s = call_alone_ns(call, machine) / 1e9 if on_host else 0.0
            self._device_s.append(self._device_s[-1] + device_s)
            self._host_s.append(self._host_s[-1] + host_s)

    def all(self) -> Iterator[_Floor]:
        down, up = (_total_bytes(found) for found in (self._down, self._up))
        computed = sum(
            work.host_dram_bytes
            for task in self._chain.tasks
            if task.task_id in self._hosts
            for work in self._chain.calls[task.call].cost
        )
        yield _Floor(computing_s={"host_compute": self._host_s[-1]})
        to, back = self._machine.duplex_weights()
        amounts = {
            "h2d": up, "d2h": down, "pcie": up * to + down * back,
            "host_dram": up + down + computed,
        }  # fmt: skip
        for name, amount in amounts.items():
            yield _Floor(copying_s={name: amount / self._machine.rate(_RATES[name])})
        yield from self._circles()

    def _circles(self) -> Iterator[_Floor]:
        """For each way back to the device the longest way there."""
        score_s = {
            way: self._device_s[way.maker + 1]
            + self._copy("d2h", way)[1]
            - self._host_s[way.reader]
            for way in self._down
        }
        for back in self._up:
            ways = (w for w in self._down if w.reader <= back.maker and w.maker >= back.reader)
            if (way := max(ways, key=score_s.__getitem__, default=None)) is not None:
                yield self._circle(way, back)

    def _circle(self, way: _Crossing, back: _Crossing) -> _Floor:
        computing_s = {
            "compute": self._device_s[way.maker + 1] - self._device_s[back.reader],
            "host_compute": self._host_s[back.maker + 1] - self._host_s[way.reader],
        }
        copying_s: dict[str, float] = {}
        for name, seconds in (self._copy("d2h", way), self._copy("h2d", back)):
            copying_s[name] = copying_s.get(name, 0.0) + seconds
        return _Floor(computing_s, copying_s)

    def _copy(self, direction: str, crossing: _Crossing) -> tuple[str, float]:
        """The resource that limits the copy, and the seconds that it takes at least."""
        names = (direction, "pcie", "hbm", "host_dram")
        slowest = min(names, key=lambda name: self._machine.rate(_RATES[name]))
        return slowest, crossing.size_bytes / self._machine.rate(_RATES[slowest])

    def _crossings(self) -> tuple[list[_Crossing], list[_Crossing]]:
        """What goes to the host within a step, and what the next step gets back from it."""
        sizes = {tensor.tensor_id: tensor.size_bytes for tensor in self._chain.tensors}
        made: dict[tuple[str, int], int] = {}
        first_read: dict[str, int] = {}
        down: dict[tuple[str, int], _Crossing] = {}
        up: dict[str, _Crossing] = {}
        for position, task in enumerate(self._chain.tasks):
            on_host = task.task_id in self._hosts
            for leaves in self._units.touched(task).values():
                for use in leaves:
                    if on_host and use.reads is not None and (use.leaf, use.reads) in made:
                        key = (use.leaf, use.reads)
                        down.setdefault(key, _Crossing(made[key], position, sizes[use.leaf]))
                    if not on_host and use.reads == 0:
                        first_read.setdefault(use.leaf, position)
                    if on_host and use.makes is not None and use.leaf in first_read:
                        up[use.leaf] = _Crossing(position, first_read[use.leaf], sizes[use.leaf])
                    if not on_host and use.makes is not None:
                        made[use.leaf, use.makes] = position
        return list(down.values()), list(up.values())


def _total_bytes(crossings: Iterable[_Crossing]) -> int:
    return sum(crossing.size_bytes for crossing in crossings)
