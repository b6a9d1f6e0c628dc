"""Price one strategy of a layered model on a cluster, or find the fastest that fits memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinstream.hardware_profiles.clusters.loader import place_names
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.layered.memory import LayeredMemory, memory_of
from twinstream.layered.prices import ClusterPrices
from twinstream.layered.step import LayeredStepTime, LayeredTask, step_time
from twinstream.layered.strategy import (
    GpuMesh,
    Strategy,
    StrategyError,
    strategies,
    strategy_text,
)
from twinstream.models.layered.model import LayeredModel
from twinstream.schedule.sizes import gib

_OF_TABLES = "no measured step of a model with embedding tables was compared with this arithmetic"
_OF_INFERENCE = "no measured inference was compared with this arithmetic"
# By GPU, of `python -m benchmarks.accuracy.layered`: mean error, steps, most GPUs of a step.
_ERRORS = {"a100": (0.054, 15, 128), "h100": (0.133, 12, 512)}
_LLAMA_65B = 0.22  # 6.56 s a step for 5.38 by its paper, arXiv:2302.13971


@dataclass(frozen=True)
class Estimate:
    """A strategy's step, the memory of a GPU, and how far the step may be off.

    `error` is a fraction, None where nothing like it was measured; `why` says what it is of.
    """

    strategy: Strategy
    task: LayeredTask
    step: LayeredStepTime
    memory: LayeredMemory
    room_bytes: int
    error: float | None
    why: str

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room_bytes

    @property
    def samples_per_s(self) -> float:
        return self.task.batch * 1e9 / self.step.step_ns

    @property
    def error_text(self) -> str:
        """Return the error beside a number."""
        return "+/- ?" if self.error is None else f"+/- {100 * self.error:.0f} %"


@dataclass(frozen=True)
class Question:
    """A task of a model on so many GPUs of a cluster."""

    model: LayeredModel
    cluster: Cluster
    mesh: GpuMesh
    task: LayeredTask

    def estimate(self, strategy: Strategy) -> Estimate:
        """Return the step and memory of one strategy, whether or not it fits.

        Raises:
            StrategyError: the strategy does not fit the model, the GPUs or the batch.
            MissingNumberError: the profile lacks a number that the step needs.
        """
        prices = ClusterPrices(self.cluster, self.mesh, self.model)
        step = step_time(self.model, strategy, self.mesh, self.task, prices)
        error, why = self._error()
        return Estimate(
            strategy=strategy, task=self.task, step=step,
            memory=memory_of(self.model, strategy, self.mesh, self.task),
            room_bytes=int(prices.machine.number("device_memory_bytes")), error=error, why=why,
        )  # fmt: skip

    def search(self, fixed: Strategy, most: int = 5) -> tuple[Estimate, ...]:
        """Return the fastest strategies that fit, with and without recompute; none repeats another.

        Raises:
            StrategyError: none divides the batch, or none fits; says what the least one lacks.
        """
        asked = [self]
        if self.task.name != "inference" and not self.task.recompute:
            asked.append(replace(self, task=replace(self.task, recompute=True)))
        found: list[Estimate] = []
        refusals: list[StrategyError] = []
        for question in asked:
            for strategy in strategies(self.model, self.mesh, fixed):
                try:
                    found.append(question.estimate(strategy))
                except StrategyError as error:
                    refusals.append(error)
        if not found:
            raise refusals[0]
        best = sorted(
            (one for one in found if one.fits),
            key=lambda one: (one.step.step_ns, one.task.recompute, strategy_text(one.strategy)),
        )
        if not best:
            least = min(found, key=lambda one: one.memory.total)
            raise StrategyError(
                f"{self.model.name} fits {self.mesh.gpus} GPUs of {self.cluster.name} by none of "
                f"{len(found)} strategies: the least memory, {gib(least.memory.total)} of "
                f"{gib(least.room_bytes)} a GPU, has {strategy_text(least.strategy)}; give more "
                "--gpus or a smaller --batch-size"
            )
        return tuple(best[:most])

    def _error(self) -> tuple[float | None, str]:
        if any(part.sparse for part in self.model.chain.embeddings):
            return None, _OF_TABLES
        if self.task.name == "inference":
            return None, _OF_INFERENCE
        gpu = place_names(self.cluster)[-1]
        known = gpu if gpu in _ERRORS else max(_ERRORS, key=lambda name: _ERRORS[name][0])
        mean, steps, most_gpus = _ERRORS[known]
        if self.mesh.gpus > most_gpus:
            return max(mean, _LLAMA_65B), (
                f"LLaMA 65B on 2,048 A100 came out so much too slow; {steps} published steps on up "
                f"to {most_gpus} {known.upper()} {mean:.1%} off (docs/benchmarks/madmax.md)"
            )
        borrowed = "" if known == gpu else f"; none on {gpu} was tried"
        return mean, (
            f"mean error of this arithmetic on {steps} published steps of decoders under FSDP on "
            f"{known.upper()} (docs/benchmarks/madmax.md){borrowed}"
        )


def mesh_of(cluster: Cluster, gpus: int) -> GpuMesh:
    """Return so many GPUs on full nodes.

    Raises:
        StrategyError: they are no whole nodes, or the cluster has fewer.
    """
    per_node = min(gpus, cluster.count("gpus_per_node"))
    nodes, rest = divmod(gpus, per_node)
    if rest:
        raise StrategyError(f"--gpus {gpus} are no whole nodes of {per_node} GPUs")
    if nodes > cluster.count("most_nodes"):
        raise StrategyError(
            f"--gpus {gpus} are {nodes} nodes, and {cluster.name} has at most "
            f"{cluster.count('most_nodes')}"
        )
    return GpuMesh(gpus, per_node)


def estimate_document(asked: Question, found: Sequence[Estimate]) -> dict[str, Any]:
    """Return a question and its answers, the fastest first, as JSON has them."""
    task = asked.task
    return {
        "model": asked.model.name, "parameters": asked.model.parameters,
        "cluster": asked.cluster.name, "gpus": asked.mesh.gpus, "batch": task.batch,
        "task": task.name, "frozen": sorted(task.frozen),
        "estimates": [_answer(one) for one in found],
    }  # fmt: skip


def _answer(one: Estimate) -> dict[str, Any]:
    step = one.step
    return {
        "strategy": strategy_text(one.strategy), "recompute": one.task.recompute,
        "step_s": step.step_ns / 1e9, "samples_per_s": one.samples_per_s,
        "error": one.error, "error_is": one.why, "fits": one.fits,
        "room_bytes": one.room_bytes,
        "memory_bytes": {"total": one.memory.total, **one.memory._asdict()},
        "compute_s": step.compute_ns / 1e9, "exposed_communication_s": step.exposed_ns / 1e9,
        "overlapped_communication_s": step.overlapped_ns / 1e9,
        "seconds_by_kind": {kind: ns / 1e9 for kind, ns in sorted(step.by_kind.items())},
    }  # fmt: skip
