"""A chain's tensors, each in a buffer of its own, to run its kernels one after the other."""

from collections.abc import Iterator

import torch

from twinstream.executor.kernels.operand import DTYPES, KernelOperand
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.providers.registry import provider_of
from twinstream.executor.run.training import step_state
from twinstream.executor.state.random_weights import RandomWeights
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.providers.model import AnyModel
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.ops import TaskOperand

_LEARNING_RATE = 1e-6
_SEED = 11


def round_results(chain: Chain, device: torch.device) -> dict[str, torch.Tensor]:
    """The loss and every gradient after the first round, in float32."""
    memory = ChainMemory(chain, device)
    run_round(chain, memory)
    return memory.results()


def run_round(chain: Chain, memory: "ChainMemory") -> None:
    """The first round's tasks and all their recomputes, without the optimizer's."""
    with torch.no_grad():
        for task in in_order(chain):
            if task.label.kind != "optimizer_step":
                call = chain.calls[task.call]
                registered_kernel(call.kernel)(memory.operands(task), call.attributes)()


def in_order(chain: Chain) -> Iterator[Task]:
    """The first round's tasks, each after the recomputes that may come right before it."""
    ends = (*chain.round_starts[1:], len(chain.tasks))
    before: dict[str, list[Task]] = {}
    for recompute in chain.recomputes:
        before.setdefault(recompute.before, []).append(recompute.task)
    for task in chain.tasks[: ends[0]]:
        yield from before.get(task.task_id, ())
        yield task


class ChainMemory:
    """One buffer for each root tensor of a chain, parameters and inputs filled.

    Args:
        model: whose chain it is; None: the decoder that the chain names.
    """

    def __init__(self, chain: Chain, device: torch.device, model: AnyModel | None = None) -> None:
        self._tensors = {tensor.tensor_id: tensor for tensor in chain.tensors}
        self._parts: dict[str, list[str]] = {}
        for tensor in chain.tensors:
            if tensor.parent is not None:
                self._parts.setdefault(tensor.parent, []).append(tensor.tensor_id)
        self._buffers = {
            tensor.tensor_id: torch.zeros(tensor.size_bytes, dtype=torch.uint8, device=device)
            for tensor in chain.tensors
            if tensor.parent is None
        }
        self._fill(chain, model or ModelSpec.model_validate(chain.model.spec))

    def operands(self, task: Task) -> dict[str, KernelOperand]:
        return {o.name: KernelOperand(bytes=self._view(o), mode=o.mode) for o in task.operands}

    def buffer(self, name: str) -> torch.Tensor:
        """Return the bytes of a tensor that is no part of another, 1-D uint8."""
        return self._buffers[name]

    def results(self) -> dict[str, torch.Tensor]:
        """Return loss and gradients by name, as float32."""
        return {
            name: buffer.view(DTYPES[self._tensors[name].dtype]).float()
            for name, buffer in self._buffers.items()
            if self._tensors[name].role in ("loss", "gradient")
        }

    def _view(self, operand: TaskOperand) -> torch.Tensor:
        tensor = self._tensors[operand.tensor]
        start, end = tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes
        if operand.num_parts is not None:
            last = self._tensors[self._parts[operand.tensor][operand.num_parts - 1]]
            end = last.offset_bytes + last.size_bytes
        return self._buffers[tensor.parent or operand.tensor][start:end]

    def _fill(self, chain: Chain, spec: AnyModel) -> None:
        recipe = Recipe.model_validate(chain.recipe)
        if spec.decoder is not None:
            weights = RandomWeights(spec.decoder, _SEED, recipe=recipe)
            for name, buffer in self._buffers.items():
                if name.startswith("param."):
                    weights.write(name.removeprefix("param."), 0, buffer)
        else:
            for group, flat in provider_of(spec).fresh(spec, _SEED):
                self._buffers[f"param.{group}"].copy_(flat)
        generator = torch.Generator().manual_seed(_SEED)
        for name, buffer in self._buffers.items():
            if name.startswith("tokens."):
                ids = torch.randint(
                    0, spec.vocab_size, (buffer.numel() // 4,), generator=generator,
                    dtype=torch.int32,
                )  # fmt: skip
                buffer.copy_(ids.view(torch.uint8))
        packed = step_state(recipe, 1, _LEARNING_RATE, _SEED, num_targets=1)
        state = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self._buffers["step_state"].copy_(state)
