"""What a sweep varies and what it fixes, from a TOML file."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from twinstream.cost.bill import price_at, prices_of
from twinstream.hardware_profiles.clusters.loader import place_names
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import parse_toml, read_text
from twinstream.schedule.sizes import parse_number
from twinstream.study.answer import StudyError
from twinstream.study.query import Loader
from twinstream.study.questions import query_of
from twinstream.study.sweep.cells import Cell
from twinstream.study.values import (
    NAMES,
    PRICE,
    Kind,
    Value,
    fault_of,
    is_price,
    kind_of,
    missing_of,
)


@dataclass(frozen=True)
class SweepConfig:
    """`axes` are varied, all combinations; `fixed` have one value.

    `folder` is the file's, `source` what errors call it. Names are those of a query's values, and
    `price_per_gpu_hour`, of all or by the name of a machine, cluster, its node or GPU:
    `price_per_gpu_hour = { h100 = 2.5, b200 = 4 }`.
    """

    axes: Mapping[str, tuple[Value, ...]]
    fixed: Mapping[str, Value]
    folder: Path = field(default_factory=Path)
    source: str = "the sweep"

    @property
    def kind(self) -> Kind:
        """The kind of its queries."""
        return kind_of({**self.fixed, **self.axes})

    @property
    def names(self) -> tuple[str, ...]:
        given, order = {**self.fixed, **self.axes}, (*NAMES[self.kind], PRICE)
        return (
            *(name for name in order if name in given),
            *(name for name in given if name not in order),
        )

    def cells(self) -> list[Cell]:
        """Every combination of the axes' values, the last axis fastest.

        Raises:
            StudyError: a model, machine, cluster or number of one is wrong; it names the values. A
                price is of nothing that the sweep is of.
        """
        load, found = Loader(self.folder), []
        names_of = self._names_of_places(load)
        for combination in product(*self.axes.values()):
            varied = dict(zip(self.axes, combination, strict=True))
            values = {**self.fixed, **varied}
            place = values.get("cluster", values.get("machine", ""))
            price = values.get(PRICE, price_at(_priced(values), names_of.get(place, ())))
            try:
                query = query_of({n: v for n, v in values.items() if not is_price(n)}, load)
            except TwinstreamError as error:
                at = ", ".join(f"{name} = {value!r}" for name, value in varied.items())
                where = f"{self.source}, at {at}" if at else self.source
                raise StudyError(f"{where}: {error}") from None
            found.append(Cell(values, query, None if price is None else float(price)))
        return found

    def _names_of_places(self, load: Loader) -> dict[Value, tuple[str, ...]]:
        """The names by which a price may be given, by place; none where no price is by name."""
        given = {**self.fixed, **self.axes}
        named = list(_priced(given))
        if not named:
            return {}
        kind = "cluster" if "cluster" in given else "machine"
        load_place = load.cluster if kind == "cluster" else load.machine
        places = {
            place: (str(place), *place_names(load_place(str(place))))
            for place in self.axes.get(kind, (self.fixed.get(kind, ""),))
        }
        known = {name.lower() for names in places.values() for name in names}
        if unknown := [name for name in named if name.lower() not in known]:
            raise StudyError(
                f"{self.source}: {PRICE} is of '{unknown[0]}', and the sweep is of "
                f"{', '.join(map(str, places))}"
            )
        return places


def _priced(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prices that are given by name."""
    start = f"{PRICE}."
    return {name.removeprefix(start): v for name, v in given.items() if name.startswith(start)}


def load_config(path: Path) -> SweepConfig:
    """Read a sweep: a table `fixed` of single values, a table `axes` of lists.

    Raises:
        StudyError: what is wrong, with the name that was probably meant.
    """
    try:
        document = parse_toml(read_text(path))
    except OSError as error:
        raise StudyError(f"cannot read {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"{path} is not valid TOML: {error}") from None
    return config_of(document, source=str(path), folder=path.parent)


def config_of(document: Mapping[str, Any], *, source: str, folder: Path) -> SweepConfig:
    """A sweep of a parsed document; see `load_config`."""
    if unknown := sorted(document.keys() - {"fixed", "axes"}):
        raise StudyError(
            f"{source}: unknown '{unknown[0]}'; a sweep has a table [fixed] of single values and a "
            "table [axes] of lists"
        )
    tables = {name: document.get(name, {}) for name in ("fixed", "axes")}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise StudyError(f"{source}: '{name}' needs to be a table")
    fixed, axes = (_flat(table) for table in tables.values())
    kind = kind_of({**fixed, **axes})
    fixed = {name: _understood(kind, name, value) for name, value in fixed.items()}
    axes = {
        name: [_understood(kind, name, value) for value in values]
        if isinstance(values, list)
        else values
        for name, values in axes.items()
    }
    given = {**fixed, **axes}
    if {"machine", "cluster"} <= given.keys():
        raise StudyError(
            f"{source}: a sweep is of machines or of clusters: leave out 'machine' or 'cluster'"
        )
    if PRICE in given and _priced(given):
        raise StudyError(f"{source}: {PRICE} is one price or a table of them: leave one out")
    for name, value in fixed.items():
        _check(kind, name, value, f"{source}: fixed.{name}")
    for name, values in axes.items():
        if name in fixed:
            raise StudyError(f"{source}: '{name}' is in [fixed] and in [axes]; leave one out")
        if not isinstance(values, list) or not values:
            raise StudyError(f"{source}: axes.{name} needs a list of values, got {values!r}")
        for value in values:
            _check(kind, name, value, f"{source}: axes.{name}")
        if len(set(map(str, values))) < len(values):
            raise StudyError(f"{source}: axes.{name} names a value twice")
    if missing := missing_of(given):
        raise StudyError(f"{source}: {missing}; put it in [fixed] or in [axes]")
    return SweepConfig({name: tuple(v) for name, v in axes.items()}, fixed, folder, source)


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """`machine.x = 1` without quotes is a table of tables in TOML; the same is meant."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if name == PRICE and isinstance(value, str) and isinstance(read := prices_of(value), dict):
            value = read
        if isinstance(value, dict):
            found |= {f"{name}.{inside}": v for inside, v in _flat(value).items()}
        else:
            found[name] = value
    return found


def _understood(kind: Kind, name: str, value: Any) -> Any:
    """A number as people write it (`"2k"`), where no text is meant."""
    number = parse_number(value) if isinstance(value, str) else None
    if number is None or fault_of(kind, name, value) is None:
        return value
    return value if fault_of(kind, name, number) else number


def _check(kind: Kind, name: str, value: object, where: str) -> None:
    if (fault := fault_of(kind, name, value)) is not None:
        raise StudyError(f"{where} {fault}")
