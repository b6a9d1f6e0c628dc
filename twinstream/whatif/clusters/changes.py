"""Changes of a cluster that money can buy, and those that a user writes down."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf

from twinstream.clusters.job import Job
from twinstream.clusters.layout import Layout, LayoutError
from twinstream.clusters.search.question import (
    CLUSTER_NUMBER,
    MACHINE_NUMBER,
    Question,
    Value,
    full_name,
    value_fault,
)
from twinstream.hardware_profiles.clusters.loader import machine_of

PRICE = "price_per_gpu_hour"
_NARROW = ("fp8", "fp4")


@dataclass(frozen=True)
class ClusterChange:
    """What changes, as people read it and as values of a question; `price` is of a GPU-hour."""

    name: str
    now: str
    then: str
    values: Mapping[str, Value]
    price: float | None = None


@dataclass(frozen=True)
class ClusterProperty:
    """Numbers that change together; `values` are theirs now, in the order of `fields`."""

    name: str
    fields: tuple[str, ...]
    values: tuple[float, ...]
    unit: str
    unit_size: float
    factors: tuple[float, ...] = (2.0,)

    @property
    def now(self) -> float:
        """Of the first, in `unit`."""
        return self.values[0] / self.unit_size

    @property
    def counts(self) -> bool:
        """Whether only whole values make sense."""
        return self.fields == ("gpus",)

    def times(self, factor: float) -> dict[str, Value]:
        """The values of a question with it."""
        values = [value * factor for value in self.values]
        return dict(zip(self.fields, map(int, values) if self.counts else values, strict=True))


def usual_changes(question: Question, factors: Sequence[float] = ()) -> list[ClusterChange]:
    """Links, HBM and compute twice as fast, half and twice the memory, twice the GPUs.

    Numbers that the profiles do not state or limit, and the network of a single node, are left out.

    Args:
        factors: of every number instead; GPUs where they come out whole.
    """
    found = []
    for one in properties_of(question):
        for factor in factors or one.factors:
            if one.counts and (one.now * factor < 1 or one.now * factor % 1):
                continue
            now, then = (_shown(one, one.now * times) for times in (1.0, factor))
            name, unit = f"{one.name} x {factor:g}", f" {one.unit}" if one.unit else ""
            found.append(ClusterChange(name, now, then + unit, one.times(factor)))
    return found


def _shown(one: ClusterProperty, value: float) -> str:
    return f"{value:,.0f}" if one.counts else f"{value:,.4g}"


def properties_of(question: Question) -> list[ClusterProperty]:
    """What money can change; without what the profiles do not state or limit."""
    matmuls = question.job.recipe.implementations.matmuls
    peaks = ["peak_bf16_flop_per_s"]
    if matmuls != "model":  # what is not a product of linear layers stays in bf16
        peaks.insert(0, f"peak_{matmuls}_flop_per_s")
    fields = [
        ("network", ("cluster.nic_bytes_per_s",), "GB/s", 1e9),
        ("links in a node", ("cluster.node_bytes_per_s",), "GB/s", 1e9),
        ("HBM", ("machine.hbm_bytes_per_s",), "GB/s", 1e9),
        ("compute peak", tuple(f"machine.{peak}" for peak in peaks), "TFLOP/s", 1e12),
        ("device memory", ("machine.device_memory_bytes",), "GiB", 2.0**30),
    ]  # fmt: skip
    alone = question.num_gpus <= question.cluster.count("gpus_per_node")
    found = []
    for name, names, unit, size in fields:
        values = tuple(_value(question, field) for field in names)
        if all(values) and not any(map(isinf, values)) and not (alone and name == "network"):
            factors = (0.5, 2.0) if name == "device memory" else (2.0,)
            found.append(ClusterProperty(name, names, values, unit, size, factors))
    return [*found, ClusterProperty("GPUs", ("gpus",), (question.num_gpus,), "", 1)]


def _value(question: Question, field: str) -> float:
    """0 where the profile does not state it."""
    if field.startswith(CLUSTER_NUMBER):
        own = field.removeprefix(CLUSTER_NUMBER)
        return question.cluster.number(own) if getattr(question.cluster, own) is not None else 0.0
    machine, own = machine_of(question.cluster), field.removeprefix(MACHINE_NUMBER)
    return machine.number(own) if getattr(machine, own) is not None else 0.0


def written_change(texts: Sequence[str]) -> ClusterChange:
    """One change of all that is written as `nic_bytes_per_s=1e11`, `gpus=1024`, `tp=open`.

    Raises:
        LayoutError: a text is none, names nothing that is known, or something twice.
    """
    values: dict[str, Value] = {}
    for text in texts:
        name, equals, written = (part.strip() for part in text.partition("="))
        if not equals or not written:
            raise LayoutError(f"--set '{text}' has no value; write it as nic_bytes_per_s=1e11")
        full = name if name == PRICE else full_name(name)
        value = _read(written)
        fault = value_fault(full, value)
        if full == PRICE and fault is None and not 0 <= float(value) <= 1e12:
            fault = f"needs a price from 0, got {value!r}"
        if fault is not None:
            raise LayoutError(f"--set {name} {fault}")
        if full in values:
            raise LayoutError(f"--set names '{name}' twice")
        values[full] = value
    price = values.pop(PRICE, None)
    told = ", ".join(text.replace(" ", "") for text in texts)
    return ClusterChange(told, "", "", values, None if price is None else float(price))


def _read(text: str) -> Value:
    """A number or a truth where it is one, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def kept_job(question: Question, layout: Layout) -> Job:
    """Of a changed question, with a layout from before; its replicas are as many as GPUs allow."""
    kept = layout.model_copy(update=dict(question.fixed))
    each = kept.tp * kept.cp * kept.pp
    if "dp" not in question.fixed and question.num_gpus % each == 0:
        kept = kept.model_copy(update={"dp": question.num_gpus // each})
    return question.job.model_copy(update={"layout": kept})
