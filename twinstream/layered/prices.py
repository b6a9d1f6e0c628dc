"""What pieces of a layered model's step take on a cluster of ours: its kernels and collectives."""

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from twinstream.hardware_profiles.clusters.curves import Collective
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.collectives.rank_group import RankGroup
from twinstream.hardware_profiles.collectives.timing import collective_time_ns
from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.schema import Machine
from twinstream.layered.strategy import GpuMesh, Spread, SpreadLevel
from twinstream.models.layered.kinds import LayerPart
from twinstream.models.layered.model import LayeredModel
from twinstream.schedule.cost import Work

_SECTOR_BYTES = 32  # the least that device memory is read by
_BACKWARD_SCORES = 2.5  # of attention: the scores again, and four products
_MOMENTS_BYTES = 8  # AdamW's, in float32
_MASTER_BYTES = 4  # beside parameters in 16 bits


def state_bytes(itemsize: int) -> int:
    """Return AdamW's state of a parameter: moments in float32, a float32 copy of 16 bits."""
    return _MOMENTS_BYTES + (_MASTER_BYTES if itemsize == 2 else 0)


@dataclass(frozen=True)
class ClusterPrices:
    """Prices by a cluster's profile: its GPU's curves, its collectives, measured or fitted."""

    cluster: Cluster
    mesh: GpuMesh
    model: LayeredModel
    _known: dict[tuple[str, int, str], float] = field(default_factory=dict)

    @cached_property
    def machine(self) -> Machine:
        """The profile of a node."""
        return machine_of(self.cluster)

    def products(self, part: LayerPart, spread: Spread, passes: int) -> float:
        """Each pass of backward is a product as large as forward's, of other sides."""
        tp, time_ns = spread.degree("tp"), 0.0
        for rows, columns, depth in part.products:
            m, n = spread.samples * rows, ceil(columns / tp)
            shapes = [(m, n, depth)]
            if passes:
                shapes = [(m, depth, n), (depth, n, m)][:passes]
            time_ns += sum(self._product(part, tp, *shape) for shape in shapes)
        if part.attention:
            time_ns += self._attention(part, spread, passes)
        moved = ceil(part.moved * spread.samples / tp) * max(1, passes)
        return time_ns + self._time("vector", (moved,), moved, moved * self.model.itemsize)

    def lookup(self, part: LayerPart, spread: Spread, passes: int) -> float:
        """Rows are read at the rate of device memory; training reads and writes them again.

        Patches are a product, and what is no table of categories has its update in `update`.
        """
        if part.products:
            return self.products(part, spread, passes and 1)
        rows = part.looked_up / part.row * spread.samples / spread.degree("shard")
        itemsize = self.model.table_itemsize
        row_bytes = ceil(part.row * itemsize / _SECTOR_BYTES) * _SECTOR_BYTES
        out = part.pooled * itemsize * spread.samples / spread.degree("shard")
        moved = rows * row_bytes * (2 if passes else 1) + out
        launch_ns = self.machine.number("launch_latency_ns")
        return launch_ns + moved / self.machine.rate("hbm_bytes_per_s") * 1e9

    def exchange(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        size = part.pooled * self.model.table_itemsize * spread.samples / level.place.degree
        return self._collective("all_to_all", size, level)

    def lookup_gradients(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        """Of tables of categories the rows that were met, else all."""
        if not part.sparse:
            size = part.parameters * self.model.table_itemsize / spread.shards
            return self._collective("all_reduce", size, level)
        met = part.looked_up * self.model.table_itemsize * spread.samples / spread.shards
        return self._collective("all_gather", met * level.place.degree, level)

    def gather(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        return self._collective("all_gather", self._piece(part, spread, "tp"), level)

    def scatter(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        return self._collective("reduce_scatter", self._piece(part, spread, "tp"), level)

    def gradients(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        return self._collective("all_reduce", self._piece(part, spread, "tp", "fsdp"), level)

    def activations(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        """Experts of other GPUs send what they found, and nothing is summed."""
        if part.experts > 1:
            return 0.0
        size = spread.samples * part.outputs * self.model.itemsize
        return self._collective("all_reduce", size, level)

    def dispatch(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        """A GPU's own samples of its group's, once to each expert that they pass."""
        size = spread.samples * part.active * part.outputs * self.model.itemsize
        return self._collective("all_to_all", size / level.place.degree, level)

    def update(self, part: LayerPart, spread: Spread) -> float:
        """AdamW reads and writes parameter and state, and reads a gradient."""
        if part.sparse or not part.parameters:
            return 0.0
        own = ceil(part.parameters / spread.shards)
        itemsize = self.model.table_itemsize if part.kind == "embedding" else self.model.itemsize
        moved = own * (3 * itemsize + 2 * state_bytes(itemsize))
        return self._time("adamw", (own,), 8 * own, moved)

    def lost(self) -> float:
        return self.cluster.number("compute_lost") if self.mesh.gpus > 1 else 0.0

    def _piece(self, part: LayerPart, spread: Spread, *cut_by: str) -> float:
        return part.parameters * self.model.itemsize / spread.degree(*cut_by)

    def _product(self, part: LayerPart, tp: int, m: int, n: int, k: int) -> float:
        copies = max(1, part.experts // tp) if part.experts > 1 else 1
        moved = (m * k + copies * k * n + m * n) * self.model.itemsize
        return self._multiplied("matmul", (m, n, k), 2 * m * n * k, moved)

    def _attention(self, part: LayerPart, spread: Spread, passes: int) -> float:
        """A query of causal attention sees the tokens before it, of an encoder all."""
        found = part.attention
        assert found is not None
        heads = max(1, found.heads // spread.degree("tp"))
        width = found.tokens * found.heads * found.head_dim / spread.degree("tp")
        queries = found.tokens if found.causal else 1
        flops = found.flops / spread.degree("tp") * spread.samples
        return self._multiplied(
            "attention_backward" if passes else "attention_forward",
            (queries, found.tokens, heads, found.head_dim, spread.samples),
            round(flops * (_BACKWARD_SCORES if passes else 1)),
            round((8 if passes else 4) * width * spread.samples * self.model.itemsize),
        )

    def _multiplied(self, unit: str, shape: tuple[int, ...], flops: int, moved: int) -> float:
        """TF32 multiplies as 16 bits do, at half the rate."""
        if self.model.products == "tf32":
            return self._time(unit, shape, 2 * flops, moved, "bfloat16")
        return self._time(unit, shape, flops, moved)

    def _time(
        self, unit: str, shape: tuple[int, ...], flops: int, moved: int, dtype: str | None = None
    ) -> float:
        if not flops:
            return 0.0
        work = Work(
            unit=unit, shape=shape, flops=flops, hbm_bytes=moved, launches=1,
            dtype=dtype or self.model.dtype,
        )  # fmt: skip
        return work_time(work, self.machine).alone_ns

    def _collective(self, kind: Collective, size: float, level: SpreadLevel) -> float:
        key = (kind, ceil(size), level.place.where)
        if key not in self._known:
            group = _group(level.place.where, self.mesh)
            self._known[key] = collective_time_ns(self.cluster, kind, ceil(size), group).time_ns
        return self._known[key]


def _group(where: str, mesh: GpuMesh) -> RankGroup:
    per_node = mesh.gpus_per_node
    if where == "inside":
        return RankGroup(ranks=per_node, ranks_per_node=per_node)
    if where == "between":
        return RankGroup(ranks=mesh.nodes, ranks_per_node=1, sharing=per_node)
    return RankGroup(ranks=mesh.gpus, ranks_per_node=per_node)
