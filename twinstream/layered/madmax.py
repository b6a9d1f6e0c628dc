"""The prices of MAD-Max (facebookresearch/ScaleExplorer): fixed shares of every peak, its sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple

from twinstream.layered.step import LayeredStepTime, LayeredTask, step_time
from twinstream.layered.strategy import GpuMesh, Spread, SpreadLevel, Strategy
from twinstream.models.layered.kinds import LayerPart
from twinstream.models.layered.model import LayeredModel
from twinstream.schedule.errors import ArgumentError

_NS = 1e9


@dataclass(frozen=True)
class MadMaxSystem:
    """A cluster as MAD-Max describes one: peaks, and the share of each that is reached always.

    `share_of_all_reduce_inside`: how much of a collective over all GPUs goes at the node's rate.
    """

    gpus: int
    nodes: int
    fp32_flops: float
    fp16_flops: float
    flops_utilisation: float
    memory_bytes: float
    memory_bytes_per_s: float
    memory_utilisation: float
    nvlinks: int
    nvlink_bytes_per_s: float
    nvlink_utilisation: float
    nics_of_a_node: int
    nic_bytes_per_s: float
    nic_utilisation: float
    share_of_all_reduce_inside: float

    @property
    def mesh(self) -> GpuMesh:
        return GpuMesh(self.gpus, self.gpus // self.nodes)

    @property
    def inside_rate(self) -> float:
        """Bytes/s of a GPU in one direction within its node: half of what links are sold as."""
        return self.nvlinks * self.nvlink_bytes_per_s / 2 * self.nvlink_utilisation

    @property
    def between_rate(self) -> float:
        """Bytes/s of a GPU's share of its node's NICs; half of them, as of links."""
        rate = self.nics_of_a_node * self.nic_bytes_per_s / 2 * self.nic_utilisation
        return rate / self.mesh.gpus_per_node

    def is_inside(self, level: SpreadLevel) -> bool:
        return level.place.where == "inside" or self.nodes == 1

    def exchange_rate(self, level: SpreadLevel) -> float:
        return self.inside_rate if self.is_inside(level) else self.between_rate

    def reduce_rate(self, level: SpreadLevel) -> float:
        if self.is_inside(level):
            return self.inside_rate
        share = self.share_of_all_reduce_inside
        return share * self.inside_rate + (1 - share) * self.between_rate


@dataclass(frozen=True)
class MadMaxPrices:
    """What MAD-Max takes each piece to be, surprises included; see docs/benchmarks/madmax.md."""

    system: MadMaxSystem
    model: LayeredModel

    def products(self, part: LayerPart, spread: Spread, passes: int) -> float:
        """Neither scores of attention nor updates count; backward is twice, frozen or not."""
        system = self.system
        peak = system.fp32_flops if self.model.itemsize == 4 else system.fp16_flops
        flops = sum(product.flops for product in part.products) * spread.samples
        times = 2 if passes else 1
        return times * flops / spread.degree("tp") / (peak * system.flops_utilisation) * _NS

    def lookup(self, part: LayerPart, spread: Spread, passes: int) -> float:
        rate = self.system.memory_bytes_per_s * self.system.memory_utilisation
        return self._looked_up(part, spread) / rate * _NS

    def exchange(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        """Of what a GPU looked up, before pooling, one share of the GPUs', there and back."""
        sent = 2 * self._looked_up(part, spread) / level.place.degree
        return sent / self.system.exchange_rate(level) * _NS

    def lookup_gradients(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        return self._looked_up(part, spread) / self.system.reduce_rate(level) * _NS

    def gather(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        size = self._bytes(part) / spread.shards * level.place.degree
        return size / (2 * self.system.reduce_rate(level)) * _NS

    def scatter(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        size = self._undivided(part, spread, level) * level.place.degree
        return size / (2 * self.system.reduce_rate(level)) * _NS

    def gradients(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        return self._undivided(part, spread, level) / self.system.reduce_rate(level) * _NS

    def activations(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        size = spread.samples * part.outputs * self.model.itemsize
        return size / self.system.reduce_rate(level) * _NS

    def dispatch(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        """Of a GPU's samples one in so many as there are experts, however many each passes."""
        size = spread.samples * part.outputs * self.model.itemsize / part.experts
        return size / self.system.exchange_rate(level) * _NS

    def update(self, part: LayerPart, spread: Spread) -> float:
        return 0.0

    def lost(self) -> float:
        return 0.0

    def _bytes(self, part: LayerPart) -> float:
        return part.parameters * self.model.itemsize

    def _looked_up(self, part: LayerPart, spread: Spread) -> float:
        size = part.looked_up * self.model.table_itemsize
        return size * spread.samples / spread.degree("shard")

    def _undivided(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        """A level's gradients are not divided by the shards of the levels inside it."""
        inner = prod(one.place.degree for one in spread.within(level) if one.how != "ddp")
        return self._bytes(part) / (spread.shards / inner)


def madmax_step(
    model: LayeredModel, strategy: Strategy, system: MadMaxSystem, task: LayeredTask
) -> LayeredStepTime:
    """Return a step as MAD-Max has it.

    Raises:
        StrategyError: the strategy does not fit the model, the GPUs or the batch.
    """
    return step_time(model, strategy, system.mesh, task, MadMaxPrices(system, model))


def madmax_fields(found: LayeredStepTime) -> dict[str, float]:
    """Return a step in ms, under the names of MAD-Max's results."""
    fields: dict[str, Any] = {
        "step": found.step_ns, "compute": found.compute_end_ns, "exposed": found.exposed_ns,
        "overlapped": found.overlapped_ns, "gemm": found.by_kind["products"],
    }  # fmt: skip
    kinds = ("lookup", "all_to_all", "all_reduce", "all_gather", "reduce_scatter")
    fields |= {kind: found.by_kind[kind] for kind in kinds}
    return {f"{name}_ms": value / 1e6 for name, value in fields.items()}


class MadMaxCase(NamedTuple):
    """A run of MAD-Max: model, system, strategy and task, and what it printed."""

    name: str
    model: LayeredModel
    system: MadMaxSystem
    strategy: Strategy
    task: LayeredTask
    printed: Mapping[str, float]


def madmax_case(found: Mapping[str, Any]) -> MadMaxCase:
    """Return a run from its description in plain names.

    Raises:
        ArgumentError: a field is missing, or is none of a run of MAD-Max.
    """
    try:
        model, task = found["model"], found["task"]
        strategy: Strategy = {
            name: tuple("shard" if way == "mp" else way for way in task[f"{key}_parallel"])
            for name, key in (
                ("embedding", "emb"),
                ("dense", "mlp"),
                ("transformer", "transformer"),
            )
            if f"{key}_parallel" in task
        }
        sharded = zip(task["emb_parallel"], task["emb_parallel_degree"], strict=True)
        replicas = prod(degree for way, degree in sharded if way == "ddp")
        usual = model["type"] == "ViT"  # of which the program has that schedule alone
        return MadMaxCase(
            name=found["name"],
            model=_model_of(model),
            system=MadMaxSystem(**found["system"]),
            strategy=strategy,
            task=LayeredTask(
                task["local_emb_bs"] * replicas, task["type"],
                prefetch=task.get("prefetch_of_fsdp", usual),
            ),
            printed={key: value for key, value in found.items() if key.endswith("_ms")},
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ArgumentError(f"no run of MAD-Max: {error}") from None


def _model_of(found: Mapping[str, Any]) -> LayeredModel:
    dtypes = {4: "float32", 2: "float16"}
    return LayeredModel.model_validate(
        {
            "name": found["type"], "dtype": dtypes[found["bytes_of_a_dense_parameter"]],
            "table_dtype": dtypes[found["bytes_of_an_embedding_parameter"]],
            "layers": _tables(found) if "tables" in found else _blocks(found),
        }
    )  # fmt: skip


def _tables(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    width = found["mlp_width"]
    top: dict[str, Any] = {"kind": "mlp", "widths": [width] * 2, "repeat": found["top_layers"]}
    if "num_experts" in found:
        top = {
            "kind": "experts", "width": width, "layers": found["top_layers"],
            "experts": found["num_experts"], "active": found["num_active_experts"],
        }  # fmt: skip
    return [
        {
            "kind": "tables", "tables": found["tables"], "rows": found["rows_of_a_table"],
            "width": found["embedding_width"], "lookups": found["lookups_of_a_table"],
        },
        {"kind": "mlp", "name": "bottom", "widths": [width] * 2, "repeat": found["bottom_layers"]},
        {**top, "name": "top", "joins": True},
    ]  # fmt: skip


def _blocks(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    width, seq_len = found["width"], found.get("transformer_seq_len")
    first = {"kind": "tokens", "vocab": found.get("rows_of_a_table"), "seq_len": seq_len}
    if seq_len is None:
        first = {"kind": "patches", "image": found["image_size"], "patch": found["patch_dim"]}
        seq_len = ceil(found["image_size"] / found["patch_dim"]) ** 2
    blocks = {
        "kind": "transformer", "layers": found["layers"], "heads": found["heads"],
        "width": width, "ffn": found["ffn_width"], "seq_len": seq_len,
        "causal": first["kind"] == "tokens",
    }  # fmt: skip
    return [{**first, "width": width}, blocks]
