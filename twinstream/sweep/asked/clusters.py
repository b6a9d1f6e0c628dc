"""Sweeps of clusters: what can be varied, and the search of layouts that some values ask for."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from twinstream.clusters.job import Job
from twinstream.clusters.layout import Layout
from twinstream.clusters.search import question
from twinstream.clusters.search.question import Question
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.profile_files import nearest
from twinstream.models.presets import load_model
from twinstream.models.spec import ModelSpec
from twinstream.sweep.asked.values import (
    CLUSTER_NUMBER,
    MACHINE_NUMBER,
    SweepError,
    Value,
    path_beside,
)
from twinstream.sweep.sources import sources_hash

PRICE = "price_per_gpu_hour"
_TEXTS = ("model", "cluster")
NAMES = (*_TEXTS, *question.NAMES, PRICE)
REQUIRED = (*_TEXTS, *question.COUNTS)
_MOST_PRICE = 1e12


@dataclass(frozen=True)
class ClusterCell:
    """One search of a sweep; `key` changes with anything that the result depends on."""

    values: Mapping[str, Value]
    question: Question
    price_per_gpu_hour: float | None = None

    @property
    def key(self) -> str:
        about = {
            "sources": sources_hash(),
            "question": self.question.content,
            "price": self.price_per_gpu_hour,
        }
        canonical = json.dumps(about, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def check_value(name: str, value: object, where: str) -> None:
    """Refuse what is no such value, or nothing that a sweep of clusters varies."""
    if name in _TEXTS:
        fault = None if isinstance(value, str) else f"needs a text in quotes, got {value!r}"
    elif name == PRICE:
        price = isinstance(value, int | float) and not isinstance(value, bool)
        fault = None if price and _possible(value) else f"needs a price from 0, got {value!r}"
    elif name in question.NAMES or name.startswith((CLUSTER_NUMBER, MACHINE_NUMBER)):
        fault = question.value_fault(name, value)
    else:
        known = [*NAMES, "cluster.<number of its profile>", "machine.<number of its node>"]
        fault = f"is nothing that can be swept: {nearest(name, known)}"
    if fault is not None:
        raise SweepError(f"{where} {fault}")


def _possible(price: Any) -> bool:
    return isfinite(price) and 0 <= price <= _MOST_PRICE


class ClusterLoader:
    """Cells from values; every model and cluster is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shapes: dict[tuple[str, int], ModelSpec] = {}
        self._clusters: dict[str, Cluster] = {}

    def cell(self, values: Mapping[str, Value]) -> ClusterCell:
        model, name = str(values["model"]), str(values["cluster"])
        seq_len, global_batch = (int(values[field]) for field in ("seq_len", "global_batch"))
        if (model, seq_len) not in self._shapes:
            found = load_model(path_beside(self._folder, model), longest=seq_len)
            self._shapes[model, seq_len] = found
        if name not in self._clusters:
            self._clusters[name] = load_cluster(path_beside(self._folder, name))
        job = Job(
            shape=self._shapes[model, seq_len], layout=Layout(), seq_len=seq_len,
            global_batch=global_batch,
        )  # fmt: skip
        base = Question(job, int(values["gpus"]), self._clusters[name], {})
        price = values.get(PRICE)
        return ClusterCell(values, base.changed(values), None if price is None else float(price))
