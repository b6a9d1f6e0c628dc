"""What a sweep varies and what it fixes, from a TOML file."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import parse_toml, read_text
from twinstream.sweep.asked import clusters, machines
from twinstream.sweep.asked.clusters import ClusterCell, ClusterLoader
from twinstream.sweep.asked.machines import Cell, MachineLoader
from twinstream.sweep.asked.values import SweepError, Value, of_clusters

AnyCell = Cell | ClusterCell


@dataclass(frozen=True)
class SweepConfig:
    """`axes` are varied, all combinations; `fixed` have one value.

    `folder` is the file's, `source` what errors call it.

    Names are those of the options of `plan` (`seq_len`, `device_mem`, ...; of a cluster `gpus`,
    `tp`, ...) and any number of a profile (`machine.pcie_h2d_bytes_per_s`,
    `machine.efficiency.matmul`, `cluster.nic_bytes_per_s`).
    """

    axes: Mapping[str, tuple[Value, ...]]
    fixed: Mapping[str, Value]
    folder: Path = field(default_factory=Path)
    source: str = "the sweep"

    @property
    def names(self) -> tuple[str, ...]:
        given = {**self.fixed, **self.axes}
        order = clusters.NAMES if of_clusters(given) else machines.NAMES
        return (
            *(name for name in order if name in given),
            *(name for name in given if name not in order),
        )

    def cells(self) -> list[AnyCell]:
        """Every combination of the axes' values, the last axis fastest.

        Raises:
            SweepError: a model, machine, cluster or number of one is wrong; it names the values.
        """
        kind = ClusterLoader if of_clusters(self.names) else MachineLoader
        load, found = kind(self.folder), []
        for combination in product(*self.axes.values()):
            varied = dict(zip(self.axes, combination, strict=True))
            try:
                found.append(load.cell({**self.fixed, **varied}))
            except TwinstreamError as error:
                at = ", ".join(f"{name} = {value!r}" for name, value in varied.items())
                where = f"{self.source}, at {at}" if at else self.source
                raise SweepError(f"{where}: {error}") from None
        return found


def load_config(path: Path) -> SweepConfig:
    """Read a sweep: a table `fixed` of single values, a table `axes` of lists.

    Raises:
        SweepError: what is wrong, with the name that was probably meant.
    """
    try:
        document = parse_toml(read_text(path))
    except OSError as error:
        raise SweepError(f"cannot read {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SweepError(f"{path} is not valid TOML: {error}") from None
    return config_of(document, source=str(path), folder=path.parent)


def config_of(document: Mapping[str, Any], *, source: str, folder: Path) -> SweepConfig:
    """A sweep of a parsed document; see `load_config`."""
    if unknown := sorted(document.keys() - {"fixed", "axes"}):
        raise SweepError(
            f"{source}: unknown '{unknown[0]}'; a sweep has a table [fixed] of single values and a "
            "table [axes] of lists"
        )
    tables = {name: document.get(name, {}) for name in ("fixed", "axes")}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SweepError(f"{source}: '{name}' needs to be a table")
    fixed, axes = (_flat(table) for table in tables.values())
    given = {**fixed, **axes}
    if {"machine", "cluster"} <= given.keys():
        raise SweepError(
            f"{source}: a sweep is of machines or of clusters: leave out 'machine' or 'cluster'"
        )
    of_kind = of_clusters(given)
    for name, value in fixed.items():
        _check(name, value, f"{source}: fixed.{name}", of_kind)
    for name, values in axes.items():
        if name in fixed:
            raise SweepError(f"{source}: '{name}' is in [fixed] and in [axes]; leave one out")
        if not isinstance(values, list) or not values:
            raise SweepError(f"{source}: axes.{name} needs a list of values, got {values!r}")
        for value in values:
            _check(name, value, f"{source}: axes.{name}", of_kind)
        if len(set(map(str, values))) < len(values):
            raise SweepError(f"{source}: axes.{name} names a value twice")
    required = clusters.REQUIRED if of_kind else machines.REQUIRED
    if missing := [name for name in required if name not in given]:
        raise SweepError(f"{source}: {missing[0]} is missing; put it in [fixed] or in [axes]")
    return SweepConfig({name: tuple(v) for name, v in axes.items()}, fixed, folder, source)


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """`machine.x = 1` without quotes is a table of tables in TOML; the same is meant."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inside}": v for inside, v in _flat(value).items()}
        else:
            found[name] = value
    return found


def _check(name: str, value: object, where: str, of_kind: bool) -> None:
    """Refuse a value that is none; a name of the other kind of sweep is told as such."""
    mine, others = (clusters, machines) if of_kind else (machines, clusters)
    if name in others.NAMES and name not in mine.NAMES:
        raise SweepError(
            f"{where} is of a sweep of {'machines' if of_kind else 'clusters'}, which "
            f"{'names a machine, not a cluster' if of_kind else 'names a cluster, not a machine'}"
        )
    mine.check_value(name, value, where)
