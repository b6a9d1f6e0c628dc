"""The parameters of a profile that a calibration fits: few, physical, bounded, with priors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from twinstream.hardware_profiles.curve_choice import curve_for, implementation_in
from twinstream.hardware_profiles.schema import CURVE_OF_RATE, Efficiency, Machine, Number
from twinstream.schedule.cost import Work

_SUSTAINED = "sustained"
_ATTENTION_64 = "head_dim_64"
# What a matmul tile's inner loop reaches of the sustained rate; the split between the two is a
# convention, their product is what runs show.
_TILE_CEILING = 0.95
_MATMUL_HALF_DEPTH = 160.0
_ATTENTION_HALF_DEPTH = 512.0
# A softmax hides behind five products backward and behind two forward: at head_dim 64, published
# and recorded kernels reach 0.84 to 0.91 of their rate at 128 backward, 0.53 to 0.91 forward.
_BACKWARD_64_WIDTH = 0.06
# Of a CPU.
_PACE_WIDTH = 0.5
_MOST_PACE = 4.0  # times faster or slower
_KIND_WIDTH = 0.05
_COPY_WIDTH = 0.3


@dataclass(frozen=True)
class Target:
    """A number of a profile: a curve's `attribute`, or a plain number where `curve` is None."""

    curve: str | None
    attribute: str


@dataclass(frozen=True)
class Parameter:
    """A common factor on some numbers of a profile, which the prior says is 1.

    `width` is the prior's standard deviation of the factor's logarithm. `low` and `high` bound the
    first target's value, in its own unit. What is `late` is fitted when the others have settled: it
    moves times by little, and would otherwise make up for what is still far off. A prior with
    `heavy_tails` resists many widths hardly more than one: what a kernel reaches of the peak may be
    several times off, and then a single factor goes far rather than several part of the way.
    """

    name: str
    meaning: str
    targets: tuple[Target, ...]
    width: float
    low: float
    high: float
    late: bool = False
    heavy_tails: bool = False

    def value_in(self, machine: Machine) -> float:
        """The first target's value in a profile."""
        return _value(machine, self.targets[0])

    def factor_bounds(self, base: Machine) -> tuple[float, float]:
        """Least and greatest factor; a base beyond a bound moves the bound to itself."""
        value = self.value_in(base)
        return min(self.low / value, 1.0), max(self.high / value, 1.0)


def prepared(base: Machine) -> Machine:
    """The base with what calibration varies made explicit, and next to the same predictions.

    A profile without `sustained` gets it from its matmul curve, and its bf16 curves as fractions
    of it; curves of matmul and attention without a `half_depth` get a usual one. What priced
    float32 too for want of a curve of its own gets one first, unchanged.
    """
    curves = dict(base.efficiency) | _float32_twins(base)
    matmul = curves.get("matmul/bfloat16", curves.get("matmul"))
    if _SUSTAINED not in curves and matmul is not None:
        share = matmul.max / _TILE_CEILING
        for key in filter(_is_half_precision, base.efficiency):
            found = curves[key]
            note = f"{found.source} ({found.max:g} of the peak, here of the sustained rate)"
            update = {"max": min(1.5, found.max / share), "source": note}
            curves[key] = found.model_copy(update=update)
        curves[_SUSTAINED] = Efficiency(
            max=share, half=0, of="flops", kind="assumed",
            source=f"matmul of {base.name} ({matmul.max:g}) over {_TILE_CEILING} of a tile's loop",
        )  # fmt: skip
    for key in filter(_is_half_precision, curves):
        if curves[key].half_depth == 0:
            depth = _MATMUL_HALF_DEPTH if key.startswith("matmul") else _ATTENTION_HALF_DEPTH
            curves[key] = curves[key].model_copy(update={"half_depth": depth})
    return base.model_copy(update={"efficiency": curves})


def _float32_twins(base: Machine) -> dict[str, Efficiency]:
    """Return curves without a dtype, where no curve of the unit is for float32."""
    plain = [key for key in base.efficiency if _is_half_precision(key) and "float16" not in key]
    return {
        f"{key}/float32": base.efficiency[key]
        for key in plain
        if f"{key.split('/')[0]}/float32" not in base.efficiency
    }


def declared_parameters(base: Machine, works: Iterable[Work]) -> tuple[Parameter, ...]:
    """The parameters of a prepared base that bear on this work and on copies."""
    used = used_curves(base, works)
    matmul = [key for key in used if key.startswith("matmul")]
    forward = _family(base, used, "attention_forward")
    backward = _family(base, used, "attention_backward")
    memory = [key for key in used if base.efficiency[key].of == "bytes"]
    half = [key for key in matmul if _is_half_precision(key)]
    plain = [key for key in matmul if not _is_half_precision(key)]
    found = [
        _curves("sustained", "bf16 rate under the board's power limit, of the datasheet peak",
                [_SUSTAINED] if half else [], "max", (0.25, 0.3, 1.15)),
        _curves("matmul_float32", "float32 matmul, of the float32 peak",
                plain, "max", (0.5, 0.02, 1.2)),
        _curves("matmul_half_depth", "steps of K that starting and ending an output tile cost",
                half, "half_depth", (0.7, 16.0, 1024.0)),
        _curves("attention_forward", "attention forward on long contexts, of the sustained rate",
                forward, "max", (0.3, 0.05, 1.2)),
        _curves("attention_backward", "attention backward on long contexts, of the sustained rate",
                backward, "max", (0.3, 0.05, 1.2)),
        _curves("attention_forward_head_dim_64", "attention forward with head_dim 64 beside 128",
                _narrow(forward, used), "max", (0.3, 0.05, 1.2)),
        _curves("attention_backward_head_dim_64", "attention backward with head_dim 64 beside 128",
                _narrow(backward, used), "max", (_BACKWARD_64_WIDTH, 0.05, 1.2)),
        _curves("attention_forward_half_depth", "keys of a query that a forward tile's start, end "
                "and masked half cost", [key for key in forward if _is_half_precision(key)],
                "half_depth", (1.0, 16.0, 4096.0)),
        _curves("attention_backward_half_depth", "keys of a query that a backward tile's start, "
                "end, masked half and dQ's second pass cost",
                [key for key in backward if _is_half_precision(key)], "half_depth",
                (1.0, 16.0, 4096.0)),
        _curves("memory_bound", "kernels bound by HBM, of its datasheet rate",
                memory, "max", (0.15, 0.2, 1.0), late=True),
        _curves("h2d", "host to device, of the link's nominal rate", ["h2d"], "max",
                (0.1, 0.3, 1.0), late=True),
        _curves("d2h", "device to host, of the link's nominal rate", ["d2h"], "max",
                (0.1, 0.3, 1.0), late=True),
        _curves("duplex", "both directions together, of twice the link's nominal rate",
                ["duplex"], "max", (0.1, 0.3, 1.0), late=True),
        _curves("host_dram", "host DRAM under DMA, of its nominal rate", ["host_dram"], "max",
                (0.1, 0.3, 1.0), late=True),
        Parameter("launch_latency", "ns between two kernels of a stream",
                  (Target(None, "launch_latency_ns"),), 0.7, 200.0, 20_000.0, late=True),
    ]  # fmt: skip
    return tuple(p for p in found if p.targets and _stated(base, p))


def cpu_parameters(base: Machine, works: Iterable[Work]) -> tuple[Parameter, ...]:
    """The parameters of a CPU's profile that bear on this work and on copies.

    A probe measured the same kernels one by one, so that how they compare is nearly right; what
    changes between a probe and a run is how fast the processor is at all (its clock, who else is
    on it, caches that other threads use). So the pace is nearly free, and each kind stays near it;
    kinds that were assumed and not measured are as free as the pace.
    """
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


def applied(
    base: Machine, parameters: Sequence[Parameter], factors: Sequence[float], source: str
) -> Machine:
    """The base with each parameter's factor on its targets; what changed is of kind "fitted".

    Each changed number says what it means, `source`, and what it was. A fraction that may not
    exceed 1.5 stops there.
    """
    product: dict[Target, float] = {}
    meaning: dict[Target, str] = {}
    for parameter, factor in zip(parameters, factors, strict=True):
        for target in parameter.targets:
            product[target] = product.get(target, 1.0) * factor
            meaning.setdefault(target, parameter.meaning)
    curves = dict(base.efficiency)
    numbers: dict[str, Number] = {}
    for target, factor in product.items():
        before = _value(base, target)
        value = before * factor
        note = f"{meaning[target]}: {source}; was {before:.4g} in {base.name}"
        if target.curve is None:
            numbers[target.attribute] = Number(value=value, kind="fitted", source=note)
            continue
        curve = curves[target.curve]
        if curve.kind == "fitted" and curve is not base.efficiency[target.curve]:
            note = f"{curve.source}; {target.attribute} was {before:.4g}"
        value = min(value, 1.5) if target.attribute == "max" else value
        update = {target.attribute: value, "kind": "fitted", "source": note}
        curves[target.curve] = curve.model_copy(update=update)
    return base.model_copy(update={**numbers, "efficiency": curves})


def _curves(
    name: str,
    meaning: str,
    keys: Iterable[str],
    attribute: str,
    prior: tuple[float, float, float],
    *,
    late: bool = False,
) -> Parameter:
    targets = tuple(Target(key, attribute) for key in keys)
    return Parameter(name, meaning, targets, *prior, late=late, heavy_tails=not late)


def used_curves(base: Machine, works: Iterable[Work]) -> list[str]:
    """Keys of the curves that price this work, in the profile's order."""
    wanted = {curve_for(work, base).key for work in works}
    return [key for key in base.efficiency if key in wanted]


def _family(base: Machine, used: Sequence[str], unit: str) -> list[str]:
    """Curves of a unit; used in half precision, it takes its other head dimensions along.

    Those of other attention implementations stay as they are.
    """
    own = [key for key in used if key.startswith(unit)]
    if not any(map(_is_half_precision, own)):
        return own
    mine = {implementation_in(key) for key in own}
    whole = [key for key in base.efficiency if key.startswith(unit) and _is_half_precision(key)]
    return [*own, *(k for k in whole if k not in own and implementation_in(k) in mine)]


def _narrow(keys: Sequence[str], used: Sequence[str]) -> list[str]:
    """Those of head_dim 64, where it and others are in use, to tell them apart."""
    found = [key for key in keys if _ATTENTION_64 in key]
    others = [key for key in keys if key not in found and key in used]
    return found if others and any(key in used for key in found) else []


def _is_half_precision(key: str) -> bool:
    return key.startswith(("matmul", "attention")) and not key.endswith("float32")


def _stated(base: Machine, parameter: Parameter) -> bool:
    """Return whether the base has the numbers; an unconstrained link has nothing to fit."""
    if not all(_has(base, target) for target in parameter.targets):
        return False
    rates: Mapping[str, str] = {curve: field for field, curve in CURVE_OF_RATE.items()}
    field = rates.get(parameter.targets[0].curve or "")
    number: Number | None = getattr(base, field) if field else None
    return field is None or (number is not None and number.value is not None)


def _has(base: Machine, target: Target) -> bool:
    if target.curve is not None:
        return target.curve in base.efficiency
    number: Number | None = getattr(base, target.attribute)
    return number is not None and bool(number.value)


def _value(machine: Machine, target: Target) -> float:
    if target.curve is None:
        return machine.number(target.attribute)
    found: float = getattr(machine.efficiency[target.curve], target.attribute)
    return found
