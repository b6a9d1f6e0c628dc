"""A reference for replicas: one process runs them one after the other, kernel after kernel.

It knows no schedule, no stream and no slot. A step is the chain of one device, run for each replica
up to its gradients; these are added up in float32 in the order of the replicas, and rounded once;
then the chain's norm and updates are run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from twinstream.executor.kernels.operand import DTYPES, KernelOperand
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import State
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.ops import Feed, Stream, TaskOperand

UPDATES = ("gradient_squares", "gradient_norm", "optimizer_step")
_ENDS = ("embed_backward", "head_loss", "head_backward")


@dataclass
class Reference:
    """What it ends with; `losses` are of each replica, step after step."""

    state: State
    losses: list[list[float]]
    norms: list[float] = field(default_factory=list)


def train_replicas(
    chain: Chain, state: State, trainings: Sequence[Training], num_steps: int, *,
    tied_apart: bool = False,
) -> Reference:  # fmt: skip
    """So many steps of a chain of one device; every training is a replica with its own data.

    With `tied_apart` the gradient of a tied embedding is summed for the head and for the embedding
    each by itself, and then the two.
    """
    if tied_apart:
        chain = _tied_apart(chain)
    made, added = _around_sum_of_ends(chain)
    found = Reference({}, [[] for _ in trainings])
    memory = ChainMemory(chain, state)
    for step in range(num_steps):
        gradients: list[dict[str, torch.Tensor]] = []
        for training, losses in zip(trainings, found.losses, strict=True):
            memory.feed = training.host_work(chain).feed
            memory.run(step, lambda task: task.task_id in made)
            for name in filter(_is_of_embedding, memory.gradients) if tied_apart else ():
                of_both = [memory.roots[one].view(memory.gradients[name]) for one in _ends(name)]
                _sum(of_both, of_both[0])
            memory.run(step, lambda task: task.task_id in added)
            gradients.append({name: memory.roots[name].clone() for name in memory.gradients})
            losses.append(memory.number("loss"))
        for name, dtype in memory.gradients.items():
            _sum([one[name].view(dtype) for one in gradients], memory.roots[name].view(dtype))
        memory.run(step, lambda task: task.label.kind in UPDATES)
        if "grad_norm" in memory.roots:
            found.norms.append(memory.number("grad_norm"))
    found.state = {name: memory.roots[name].clone() for name in state}
    return found


def _around_sum_of_ends(chain: Chain) -> tuple[set[str], set[str]]:
    """Tasks up to the last contribution to the embedding's gradient, and what then adds up parts of
    sequences; no updates."""
    ids = [task.task_id for task in chain.tasks if task.label.kind not in UPDATES]
    kinds = [task.label.kind for task in chain.tasks if task.label.kind not in UPDATES]
    last = max((n for n, kind in enumerate(kinds) if kind == "embed_backward"), default=len(ids))
    return set(ids[: last + 1]), set(ids[last + 1 :])


def _tied_apart(chain: Chain) -> Chain:
    """The head's contributions go to tensors of their own; each tensor's first is written."""
    begun: set[str] = set()

    def apart(operand: TaskOperand, kind: str) -> TaskOperand:
        if not _is_of_embedding(operand.tensor) or operand.mode == "read" or kind not in _ENDS:
            return operand
        tensor = _ends(operand.tensor)[kind != "embed_backward"]
        mode = "update" if tensor in begun else "write"
        begun.add(tensor)
        return operand.model_copy(update={"tensor": tensor, "mode": mode})

    tasks = [
        task.model_copy(
            update={"operands": tuple(apart(one, task.label.kind) for one in task.operands)}
        )
        for task in chain.tasks
    ]
    of_head = [
        one.model_copy(update={"tensor_id": _ends(one.tensor_id)[1]})
        for one in chain.tensors
        if _is_of_embedding(one.tensor_id)
    ]
    return chain.model_copy(update={"tasks": tuple(tasks), "tensors": (*chain.tensors, *of_head)})


def _is_of_embedding(tensor: str) -> bool:
    return tensor.startswith("grad.embedding")


def _ends(tensor: str) -> tuple[str, str]:
    """A gradient of the embedding, and what the head has of it."""
    return tensor, f"of_head.{tensor}"


def _sum(pieces: Sequence[torch.Tensor], result: torch.Tensor) -> None:
    total = pieces[0].float()
    for piece in pieces[1:]:
        total = total + piece.float()
    result.copy_(total)


def with_recomputes(chain: Chain, levels: tuple[str, ...]) -> list[Task]:
    """The chain's tasks, with the recomputes of these levels before those that they are for."""
    before: dict[str, list[Task]] = {}
    for one in chain.recomputes:
        if one.task.label.level in levels:
            before.setdefault(one.before, []).append(one.task)
    return [each for task in chain.tasks for each in (*before.get(task.task_id, []), task)]


class ChainMemory:
    """Every whole tensor of a chain in bytes of its own."""

    def __init__(self, chain: Chain, state: State, fill: int = 0) -> None:
        self.chain = chain
        self.tensors = {tensor.tensor_id: tensor for tensor in chain.tensors}
        self.roots = {
            name: state[name].clone() if name in state else torch.full((t.size_bytes,), fill).byte()
            for name, t in self.tensors.items()
            if t.parent is None
        }
        self.gradients = {
            name: DTYPES[t.dtype]
            for name, t in self.tensors.items()
            if t.role == "gradient" and t.parent is None
        }
        self.feed: Callable[[Feed, int], torch.Tensor]
        self._inputs = {(one.tensor, one.version): one for one in chain.inputs}

    def number(self, name: str) -> float:
        return float(self.roots[name].view(torch.float32).item())

    def operands_of(self, task: Task) -> dict[str, KernelOperand]:
        return {o.name: KernelOperand(self._view(o), o.mode) for o in task.operands}

    def run(self, step: int, wanted: Callable[[Task], bool], levels: tuple[str, ...] = ()) -> None:
        again = with_recomputes(self.chain, levels)
        for task in filter(wanted, again):
            for operand in task.operands:
                if fed := self._inputs.get((operand.tensor, operand.version)):
                    op = Feed(
                        op_id="feed", stream=Stream(queue="host"), slot="", tensor=fed.tensor,
                        version=fed.version, source=fed.source, index=fed.index,
                    )  # fmt: skip
                    self.roots[fed.tensor].copy_(self.feed(op, step))
            call = self.chain.calls[task.call]
            registered_kernel(call.kernel)(self.operands_of(task), call.attributes)()

    def _view(self, operand: TaskOperand) -> torch.Tensor:
        tensor = self.tensors[operand.tensor]
        size = tensor.size_bytes
        if operand.num_parts is not None:
            parts = [t for t in self.chain.tensors if t.parent == operand.tensor]
            size = sum(part.size_bytes for part in parts[: operand.num_parts])
        whole = self.roots[tensor.parent or operand.tensor]
        return whole[tensor.offset_bytes : tensor.offset_bytes + size]
