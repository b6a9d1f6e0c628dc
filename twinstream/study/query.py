"""A question about a training step whose values can be changed by name, and its answer.

What studies a step (`whatif`, `sweep`, `explore`) knows these two alone, not how many GPUs it has.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, Self

from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.clusters.what_if import with_numbers
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.overrides import override
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.decoders.config import Dtype, is_priced_config
from twinstream.models.presets import config_of, load_model
from twinstream.models.providers.model import AnyModel
from twinstream.planner.planner import Planner
from twinstream.schedule.document import Schedule
from twinstream.schedule.node import Node
from twinstream.schedule.python_file import split_name
from twinstream.study.answer import Answer, StudyError
from twinstream.study.values import MACHINE_NUMBER, Kind, Value, Values
from twinstream.tracing import find_model


class Subject(Node):
    """A model on a machine's device, or on so many GPUs of a cluster, that a query is about.

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
        """The subject in a few words."""
        if self.cluster is not None:
            return f"{self.model} on {self.num_gpus:,} GPUs of {self.cluster}"
        return f"{self.model} on {self.machine}, policy {self.policy}"


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
        """The value of the first field, in `unit`."""
        return self.values[0] / self.unit_size

    @property
    def is_count(self) -> bool:
        """True where only whole values make sense."""
        return self.fields == ("gpus",)

    def can_be(self, factor: float) -> bool:
        """Return whether the value times a factor can be: a count is a whole number."""
        return not self.is_count or (self.now * factor >= 1 and self.now * factor % 1 == 0)

    def times(self, factor: float) -> dict[str, Value]:
        """The values of a query with it."""
        values = [value * factor for value in self.values]
        return dict(zip(self.fields, map(int, values) if self.is_count else values, strict=True))


class Loader:
    """Models, machines and clusters by name or file, each read once.

    Args:
        folder: that files lie relative to.
    """

    def __init__(self, folder: Path = Path()) -> None:
        def beside(name: str) -> str:
            path = os.path.join(folder, name)  # noqa: PTH118 - false of a name that is too long
            return path if os.path.isfile(path) else name  # noqa: PTH113

        @cache
        def model(  # noqa: PLR0913
            name: str, longest: int | None, lora: str | None = None, loss: str | None = None,
            dtype: Dtype | None = None, *, trusted: bool = False, priced: bool = False,
        ) -> AnyModel:  # fmt: skip
            if priced and is_priced_config(config_of(beside(name))):
                return load_model(beside(name), dtype=dtype)
            return find_model(
                beside(name), longest=longest, lora=lora, loss=loss, dtype=dtype,
                trust_remote_code=trusted,
            )  # fmt: skip

        self.model, self._folder = model, folder
        self.machine: Callable[[str], Machine] = cache(lambda name: load_machine(beside(name)))
        self.cluster: Callable[[str], Cluster] = cache(lambda name: load_cluster(beside(name)))

    def with_numbers(self, numbers: Mapping[str, float]) -> "Loader":
        """The loader of profiles with other numbers than they state, which reads nothing anew.

        Args:
            numbers: of machines as `machine.hbm_bytes_per_s`, of clusters by their own names.
        """
        found = copy(self)
        if numbers:
            found.machine = cache(lambda name: with_machine_numbers(self.machine(name), numbers))
            found.cluster = cache(lambda name: with_numbers(self.cluster(name), numbers))
        return found

    def on(self, machine: Machine) -> "Loader":
        """The loader of a machine that is no file, whatever it is called."""
        found = copy(self)
        found.machine = lambda name: machine
        return found

    def policy(self, name: str) -> str:
        """The name of a policy, its file where it lies."""
        own = split_name(name)
        if own is None or not os.path.isfile(self._folder / own[0]):  # noqa: PTH113
            return name
        return f"{self._folder / own[0]}:{own[1]}"


def with_machine_numbers(machine: Machine, numbers: Mapping[str, float]) -> Machine:
    """The machine with the numbers that are named `machine.<number>`."""
    own = {
        name.removeprefix(MACHINE_NUMBER): value
        for name, value in numbers.items()
        if name.startswith(MACHINE_NUMBER)
    }
    return override(machine, own) if own else machine


class Query(ABC):
    """A model, its step and what it runs on, as a question: how fast is it, planned how?

    What values it has, and what its answers' figures are called, `study.values` says by its kind.
    """

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """The kind of the query: of one device, of ranks, or of a cluster's GPUs."""

    @property
    @abstractmethod
    def subject(self) -> Subject:
        """The model and the place that the query is about."""

    @property
    @abstractmethod
    def content(self) -> dict[str, Any]:
        """All that the answer depends on, but for our own sources."""

    @property
    @abstractmethod
    def properties(self) -> list[Property]:
        """The numbers that money can change, without those that profiles do not state or limit."""

    @property
    def is_searched(self) -> bool:
        """True where the answer is the best that is found, and not made by fixed rules."""
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
        progress: Callable[[str], None] = lambda text: None,
    ) -> Answer:  # fmt: skip
        """The fastest of what is found and of what is known of other queries.

        Args:
            known: answers of queries with other numbers; those of other steps are left out.
            planner: where there is one that made plans before, which it learns from.
            enough_tokens_per_s: where a known one reaches it, no other need be looked for.
            advises: whether a refusal says what would do, which takes longest.
            progress: is told now and then what is looked at, and the best so far.

        Raises:
            TwinstreamError: nothing fits, or the query contradicts itself.
        """

    def begun_from(self, plans: Sequence[Schedule]) -> Answer:
        """The fastest of what is found and of plans of this very step.

        Raises:
            WarmStartError: one of these is of another step.
            TwinstreamError: nothing fits, or the query is not of one device.
        """
        raise StudyError("--warm-start is of one device; leave it out")

    @abstractmethod
    def kept(self, answer: Answer) -> Answer:
        """The plan of another query's answer, as it is, here.

        Raises:
            TwinstreamError: it is of another step, or does not fit; says why.
        """

    def adopted(self, answer: Answer) -> Answer:
        """Return what `kept` does, with the lower bound of this query."""
        return self.kept(answer)

    def saved_s(self, answer: Answer, one: Property) -> float | None:
        """Seconds of the step that one more unit saves by the lower bound, if it has a price."""
        return None
