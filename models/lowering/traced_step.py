"""The tasks of a traced module: prelude, blocks, postlude; backward runs a block again.

Every value that goes from one to another is a tensor of its chunk, and so is its gradient, to which
all who read the value contribute. Temporaries come from torch's allocator: they are declared as
what the calls' library takes beside the arena.
"""

from collections.abc import Sequence
from math import ceil, prod

from twinstream.models.kernel_costs.attributes import PLACES_A_ROUND, TEMPORARY_BYTES
from twinstream.models.layout import EMBEDDING, HEAD
from twinstream.models.lowering.declarations import (
    Shapes,
    declare_groups,
    declare_inputs,
    declare_results,
)
from twinstream.models.lowering.optimizer_tasks import gradient_attribute
from twinstream.models.lowering.step import StepLowering
from twinstream.models.providers.model import chunk_refusal
from twinstream.models.providers.traced import TracedModel
from twinstream.models.providers.traced_parts import (
    BYTES_OF_DTYPE,
    SAMPLE,
    STATE,
    TracedTask,
)
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cost import Work
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Attribute, TaskOperand
from twinstream.schedule.tensors import Role, Tensor
from twinstream.schedule.workload import Workload

MODULE_KERNELS = "module_"  # begins the names of kernels that run a module's parts
_TEMPORARIES = 1.1  # times the traced peak: allocators round, libraries take some for themselves


class TracedLowering(StepLowering):
    """Adds the tasks of a `TracedModel`.

    Raises:
        TwinstreamError: the workload slices sequences, or packs documents that the module would not
            keep apart; or the recipe has adapters.
    """

    def __init__(self, model: TracedModel, workload: Workload, recipe: Recipe) -> None:
        _require_possible(model, workload, recipe)
        super().__init__(Shapes(model, workload, recipe), workload, recipe)
        self.model = model
        self.trains_embedding = any(group in self.trained for group in model.prelude.groups)
        self.batch = 1 if model.is_packed else workload.chunk_tokens // workload.seq_len
        self.seq_len = workload.chunk_tokens // self.batch
        self._values = {value.name: value for value in model.values}
        self._layer_of = {
            name: layer for layer, call in enumerate(model.calls) for name in call.outputs
        }
        self._last_use = self._last_uses()
        self._begun: set[str] = set()

    @staticmethod
    def saved_per_token(model: TracedModel) -> int:
        return model.saved_bytes_per_token

    def model_flops(self) -> int:
        chunks = self.workload.chunks_per_round * self.workload.rounds_per_step
        of_chunk = self.model.training_flops
        if self.workload.forward_only:
            of_chunk = self.model.forward_flops
        return chunks * of_chunk(self.batch, self.seq_len)

    def _declare(self) -> None:
        declare_groups(self.builder, self.shapes)
        for chunk in range(self.workload.chunks_per_round):
            declare_inputs(self.builder, self.shapes, chunk)
            for one in self.model.inputs:
                name, shape = f"{SAMPLE}{one.name}.{chunk}", (self.batch, *one.shape)
                self._declare_tensor(name, "input", one.dtype, shape)
            for value in self.model.values:
                kept = value.stored_shape_at(self.batch, self.seq_len)
                self._declare_tensor(f"{value.name}.{chunk}", "activation", value.dtype, kept)
                if self._needs_gradient(value.name) and not self.workload.forward_only:
                    whole = value.shape_at(self.batch, self.seq_len)
                    name = f"d_{value.name}.{chunk}"
                    self._declare_tensor(name, "activation", value.dtype, whole)
        declare_results(self.builder, self.shapes)

    def _declare_tensor(self, name: str, role: Role, dtype: str, shape: tuple[int, ...]) -> None:
        size_bytes = prod(shape) * BYTES_OF_DTYPE[dtype]
        self.builder.declare(
            Tensor(tensor_id=name, size_bytes=size_bytes, role=role, dtype=dtype, shape=shape)
        )

    @property
    def _sources(self) -> tuple[str, ...]:
        return (*super()._sources, *(f"{SAMPLE}{one.name}" for one in self.model.inputs))

    def _needs_gradient(self, name: str) -> bool:
        """Whether a gradient flows through a value to something that is trained."""
        if not self._values[name].has_gradient:
            return False
        layer = self._layer_of.get(name)
        return self.trains_embedding if layer is None else layer >= self.first_backward

    def _last_uses(self) -> dict[int | str, list[str]]:
        """Where the last contribution to the gradient of each trained group is made."""
        found: dict[int | str, list[str]] = {}
        for group in self.shapes.trained:
            if group in self.model.prelude.groups:
                found.setdefault(EMBEDDING, []).append(group)
                continue
            layers = [n for n, call in enumerate(self.model.calls) if group in call.groups]
            found.setdefault(min(layers) if layers else HEAD, []).append(group)
        return found

    def _parameters(self, groups: Sequence[str]) -> list[TaskOperand]:
        read = self.builder.read
        return [read(f"parameters.{name}", self.shapes.parameters(name)) for name in groups]

    def _states(self, groups: Sequence[str]) -> list[TaskOperand]:
        """What a block's forward changes in training, and reads in an evaluation."""
        use = self.builder.read if self.workload.forward_only else self.builder.update
        return [use(f"parameters.{name}", self.shapes.parameters(name)) for name in groups]

    def _gradients(self, groups: Sequence[str], round_: int) -> list[TaskOperand]:
        return [
            operand
            for name in groups
            for operand in self._gradient(f"gradients.{name}", name, round_)
        ]

    def _fed(self, chunk: int) -> list[TaskOperand]:
        """Ids and labels of a chunk; where documents are packed, their starts and positions; of
        samples their tensors."""
        found = [self.builder.read("tokens", f"tokens.{chunk}")]
        for one in self.model.inputs:
            name = f"{SAMPLE}{one.name}"
            found.append(self.builder.read(name, f"{name}.{chunk}"))
        if self.workload.packing is not None:
            found.append(self.builder.read("sequences", f"sequences.{chunk}"))
        return found

    def _inputs(self, names: Sequence[str], chunk: int) -> list[TaskOperand]:
        return [
            self.builder.read(f"input.{place}", f"{name}.{chunk}")
            for place, name in enumerate(names)
        ]

    def _outputs(self, names: Sequence[str], chunk: int) -> list[TaskOperand]:
        return [
            self.builder.write(f"output.{place}", f"{name}.{chunk}")
            for place, name in enumerate(names)
        ]

    def _input_gradients(self, names: Sequence[str], chunk: int) -> list[TaskOperand]:
        """What is added to the gradients of inputs; the round's first contribution is a write."""
        found: dict[str, TaskOperand] = {}
        for place, name in enumerate(names):
            tensor = f"d_{name}.{chunk}"
            if not self._needs_gradient(name) or tensor in found:
                continue
            add = self.builder.update if tensor in self._begun else self.builder.write
            self._begun.add(tensor)
            found[tensor] = add(f"d_input.{place}", tensor)
        return list(found.values())

    def _output_gradients(self, names: Sequence[str], chunk: int) -> list[TaskOperand]:
        """Gradients of what a block has made, as far as anybody has contributed to them."""
        return [
            self.builder.read(f"d_output.{place}", f"d_{name}.{chunk}")
            for place, name in enumerate(names)
            if f"d_{name}.{chunk}" in self._begun
        ]

    def _call(
        self, call_id: str, kernel: str, works: tuple[Work, ...], peak_bytes: int,
        **more: Attribute,
    ) -> str:  # fmt: skip
        attributes: dict[str, Attribute] = {
            "batch": self.batch, "seq_len": self.seq_len, "dtype": self.model.dtype,
            TEMPORARY_BYTES: ceil(_TEMPORARIES * peak_bytes), **more,
        }  # fmt: skip
        # Nothing is dropped where a pass is compared with the reference's (TRL: disable_dropout).
        compared = self.recipe.loss.has_reference and self.model.has_randomness
        if self.workload.forward_only or compared:
            attributes["evaluates"] = True
        if self.workload.packing is not None:
            attributes["most_sequences"] = self.workload.packing.most_sequences
        elif self.model.is_packed:
            attributes["document_len"] = self.workload.seq_len
        key = f"{MODULE_KERNELS}{kernel}/torch"
        return self.builder.call(call_id, key, attributes, works)

    def _call_of(self, kernel: str, task: TracedTask, chunk: int, **more: Attribute) -> str:
        """A call for a whole chunk; of each block another, since it runs other code, and of each
        chunk where it draws random numbers. Rounds have the same calls."""
        size = self.batch, self.seq_len
        places = [str(more["block"])] if "block" in more else []
        if PLACES_A_ROUND in more:
            places.append(str(chunk))
        call_id = ".".join([kernel, *places])
        if call_id in self.builder.calls:
            return call_id
        works, peak_bytes = task.works_at(*size), task.peak_bytes.at(*size)
        return self._call(call_id, kernel, works, peak_bytes, **more)

    def _state(self) -> list[TaskOperand]:
        """Step and seed, of which random numbers follow."""
        if not self.model.has_randomness:
            return []
        return [self.builder.read("step_state", "step_state")]

    def _place(self, layer: int, chunk: int) -> dict[str, Attribute]:
        """What tells a call's random numbers from others' of the step: forward's and backward's
        are the same. It is of the first round; so many places further are those of the next."""
        if not self.model.has_randomness:
            return {}
        chunks = self.workload.chunks_per_round
        place = (layer + 1) * self.workload.rounds_per_step * chunks + chunk
        return {"place": place, PLACES_A_ROUND: chunks}

    def _embed_forward(self, round_: int) -> None:
        prelude = self.model.prelude
        for group in prelude.groups:
            self._begin_group(group, round_)
        for chunk in self._chunks():
            call = self._call_of("prelude", prelude.forward, chunk, **self._place(-1, chunk))
            operands = [
                *self._parameters(prelude.groups), *self._fed(chunk), *self._state(),
                *self._outputs(prelude.outputs, chunk),
            ]  # fmt: skip
            self._add("embed_forward", call, operands, round_=round_, chunk=chunk)

    def _forward_layer(self, round_: int, layer: int) -> None:
        block = self.model.calls[layer]
        for group in block.groups:
            if layer == self._first_use(group):
                self._begin_group(group, round_)
        task = self.model.kinds[block.kind].forward
        for chunk in self._chunks():
            call = self._call_of("block", task, chunk, block=layer, **self._place(layer, chunk))
            operands = [
                *self._parameters(block.groups), *self._states(block.state),
                *self._inputs(block.inputs, chunk), *self._state(),
                *self._outputs(block.outputs, chunk),
            ]  # fmt: skip
            self._add("block_forward", call, operands, round_=round_, layer=layer, chunk=chunk)

    def _first_use(self, group: str) -> int:
        """The first block that reads a group; -1 where the prelude does."""
        if group in self.model.prelude.groups:
            return -1
        return next(n for n, call in enumerate(self.model.calls) if group in call.groups)

    @property
    def _gradient_dtype(self) -> dict[str, Attribute]:
        return gradient_attribute(self.recipe, self.model.dtype)

    def _head_call(self, kernel: str, *tasks: TracedTask, **more: Attribute) -> str:
        """Passes over the rows, one slice after the other."""
        tokens = self.workload.chunk_tokens
        rows = self.recipe.row_slice(tokens, self.seq_len if self.model.inputs else 1)
        works = tuple(
            _repeated(work, tokens // rows) for task in tasks for work in task.works_at(1, rows)
        )
        peak_bytes = max(task.peak_bytes.at(1, rows) for task in tasks)
        loss = self.recipe.loss
        works += loss.works(tokens, self.model.dtype)
        peak_bytes += loss.bytes_per_token * tokens
        more |= loss.attributes(self.workload)
        return self._call(kernel, kernel, works, peak_bytes, row_slice=rows, **more)

    def _head_operands(self, chunk: int) -> list[TaskOperand]:
        post = self.model.postlude
        return [
            *self._parameters(post.groups), *self._inputs(post.inputs, chunk),
            self.builder.read("tokens", f"tokens.{chunk}"),
        ]  # fmt: skip

    def _head(self, round_: int) -> None:
        post, builder = self.model.postlude, self.builder
        self._begun.clear()
        for group in post.groups:
            if group not in self.model.prelude.groups:
                self._begin_group(group, round_)
        loss = self.recipe.loss
        tasks = [*([post.evaluation] if loss.passes > 1 else []), post.training]
        call = self._head_call(loss.kernel, *tasks, **self._gradient_dtype)
        for chunk in self._chunks_reversed():
            operands = [
                *self._head_operands(chunk), *self._loss_operands(chunk),
                *self._input_gradients(post.inputs, chunk),
                *self._gradients(post.groups, round_), builder.accumulate("loss", "loss"),
                self.optimizer.step_state,
            ]  # fmt: skip
            self._add("head_loss", call, operands, round_=round_, chunk=chunk)
        self._after(HEAD, round_)

    def _head_alone(self, step_state: TaskOperand) -> None:
        kernel = self.recipe.loss.evaluation_kernel
        call = self._head_call(kernel, self.model.postlude.evaluation)
        for chunk in self._chunks_reversed():
            operands = [
                *self._head_operands(chunk), *self._loss_operands(chunk),
                *self._row_results(chunk), self.builder.accumulate("loss", "loss"), step_state
            ]  # fmt: skip
            self._add("head_loss", call, operands, round_=0, chunk=chunk)

    def _backward_layer(self, round_: int, layer: int) -> None:
        block = self.model.calls[layer]
        task = self.model.kinds[block.kind].backward
        for chunk in self._chunks_reversed():
            more = self._place(layer, chunk) | self._gradient_dtype
            call = self._call_of("block_backward", task, chunk, block=layer, **more)
            operands = [
                *self._parameters(block.groups), *self._inputs(block.inputs, chunk),
                *self._state(), *self._output_gradients(block.outputs, chunk),
                *self._input_gradients(block.inputs, chunk),
                *self._gradients(block.groups, round_),
            ]  # fmt: skip
            self._add("block_backward", call, operands, round_=round_, layer=layer, chunk=chunk)
        self._after(layer, round_)

    def _embed_backward(self, round_: int) -> None:
        prelude = self.model.prelude
        assert prelude.backward is not None, "a prelude with parameters has a backward"
        for chunk in self._chunks_reversed():
            more = self._place(-1, chunk) | self._gradient_dtype
            call = self._call_of("prelude_backward", prelude.backward, chunk, **more)
            operands = [
                *self._parameters(prelude.groups), *self._fed(chunk), *self._state(),
                *self._output_gradients(prelude.outputs, chunk),
                *self._gradients(prelude.groups, round_),
            ]  # fmt: skip
            self._add("embed_backward", call, operands, round_=round_, chunk=chunk)
        self._after(EMBEDDING, round_)

    def _after(self, place: int | str, round_: int) -> None:
        for group in reversed(self._last_use.get(place, [])):
            self._after_group(group, round_)


def _repeated(work: Work, times: int) -> Work:
    """As many works of a kind, one after the other."""
    return work.model_copy(
        update={
            "flops": times * work.flops, "hbm_bytes": times * work.hbm_bytes,
            "launches": times * work.launches,
        }
    )  # fmt: skip


def _require_possible(model: TracedModel, workload: Workload, recipe: Recipe) -> None:
    if workload.sliced:
        raise TwinstreamError(
            f"chunks of {workload.chunk_tokens} tokens slice sequences of {workload.seq_len}, "
            f"which only twinstream's own kernels do: '{model.name}' is a traced module and needs "
            "chunks of whole sequences"
        )
    longest = recipe.loss.longest(workload.seq_len, workload.packing)
    why = chunk_refusal(model, workload.seq_len, workload.chunk_tokens, longest)
    if why is not None:
        raise TwinstreamError(why)
    if workload.packing is not None and not model.is_packed:
        raise TwinstreamError(
            f"'{model.name}' was traced for one document a sequence, and not for documents of any "
            "lengths side by side: trace it again with --packed"
        )
    known = {
        t.name for group in model.groups if group.name.startswith(STATE) for t in group.tensors
    }
    if state := [one.name for one in model.buffers if one.is_state and one.name not in known]:
        raise TwinstreamError(
            f"'{model.name}' changes its buffer '{state[0]}' in training: only batch norm's, in "
            "blocks, are carried from step to step, because its outputs do not depend on them"
        )
    if recipe.lora is not None:
        raise TwinstreamError(
            f"'{model.name}' is a traced module, whose adapters are part of it: trace it with "
            "--lora, and leave them out of the recipe"
        )
