"""What a run may correct of a CPU's profile: mostly its pace, a little each kind of kernel.

A probe measured the same kernels one by one, so that how they compare is nearly right; what
changes between a probe and a run is how fast the processor is at all (its clock, who else is
on it, caches that other threads use). So the pace is nearly free, and each kind stays near it;
kinds that were assumed and not measured are as free as the pace.
"""

from collections.abc import Iterable, Sequence

from twinstream.hardware_profiles.calibration.parameters import Parameter, Target, used_curves
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.cost import Work

_PACE_WIDTH = 0.5
_MOST_PACE = 4.0  # times faster or slower
_KIND_WIDTH = 0.05
_COPY_WIDTH = 0.3


def cpu_parameters(base: Machine, works: Iterable[Work]) -> tuple[Parameter, ...]:
    """The parameters of a CPU's profile that bear on this work and on copies."""
    used = used_curves(base, works)
    kinds = {
        "matmul": [key for key in used if key.startswith("matmul")],
        "attention_forward": [key for key in used if key.startswith("attention_forward")],
        "attention_backward": [key for key in used if key.startswith("attention_backward")],
        "vector": [key for key in used if not key.startswith(("matmul", "attention"))],
    }
    links = [key for key in ("h2d", "d2h") if key in base.efficiency]
    found = [_factor(base, "pace", "speed of the CPU in a run, of the probe's", used, _PACE_WIDTH)]
    found += [
        _factor(base, name, f"{name} beside the pace", keys, _kind_width(base, keys))
        for name, keys in kinds.items()
        if keys
    ]
    if links:
        found.append(_factor(base, "copies", "copies beside kernels", links, _COPY_WIDTH))
    return tuple(found)


def _kind_width(base: Machine, keys: Sequence[str]) -> float:
    assumed = any(base.efficiency[key].kind == "assumed" for key in keys)
    return _PACE_WIDTH if assumed else _KIND_WIDTH


def _factor(base: Machine, name: str, meaning: str, keys: Iterable[str], width: float) -> Parameter:
    targets = tuple(Target(key, "max") for key in keys)
    first = base.efficiency[targets[0].curve or ""].max
    return Parameter(name, meaning, targets, width, first / _MOST_PACE, first * _MOST_PACE)
