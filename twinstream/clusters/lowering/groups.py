"""Groups of parameters of a stage: where they are sharded, and who sums their gradients."""

from dataclasses import dataclass

from twinstream.clusters.job import MASTER_BYTES, Job
from twinstream.models.shapes.parameters import rank_parameters
from twinstream.models.spec import ITEMSIZE_BYTES
from twinstream.schedule.cluster.mesh import Axis, Mesh


def mesh_of(job: Job, ranks_per_node: int) -> Mesh:
    """The mesh of a layout: pp outermost, then replicas, tp innermost.

    `rep` are groups of replicas that hold the same shards (`shard` below dp x cp), `dp` the
    replicas among which ZeRO shards and that do not share experts, `ep` those that do.
    """
    layout = job.layout
    replicas = layout.dp * layout.cp // layout.shards
    sizes = (
        ("rep", replicas),
        ("dp", layout.dp // replicas // layout.ep),
        ("ep", layout.ep),
        ("cp", layout.cp),
        ("tp", layout.tp),
    )
    axes = [Axis(name="pp", size=layout.pp)]
    axes += [Axis(name=name, size=size) for name, size in sizes if size > 1]
    return Mesh(axes=tuple(axes), ranks_per_node=ranks_per_node)


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered, reduced and updated together.

    `axes` are those over which replicas hold the same parameters and ZeRO shards; `outer` those
    over which shards are held again.
    """

    name: str
    num_parameters: int
    axes: tuple[str, ...]
    outer: tuple[str, ...]
    num_shards: int
    itemsize: int
    gradient_itemsize: int

    @property
    def bytes(self) -> int:
        """Of all its parameters on a rank."""
        return self.num_parameters * self.itemsize

    @property
    def shard(self) -> int:
        """Parameters of a shard."""
        return -(-self.num_parameters // self.num_shards)

    @property
    def gradient_bytes(self) -> int:
        return self.num_parameters * self.gradient_itemsize

    def state_bytes(self, sharded: bool) -> int:
        """Of the optimizer's state on a rank."""
        return MASTER_BYTES * (self.shard if sharded else self.num_parameters)


def groups_of_layer(job: Job) -> tuple[Group, ...]:
    """A layer's own, and its experts' where it has any."""
    shape, layout = job.shape, job.layout
    counted = lambda part: rank_parameters(shape, layout.tp, layout.ep, part)  # noqa: E731
    dense = counted("attention") + counted("mlp") + counted("router")
    found = [_group(job, "layer", dense, ("dp", "ep", "cp"))]
    if shape.experts is not None:
        found.append(_group(job, "experts", counted("experts"), ("dp", "cp")))
    return tuple(found)


def embedding_group(job: Job) -> Group:
    layout = job.layout
    rows = sum(
        rank_parameters(job.shape, layout.tp, layout.ep, part) for part in ("embedding", "positions")
    )
    return _group(job, "embedding", rows, ("dp", "ep", "cp"))


def head_group(job: Job) -> Group:
    """Final norm and LM head; a tied head on another stage than the embedding is a copy of it."""
    layout = job.layout
    part = "head"
    if job.shape.tied_embeddings and layout.pp > 1:
        part = "embedding"
    count = rank_parameters(job.shape, layout.tp, layout.ep, part)  # type: ignore[arg-type]
    count += rank_parameters(job.shape, layout.tp, layout.ep, "final_norm")
    return _group(job, "head", count, ("dp", "ep", "cp"))


def _group(job: Job, name: str, count: int, axes: tuple[str, ...]) -> Group:
    mesh = mesh_of(job, 1)
    present = tuple(axis for axis in axes if axis in mesh.names)
    shards = 1
    for axis in present:
        shards *= mesh.length(axis)
    outer = ("rep",) if "rep" in mesh.names else ()
    gradient = ITEMSIZE_BYTES[job.layout.gradient_dtype]
    return Group(name, count, present, outer, shards, job.work.itemsize, gradient)
