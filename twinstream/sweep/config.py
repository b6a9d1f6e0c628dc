"""What a sweep varies and what it fixes, from a TOML file."""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from twinstream.hardware_profiles.loader import load_machine, override
from twinstream.hardware_profiles.overrides import nearest
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.freezing import trained_of
from twinstream.models.lowering.lower import model_ref
from twinstream.models.presets import load_model
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.choices import EFFORTS
from twinstream.planner.policies import UnknownPolicyError, policy_names
from twinstream.planner.request import DEFAULT_POLICY, PlanRequest, TrainingStep
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.sizes import SizeError, parse_bytes
from twinstream.sweep.sources import sources_hash

Value = str | int | float
MACHINE_NUMBER = "machine."
_COUNTS = ("seq_len", "tokens_per_step", "chunk_tokens", "chunks_per_round")
_TEXTS = ("model", "machine", "policy", "effort", "lora", "freeze")
_SIZES = ("device_mem", "host_mem")
NAMES = ("model", "machine", *_COUNTS, *_SIZES, "policy", "effort", "lora", "freeze")
_NOT_ASKED = "none"
_REQUIRED = ("model", "machine", "seq_len")


class SweepError(TwinstreamError):
    """A sweep's file or folder is not what it should be."""


@dataclass(frozen=True)
class Cell:
    """One plan of a sweep: what was asked for, and what that amounts to.

    `key` changes with anything that the result depends on, twinstream's sources among it. It does
    not with `beside`, a cell of less whose plan is the answer where it is faster.
    """

    values: Mapping[str, Value]
    request: PlanRequest
    beside: "Cell | None" = None

    @property
    def key(self) -> str:
        asked = self.request
        error = asked.machine.expected_error  # of the figures, though no plan follows from it
        about = {
            "sources": sources_hash(),
            "model": model_ref(asked.spec).content_hash,
            "machine": asked.machine.content_hash,
            "error": None if error is None else error.model_dump(),
            "caps": asked.caps.model_dump(),
            "step": [getattr(asked.step, name) for name in _COUNTS],
            "recipe": asked.recipe.model_dump(mode="json"),
            "policy": asked.policy,
            "effort": asked.choices.effort,
        }
        canonical = json.dumps(about, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SweepConfig:
    """`axes` are varied, all combinations; `fixed` have one value.

    `folder` is the file's, `source` what errors call it.

    Names are those of the options of `plan` (`seq_len`, `device_mem`, ...) and any number of a
    machine's profile (`machine.pcie_h2d_bytes_per_s`, `machine.efficiency.matmul`).
    """

    axes: Mapping[str, tuple[Value, ...]]
    fixed: Mapping[str, Value]
    folder: Path = field(default_factory=Path)
    source: str = "the sweep"

    @property
    def names(self) -> tuple[str, ...]:
        given = {**self.fixed, **self.axes}
        return (
            *(name for name in NAMES if name in given),
            *(name for name in given if name.startswith(MACHINE_NUMBER)),
        )

    def cells(self) -> list[Cell]:
        """Every combination of the axes' values, the last axis fastest.

        Raises:
            SweepError: a model, machine or number of one is wrong; it names the values.
        """
        load = _Loader(self.folder)
        found = []
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
        document = tomllib.loads(path.read_text(encoding="utf-8"))
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
    for name, value in fixed.items():
        _check(name, value, f"{source}: fixed.{name}")
    for name, values in axes.items():
        if name in fixed:
            raise SweepError(f"{source}: '{name}' is in [fixed] and in [axes]; leave one out")
        if not isinstance(values, list) or not values:
            raise SweepError(f"{source}: axes.{name} needs a list of values, got {values!r}")
        for value in values:
            _check(name, value, f"{source}: axes.{name}")
        if len(set(map(str, values))) < len(values):
            raise SweepError(f"{source}: axes.{name} names a value twice")
    if missing := [name for name in _REQUIRED if name not in fixed and name not in axes]:
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


def _check(name: str, value: object, where: str) -> None:
    if name in _COUNTS:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SweepError(f"{where} needs a positive whole number, got {value!r}")
    elif name in _TEXTS:
        if not isinstance(value, str):
            raise SweepError(f"{where} needs a text in quotes, got {value!r}")
    elif name in _SIZES:
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise SweepError(f'{where} needs a size such as "24GiB", "80%" or bytes, got {value!r}')
        _check_size(value, where)
    elif name.startswith(MACHINE_NUMBER):
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise SweepError(f"{where} needs a number, got {value!r}")
    else:
        known = [*NAMES, "machine.<number of the profile>"]
        raise SweepError(f"{where} is nothing that can be swept: {nearest(name, known)}")
    if name == "policy" and value not in policy_names():
        there = ", ".join(policy_names())
        raise UnknownPolicyError(f"{where}: unknown policy '{value}'; known: {there}")
    if name == "effort" and value not in EFFORTS:
        raise SweepError(f"{where}: effort '{value}' is unknown; known: {', '.join(EFFORTS)}")


def _check_size(value: str | int, where: str) -> None:
    """Refuse what is no size; of how much a share is, only a machine tells."""
    try:
        size_bytes = value if isinstance(value, int) else parse_bytes(value, whole_bytes=2.0**40)
    except SizeError as error:
        raise SweepError(f"{where}: {error}") from None
    if size_bytes < 1:
        raise SweepError(f"{where} needs a size of at least a byte, got {value!r}")


class _Loader:
    """Cells from values; every model and machine is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._specs: dict[str, ModelSpec] = {}
        self._machines: dict[tuple[tuple[str, Value], ...], Machine] = {}

    def cell(self, values: Mapping[str, Value]) -> Cell:
        model = str(values["model"])
        if model not in self._specs:
            self._specs[model] = load_model(self._path(model))
        counts: dict[str, Any] = {name: values[name] for name in _COUNTS if name in values}
        step = TrainingStep(**counts, recipe=self._recipe(values))
        request = PlanRequest.of(
            self._specs[model], self._machine(values), step=step,
            device_mem=_size(values, "device_mem"), host_mem=_size(values, "host_mem"),
            policy=str(values.get("policy", DEFAULT_POLICY)),
        )  # fmt: skip
        effort: Any = values.get("effort", "normal")
        return Cell(values, request.with_effort(effort))

    def _recipe(self, values: Mapping[str, Value]) -> Recipe:
        """With adapters and what is frozen: patterns with commas in between, or `none`."""
        lora, freeze = (str(values.get(name, _NOT_ASKED)) for name in ("lora", "freeze"))
        patterns = [] if freeze == _NOT_ASKED else freeze.split(",")
        spec = self._specs[str(values["model"])]
        return trained_of(spec, None if lora == _NOT_ASKED else lora, patterns)

    def _machine(self, values: Mapping[str, Value]) -> Machine:
        changes = {
            name.removeprefix(MACHINE_NUMBER): float(value)
            for name, value in values.items()
            if name.startswith(MACHINE_NUMBER)
        }
        key = (("machine", values["machine"]), *changes.items())
        if key not in self._machines:
            machine = load_machine(self._path(str(values["machine"])))
            self._machines[key] = override(machine, changes) if changes else machine
        return self._machines[key]

    def _path(self, name: str) -> str:
        """A file is meant relative to the sweep's own."""
        beside = self._folder / name
        return str(beside) if beside.is_file() else name


def _size(values: Mapping[str, Value], name: str) -> str | None:
    value = values.get(name)
    assert not isinstance(value, float)
    return None if value is None else str(value)
