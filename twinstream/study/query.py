"""A question about a training step whose values can be changed by name, and its answer.

What studies a step (`whatif`, `sweep`, `explore`) knows these two alone, not how many GPUs it has.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import SerializerFunctionWrapHandler, model_serializer

from twinstream.cost.bill import Bill
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.hardware_profiles.loader import load_machine
from twinstream.measures.uncertainty import Uncertainty
from twinstream.models.hf.config import Dtype
from twinstream.models.model import AnyModel
from twinstream.models.parallel.layout import Layout
from twinstream.models.presets import load_model
from twinstream.models.spec import ModelSpec
from twinstream.planner.planner import Planner
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node, facts_html
from twinstream.schedule.python_file import split_name
from twinstream.schedule.sizes import SizeError, gib, parse_bytes, rate_text
from twinstream.tracing import find_model

Value = str | bool | int | float
Values = Mapping[str, Value]
MACHINE_NUMBER, CLUSTER_NUMBER = "machine.", "cluster."
STEP_COUNTS = ("seq_len", "tokens_per_step", "chunk_tokens", "chunks_per_round")
MEMORY_CAPS = ("device_mem", "host_mem")


class StudyError(TwinstreamError):
    """A value, a name or a target that cannot be used."""


class Subject(Node):
    """What is asked about: a model on a machine's device, or on so many GPUs of a cluster.

    `policy` is by whose rules a device's step is planned. `tokens_per_step` are None where the
    planner chooses them.
    """

    model: str
    machine: str | None = None
    cluster: str | None = None
    policy: str | None = None
    num_gpus: int = 1
    tokens_per_step: int | None = None

    @property
    def title(self) -> str:
        """In a few words."""
        if self.cluster is not None:
            return f"{self.model} on {self.num_gpus:,} GPUs of {self.cluster}"
        return f"{self.model} on {self.machine}, policy {self.policy}"


class Step(Node):
    """The figures of a step, without its plan; `layout_text` is "" of one device.

    In JSON `figures` stand beside the others.
    """

    layout: Layout | None
    layout_text: str
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    memory_bytes: int
    host_bytes: int
    num_gpus: int
    shares: Mapping[str, float]
    bill: Bill | None = None
    figures: Mapping[str, Any] = {}

    @model_serializer(mode="wrap")
    def _flat(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = whole(self)
        return {**found.pop("figures"), **found}


@dataclass(frozen=True)
class Property:
    """Numbers that money can change, together; `values` are theirs now, in the order of `fields`.

    `fields` are names of a query's values, `factors` those that a what-if tries. `price_of` names
    the price in the lower bound, if there is one; a price is for one more `unit`.
    """

    name: str
    fields: tuple[str, ...]
    values: tuple[float, ...]
    unit: str
    unit_size: float
    factors: tuple[float, ...]
    price_of: str | None = None
    lower_is_better: bool = False
    for_target: bool = True

    @property
    def now(self) -> float:
        """Of the first, in `unit`."""
        return self.values[0] / self.unit_size

    @property
    def is_count(self) -> bool:
        """Whether only whole values make sense."""
        return self.fields == ("gpus",)

    def can_be(self, factor: float) -> bool:
        """Whether the value times a factor is one: of a count a whole number."""
        return not self.is_count or (self.now * factor >= 1 and self.now * factor % 1 == 0)

    def times(self, factor: float) -> dict[str, Value]:
        """The values of a query with it."""
        values = [value * factor for value in self.values]
        return dict(zip(self.fields, map(int, values) if self.is_count else values, strict=True))


def size_fault(value: object) -> str | None:
    """What a memory cap needs to be; None if it is that."""
    if not isinstance(value, str | int) or isinstance(value, bool):
        return f'needs a size such as "24GiB", "80%" or bytes, got {value!r}'
    try:  # of how much a share is, only a machine tells
        size_bytes = value if isinstance(value, int) else parse_bytes(value, whole_bytes=2.0**40)
    except SizeError as error:
        return f"is no size: {error}"
    return None if size_bytes >= 1 else f"needs a size of at least a byte, got {value!r}"


@dataclass(frozen=True, kw_only=True)
class Answer(ABC):
    """A step that was planned and predicted; bytes are those of the fullest device.

    `bound_s` is what no plan, or layout, can beat, `gap` how far above it the step is; None where
    that is not known. `limits` are what the bound hangs on, `shares` of the step, both where they
    are known; `room_bytes` what the plan may take of device and host memory. `is_known`: the answer
    was given as known. `can_be_refined`: a query with more effort may have a better one.
    """

    step_s: float
    tokens_per_s: float
    mfu: float
    device_bytes: int
    host_bytes: int
    room_bytes: tuple[int | None, int | None]
    num_gpus: int = 1
    bound_s: float | None
    gap: float | None
    limits: tuple[str, ...] = ()
    shares: Mapping[str, float]
    layout: Layout | None = None
    is_known: bool
    can_be_refined: bool = False

    @property
    def layout_text(self) -> str:
        """The layout in words; "" of one device."""
        return "" if self.layout is None else self.layout.text

    @property
    @abstractmethod
    def place_names(self) -> tuple[str, ...]:
        """The names by which a price of its machine or cluster may be given."""

    @property
    @abstractmethod
    def uncertainty(self) -> Uncertainty:
        """How far off the prediction may be."""

    @property
    @abstractmethod
    def compute_waits(self) -> float:
        """The share of the step in which compute waits."""

    @property
    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """All figures by the names of a sweep's columns."""

    def records(self) -> list[dict[str, object]]:
        """One row, with all figures."""
        return [dict(self.figures)]

    def _repr_html_(self) -> str:
        error = self.uncertainty
        bound = "not known"
        if self.bound_s is not None and self.gap is not None:
            bound = f"{self.bound_s:.4g} s; the step is {self.gap:.1%} above it"
        facts = {
            "step": f"{self.step_s:.4g} s",
            "tokens/s": f"{rate_text(self.tokens_per_s)} ({error.short}: {error.why})",
            "MFU": f"{self.mfu:.1%}",
            "bound": bound,
            "limited by": ", ".join(self.limits),
            "device, host memory": f"{gib(self.device_bytes)}, {gib(self.host_bytes)}",
        }
        where = f"{self.num_gpus:,} GPUs, {self.layout_text}" if self.layout else "one device"
        return facts_html(f"Step on {where}", facts)

    @abstractmethod
    def compute_limit(self) -> float:
        """Tokens/s if compute never waited.

        Raises:
            StudyError: computing takes no time.
        """

    def step(self, bill: Bill | None = None, *, whole: bool = False) -> Step:
        """The figures of every step; `whole` with all that there are."""
        return Step(
            layout=self.layout, layout_text=self.layout_text, step_s=self.step_s,
            tokens_per_s=self.tokens_per_s, mfu=self.mfu,
            tokens_per_s_per_gpu=self.tokens_per_s / self.num_gpus,
            memory_bytes=self.device_bytes, host_bytes=self.host_bytes, num_gpus=self.num_gpus,
            shares=dict(self.shares), bill=bill, figures=self.figures if whole else {},
        )  # fmt: skip


class Loader:
    """Models, machines and clusters by name or file, each read once.

    Args:
        folder: that files lie relative to.
    """

    def __init__(self, folder: Path = Path()) -> None:
        def beside(name: str) -> str:
            return str(folder / name) if (folder / name).is_file() else name

        @cache
        def model(name: str, longest: int | None, dtype: Dtype | None = None) -> ModelSpec:
            return load_model(beside(name), dtype=dtype, longest=longest)

        @cache
        def any_model(
            name: str, longest: int | None, lora: str | None = None, loss: str | None = None
        ) -> AnyModel:
            return find_model(beside(name), longest=longest, lora=lora, loss=loss)

        self.model, self.any_model = model, any_model
        self._folder = folder
        self.machine = cache(lambda name: load_machine(beside(name)))
        self.cluster = cache(lambda name: load_cluster(beside(name)))

    def policy(self, name: str) -> str:
        """The name of a policy, its file where it lies."""
        own = split_name(name)
        if own is None or not (self._folder / own[0]).is_file():
            return name
        return f"{self._folder / own[0]}:{own[1]}"


class Query(ABC):
    """A model, its step and what it runs on, as a question: how fast is it, planned how?

    `names` are of values that can be changed, beside numbers of profiles such as
    `machine.hbm_bytes_per_s`; without the `required` ones there is no query. `columns` are the
    names of an answer's figures, `resources` those of values of which more is never slower.
    """

    names: ClassVar[tuple[str, ...]]
    required: ClassVar[tuple[str, ...]]
    columns: ClassVar[tuple[str, ...]]
    resources: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def of(cls, values: Values, load: Loader) -> Self:
        """The query of values that were checked by `fault`.

        Raises:
            TwinstreamError: a model, a profile or a number of one is wrong.
        """

    @classmethod
    @abstractmethod
    def full_name(cls, name: str) -> str:
        """Of a number its name with what it is of: `machine.x` of `x`.

        Raises:
            TwinstreamError: nothing is called so; says what was probably meant.
        """

    @classmethod
    @abstractmethod
    def fault(cls, name: str, value: object) -> str | None:
        """What a value of a full name needs to be; None if it is that."""

    @property
    @abstractmethod
    def subject(self) -> Subject:
        """What is asked about."""

    @property
    @abstractmethod
    def content(self) -> dict[str, Any]:
        """All that the answer depends on, but for our own sources."""

    @property
    @abstractmethod
    def properties(self) -> list[Property]:
        """What money can change, without what the profiles do not state or limit."""

    @property
    def is_searched(self) -> bool:
        """Whether the answer is the best that is found, and not made by fixed rules."""
        return True

    @property
    def quick(self) -> Self:
        """The same, to be answered with the least search."""
        return self

    @abstractmethod
    def changed(self, values: Values) -> Self:
        """The query with other values, as a hypothesis: a memory may be more than any device has.

        Raises:
            TwinstreamError: there is no such number, or it cannot be.
        """

    def following(self, answer: Answer) -> Self:
        """The query with what the answer chose of the step itself, so that answers compare."""
        return self

    @abstractmethod
    def answer(
        self, known: Sequence[Answer] = (), planner: Planner | None = None, *,
        enough_tokens_per_s: float = inf, advises: bool = True,
    ) -> Answer:  # fmt: skip
        """The fastest of what is found and of what is known of other queries.

        Args:
            known: answers of queries with other numbers; those of other steps are left out.
            planner: where there is one that made plans before, which it learns from.
            enough_tokens_per_s: where a known one reaches it, no other need be looked for.
            advises: whether a refusal says what would do, which takes longest.

        Raises:
            TwinstreamError: nothing fits, or the query contradicts itself.
        """

    @abstractmethod
    def kept(self, answer: Answer) -> Answer:
        """The plan of another query's answer, as it is, here.

        Raises:
            TwinstreamError: it is of another step, or does not fit; says why.
        """

    def adopted(self, answer: Answer) -> Answer:
        """As `kept`, with the lower bound of this query."""
        return self.kept(answer)

    def saved_s(self, answer: Answer, one: Property) -> float | None:
        """Seconds of the step that one more unit saves by the lower bound, if it has a price."""
        return None
