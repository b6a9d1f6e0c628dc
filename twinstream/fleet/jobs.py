"""The jobs of a fleet and the cluster that they share, from a TOML file."""

import tomllib
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from twinstream.cost.bill import GpuHourPrice
from twinstream.schedule.errors import TwinstreamError, did_you_mean
from twinstream.schedule.files import parse_toml, read_text
from twinstream.schedule.node import Node
from twinstream.schedule.sizes import parse_number

HOUR_S = 3600.0
_MOST_NODES = 2**20
_MOST_FAILURES = 4  # in what is done again after each: e^4 tries on average


class FleetError(TwinstreamError):
    """A fleet's file, or a job of it, that cannot be planned."""


def _read_number(given: object) -> object:
    number = parse_number(given) if isinstance(given, str) else None
    return given if number is None else number


def _read_sizes(given: object) -> object:
    return tuple(given) if isinstance(given, list) else (given,)


_Count = Annotated[int, BeforeValidator(_read_number), Field(gt=0, le=2**60)]
_Amount = Annotated[float, BeforeValidator(_read_number), Field(ge=0, le=1e12, allow_inf_nan=False)]
_Nodes = Annotated[int, Field(gt=0, le=_MOST_NODES)]


class FleetJob(Node):
    """One training run.

    Fields:
        tokens: of the whole run.
        global_batch: sequences of a step; `tokens_per_step` says the same in tokens.
        deadline_hours, arrives_hours: from the start of the calendar; no deadline: it may end at
            any time.
        priority: the weight of its deadline.
        nodes: how many it may use; by default powers of two and the whole cluster.
        elastic: it may change the number of its nodes, by a checkpoint and a restart.
        layout: what is not open of its layouts, as `{ tp = 8 }`.
    """

    name: Annotated[str, Field(min_length=1, max_length=80)]
    model: str
    tokens: _Count
    seq_len: _Count
    global_batch: _Count | None = None
    tokens_per_step: _Count | None = None
    deadline_hours: Annotated[_Amount | None, Field(gt=0)] = None
    arrives_hours: _Amount = 0.0
    priority: Annotated[_Amount, Field(gt=0, le=1e6)] = 1.0
    nodes: Annotated[
        tuple[_Nodes, ...] | None, BeforeValidator(_read_sizes), Field(min_length=1)
    ] = None
    elastic: bool = False
    layout: Mapping[str, str | bool | int | float] = {}

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.global_batch is None) == (self.tokens_per_step is None):
            raise PydanticCustomError("batch", "needs global_batch or tokens_per_step, one of them")
        if self.deadline_hours is not None and self.deadline_hours <= self.arrives_hours:
            raise PydanticCustomError(
                "deadline", f"has deadline_hours = {self.deadline_hours:g}, which is not after "
                f"arrives_hours = {self.arrives_hours:g}",
            )  # fmt: skip
        return self

    @property
    def deadline_s(self) -> float:
        """Seconds from the start of the calendar; infinite without a deadline."""
        return inf if self.deadline_hours is None else self.deadline_hours * HOUR_S

    @property
    def arrives_s(self) -> float:
        """Seconds from the start of the calendar."""
        return self.arrives_hours * HOUR_S

    def sizes(self, num_nodes: int) -> tuple[int, ...]:
        """Counts of nodes that it may use, in order.

        >>> FleetJob(name="a", model="8b", tokens=1, seq_len=1, global_batch=1).sizes(6)
        (1, 2, 4, 6)
        """
        if self.nodes is not None:
            return tuple(sorted(set(self.nodes)))
        powers = (2**power for power in range(num_nodes.bit_length()))
        return tuple(sorted({num_nodes, *(size for size in powers if size <= num_nodes)}))


class FleetFile(Node):
    """A cluster's nodes, what an hour and an interruption cost, and the jobs.

    Fields:
        objective: what comes first: deadlines that are met (by priority), or the makespan.
        checkpoint_s, checkpoint_interval_s, restart_s: a checkpoint stops a run for that long, so
            often; a restart takes that long before it trains again.
        failures_per_node_hour: of one node, as a Poisson process; a failure loses the work since
            the last checkpoint.
    """

    cluster: str
    nodes: _Nodes
    objective: Literal["deadlines", "makespan"] = "deadlines"
    price_per_gpu_hour: GpuHourPrice = None
    checkpoint_s: _Amount = 60.0
    checkpoint_interval_s: Annotated[_Amount, Field(gt=0)] = 1800.0
    restart_s: _Amount = 300.0
    failures_per_node_hour: Annotated[_Amount, Field(le=1e3)] = 0.0
    jobs: Annotated[
        tuple[FleetJob, ...], BeforeValidator(_read_sizes), Field(min_length=1, max_length=1000)
    ]

    @property
    def saving_share(self) -> float:
        """Wall time over time that trains, by the checkpoints of a run."""
        return 1.0 + self.checkpoint_s / self.checkpoint_interval_s


def load_fleet(path: Path) -> FleetFile:
    """Read a fleet's file: the cluster and its rates above, a table [[jobs]] for each job.

    Raises:
        FleetError: says what is wrong, where, and what to do.
    """
    try:
        document = parse_toml(read_text(path))
    except OSError as error:
        raise FleetError(f"cannot read {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FleetError(f"{path} is not valid TOML: {error}") from None
    return fleet_of(document, str(path))


def fleet_of(document: Mapping[str, Any], source: str = "the fleet") -> FleetFile:
    """A fleet of a parsed document; see `load_fleet`."""
    try:
        found = FleetFile.model_validate(dict(document))
    except ValidationError as error:
        raise FleetError(f"{source}{_told(error.errors()[0], document)}") from None
    failures_per_s = found.failures_per_node_hour * found.nodes / HOUR_S
    unbroken_s = found.checkpoint_interval_s + found.checkpoint_s + found.restart_s
    if failures_per_s * unbroken_s > _MOST_FAILURES:
        raise FleetError(
            f"{source}: failures_per_node_hour = {found.failures_per_node_hour:g} is a failure of "
            f"{found.nodes} nodes every {1 / failures_per_s:,.3g} s, and to get from checkpoint to "
            f"checkpoint takes {unbroken_s:,.4g} s: lower checkpoint_interval_s or the rate"
        )
    names = [job.name for job in found.jobs]
    for job in found.jobs:
        where = f"{source}, job '{job.name}'"
        if names.count(job.name) > 1:
            raise FleetError(f"{where}: {names.count(job.name)} jobs have this name: rename one")
        if max(job.sizes(found.nodes)) > found.nodes:
            raise FleetError(
                f"{where}: nodes = {max(job.sizes(found.nodes))} are more than the {found.nodes} "
                "of the cluster: ask for fewer, or raise nodes"
            )
    return found


def _told(error: Any, document: Mapping[str, Any]) -> str:
    """The place and the fault of one error of validation."""
    loc, where = list(error["loc"]), ""
    kind: type[Node] = FleetFile
    if len(loc) > 1 and loc[0] == "jobs" and isinstance(loc[1], int):
        given = document["jobs"]
        job = given[loc[1]] if isinstance(given, list) else given
        name = job.get("name") if isinstance(job, Mapping) else None
        where = f", job '{name}'" if isinstance(name, str) else f", job {loc[1] + 1}"
        loc, kind = loc[2:], FleetJob
    field = str(loc[0]) if loc else ""
    if error["type"] == "extra_forbidden":
        hint = did_you_mean(field, kind.model_fields) or f"known: {', '.join(kind.model_fields)}"
        return f"{where}: unknown '{field}': {hint}"
    if error["type"] == "missing":
        told = " ([[jobs]])" if field == "jobs" else ""
        return f"{where}: {field}{told} is missing"
    said = error["msg"].replace("Input should be", "needs to be")
    got = "" if not loc or error["type"] == "price" else f", got {error['input']!r:.60}"
    return f"{where}: {field} {said}{got}" if field else f"{where} {said}"
