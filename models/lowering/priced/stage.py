"""What one stage of a pipeline does in a step: its actions, one after the other, as ops."""

from dataclasses import replace

from twinstream.models.lowering.priced.builder import Buffer, StageBuilder, Use
from twinstream.models.lowering.priced.groups import (
    Group,
    embedding_group,
    groups_of_layer,
    head_group,
)
from twinstream.models.lowering.priced.layers import LayerOps
from twinstream.models.lowering.priced.parts import whole
from twinstream.models.lowering.priced.weights import StageWeights
from twinstream.models.parallel.job import Job
from twinstream.models.parallel.layout import stages_of
from twinstream.models.parallel.orders import Action, actions_of
from twinstream.models.shapes.saved import head_peak_bytes, stored_hidden_bytes
from twinstream.schedule.cost import Work


class StageOps:
    """Emits a stage's step into a builder.

    Hidden states and their gradients go from stage to stage as `boundary.G.J` and `d_boundary.G.J`
    (into virtual stage G, of microbatch J). The head runs, forward and backward, where its
    microbatch's backward begins, so that logits of one microbatch are there at a time.
    """

    def __init__(
        self, job: Job, stage: int, axes: tuple[str, ...], *, folded: bool = False
    ) -> None:
        layout = job.layout
        self.job, self.stage, self.axes = job, stage, axes
        self.b = StageBuilder()
        self.spans = stages_of(layout, job.shape.num_layers)
        self.num_stages = len(self.spans)
        self.chunks = [self.spans[c * layout.pp + stage] for c in range(layout.virtual_stages)]
        self.actions = actions_of(layout, stage, job.num_microbatches)
        self.weights = StageWeights(self.b, job, self._groups())
        self.layers = LayerOps(self.b, job, self.weights, folded=folded)
        self.hidden = stored_hidden_bytes(job.work)
        self._inputs: dict[tuple[int, int], Buffer] = {}
        self._tops: dict[int, Buffer] = {}
        self._last = self._last_of("weight" if layout.pipeline == "zero_bubble" else "backward")

    def lower(self) -> StageBuilder:
        """All tasks of the step."""
        steps = {"forward": self._forward, "backward": self._backward, "weight": self._weight}
        for action in self.actions:
            steps[action.phase](action)
        self._tied()
        self.weights.finish(self.axes)
        return self.b

    def _groups(self) -> dict[str, Group]:
        found: dict[str, Group] = {}
        own, *experts = groups_of_layer(self.job)
        first, last = self.stage == 0, self.stage == self.job.layout.pp - 1
        if first:
            found["embedding"] = embedding_group(self.job)
        for span in self.chunks:
            for layer in span:
                found[str(layer)] = replace(own, layer=layer)
                found |= {f"{layer}.experts": replace(group, layer=layer) for group in experts}
        if last:
            found["head"] = head_group(self.job)
        return found

    def _last_of(self, phase: str) -> dict[int, int]:
        """By chunk the microbatch whose gradients complete it."""
        return {action.chunk: action.microbatch for action in self.actions if action.phase == phase}

    def _place(self, chunk: int) -> int:
        return chunk * self.job.layout.pp + self.stage

    def _forward(self, action: Action) -> None:
        _, chunk, j = action
        place = self._place(chunk)
        entered = self._enter(place, j)
        self._inputs[chunk, j] = entered
        if place == self.num_stages - 1:
            out = self._take("boundary", f"boundary.{place + 1}.{j}")
            self._tops[j] = out
        else:
            out = self._take("sending", f"boundary.{place + 1}.{j}", spare=1)
        fine = self.layers.alone or (j == 0 and self.job.layout.dp_overlap)
        self.layers.forward(self.chunks[chunk], chunk, j, entered, out, fine=fine)
        if place < self.num_stages - 1:
            self._send("boundary", place + 1, j, out, 1)

    def _backward(self, action: Action) -> None:
        _, chunk, j = action
        place = self._place(chunk)
        last = self._last[chunk] == j
        top = place == self.num_stages - 1
        if top:
            gradient = self._head(j, last=last)
        else:
            gradient = self._take("receiving", f"d_boundary.{place + 1}.{j}", self._early)
            gradient.version = self.layers.versions_made(self.spans[place + 1], "backward") - 1
            self._receive("d_boundary", place + 1, j, gradient, 1)
        out = self._take("sending_back", f"d_boundary.{place}.{j}", spare=1)
        entered = self._inputs[chunk, j]
        fine = self.layers.alone or (last and self.job.layout.dp_overlap)
        self.layers.backward(
            self.chunks[chunk], chunk, j, (entered, gradient, out), fine=fine, last=last
        )
        if top:
            self.b.free(gradient)
        if place == 0:
            self._embed_backward(j, out, last=last)
        else:
            self._send("d_boundary", place, j, out, -1)

    def _weight(self, action: Action) -> None:
        _, chunk, j = action
        last = self._last[chunk] == j
        fine = self.layers.alone or (last and self.job.layout.dp_overlap)
        self.layers.weight(
            self.chunks[chunk], chunk, j, self._inputs[chunk, j], fine=fine, last=last
        )

    def _enter(self, place: int, j: int) -> Buffer:
        held = self._take("boundary", f"boundary.{place}.{j}", spare=1 if place else 0)
        if place:
            held.version = self.layers.versions_made(self.spans[place - 1], "forward") - 1
            self._receive("boundary", place, j, held, -1)
            return held
        job, b = self.job, self.b
        self.weights.gather("embedding", f"forward.{j}")
        works = job.work.embedding().forward
        label = b.label("embed_forward", microbatch=j)
        read = self.weights.read("embedding")
        if job.layout.tp == 1:
            self._compute(f"embed_forward.{j}", works, [read, ("output", held, "write")], label)
        elif not job.layout.sequence_parallel:
            self._compute(f"embed_forward.{j}", works, [read, ("output", held, "write")], label)
            self._communicate(f"embed_reduce.{j}", "all_reduce", [("hidden", held, "update")])
        else:
            part = b.allocate("whole", whole(job), "activation", job.dtype)
            self._compute(f"embed_forward.{j}", works, [read, ("output", part, "write")], label)
            self._communicate(
                f"embed_scatter.{j}", "reduce_scatter",
                [("hidden", part, "read"), ("part", held, "write")],
            )  # fmt: skip
            b.free(part)
        self.weights.drop("embedding")
        return held

    def _embed_backward(self, j: int, gradient: Buffer, *, last: bool) -> None:
        job, b = self.job, self.b
        source = gradient
        if job.layout.tp > 1 and job.layout.sequence_parallel:
            source = b.allocate("whole", whole(job), "activation", job.dtype)
            self._communicate(
                f"embed_gather.{j}", "all_gather",
                [("part", gradient, "read"), ("hidden", source, "write")],
            )  # fmt: skip
        uses: list[Use] = [("d_hidden", source, "read"), self.weights.gradient("embedding")]
        self._compute(f"embed_backward.{j}", job.work.embedding().backward, uses,
                      b.label("embed_backward", microbatch=j))  # fmt: skip
        if source is not gradient:
            b.free(source)
        if not (last and self._ties):
            self.weights.after_backward("embedding", f"backward.{j}", last=last)

    def _head(self, j: int, *, last: bool) -> Buffer:
        """Forward, loss and backward of the head; gives the gradient of the last hidden state."""
        job, b, weights = self.job, self.b, self.weights
        layout = job.layout
        split = layout.tp > 1 and layout.sequence_parallel
        top = self._tops.pop(j)
        weights.gather("head", f"{j}")
        if self.job.shape.tied_embeddings and layout.pp == 1:
            weights.gather("embedding", f"head.{j}")
        hidden = top
        if split:
            hidden = b.allocate("whole", whole(job), "activation", job.dtype)
            self._communicate(f"head_gather.{j}", "all_gather",
                       [("part", top, "read"), ("hidden", hidden, "write")])  # fmt: skip
        logits = b.allocate("logits", head_peak_bytes(job.work), "scratch", "float32")
        work = job.work.head()
        read = [weights.read("head")]
        grads = [weights.gradient("head")]
        if job.shape.tied_embeddings and layout.pp == 1:
            read.append(weights.read("embedding"))
            grads.append(weights.gradient("embedding"))
        self._compute(
            f"head_forward.{j}", work.forward,
            [("hidden", hidden, "read"), *read, ("logits", logits, "write")],
            b.label("head_forward", microbatch=j),
        )  # fmt: skip
        if layout.tp > 1:
            sums = b.allocate("loss_sums", 12 * job.work.tokens, "scratch", "float32")
            uses: list[Use] = [("logits", logits, "read"), ("sums", sums, "write")]
            self._compute(f"loss_sums.{j}", (), uses, b.label("loss", microbatch=j))
            self._communicate(f"loss_reduce.{j}", "all_reduce", [("sums", sums, "update")])
            read.append(("sums", sums, "read"))
            b.free(sums)
        out = b.allocate("head_gradient", self.hidden, "activation", job.dtype, spare=1)
        whole_out = b.allocate("whole", whole(job), "activation", job.dtype) if split else out
        self._compute(
            f"head_backward.{j}", work.backward,
            [("hidden", hidden, "read"), *read, ("logits", logits, "update"),
             ("d_hidden", whole_out, "write"), *grads],
            b.label("head_backward", microbatch=j),
        )  # fmt: skip
        if split:
            self._communicate(f"head_scatter.{j}", "reduce_scatter",
                       [("hidden", whole_out, "read"), ("part", out, "write")])  # fmt: skip
            b.free(whole_out)
            b.free(hidden)
        elif layout.tp > 1:
            self._communicate(f"head_reduce.{j}", "all_reduce", [("hidden", out, "update")])
        b.free(logits)
        weights.drop("head")
        if job.shape.tied_embeddings and layout.pp == 1:
            weights.drop("embedding")
        if not (last and self._ties):
            weights.after_backward("head", f"{j}", last=last)
        return out

    @property
    def _ties(self) -> bool:
        """Whether first and last stage hold copies of one embedding, and add their gradients."""
        return self.job.shape.tied_embeddings and self.job.layout.pp > 1

    def _tied(self) -> None:
        """First and last stage tell one another their gradients of the tied embedding."""
        stage, pp = self.stage, self.job.layout.pp
        if not self._ties or stage not in (0, pp - 1):
            return
        b, own = self.b, "embedding" if stage == 0 else "head"
        group = embedding_group(self.job)
        dtype = self.job.gradient_dtype
        told = b.exchanged("tied_told", group.gradient_bytes, "gradient", dtype, f"tied.{stage}")
        heard = b.exchanged(
            "tied_heard", group.gradient_bytes, "gradient", dtype, f"tied.{pp - 1 - stage}"
        )
        label = b.label("tied_gradients")
        name, held, _ = self.weights.gradient(own)
        copied = Work(unit="copy", shape=(group.num_parameters,), flops=0,
                      hbm_bytes=2 * group.gradient_bytes, launches=1, dtype=dtype)  # fmt: skip
        self._compute(
            "tied_copy", (copied,), [(name, held, "read"), ("told", told, "write")], label
        )
        shift = -1 if stage == 0 else 1  # around the ends of the pipeline
        end = "prev" if stage == 0 else "next"
        send, receive = f"send.{end}", f"recv.{end}"
        b.communicate("tied_send", "send", (("pp",), send), [("told", told, "read")], label, shift)
        b.communicate(
            "tied_recv", "recv", (("pp",), receive), [("heard", heard, "write")], label, shift
        )
        summed = copied.model_copy(
            update={"unit": "accumulate", "hbm_bytes": 3 * group.gradient_bytes}
        )
        self._compute(
            "tied_add", (summed,), [("heard", heard, "read"), (name, held, "update")], label
        )
        self.weights.after_backward(own, "tied", last=True)

    @property
    def _early(self) -> int:
        """How many gradients come before they can be used, beside the one in use: breadth first,
        those of the first stage's next chunk come while this one still runs the chunk before."""
        layout = self.job.layout
        if layout.pipeline == "ring" and self.stage == layout.pp - 1:
            return max(1, self.job.num_microbatches - layout.pp + 1)
        return 1

    def _take(self, pool: str, tensor: str, spare: int = 0) -> Buffer:
        return self.b.exchanged(pool, self.hidden, "activation", self.job.dtype, tensor, spare)

    def _send(self, what: str, place: int, j: int, held: Buffer, shift: int) -> None:
        queue = "send.next" if shift > 0 else "send.prev"
        self.b.communicate(
            f"send.{what}.{place}.{j}", "send", (("pp",), queue), [("hidden", held, "read")],
            self.b.label("send", microbatch=j), shift,
        )  # fmt: skip

    def _receive(self, what: str, place: int, j: int, held: Buffer, shift: int) -> None:
        queue = "recv.next" if shift > 0 else "recv.prev"
        self.b.communicate(
            f"recv.{what}.{place}.{j}", "recv", (("pp",), queue), [("hidden", held, "write")],
            self.b.label("recv", microbatch=j), shift,
        )  # fmt: skip

    def _compute(self, op_id: str, works: tuple[Work, ...], uses: list[Use], label) -> None:  # type: ignore[no-untyped-def]
        self.b.compute(op_id, label.kind, works, uses, label)

    def _communicate(self, op_id: str, collective, uses: list[Use]) -> None:  # type: ignore[no-untyped-def]
        self.b.communicate(op_id, collective, (("tp",), "tp"), uses, self.b.label("tp"))
