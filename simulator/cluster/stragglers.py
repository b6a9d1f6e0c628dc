"""Ranks that compute slower than the others."""

from collections.abc import Mapping

from twinstream.hardware_profiles.overrides import override
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
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
    schedule: ClusterSchedule, machine: Machine, factors: Mapping[str, float]
) -> dict[str, Machine]:
    """Machines of the classes, by name, that take so many times as long.

    Raises:
        StragglerError: there is no such class, or the factor is out of range.
    """
    names = [one.name for one in schedule.classes]
    for name, factor in factors.items():
        if name not in names:
            hint = did_you_mean(name, names) or f"its classes are {', '.join(names[:16])}"
            raise StragglerError(f"the cluster's schedule has no class '{name}': {hint}")
        if not _LEAST <= factor <= _MOST:
            raise StragglerError(
                f"class '{name}' cannot take {factor:g} times as long; give a factor from "
                f"{_LEAST:g} to {_MOST:g}, 1.2 for a fifth more"
            )
    return {name: slower(machine, factor) for name, factor in factors.items()}
