"""The tasks of our own decoders: embedding, blocks with their recompute levels, head."""

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.attributes import FROZEN_NORM
from twinstream.models.layout import EXPERTS, ROUTER_BIAS
from twinstream.models.lowering.declarations import (
    DecoderShapes,
    declare_groups,
    declare_step,
)
from twinstream.models.lowering.decoder_calls import KernelCalls, frozen_attribute
from twinstream.models.lowering.optimizer_tasks import gradient_attribute
from twinstream.models.lowering.step import StepLowering
from twinstream.models.providers.flops import (
    SavedLevel,
    model_flops_per_step,
    saved_bytes_per_token,
)
from twinstream.models.recipes.adapter_layout import (
    adapter_group,
)
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.chain import Output
from twinstream.schedule.ops import Attribute, Label, TaskOperand
from twinstream.schedule.workload import Workload


class DecoderLowering(StepLowering):
    """Adds the tasks of a `ModelSpec`."""

    shapes: DecoderShapes

    def __init__(
        self, spec: ModelSpec, workload: Workload, recipe: Recipe,
        shapes: DecoderShapes | None = None,
    ) -> None:  # fmt: skip
        super().__init__(shapes or DecoderShapes(spec, workload, recipe), workload, recipe)
        self.spec = spec
        self.calls = KernelCalls(self.builder, spec, workload, recipe)

    @staticmethod
    def saved_per_token(model: ModelSpec) -> int:
        return saved_bytes_per_token(model, SavedLevel.FULL)

    def model_flops(self) -> int:
        return model_flops_per_step(self.spec, self.workload, self.recipe)

    def _declare(self) -> None:
        declare_groups(self.builder, self.shapes)
        declare_step(self.builder, self.shapes)

    def _logits(self) -> None:
        call = self.calls.other(
            "head_logits", self.calls.work().head_logits(),
            {
                "norm_eps": self.spec.norm_eps, "tied": self.spec.tied_embeddings,
                "num_rows": self.workload.chunk_tokens // self.workload.seq_len,
            },
        )  # fmt: skip
        for chunk in self._chunks_reversed():
            made = self.builder.write("logits", f"logits.{chunk}")
            operands = [*self._head_inputs(chunk)[:2], made]
            if self.spec.tied_embeddings:
                embedding = self.shapes.parameters("embedding")
                operands.append(self.builder.read("embedding", embedding))
            self._add("head_logits", call, operands, round_=0, chunk=chunk)
            output = Output(tensor=made.tensor, version=made.version, sink=f"logits.{chunk}")
            self.builder.outputs.append(output)

    def _head_alone(self, step_state: TaskOperand) -> None:
        """The loss of a round, and no gradients."""
        builder, work = self.builder, self.calls.work()
        cost = (*work.head(self._row_slice, evaluates=True), *work.row_results())
        call = self.calls.other(self.recipe.loss.evaluation_kernel, cost, self._head_attributes)
        for chunk in self._chunks_reversed():
            operands = [
                *self._head_inputs(chunk), *self._loss_operands(chunk), *self._row_results(chunk),
                builder.accumulate("loss", "loss"), step_state,
            ]  # fmt: skip
            if self.spec.tied_embeddings:
                operands.append(builder.read("embedding", self.shapes.parameters("embedding")))
            self._add("head_loss", call, operands, round_=0, chunk=chunk)

    def _embed_forward(self, round_: int) -> None:
        builder = self.builder
        self._begin_group("embedding", round_)
        for chunk in self._chunks():
            operands = [
                builder.read("parameters", self.shapes.parameters("embedding")),
                builder.read("tokens", f"tokens.{chunk}"),
                builder.write("output", self.shapes.hidden(0, chunk)),
            ]
            call = self.calls.other("embed_forward", self.calls.work().embed_forward())
            self._add("embed_forward", call, operands, round_=round_, chunk=chunk)

    def _forward_layer(self, round_: int, layer: int) -> None:
        for group in (*self.spec.layer_groups(layer), adapter_group(layer)):
            self._begin_group(group, round_)
        for chunk in self._chunks():
            self._block_forward(round_, layer, chunk)

    def _block_forward(self, round_: int, layer: int, chunk: int) -> None:
        builder = self.builder
        operands = [
            *self._block_inputs(layer, chunk),
            *(self._choice(layer, chunk) if self.shapes.with_experts(layer) else []),
            *self._cache(layer, chunk),
            builder.write("norms", f"norms.{layer}.{chunk}"),
            *([builder.write("low", f"low.{layer}.{chunk}")] if self._has_low(layer) else []),
            builder.write("kv", self.shapes.kv(layer, chunk)),
            builder.write("attention", f"attention.{layer}.{chunk}"),
            builder.write("projections", f"projections.{layer}.{chunk}"),
            *self._block_output(layer, chunk),
        ]
        call = self.calls.block("block_forward", chunk, layer)
        self._add("block_forward", call, operands, round_=round_, layer=layer, chunk=chunk)

    def _block_output(self, layer: int, chunk: int) -> list[TaskOperand]:
        """What a block's forward makes beside what it keeps of attention."""
        builder, output = self.builder, self.shapes.hidden(layer + 1, chunk)
        routed = [builder.write("expert_projections", f"experts.{layer}.{chunk}")
                  for _ in range(self._keeps_experts(layer))]  # fmt: skip
        return [*routed, builder.write("output", output)]

    def _keeps_experts(self, layer: int) -> bool:
        """Whether a layer has experts whose projections its own tasks make and keep."""
        return self.shapes.with_experts(layer)

    def _cache(self, layer: int, chunk: int) -> list[TaskOperand]:
        """What generating text keeps of a layer: made by the first pass, and only read by one of
        a token, whose own row is written where it lies."""
        cache = self.workload.cache
        if cache is None:
            return []
        use = self.builder.read if cache.filled else self.builder.write
        return [use("cache", self.shapes.cache(layer, chunk))]

    def _has_low(self, layer: int) -> bool:
        return self.shapes.low_width(layer) > 0

    def _choice(self, layer: int, chunk: int) -> list[TaskOperand]:
        """What forward alone has of a router: its bias, and what it writes."""
        builder = self.builder
        found = [builder.write("routes", f"routes.{layer}.{chunk}")]
        bias = f"{layer}{ROUTER_BIAS}"
        if bias in self.spec.layer_groups(layer):
            found.append(builder.read("router_bias", self.shapes.parameters(bias)))
        if self.shapes.balances:
            first = layer == self._first_with_experts and chunk == self._chunks()[0]
            make = builder.write if first else builder.update
            found.append(make("balance", "balance"))
            found.append(builder.read("tokens", f"tokens.{chunk}"))
        return found

    @property
    def _first_with_experts(self) -> int:
        return next(i for i in range(self.spec.num_layers) if self.shapes.with_experts(i))

    def _block_inputs(self, layer: int, chunk: int) -> list[TaskOperand]:
        operands = [
            self.builder.read("parameters", self.shapes.parameters(str(layer))),
            self.builder.read("hidden", self.shapes.hidden(layer, chunk)),
        ]
        if self.shapes.with_experts(layer):
            group = f"{layer}{EXPERTS}"
            operands.append(self.builder.read("experts", self.shapes.parameters(group)))
        if adapter_group(layer) in self.shapes.groups:
            adapters = self.shapes.parameters(adapter_group(layer))
            operands.append(self.builder.read("adapters", adapters))
        if self.workload.packing is not None:
            operands.append(self.builder.read("sequences", f"sequences.{chunk}"))
        if before := chunk % self.workload.chunks_per_sequence:
            context = self.shapes.context(layer, chunk)
            operands.append(self.builder.read("context", context, num_parts=before))
        return operands

    def _head(self, round_: int) -> None:
        builder, tied = self.builder, self.spec.tied_embeddings
        self._begin_group("head", round_)
        for chunk in self._chunks_reversed():
            operands = [
                *self._head_inputs(chunk),
                *self._loss_operands(chunk),
                builder.write("d_hidden", f"d_hidden.{chunk}"),
                *self._gradient("gradients", "head", round_),
                builder.accumulate("loss", "loss"),
                self.optimizer.step_state,
            ]
            balances = self.shapes.balances and chunk == self._chunks()[-1]
            operands += [builder.read("balance", "balance")] if balances else []
            call = self._head_call(with_balance=balances)
            if tied:
                operands.append(builder.read("embedding", self.shapes.parameters("embedding")))
                operands += self._gradient("embedding_gradients", "embedding", round_)
            self._add("head_loss", call, operands, round_=round_, chunk=chunk)
        self._after_group("head", round_)

    def _head_call(self, *, with_balance: bool) -> str:
        """The loss and its gradients; once a round with that of its load balance."""
        attributes: dict[str, Attribute] = {
            **self._head_attributes, **frozen_attribute("head" not in self.trained),
            **({FROZEN_NORM: True} if self._saves_head else {}),
            **gradient_attribute(self.recipe, self.spec.dtype),
        }  # fmt: skip
        if with_balance and self.spec.experts is not None:
            attributes |= self.calls.experts_attributes(self.spec.experts)
        suffix, work = ".balance" if with_balance else "", self.calls.work()
        cost = work.head(self._row_slice)
        return self.calls.other(self.recipe.loss.kernel, cost, attributes, suffix)

    @property
    def _row_slice(self) -> int:
        return self.recipe.row_slice(self.workload.chunk_tokens)

    @property
    def _saves_head(self) -> bool:
        """Whether the LM head is trained beside adapters: then the norm before it is not."""
        return self.recipe.lora is not None and "lm_head" in self.recipe.lora.saved

    @property
    def _head_attributes(self) -> dict[str, Attribute]:
        return {
            "norm_eps": self.spec.norm_eps,
            "tied": self.spec.tied_embeddings,
            "row_slice": self._row_slice,
            **self.recipe.loss.attributes(self.workload),
        }

    def _head_inputs(self, chunk: int) -> list[TaskOperand]:
        return [
            self.builder.read("parameters", self.shapes.parameters("head")),
            self.builder.read("hidden", self.shapes.hidden(self.spec.num_layers, chunk)),
            self.builder.read("tokens", f"tokens.{chunk}"),
        ]

    def _backward_layer(self, round_: int, layer: int) -> None:
        for chunk in self._chunks_reversed():
            self._block_backward(round_, layer, chunk)
        self._after_layer(round_, layer)

    def _block_backward(self, round_: int, layer: int, chunk: int) -> None:
        builder = self.builder
        self._recomputes(round_, layer, chunk)
        reads = [
            *self._block_inputs(layer, chunk),
            *self._block_scalars(layer, chunk),
            builder.read("kv", self.shapes.kv(layer, chunk)),
            builder.read("attention", f"attention.{layer}.{chunk}"),
            builder.read("projections", f"projections.{layer}.{chunk}"),
            *self._expert_projections(layer, chunk),
            builder.update("d_hidden", f"d_hidden.{chunk}"),
            *self._gradient("gradients", str(layer), round_),
            *self._expert_gradient(layer, round_),
            *self._gradient("adapter_gradients", adapter_group(layer), round_),
        ]
        if self.workload.sliced:
            reads.append(self._d_context(chunk))
        call = self.calls.block("block_backward", chunk, layer, frozen=self._frozen(layer))
        task_id = self._add("block_backward", call, reads, round_=round_, layer=layer, chunk=chunk)
        builder.bind_recomputes(before=task_id)

    def _expert_gradient(self, layer: int, round_: int) -> list[TaskOperand]:
        return self._gradient("expert_gradients", f"{layer}{EXPERTS}", round_)

    def _frozen(self, layer: int) -> frozenset[str]:
        """Those of a layer's groups that have no gradient."""
        return frozenset(self.spec.layer_groups(layer)) - self.trained

    def _after_layer(self, round_: int, layer: int) -> None:
        adapters = self.spec.adapter_parts(adapter_group(layer))
        for group in (*reversed(self.spec.layer_groups(layer)), *adapters):
            self._after_group(group, round_)

    def _expert_projections(self, layer: int, chunk: int) -> list[TaskOperand]:
        """What a backward reads of routed experts, beside where rows go."""
        if not self.shapes.with_experts(layer):
            return []
        found = [self.builder.read("expert_projections", f"experts.{layer}.{chunk}")]
        if self.shapes.balances:
            found.append(self.builder.read("balance", "balance"))
            found.append(self.builder.read("tokens", f"tokens.{chunk}"))
        return found

    def _block_scalars(self, layer: int, chunk: int) -> list[TaskOperand]:
        """What forward leaves of each token in a few numbers, and no recompute makes again."""
        names = ["norms"]
        names += ["low"] if self._has_low(layer) else []
        names += ["routes"] if self.shapes.with_experts(layer) else []
        return [self.builder.read(name, f"{name}.{layer}.{chunk}") for name in names]

    def _recomputes(self, round_: int, layer: int, chunk: int) -> None:
        builder = self.builder
        group = f"r{round_}.block.{layer}.{chunk}"
        has_experts = self._keeps_experts(layer)
        for kernel, level in (
            *([("block_recompute_experts", "EXPERTS")] if has_experts else []),
            ("block_recompute_attention", "ATTENTION"),
            ("block_recompute_input", "INPUT"),
        ):
            operands = [
                *self._block_inputs(layer, chunk),
                *self._block_scalars(layer, chunk),
            ]
            projections = f"projections.{layer}.{chunk}"
            if level != "INPUT":
                operands = [operand for operand in operands if operand.name != "context"]
            if level == "EXPERTS":
                operands.append(builder.read("projections", projections))
            elif level == "ATTENTION":
                operands.append(builder.read("attention", f"attention.{layer}.{chunk}"))
            else:
                operands.append(builder.read("kv", self.shapes.kv(layer, chunk)))
                operands.append(builder.again("attention", f"attention.{layer}.{chunk}"))
            if level != "EXPERTS":
                operands.append(builder.again("projections", projections))
            if has_experts:
                operands.append(builder.again("expert_projections", f"experts.{layer}.{chunk}"))
            label = Label(kind="block_recompute", layer=layer, chunk=chunk, round=round_,
                          level=level)  # fmt: skip
            call = self.calls.block(kernel, chunk, layer)
            builder.add_recompute(group, f"{group}.recompute.{level}", call, operands, label)

    def _d_context(self, chunk: int) -> TaskOperand:
        """Gradients of the K and V this chunk saw; the sequence's last chunk starts them."""
        per_sequence = self.workload.chunks_per_sequence
        sequence, position = divmod(chunk, per_sequence)
        make = self.builder.write if position == per_sequence - 1 else self.builder.update
        return make("d_context", f"d_context.{sequence}", num_parts=position + 1)

    def _embed_backward(self, round_: int) -> None:
        builder = self.builder
        gradient = gradient_attribute(self.recipe, self.spec.dtype)
        call = self.calls.other("embed_backward", self.calls.work().embed_backward(), gradient)
        for chunk in self._chunks_reversed():
            operands = [
                builder.read("tokens", f"tokens.{chunk}"),
                builder.read("d_hidden", f"d_hidden.{chunk}"),
                self.optimizer.gradient("gradients", "embedding", round_),
            ]
            self._add("embed_backward", call, operands, round_=round_, chunk=chunk)
        self._after_group("embedding", round_)
