"""The profile of a machine: peaks, capacities, latencies and efficiencies, each with its source."""

import hashlib
import json
import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from twinstream.hardware_profiles.attention_rates import IMPLEMENTATIONS
from twinstream.hardware_profiles.errors import MissingNumberError
from twinstream.hardware_profiles.link import LINK_FIELDS, duplex_weights, link_fault
from twinstream.hardware_profiles.profile_files import MACHINES_FOLDER, Profile, Text, shipped_with
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import Finite

# Which curve turns the nominal rate of a link or memory into its usable rate.
CURVE_OF_RATE = {
    "hbm_bytes_per_s": "hbm",
    "pcie_h2d_bytes_per_s": "h2d",
    "pcie_d2h_bytes_per_s": "d2h",
    "pcie_duplex_bytes_per_s": "duplex",
    "host_dram_bytes_per_s": "host_dram",
}
# Peaks of tensor cores that many machines lack; matrix products are asked for in them, or not.
NARROW_PEAKS = ("peak_fp8_flop_per_s", "peak_fp4_flop_per_s")
# What a machine may lack, and most do: peaks of narrow types, and a drive.
DISK_FIELDS = (
    "disk_memory_bytes",
    "disk_read_bytes_per_s",
    "disk_latency_ns",
    "disk_write_bytes_per_s",
    "disk_overlap",
    "disk_endurance_bytes",
)
OPTIONAL_FIELDS = (*NARROW_PEAKS, *DISK_FIELDS)
RATE_FIELDS = (
    "peak_bf16_flop_per_s",
    *NARROW_PEAKS,
    "peak_fp32_flop_per_s",
    "host_peak_fp32_flop_per_s",
    *CURVE_OF_RATE,
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
)
# Which curve, where a profile states it, turns a peak into what the board's power limit sustains.
SUSTAINED_OF_PEAK = dict.fromkeys(("peak_bf16_flop_per_s", *NARROW_PEAKS), "sustained")
CAPACITY_FIELDS = ("device_memory_bytes", "host_memory_bytes")
_UNIFIED = "unified_memory_bytes"
DEVICE_SHARE = 0.75  # of a CPU's memory that is planned as the device's
FEED_BYTES = 2**28  # of one memory that GPU and host use: for what feeds the GPU, and no more
_NO_PART_OF_PLANS = ("compute_capability", "expected_error", "one_gpu_profile", _UNIFIED)
# Costs may be zero and are never unconstrained: a machine without the cost states 0.
COST_FIELDS = (
    "device_reserve_bytes",
    "launch_latency_ns",
    "copy_latency_ns",
    "event_wait_latency_ns",
    "disk_latency_ns",
)
_OF_DRIVES = ("disk_memory_bytes", "disk_endurance_bytes", "disk_overlap")
NUMBER_FIELDS = (*RATE_FIELDS, *CAPACITY_FIELDS, *COST_FIELDS, *_OF_DRIVES)

_LEAST_RATE, _MOST_RATE = 1e5, 1e21  # what is beyond them is a slip
_LEAST_CAPACITY, _MOST_CAPACITY = 2**16, 2**60
_MOST_COST = 1e12  # of a latency 17 minutes, of a reserve a TB

_REFINED = r"(/head_dim_[0-9]+)?(/(bfloat16|float16|float32|fp8|fp4))?"
_CURVE_KEY = re.compile(
    rf"(attention_(forward|backward)/({'|'.join(IMPLEMENTATIONS)})|[a-z][a-z0-9_]*){_REFINED}"
)
_CURVE_OF_ANY = re.compile(rf"attention_(forward|backward){_REFINED}")


def is_compute_unit(unit: str) -> bool:
    """Return whether the unit's flops run at its dtype's peak; it never falls back to `vector`."""
    return unit.startswith(("matmul", "grouped_matmul", "attention"))


class Number(Node):
    """One number of a profile and where it comes from."""

    value: Finite | None = None
    kind: Literal["datasheet", "measured", "fitted", "assumed", "hypothetical", "unconstrained"]
    source: Text

    @model_validator(mode="after")
    def _value_matches_kind(self) -> Self:
        if self.kind == "unconstrained":
            if self.value is not None:
                raise PydanticCustomError(
                    "value_of_unconstrained", "kind 'unconstrained' has no value: drop the value"
                )
        elif self.value is None:
            raise PydanticCustomError(
                "value_missing", "kind '{kind}' needs a value", {"kind": self.kind}
            )
        elif self.value < 0:
            raise PydanticCustomError(
                "value_negative", "{value} is negative", {"value": self.value}
            )
        return self


class Efficiency(Node):
    """Fraction of a nominal rate that is reached at size x: `max * x / (x + half)`.

    x is per kernel launch (per copy for `h2d` and `d2h`): FLOPs where `of` is "flops", bytes moved
    where it is "bytes". At x = half the fraction is max / 2, so that each launch costs
    half / (rate * max) on top of its amount / (rate * max). `max` may exceed 1 because boost
    clocks can exceed the clock of the datasheet.

    `half_depth`, of matrix products and attention only, is what an output tile's start and end
    cost, in steps of its inner loop: at depth D (K of a matmul; of attention the mean number of
    keys of a query) the FLOPs count (D + half_depth) / D fold. `diagonal`, of attention only, is
    what a FLOP among a chunk's own tokens, the triangle under the causal mask, costs more than one
    with the context before it: a deterministic backward adds up the triangle's tiles in turn.

    `implementation` says whose rate an attention curve is whose key names none; where neither does,
    it is that of the profile's `attention`.
    """

    max: Annotated[float, Field(ge=1e-6, le=1.5)]
    half: Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
    half_depth: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    diagonal: Annotated[float, Field(ge=0, le=100)] = 0.0
    of: Literal["flops", "bytes"]
    implementation: str | None = None
    kind: Literal["datasheet", "measured", "fitted", "assumed", "hypothetical"]
    source: Text


class AttentionChoice(Node):
    """The attention implementation that plans for the machine name where none is asked for."""

    name: Text
    kind: Literal["measured", "assumed"]
    source: Text


class ComputeCapability(Node):
    """CUDA compute capability, `major.minor`: which attention implementations are made for it."""

    value: Annotated[str, Field(pattern=r"^[1-9][0-9]?\.[0-9]$")]
    kind: Literal["datasheet", "measured", "assumed", "hypothetical"]
    source: Text

    @property
    def major(self) -> int:
        """9 of "9.0"."""
        return int(self.value.partition(".")[0])


class ExpectedError(Node):
    """The error of predictions with this profile: |predicted / measured - 1| of step time.

    `held_out`: on measured runs of this machine that the profile was not fitted to. `left_out`: on
    each run it was fitted to, with that run left out. `borrowed`: what borrowing a relative's
    efficiencies was off by where it could be tested. `assumed`: nothing of the kind was measured.
    `checked`: the profile was scaled by a check of the machine at the start of a run.
    """

    mean: Annotated[float, Field(gt=0, le=10)]
    worst: Annotated[float, Field(gt=0, le=100)] | None = None
    kind: Literal["held_out", "left_out", "borrowed", "assumed", "checked"]
    source: Text


class Machine(Profile):
    """One machine: a device, its host and the link between them.

    A field that is None is unknown, which is neither zero nor unlimited: using it raises
    `MissingNumberError`. `device_reserve_bytes` is what the context and libraries take of
    `device_memory_bytes`; `pcie_duplex_bytes_per_s` limits both directions together (a profile is
    refused where it is below one direction or above their sum).

    Keys of `efficiency` are the links and memories (`h2d`, `d2h`, `duplex`, `hbm`, `host_dram`),
    `sustained` (the fraction of the datasheet's bf16 peak that the board's power limit sustains,
    taken to be that of fp8 and fp4 too; matmul and attention are fractions of it, or of the peak
    where it is not stated) and the units
    of work, refined by head dimension or dtype where that matters: `matmul`,
    `matmul/float32`, `attention_forward/head_dim_64`, `rms_norm`, `vector`. Attention's may name
    an implementation first: `attention_forward/flash3/head_dim_64`. What the host CPU computes has
    units of its own, as fractions of the host DRAM rate: `host_adamw`, `host_vector`.

    `duplex_h2d_share` is what H2D has of the duplex rate while both directions are busy, D2H the
    rest; where it is not stated, both want the same.

    `disk_read_bytes_per_s` is what large direct reads of a drive reach, several in flight, and
    `disk_latency_ns` what each read or write of a tensor takes beside them. A drive whose
    `disk_write_bytes_per_s` is not stated is only read. While both are under way they reach
    `disk_overlap` of what each reaches alone: from 1, they take turns, to 2, both are as fast as
    alone. `disk_endurance_bytes` is what its maker warrants to be written (TBW).

    `unified_memory_bytes` is the one memory of a machine whose GPU has none of its own: the two
    capacities are shares of it (a profile is refused where they are more than it has). A plan has
    all of it as the device's, but for what feeds the device.

    `one_gpu_profile` names the profile of the same device in runs of one, where this one's
    constants were fitted to training steps of many.
    """

    device: Literal["cuda", "cpu"]
    peak_bf16_flop_per_s: Number | None = None
    peak_fp8_flop_per_s: Number | None = None
    peak_fp4_flop_per_s: Number | None = None
    peak_fp32_flop_per_s: Number | None = None
    host_peak_fp32_flop_per_s: Number | None = None
    hbm_bytes_per_s: Number | None = None
    pcie_h2d_bytes_per_s: Number | None = None
    pcie_d2h_bytes_per_s: Number | None = None
    pcie_duplex_bytes_per_s: Number | None = None
    duplex_h2d_share: Number | None = None
    host_dram_bytes_per_s: Number | None = None
    device_memory_bytes: Number | None = None
    host_memory_bytes: Number | None = None
    unified_memory_bytes: Number | None = None
    disk_memory_bytes: Number | None = None
    disk_read_bytes_per_s: Number | None = None
    disk_latency_ns: Number | None = None
    disk_write_bytes_per_s: Number | None = None
    disk_overlap: Number | None = None
    disk_endurance_bytes: Number | None = None
    device_reserve_bytes: Number | None = None
    launch_latency_ns: Number | None = None
    copy_latency_ns: Number | None = None
    event_wait_latency_ns: Number | None = None
    compute_capability: ComputeCapability | None = None
    attention: AttentionChoice | None = None
    one_gpu_profile: Text | None = None
    expected_error: ExpectedError | None = None
    efficiency: dict[str, Efficiency] = Field(default_factory=dict)

    @field_validator(*NUMBER_FIELDS, _UNIFIED)
    @classmethod
    def _numbers_are_possible(cls, number: Number | None, info: ValidationInfo) -> Number | None:
        if number is not None and (fault := _number_fault(str(info.field_name), number.value)):
            raise PydanticCustomError(*fault)
        return number

    @field_validator("duplex_h2d_share")
    @classmethod
    def _share_leaves_some(cls, share: Number | None) -> Number | None:
        if share is not None and not (share.value and share.value < 1):
            raise PydanticCustomError("share", "a share of both is above 0 and below 1")
        return share

    @field_validator("efficiency")
    @classmethod
    def _curves_fit_their_keys(cls, curves: dict[str, Efficiency]) -> dict[str, Efficiency]:
        for key, curve in curves.items():
            if fault := _curve_fault(key, curve):
                raise PydanticCustomError(*fault)
        return curves

    @model_validator(mode="after")
    def _both_directions_fit_each(self) -> Self:
        if fault := link_fault(self.link_rates()):
            raise PydanticCustomError("link", fault)
        return self

    @model_validator(mode="after")
    def _memories_are_there(self) -> Self:
        has = self.unified_memory_bytes
        if has is None or has.value is None:
            return self
        shares = {field: getattr(self, field) for field in CAPACITY_FIELDS}
        unknown = [field for field, share in shares.items() if share is None or share.value is None]
        if unknown:
            raise PydanticCustomError(
                "unified_shares",
                "{field} is unknown: of one memory, state the shares of device and host",
                {"field": unknown[0]},
            )
        both = sum(share.value for share in shares.values())
        if both > has.value:
            raise PydanticCustomError(
                "unified_twice",
                "device_memory_bytes and host_memory_bytes are {both} together, of one memory of "
                "{has}: divide it, as three quarters and one",
                {"both": f"{both:.0f}", "has": f"{has.value:.0f}"},
            )
        return self

    @property
    def pool_bytes(self) -> int | None:
        """The one memory that a GPU and the host use; None where the GPU has its own."""
        has = self.unified_memory_bytes
        if self.device == "cpu" or has is None or has.value is None:
            return None
        return int(has.value)

    def link_rates(self) -> dict[str, float]:
        """The rates of the link that the profile states; inf where unconstrained."""
        stated = [field for field in LINK_FIELDS if getattr(self, field) is not None]
        return {field: self.number(field) for field in stated}

    def duplex_weights(self) -> tuple[float, float]:
        """Return what a byte of H2D, and one of D2H, takes of the duplex rate; see there."""
        share = self.duplex_h2d_share
        if share is None or share.value is None:
            return 1.0, 1.0
        h2d, d2h, duplex = (self.rate(field) for field in LINK_FIELDS)
        return duplex_weights(h2d, d2h, duplex, share.value)

    def number(self, field: str) -> float:
        """The stated value of a field of this profile; inf where it is unconstrained.

        Raises:
            MissingNumberError: the profile does not state it.
        """
        assert field in NUMBER_FIELDS, f"no number of a machine is called {field!r}"
        number: Number | None = getattr(self, field)
        if number is None:
            raise self._missing(field, 'value = ..., kind = "measured", source = "..."')
        return math.inf if number.value is None else number.value

    def curve(self, *keys: str) -> Efficiency:
        """The first of these efficiency curves that the profile states.

        Raises:
            MissingNumberError: it states none; the message names the last, the most general one.
        """
        for key in keys:
            if key in self.efficiency:
                return self.efficiency[key]
        of = "flops" if is_compute_unit(keys[-1]) else "bytes"
        table = f'max = ..., half = 0, of = "{of}", kind = "measured", source = "..."'
        raise self._missing(f"efficiency.{keys[-1]}", table)

    def rate(self, field: str) -> float:
        """The usable value of a field: what large transfers reach, on links and memories.

        Links and memories: the nominal rate times the `max` of its curve, inf where unconstrained.
        Peaks of tensor cores: times what the power limit sustains, where the profile says so. Every
        other field: the same as `number` (a peak's efficiency depends on the unit of work).

        Raises:
            MissingNumberError: the profile does not state the number or its efficiency.
        """
        nominal = self.number(field)
        sustained = SUSTAINED_OF_PEAK.get(field)
        if sustained is not None and sustained in self.efficiency:
            return nominal * self.efficiency[sustained].max
        if field not in CURVE_OF_RATE or math.isinf(nominal):
            return nominal
        return nominal * self.curve(CURVE_OF_RATE[field]).max

    @property
    def content_hash(self) -> str:
        """16 hex digits that change with any number, source or text that a plan follows from."""
        document: dict[str, Any] = self.model_dump(mode="json")
        for field in (*_NO_PART_OF_PLANS, *NARROW_PEAKS):
            del document[field]  # nothing that a plan follows from, which is of bf16 or float32
        for optional in (
            "attention",
            "duplex_h2d_share",
            *DISK_FIELDS,
        ):  # as before profiles could state one
            if document[optional] is None:
                del document[optional]
        for curve in document["efficiency"].values():  # as before curves could
            for field, usual in (("implementation", None), ("diagonal", 0.0)):
                if curve[field] == usual:
                    del curve[field]
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def _missing(self, field: str, table: str) -> MissingNumberError:
        return MissingNumberError(
            machine=self.name,
            field=field,
            stated_by=shipped_with(MACHINES_FOLDER, field),
            toml_line=f"{field} = {{ {table} }}",
        )


def _number_fault(field: str, value: float | None) -> tuple[str, str] | None:
    """Code and text of what is wrong with a field's value (None: unconstrained)."""
    if field in COST_FIELDS:
        if value is None:
            return "cost_unconstrained", "a cost cannot be unconstrained: state 0"
        if value > _MOST_COST:
            return "value_beyond", f"{value} is more than any machine takes"
        return None
    if value is None:
        return None
    if value == 0:
        return "value_zero", "0 is not positive; drop an unknown number"
    if field == "disk_overlap":
        beyond = not 1 <= value <= 2
        return ("overlap", "1 is that reads and writes take turns, 2 the most") if beyond else None
    least, most, unit = _LEAST_RATE, _MOST_RATE, "bytes a second"
    if field.endswith(("memory_bytes", "endurance_bytes")):
        least, most, unit = _LEAST_CAPACITY, _MOST_CAPACITY, "bytes"
        usual = f"{value:g} GiB are {value * 2**30:.0f}"
    else:
        usual = f"{value:g} GB/s are {value * 1e9:g}"
        if field.endswith("flop_per_s"):
            unit, usual = "FLOPs a second", f"{value:g} TFLOP/s are {value * 1e12:g}"
    if value < least:
        return "value_too_small", f"{value:g} is so many {unit}; {usual}"
    if value > most:
        return "value_beyond", f"{value} {unit} is no limit; write inf"
    return None


def _curve_fault(key: str, curve: Efficiency) -> tuple[str, str] | None:
    """Code and text of what is wrong with a curve of this key."""
    names = ", ".join(IMPLEMENTATIONS)
    if not _CURVE_KEY.fullmatch(key):
        return "curve_key", (
            f"'{key}' is no efficiency key: write unit, unit/head_dim_64, unit/float32 or "
            "unit/head_dim_64/float32 (dtypes: bfloat16, float16, float32, fp8, fp4); of attention "
            f"also unit/implementation/head_dim_64/float32 (implementations: {names})"
        )
    if is_compute_unit(key) and curve.of != "flops":
        return "curve_of_compute", f"'{key}' needs of = 'flops'"
    if curve.half_depth and not is_compute_unit(key):
        return (
            "depth_of_memory",
            f"'{key}' has no inner loop: half_depth is of matmul and attention",
        )
    if curve.diagonal and not key.startswith("attention"):
        return "diagonal_of_others", f"'{key}' has no causal mask: diagonal is of attention"
    if key in SUSTAINED_OF_PEAK.values() and (curve.of, curve.half) != ("flops", 0):
        return "curve_of_peak", f"'{key}' needs of = 'flops' and half = 0"
    if key in CURVE_OF_RATE.values() and curve.of != "bytes":
        return "curve_of_link", f"'{key}' needs of = 'bytes'"
    if curve.implementation is None:
        return None
    if not _CURVE_OF_ANY.fullmatch(key):
        return "curve_implementation", (
            f"'{key}' takes no implementation: attention curves whose key names none do"
        )
    if curve.implementation not in IMPLEMENTATIONS:
        return "implementation_unknown", (
            f"'{key}' is of '{curve.implementation}', which no attention implementation is; "
            f"known: {names}"
        )
    return None
