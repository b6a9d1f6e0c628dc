"""The order of a training step's tasks, whatever the model: rounds, chunks, groups, updates.

In every round all chunks pass a layer before the first chunk starts on the next; the head takes
chunks in reverse; backward takes layers and chunks in reverse. In the last round a group's
optimizer task follows its last gradient at once, unless the recipe's `optimizer` says otherwise.
Tensors keep their names from round to round; versions tell rounds apart.
"""

from abc import ABC, abstractmethod
from typing import Any

from twinstream.models.layout import EMBEDDING, whole_group
from twinstream.models.lowering.chain_builder import ChainBuilder
from twinstream.models.lowering.declarations import Shapes
from twinstream.models.lowering.optimizer_tasks import OptimizerTasks
from twinstream.models.providers.model import NotExecutableError
from twinstream.models.providers.trained import first_backward_layer
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.chain import Input, Output
from twinstream.schedule.ops import Label, TaskOperand
from twinstream.schedule.tensors import Tensor
from twinstream.schedule.workload import Workload


class StepLowering(ABC):
    """Adds a step's tasks to a chain; what a model's own tasks are its subclasses say.

    A stage of a pipeline adds them in another order.
    """

    optimizer: OptimizerTasks
    has_head = True

    def __init__(self, shapes: Shapes, workload: Workload, recipe: Recipe) -> None:
        self.workload, self.recipe = workload, recipe
        self.builder = ChainBuilder()
        self.shapes = shapes
        self.trained = frozenset(shapes.trained)
        self.trains_embedding = EMBEDDING in map(whole_group, self.trained)
        self.first_backward = first_backward_layer(shapes.spec, recipe)
        self.round_starts: list[int] = []

    @staticmethod
    @abstractmethod
    def saved_per_token(model: Any) -> int:
        """Return the bytes that a block keeps of a token for its backward pass, the most of it."""

    @abstractmethod
    def model_flops(self) -> int:
        """Of the whole step."""

    @abstractmethod
    def _declare(self) -> None:
        """Declare all tensors that tasks use."""

    @abstractmethod
    def _embed_forward(self, round_: int) -> None:
        """What comes before the first layer."""

    @abstractmethod
    def _forward_layer(self, round_: int, layer: int) -> None:
        """All chunks through a layer."""

    @abstractmethod
    def _head(self, round_: int) -> None:
        """The loss and its gradients, chunk by chunk in reverse."""

    def _logits(self) -> None:
        """The logits of each sequence's last token; only where keys and values can be kept."""
        raise NotExecutableError("keys and values are kept of twinstream's own decoders alone")

    @abstractmethod
    def _head_alone(self, step_state: TaskOperand) -> None:
        """The loss of a round, and no gradients."""

    @abstractmethod
    def _backward_layer(self, round_: int, layer: int) -> None:
        """All chunks back through a layer."""

    @abstractmethod
    def _embed_backward(self, round_: int) -> None:
        """What comes after the first layer's backward, where something of it is trained."""

    def run(self) -> None:
        self._declare()
        if self.workload.cache is not None:
            self._generate()
            return
        self.builder.inputs.append(
            Input(tensor="step_state", version=1, source="step_state", index=0)
        )
        state = self.builder.write("step_state", "step_state")
        step_state = state.model_copy(update={"mode": "read"})
        self._add_tasks(step_state)
        results = ["loss", *(["grad_norm"] if self.recipe.clips and self._trains else [])]
        for name in results if self.has_head else ():
            version = self.builder.read(name, name).version
            self.builder.outputs.append(Output(tensor=name, version=version, sink=name))

    @property
    def _trains(self) -> bool:
        """Whether it is a training step, and not its forward alone."""
        return not self.workload.forward_only

    def _add_tasks(self, step_state: TaskOperand) -> None:
        if not self._trains:
            self.round_starts.append(0)
            self._forward(0)
            self._head_alone(step_state)
            return
        self.optimizer = OptimizerTasks(self.builder, self.shapes, self.recipe, step_state)
        for round_ in range(self.workload.rounds_per_step):
            self.round_starts.append(len(self.builder.tasks))
            self._forward(round_)
            self._head(round_)
            for layer in reversed(range(self.first_backward, self.shapes.spec.num_layers)):
                self._backward_layer(round_, layer)
            if self.trains_embedding:
                self._embed_backward(round_)

    def _generate(self) -> None:
        self.round_starts.append(0)
        self._forward(0)
        self._logits()

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors of a training step; of a forward alone what is used or persistent."""
        return tuple(self.builder.tensors) if self._trains else self._used_tensors()

    def _used_tensors(self) -> tuple[Tensor, ...]:
        """Return the whole of whatever tasks use a part of, and the persistent state."""
        builder = self.builder
        tasks = [*builder.tasks, *(again.task for again in builder.recomputes)]
        root = {tensor.tensor_id: tensor.parent or tensor.tensor_id for tensor in builder.tensors}
        kept = {root[operand.tensor] for task in tasks for operand in task.operands}
        kept.update(self.shapes.persistent)
        return tuple(tensor for tensor in builder.tensors if root[tensor.tensor_id] in kept)

    def _chunks(self) -> range:
        """The chunks of the round that is being lowered."""
        return range(self.workload.chunks_per_round)

    def _chunks_reversed(self) -> range:
        return self._chunks()[::-1]

    def _forward(self, round_: int) -> None:
        for chunk in self._chunks():
            for source in self._sources:
                self._feed(source, chunk, round_ * self.workload.chunks_per_round + chunk)
        self._embed_forward(round_)
        for layer in range(self.shapes.spec.num_layers):
            self._forward_layer(round_, layer)

    def _feed(self, source: str, chunk: int, index: int) -> None:
        fed = self.builder.write(source, f"{source}.{chunk}")
        self.builder.inputs.append(
            Input(tensor=fed.tensor, version=fed.version, source=source, index=index)
        )

    @property
    def _sources(self) -> tuple[str, ...]:
        """What each chunk is fed."""
        packed = ("sequences",) if self.workload.packing else ()
        return ("tokens", *packed, *self.recipe.loss.fed(self.workload))

    def _loss_operands(self, chunk: int) -> list[TaskOperand]:
        """What a head reads for its loss, and what it makes of each chunk, which goes out."""
        loss, found = self.recipe.loss, list[TaskOperand]()
        for name in (*(("sequences",) if loss.sides > 1 else ()), *loss.fed(self.workload)):
            found.append(self.builder.read(name, f"{name}.{chunk}"))
        for name in loss.results(self.workload):
            made = self.builder.write(name, f"{name}.{chunk}")
            self.builder.outputs.append(
                Output(tensor=made.tensor, version=made.version, sink=made.tensor)
            )
            found.append(made)
        return found

    def _row_results(self, chunk: int) -> list[TaskOperand]:
        """What a head alone hands out of each row, beside the loss."""
        result = self.workload.result
        if result == "loss":
            return []
        made = self.builder.write(result, f"{result}.{chunk}")
        sink = f"{result}.{chunk}"
        self.builder.outputs.append(Output(tensor=made.tensor, version=made.version, sink=sink))
        return [made]

    def _begin_group(self, group: str, round_: int) -> None:
        if group in self.trained and self._trains:
            self.optimizer.before_group(group, round_)

    def _gradient(self, name: str, group: str, round_: int) -> list[TaskOperand]:
        """The operand that takes a group's gradient, if the group is trained."""
        if group not in self.trained:
            return []
        return [self.optimizer.gradient(name, group, round_)]

    def _after_group(self, group: str, round_: int) -> None:
        if group in self.trained:
            self.optimizer.after_group(group, round_)

    def _add(
        self, kind: str, call: str, operands: list[TaskOperand], *, round_: int, chunk: int,
        layer: int | None = None,
    ) -> str:  # fmt: skip
        place = f"{kind}.{layer}.{chunk}" if layer is not None else f"{kind}.{chunk}"
        task_id = f"r{round_}.{place}"
        label = Label(kind=kind, layer=layer, chunk=chunk, round=round_)
        self.builder.add(task_id, call, operands, label)
        return task_id
