"""One way to name and check a query's values: in a sweep's file, on the command line, in Python."""

from collections.abc import Container, Mapping, Sequence

from twinstream.cost.bill import prices_of
from twinstream.hardware_profiles.profile_files import nearest
from twinstream.schedule.sizes import parse_number
from twinstream.study.many_gpus import LayoutQuery
from twinstream.study.one_device import DeviceQuery
from twinstream.study.query import (
    CLUSTER_NUMBER,
    MACHINE_NUMBER,
    Loader,
    Query,
    StudyError,
    Value,
    Values,
)
from twinstream.study.several_ranks import RanksQuery

PRICE = "price_per_gpu_hour"
_KINDS: tuple[type[Query], ...] = (DeviceQuery, RanksQuery, LayoutQuery)


def kind_of(names: Container[str]) -> type[Query]:
    """Whether a query of these names is of ranks that run, a cluster's GPUs or one device."""
    if "ranks" in names:
        return RanksQuery
    return LayoutQuery if "cluster" in names else DeviceQuery


def query_of(values: Values, load: Loader | None = None) -> Query:
    """The query of values by name; a price is no part of it.

    >>> query_of({"model": "tiny", "machine": "cpu", "seq_len": 64}).subject.title
    'tiny on cpu, policy optimal'

    Raises:
        TwinstreamError: a name or a value is wrong, or one is missing.
    """
    kind = kind_of(values)
    for name, value in values.items():
        if (fault := fault_of(kind, name, value)) is not None:
            raise StudyError(f"{name} {fault}")
    if missing := missing_of(values):
        raise StudyError(f"{missing} is missing")
    return kind.of(values, load or Loader())


def missing_of(names: Container[str]) -> str | None:
    """The first name that a query cannot do without, if one is missing."""
    return next((name for name in kind_of(names).required if name not in names), None)


def fault_of(kind: type[Query], name: str, value: object) -> str | None:
    """What a value needs to be, or its name; None if both are right."""
    if name == PRICE or name.startswith(f"{PRICE}."):
        is_price = not isinstance(value, str) and prices_of(value) is not None
        return None if is_price else f"needs a price from 0, got {value!r}"
    prefixes = _prefixes(kind)
    if name in kind.names or name.startswith(tuple(prefixes)):
        return kind.fault(name, value)
    if any(name in other.names for other in _KINDS):
        mine, others = ("cluster", "machines") if kind is LayoutQuery else ("machine", "clusters")
        return f"is of {others}, and this is of a {mine}"
    known = [*kind.names, PRICE, *(f"{prefix}<number of its profile>" for prefix in prefixes)]
    return f"is nothing that can be changed: {nearest(name, known)}"


def _prefixes(kind: type[Query]) -> Sequence[str]:
    return (CLUSTER_NUMBER, MACHINE_NUMBER) if kind is LayoutQuery else (MACHINE_NUMBER,)


def written_values(texts: Sequence[str], query: Query) -> Mapping[str, Value]:
    """Values by their full names of `nic_bytes_per_s=1e11`, `gpus=1024`, `tp=open`.

    Raises:
        StudyError: a text is none, names nothing that is known, or something twice.
    """
    values: dict[str, Value] = {}
    for text in texts:
        name, equals, written = (part.strip() for part in text.partition("="))
        if not equals or not written:
            raise StudyError(f"--set '{text}' has no value; write it as hbm_bytes_per_s=4e12")
        full = name if name == PRICE else query.full_name(name)
        value = _read(written)
        if (fault := fault_of(type(query), full, value)) is not None:
            raise StudyError(f"--set {name} {fault}")
        if full in values:
            raise StudyError(f"--set names '{name}' twice")
        values[full] = value
    return values


def _read(text: str) -> Value:
    """A number or a truth where it is one, else the text: `8k`, but `8b` is a model."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text[-1:].lower() == "k" and (count := parse_number(text)) is not None:
        return count
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
