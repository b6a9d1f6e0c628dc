"""Groups of parameters of a stage: where they are sharded, and who sums their gradients."""

from dataclasses import dataclass

from twinstream.models.decoders.sizes import ITEMSIZE_BYTES, ParameterPart, rank_parameters
from twinstream.models.kernel_costs.scratch_sizes import state_bytes
from twinstream.models.layout import EXPERTS, block_layout, experts_layout
from twinstream.models.layouts.job import Job
from twinstream.models.recipes.adapter_layout import adapter_sites, expert_sites
from twinstream.models.recipes.quantized_base import quantized_layout
from twinstream.models.recipes.recipe import OptimizerState
from twinstream.schedule.document import Axis, Mesh

_OF_LAYERS = ("layer", "experts")


def mesh_of(job: Job, ranks_per_node: int) -> Mesh:
    """The mesh of a layout: pp outermost, then replicas, tp innermost.

    `rep` are groups of replicas that hold the same shards (`shard` below dp x cp), `dp` the
    replicas among which ZeRO shards and that do not share experts, `ep` those that do.
    """
    layout = job.layout
    replicas = layout.dp * layout.cp // layout.shards
    sizes = (
        ("rep", replicas),
        ("dp", layout.dp // replicas // layout.expert_replicas),
        ("ep", layout.expert_replicas),
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
    over which shards are held again. With `padded` there are so many more that shards are equal.
    Of a frozen base `num_trained` are the parameters of its adapters, else all; `kept_share` is
    what it takes of its bytes, where it is kept in few bits.
    """

    name: str
    num_parameters: int
    axes: tuple[str, ...]
    outer: tuple[str, ...]
    num_shards: int
    itemsize: int
    gradient_itemsize: int
    padded: bool
    dtype: str
    optimizer_state: OptimizerState
    num_trained: int
    kept_share: float = 1.0
    layer: int | None = None

    @property
    def num_held(self) -> int:
        """All its parameters on a rank, with padding."""
        return self.shard * self.num_shards if self.padded else self.num_parameters

    @property
    def bytes(self) -> int:
        return int(self.num_held * self.itemsize * self.kept_share)

    @property
    def shard(self) -> int:
        """Parameters of a shard."""
        return -(-self.num_parameters // self.num_shards)

    @property
    def trained_shard(self) -> int:
        """Trained parameters of a shard."""
        return -(-self.num_trained // self.num_shards)

    @property
    def gradient_bytes(self) -> int:
        held = self.trained_shard * self.num_shards if self.padded else self.num_trained
        return held * self.gradient_itemsize

    @property
    def gradient_shard_bytes(self) -> int:
        return self.trained_shard * self.gradient_itemsize

    @property
    def has_master(self) -> bool:
        """Whether a float32 master of the parameters is in the optimizer's state."""
        return self.optimizer_state == "float32_master"

    def state_bytes(self, sharded: bool) -> int:
        """Of the optimizer's state on a rank."""
        return self.state_of(self.trained_shard if sharded else self.num_trained)

    def state_of(self, count: int) -> int:
        """Of the optimizer's state of so many parameters."""
        return state_bytes(self.optimizer_state, self.dtype, count)


def groups_of_layer(job: Job) -> tuple[Group, ...]:
    """A layer's own, and its experts' where it has any."""
    dense = sum(_counted(job, part) for part in ("attention", "mlp", "router"))
    found = [_group(job, "layer", dense, ("dp", "ep", "cp"))]
    if job.shape.experts is not None:
        found.append(_group(job, "experts", _counted(job, "experts"), ("dp", "cp")))
    return tuple(found)


def embedding_group(job: Job) -> Group:
    """Token embedding and learned positions."""
    rows = _counted(job, "embedding") + _counted(job, "positions")
    return _group(job, "embedding", rows, ("dp", "ep", "cp"))


def head_group(job: Job) -> Group:
    """Final norm and LM head; a tied head on another stage than the embedding is a copy of it."""
    copied = job.shape.tied_embeddings and job.layout.pp > 1
    count = _counted(job, "embedding" if copied else "head") + _counted(job, "final_norm")
    return _group(job, "head", count, ("dp", "ep", "cp"))


def _counted(job: Job, part: ParameterPart) -> int:
    return rank_parameters(job.shape, job.layout.tp, job.layout.ep, part, job.layout.etp)


def _group(job: Job, name: str, count: int, axes: tuple[str, ...]) -> Group:
    mesh = mesh_of(job, 1)
    present = tuple(axis for axis in axes if axis in mesh.names)
    shards = 1
    for axis in present:
        shards *= mesh.length(axis)
    outer = ("rep",) if "rep" in mesh.names else ()
    gradient = ITEMSIZE_BYTES[job.gradient_dtype]
    padded = job.layout.zero > 0
    return Group(
        name, count, present, outer, shards, job.work.itemsize, gradient, padded, job.dtype,
        job.recipe.state_of(job.dtype), _num_trained(job, name, count), _kept_share(job, name),
    )  # fmt: skip


def _kept_share(job: Job, name: str) -> float:
    if name not in _OF_LAYERS or job.recipe.base == "model":
        return 1.0
    whole = experts_layout(job.shape) if name == "experts" else block_layout(job.shape)
    return quantized_layout(whole, job.recipe.base).size_bytes / whole.size_bytes


def _num_trained(job: Job, name: str, count: int) -> int:
    """Parameters of a group, or of the adapters beside it where its base is frozen.

    Where some layers, or the experts of some, are frozen, all count as those that are frozen most:
    1.
    """
    lora, frozen = job.recipe.lora, job.recipe.frozen
    if lora is not None:
        counts = {
            "layer": sum(site.num_parameters for site in adapter_sites(job.shape, lora)),
            "experts": sum(site.num_parameters for site in expert_sites(job.shape, lora)),
        }
        return counts.get(name, 0) or 1
    some_frozen = {
        "layer": any(group.isdigit() for group in frozen),
        "experts": any(group.endswith(EXPERTS) for group in frozen),
    }
    return 1 if name in frozen or some_frozen.get(name, False) else count
