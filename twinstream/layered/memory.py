"""What a GPU keeps of a layered model: parameters, gradients, state, activations, buffers."""

from typing import NamedTuple

from twinstream.layered.prices import state_bytes
from twinstream.layered.step import LayeredTask
from twinstream.layered.strategy import GpuMesh, Spread, Strategy, spread_of
from twinstream.models.layered.kinds import LayerPart
from twinstream.models.layered.model import LayeredModel

_ROW_STATE_BYTES = 4  # of row-wise AdaGrad: one float32 a row
_GATHERED_AT_ONCE = 2  # parts, whose weights are there while they are computed
_CONTEXT_BYTES = 2**30  # assumed: CUDA's context, and buffers of the library of collectives


class LayeredMemory(NamedTuple):
    """Bytes of the fullest GPU."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(self)


def memory_of(
    model: LayeredModel, strategy: Strategy, mesh: GpuMesh, task: LayeredTask
) -> LayeredMemory:
    """Return what a GPU keeps in a step.

    Raises:
        StrategyError: the strategy does not fit the model, the GPUs or the batch.
    """
    chain = model.chain
    spread = [
        (part, spread_of(part, strategy, mesh, task.batch))
        for part in (*chain.embeddings, *chain.parts)
    ]
    parameters = gradients = optimizer = activations = 0.0
    for part, where in spread:
        own = part.parameters / where.shards
        itemsize = model.table_itemsize if part.kind == "embedding" else model.itemsize
        parameters += own * itemsize
        if task.trains(part):
            gradients += 0 if part.sparse else own * itemsize
            rows = part.rows / where.shards * _ROW_STATE_BYTES
            optimizer += rows if part.sparse else own * state_bytes(itemsize)
        activations += _kept(part, where, model, task)
    gathered = sorted(
        part.parameters * model.itemsize / where.degree("tp")
        for part, where in spread
        if any(level.how == "fsdp" for level in where.levels)
    )[-_GATHERED_AT_ONCE:]
    largest = max(_of_a_gpu(part, where) * part.outputs for part, where in spread)
    buffers = sum(gathered) + 2 * largest * model.itemsize + _CONTEXT_BYTES
    amounts = (parameters, gradients, optimizer, activations, buffers)
    return LayeredMemory(*(round(amount) for amount in amounts))


def _kept(part: LayerPart, where: Spread, model: LayeredModel, task: LayeredTask) -> float:
    """What backward reads of a part: with recompute its input alone, which is as an output."""
    if task.name == "inference":
        return 0.0
    itemsize = model.table_itemsize if part.kind == "embedding" else model.itemsize
    if part.kind == "embedding":
        return _of_a_gpu(part, where) * part.outputs * itemsize
    if task.recompute:
        return where.samples * part.outputs * itemsize
    return where.samples * part.saved * itemsize / where.degree("tp")


def _of_a_gpu(part: LayerPart, where: Spread) -> float:
    """Samples whose outputs are on one GPU: of shared tables, its share of the group's."""
    return where.samples / where.degree("shard")
