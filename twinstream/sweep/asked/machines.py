"""Sweeps of one device: what can be varied, and the plan that is asked for by some values."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinstream.hardware_profiles.loader import load_machine, override
from twinstream.hardware_profiles.profile_files import nearest
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.freezing import trained_of
from twinstream.models.lowering.lower import model_ref
from twinstream.models.presets import load_model
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.choices import EFFORTS
from twinstream.planner.policies import UnknownPolicyError, policy_names
from twinstream.planner.request import DEFAULT_POLICY, PlanRequest, TrainingStep
from twinstream.schedule.sizes import SizeError, parse_bytes
from twinstream.sweep.asked.values import MACHINE_NUMBER, SweepError, Value, path_beside
from twinstream.sweep.sources import sources_hash

_COUNTS = ("seq_len", "tokens_per_step", "chunk_tokens", "chunks_per_round")
_TEXTS = ("model", "machine", "policy", "effort", "lora", "freeze")
_SIZES = ("device_mem", "host_mem")
NAMES = ("model", "machine", *_COUNTS, *_SIZES, "policy", "effort", "lora", "freeze")
REQUIRED = ("model", "machine", "seq_len")
_NOT_ASKED = "none"


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


def check_value(name: str, value: object, where: str) -> None:
    """Refuse what is no such value, or nothing that a sweep of machines varies."""
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


class MachineLoader:
    """Cells from values; every model and machine is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._specs: dict[tuple[str, int | None], ModelSpec] = {}
        self._machines: dict[tuple[tuple[str, Value], ...], Machine] = {}

    def cell(self, values: Mapping[str, Value]) -> Cell:
        counts: dict[str, Any] = {name: values[name] for name in _COUNTS if name in values}
        spec = self._spec(str(values["model"]), counts.get("seq_len"))
        step = TrainingStep(**counts, recipe=_recipe(spec, values))
        request = PlanRequest.of(
            spec, self._machine(values), step=step,
            device_mem=_size(values, "device_mem"), host_mem=_size(values, "host_mem"),
            policy=str(values.get("policy", DEFAULT_POLICY)),
        )  # fmt: skip
        effort: Any = values.get("effort", "normal")
        return Cell(values, request.with_effort(effort))

    def _spec(self, model: str, longest: int | None) -> ModelSpec:
        if (model, longest) not in self._specs:
            found = load_model(path_beside(self._folder, model), longest=longest)
            self._specs[model, longest] = found
        return self._specs[model, longest]

    def _machine(self, values: Mapping[str, Value]) -> Machine:
        changes = {
            name.removeprefix(MACHINE_NUMBER): float(value)
            for name, value in values.items()
            if name.startswith(MACHINE_NUMBER)
        }
        key = (("machine", values["machine"]), *changes.items())
        if key not in self._machines:
            machine = load_machine(path_beside(self._folder, str(values["machine"])))
            self._machines[key] = override(machine, changes) if changes else machine
        return self._machines[key]


def _recipe(spec: ModelSpec, values: Mapping[str, Value]) -> Recipe:
    """With adapters and what is frozen: patterns with commas in between, or `none`."""
    lora, freeze = (str(values.get(name, _NOT_ASKED)) for name in ("lora", "freeze"))
    patterns = [] if freeze == _NOT_ASKED else freeze.split(",")
    return trained_of(spec, None if lora == _NOT_ASKED else lora, patterns)


def _size(values: Mapping[str, Value], name: str) -> str | None:
    value = values.get(name)
    assert not isinstance(value, float)
    return None if value is None else str(value)
