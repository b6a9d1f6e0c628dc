"""The curve of a profile that prices a piece of work, and the implementation that it is of."""

from collections.abc import Iterable
from dataclasses import dataclass

from twinstream.hardware_profiles.attention_rates import (
    IMPLEMENTATIONS,
    SAME,
    Ratio,
    attention_ratio,
)
from twinstream.hardware_profiles.schema import Efficiency, Machine, is_compute_unit
from twinstream.schedule.cost import Work

_SIMPLER = {  # priced at this unit's rate where no curve is their own
    "rms_norm_backward": "rms_norm",
    "rope_backward": "rope",
    "swiglu_backward": "swiglu",
    "adamw_8bit": "adamw",
    "adamw_may_skip": "adamw",
}
_HEAD_DIM = 3  # its place in the shape of attention work
ATTENTION_RANK = 5


@dataclass(frozen=True)
class ChosenCurve:
    """The curve under `key`; the work runs `ratio` times as fast as it says.

    `of` is the attention implementation whose rate it is, None where that is not known or the work
    is no attention.
    """

    key: str
    curve: Efficiency
    of: str | None = None
    ratio: Ratio = SAME


def efficiency_keys(work: Work) -> tuple[str, ...]:
    """Keys of the curve of this work, the most specific first: unit/implementation/head_dim/dtype.

    Grouped matmuls fall back to matmul; other units than these and attention to `vector`, before
    that some backwards to their forward, and updates that do more to the plain one.
    """
    units = [work.unit]
    if not is_compute_unit(work.unit):
        units += [_SIMPLER[work.unit]] if work.unit in _SIMPLER else []
        units.append("vector")
    elif work.unit.startswith("grouped_matmul"):
        units += ["grouped_matmul", "matmul"]
    if work.implementation is not None:
        units.insert(0, f"{work.unit}/{work.implementation}")
    keys: list[str] = []
    for unit in units:
        names = [unit]
        if unit.startswith("attention") and len(work.shape) == ATTENTION_RANK:
            names = [f"{unit}/head_dim_{work.shape[_HEAD_DIM]}", unit]
        keys += [f"{name}/{work.dtype}" for name in names] + names
    return tuple(dict.fromkeys(keys))


def curve_for(work: Work, machine: Machine) -> ChosenCurve:
    """The curve of this work; of attention another implementation's where its own is not stated.

    Raises:
        MissingNumberError: the profile states none.
    """
    key = _stated(work, machine)
    if key is None and work.unit.startswith("attention"):
        for other in _others(work, machine):
            key = key or _stated(work.model_copy(update={"implementation": other}), machine)
    if key is None:
        machine.curve(*efficiency_keys(work))  # raises
        raise AssertionError
    curve = machine.efficiency[key]
    of = implementation_of(key, machine)
    mine = work.implementation
    if mine is None or of is None or mine == of:
        return ChosenCurve(key, curve, of)
    capability = machine.compute_capability
    major = capability.major if capability is not None else None
    return ChosenCurve(key, curve, of, attention_ratio(work.unit, mine, of, major))


def with_own_rates(machine: Machine, works: Iterable[Work]) -> Machine:
    """The profile with curves of its own for each attention of the work; prices stay the same."""
    curves = dict(machine.efficiency)
    for work in works:
        chosen = curve_for(work, machine)
        if work.implementation is None or chosen.of in (None, work.implementation):
            continue
        grounds = chosen.ratio.source or "nothing is known of it"
        source = f"{chosen.of}'s times {chosen.ratio.value:.2f} ({grounds})"
        for key, curve in machine.efficiency.items():
            if key.split("/")[0] == work.unit and implementation_of(key, machine) == chosen.of:
                refined = "/".join(p for p in key.split("/")[1:] if p not in IMPLEMENTATIONS)
                own = "/".join(filter(None, (work.unit, work.implementation, refined)))
                rate = min(1.5, curve.max * chosen.ratio.value)
                told = f"{source}; {curve.source}"
                update = {"max": rate, "implementation": None, "source": told}
                curves.setdefault(own, curve.model_copy(update=update))
    return machine.model_copy(update={"efficiency": curves})


def implementation_of(key: str, machine: Machine) -> str | None:
    """Return whose rate an attention curve is: by its key or itself, else the profile's choice."""
    if not key.startswith("attention"):
        return None
    if named := implementation_in(key):
        return named
    if stated := machine.efficiency[key].implementation:
        return stated
    return machine.attention.name if machine.attention is not None else None


def implementation_in(key: str) -> str | None:
    """The attention implementation that an efficiency key names.

    >>> implementation_in("attention_forward/flash3/head_dim_64")
    'flash3'
    """
    parts = key.split("/")
    return parts[1] if len(parts) > 1 and parts[1] in IMPLEMENTATIONS else None


def _stated(work: Work, machine: Machine) -> str | None:
    return next((key for key in efficiency_keys(work) if key in machine.efficiency), None)


def _others(work: Work, machine: Machine) -> list[str]:
    """Implementations that the profile has a rate of, its own choice first."""
    units = [key for key in machine.efficiency if key.split("/")[0] == work.unit]
    named = {implementation_in(key) for key in units}
    chosen = machine.attention.name if machine.attention is not None else None
    found = [name for name in IMPLEMENTATIONS if name in named]
    return sorted(found, key=lambda name: name != chosen)
