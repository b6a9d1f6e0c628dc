"""Ranks that compute slower than the others."""

from collections.abc import Mapping

from twinstream.hardware_profiles.overrides import override
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.cluster.splitting import with_straggler
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError, did_you_mean

_RATES = (
    "peak_bf16_flop_per_s",
    "peak_fp8_flop_per_s",
    "peak_fp4_flop_per_s",
    "peak_fp32_flop_per_s",
    "hbm_bytes_per_s",
)
_LEAST, _MOST = 0.01, 100.0


class StragglerError(TwinstreamError):
    """A straggler that is no class of the cluster's, or so fast or slow that none is."""


def slower(machine: Machine, factor: float) -> Machine:
    """The machine whose kernels take `factor` times as long alone; links are as they were."""
    changes = {}
    for field in (*_RATES, "launch_latency_ns"):
        number = getattr(machine, field)
        if number is not None and number.value is not None:
            changes[field] = number.value * (1 / factor if field in _RATES else factor)
    return override(machine, changes)


def with_stragglers(
    schedule: Schedule, machine: Machine, factors: Mapping[str, float]
) -> tuple[Schedule, dict[str, Machine]]:
    """Machines of the classes, by name, that take so many times as long.

    A straggler is a whole class by its name, or `rank 5` alone: then its class, and those that it
    meets, are split, and the schedule is that with more classes.

    Raises:
        StragglerError: there is no such class or rank, or the factor is out of range.
    """
    ranks = {name: _rank(schedule, name) for name in factors}
    for name, factor in factors.items():
        if not _LEAST <= factor <= _MOST:
            raise StragglerError(
                f"'{name}' cannot take {factor:g} times as long; give a factor from {_LEAST:g} to "
                f"{_MOST:g}, 1.2 for a fifth more"
            )
    cut = schedule
    for rank in ranks.values():
        if rank is not None:
            cut = with_straggler(cut, rank)[0]
    machines: dict[str, Machine] = {}
    for name, rank in ranks.items():
        place = _cells(schedule, name, rank)
        slow = slower(machine, factors[name])
        for one in cut.classes:
            if all(
                set(one.cell(axis, cut.mesh.length(axis))) <= mine for axis, mine in place.items()
            ):
                machines[one.name] = slow
    return cut, machines


def _rank(schedule: Schedule, name: str) -> int | None:
    """The rank that a straggler's name is, or None: it is a class."""
    names = [one.name for one in schedule.classes]
    if name in names:
        return None
    word, _, number = name.partition(" ")
    if word == "rank" and number.isdecimal() and int(number) < schedule.mesh.size:
        return int(number)
    hint = did_you_mean(name, names) or f"its classes are {', '.join(names[:16])}"
    raise StragglerError(
        f"the cluster's schedule has no class '{name}': {hint}; or write a single rank as "
        f"'rank N', N from 0 to {schedule.mesh.size - 1}"
    )


def _cells(schedule: Schedule, name: str, rank: int | None) -> dict[str, set[int]]:
    """The coordinates along every axis of a rank, or of a class."""
    mesh = schedule.mesh
    if rank is not None:
        return {axis: {at} for axis, at in mesh.coordinates(rank).items()}
    (whole,) = (one for one in schedule.classes if one.name == name)
    return {axis.name: set(whole.cell(axis.name, axis.size)) for axis in mesh.axes}
