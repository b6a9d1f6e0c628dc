"""Layers as a module that has been traced, by arithmetic: what planning for one device asks of it.

A sample is a chunk's unit, with one label. Kinds of layers are blocks, what is looked up comes
before them, and the loss, a mean over the last one's outputs, after them. Backward runs a block
again, as it does of every traced module. All parameters are of the model's dtype.
"""

from collections.abc import Sequence
from itertools import chain

from twinstream.models.layered.kinds import LOOKED_UP, LayerPart, Product
from twinstream.models.layered.model import LayeredModel, LayeredModelError
from twinstream.models.layout import EMBEDDING
from twinstream.models.options import PositionLimit
from twinstream.models.providers.traced import ModuleSource, TracedModel
from twinstream.models.providers.traced_parts import (
    Peak,
    Poly,
    TracedCall,
    TracedGroup,
    TracedInput,
    TracedKind,
    TracedPostlude,
    TracedPrelude,
    TracedTask,
    TracedTensor,
    TracedValue,
    TracedWork,
)
from twinstream.schedule.sizes import brief

_BACKWARD_SCORES = 2.5  # of attention: the scores again, and four products
_LARGEST_TABLES = 2**38  # bytes of one group, which a device has whole to look up in it
_LAUNCHES = 3  # of what passes memory in a part, beside its products
_LOSS_PASSES = 3  # the outputs are read, read again and their gradient written
_ONE_LABEL = PositionLimit(tokens=1, why="a sample has one label")


def layered_module(model: LayeredModel) -> TracedModel:
    """Return a layered model as a module of which sizes and costs are known, and no code.

    Raises:
        LayeredModelError: what is looked up is larger than the memory of any device.

    >>> from twinstream.models.layered.model import load_layered
    >>> layered_module(load_layered("vit_h")).num_parameters
    630225920
    """
    tables = sum(part.parameters for part in model.chain.embeddings) * model.itemsize
    if tables > _LARGEST_TABLES:
        raise LayeredModelError(
            f"{model.name} looks up rows of {brief(tables)}, which no device holds: `twinstream "
            f"estimate {model.name}` spreads them over a cluster"
        )
    return _LayersAsBlocks(model).module()


class _LayersAsBlocks:
    def __init__(self, model: LayeredModel) -> None:
        self._model, self._itemsize = model, model.itemsize
        self._looked_up = model.chain.embeddings
        layers = [layer for layer in model.layers if not isinstance(layer, LOOKED_UP)]
        self._blocks = tuple(chain.from_iterable(layer.blocks() for layer in layers))
        joins = [layer.joins for layer in layers]
        ahead = layers[: joins.index(True)] if True in joins else []
        self._join = sum(len(layer.blocks()) for layer in ahead)

    def module(self) -> TracedModel:
        kinds: dict[tuple[object, ...], TracedKind] = {}
        calls, places = list[TracedCall](), list[int]()
        for number, block in enumerate(self._blocks):
            key = (self._read_by(number)[1:], *(part._replace(layer="") for part in block))
            kinds.setdefault(key, self._kind(number, block))
            places.append(list(kinds).index(key))
            calls.append(self._call(number, places[-1]))
        parts = (*self._looked_up, *chain.from_iterable(self._blocks))
        return TracedModel(
            name=self._model.name, model_type=self._model.name,
            source=ModuleSource(kind="layers"), dtype=self._model.dtype, attention="sdpa",
            vocab_size=1, max_seq_len=1, positions=_ONE_LABEL, captured_size=(2, 1),
            num_parameters=sum(part.parameters for part in parts), groups=self._groups(),
            values=self._values(), kinds=tuple(kinds.values()), prelude=self._prelude(),
            calls=tuple(calls), postlude=self._postlude(), inputs=self._inputs(), torch_version="",
        )  # fmt: skip

    def _groups(self) -> tuple[TracedGroup, ...]:
        places = [
            (EMBEDDING, None, self._looked_up),
            *((str(layer), layer, block) for layer, block in enumerate(self._blocks)),
        ]
        return tuple(
            TracedGroup(
                name=name, layer=layer,
                tensors=tuple(
                    TracedTensor(name=f"{part.layer}.{name}.{place}", shape=_shape(part))
                    for place, part in enumerate(parts)
                    if part.parameters
                ),
            )
            for name, layer, parts in places
            if any(part.parameters for part in parts)
        )  # fmt: skip

    def _inputs(self) -> tuple[TracedInput, ...]:
        """Numbers of the first layers, where these do not read what is looked up."""
        fed = [layer.fed() for layer in self._model.layers if isinstance(layer, LOOKED_UP)]
        found = [
            TracedInput(name=f"looked_up.{place}", shape=shape, dtype=dtype)
            for place, (shape, dtype) in enumerate(fed)
        ]
        if self._join:
            found.append(
                TracedInput(name="numbers", shape=(self._numbers,), dtype=self._model.dtype)
            )
        return tuple(found)

    @property
    def _numbers(self) -> int:
        return self._blocks[0][0].products[0].depth

    @property
    def _pooled(self) -> int:
        return sum(part.pooled for part in self._looked_up)

    def _values(self) -> tuple[TracedValue, ...]:
        sizes = [("prelude.0", self._pooled, True)]
        if self._join:
            sizes.append(("prelude.1", self._numbers, False))
        sizes += [(_made(n), block[-1].outputs, True) for n, block in enumerate(self._blocks)]
        return tuple(
            TracedValue(
                name=name, shape=(_each(1), Poly.constant(size)), dtype=self._model.dtype,
                has_gradient=has_gradient,
            )
            for name, size, has_gradient in sizes
        )  # fmt: skip

    def _read_by(self, number: int) -> tuple[str, ...]:
        """What a block reads: the last one's outputs, and where these are joined, what was looked
        up."""
        before = _made(number - 1) if number else ("prelude.1" if self._join else "prelude.0")
        return (before, "prelude.0") if number and number == self._join else (before,)

    def _call(self, number: int, kind: int) -> TracedCall:
        groups = (str(number),) if any(part.parameters for part in self._blocks[number]) else ()
        return TracedCall(
            kind=kind, groups=groups, inputs=self._read_by(number), outputs=(_made(number),)
        )

    def _kind(self, number: int, block: Sequence[LayerPart]) -> TracedKind:
        sizes = {value.name: value.shape[1].at(1, 1) for value in self._values()}
        entered = sum(sizes[name] for name in self._read_by(number))
        forward = [work for part in block for work in self._forward(part)]
        backward = [work for part in block for work in self._backward(part)]
        return TracedKind(
            name=block[0].layer,
            forward=self._forward_task(forward, block, entered),
            backward=self._backward_task([*forward, *backward], block),
        )

    def _forward_task(
        self, works: Sequence[TracedWork], block: Sequence[LayerPart], entered: int
    ) -> TracedTask:
        """At its peak what the largest part makes is there, beside what goes in and out."""
        most = max(part.saved for part in block) + sum(part.outputs for part in block) + entered
        return self._task(works, 0, most)

    def _backward_task(self, works: Sequence[TracedWork], block: Sequence[LayerPart]) -> TracedTask:
        """At its peak all is there that backward reads, and gradients of all parameters."""
        most = sum(part.saved + 2 * part.outputs for part in block)
        return self._task(works, sum(part.parameters for part in block), most)

    def _task(self, works: Sequence[TracedWork], fixed: int, of_sample: int) -> TracedTask:
        size = self._itemsize
        peak = Poly(coefficients=(fixed * size, of_sample * size))
        return TracedTask(works=tuple(works), peak_bytes=Peak(moments=(peak,)))

    def _prelude(self) -> TracedPrelude:
        """Gradients of tables are whole, as torch's are unless they are asked to be sparse."""
        parts = self._looked_up
        forward = [work for part in parts for work in self._forward(part)]
        backward = [work for part in parts for work in self._weight_gradients(part)]
        backward += [self._moved(part.parameters, 2 * part.looked_up) for part in parts]
        outputs = ("prelude.0", "prelude.1") if self._join else ("prelude.0",)
        return TracedPrelude(
            forward=self._forward_task(forward, parts, 0), groups=(EMBEDDING,), outputs=outputs,
            backward=self._backward_task(backward, parts),
        )  # fmt: skip

    def _postlude(self) -> TracedPostlude:
        size = self._blocks[-1][-1].outputs
        works = [
            TracedWork(
                unit="vector", shape=(_row(size),), flops=Poly(), launches=Poly.constant(2),
                hbm_bytes=_row(passes * size * self._itemsize), dtype=self._model.dtype,
            )
            for passes in (_LOSS_PASSES, 1)
        ]  # fmt: skip
        training, evaluation = (
            TracedTask(works=(work,), peak_bytes=Peak(moments=(_row(kept * self._itemsize),)))
            for work, kept in zip(works, (size, 1), strict=True)
        )
        return TracedPostlude(
            training=training, evaluation=evaluation, groups=(),
            inputs=(_made(len(self._blocks) - 1),),
        )  # fmt: skip

    def _forward(self, part: LayerPart) -> list[TracedWork]:
        works = [
            self._product(part, one, (one.rows, one.columns, one.depth)) for one in part.products
        ]
        works += self._attention(part, "attention_forward", 1)
        return [*works, self._moved(0, part.moved + part.looked_up)]

    def _backward(self, part: LayerPart) -> list[TracedWork]:
        """Two products for each of forward: gradients of its input, and of its weights."""
        works = [
            self._product(part, one, (one.rows, one.depth, one.columns)) for one in part.products
        ]
        works += self._weight_gradients(part)
        works += self._attention(part, "attention_backward", _BACKWARD_SCORES)
        return [*works, self._moved(0, 2 * part.moved)]

    def _weight_gradients(self, part: LayerPart) -> list[TracedWork]:
        return [
            self._product(part, one, (one.depth, one.columns, one.rows), sums_rows=True)
            for one in part.products
        ]

    def _product(
        self, part: LayerPart, one: Product, sides: tuple[int, int, int], *, sums_rows: bool = False
    ) -> TracedWork:
        """Of all samples: their rows are the first side, or what is summed over."""
        m, n, k = sides
        shape = (Poly.constant(m), Poly.constant(n), _each(k))
        if not sums_rows:
            shape = (_each(m), Poly.constant(n), Poly.constant(k))
        weight = part.experts * one.columns * one.depth if part.parameters else 0
        of_sample = one.rows * (one.columns + one.depth)
        if not part.parameters:
            of_sample += one.columns * one.depth
        hbm = Poly(coefficients=(weight * self._itemsize, of_sample * self._itemsize))
        experts = (Poly.constant(part.experts),) if part.experts > 1 else ()
        unit, dtype, flops = self._multiplied("grouped_matmul" if experts else "matmul", one.flops)
        return TracedWork(
            unit=unit, shape=(*shape, *experts), flops=_each(flops), hbm_bytes=hbm,
            launches=Poly.constant(1), dtype=dtype,
        )  # fmt: skip

    def _attention(self, part: LayerPart, unit: str, times: float) -> list[TracedWork]:
        """A query of causal attention sees the tokens before it, of an encoder all."""
        if (found := part.attention) is None:
            return []
        queries = found.tokens if found.causal else 1
        sides = (queries, found.tokens, found.heads, found.head_dim)
        moved = 4 * times * found.tokens * found.heads * found.head_dim * self._itemsize
        name, dtype, flops = self._multiplied(unit, round(found.flops * times))
        return [
            TracedWork(
                unit=name, shape=(*map(Poly.constant, sides), _each(1)), flops=_each(flops),
                hbm_bytes=_each(round(moved)), launches=Poly.constant(1), dtype=dtype,
            )
        ]  # fmt: skip

    def _multiplied(self, unit: str, flops: int) -> tuple[str, str, int]:
        """TF32 multiplies as 16 bits do, at half the rate."""
        if self._model.products == "tf32":
            return unit, "bfloat16", 2 * flops
        return unit, self._model.dtype, flops

    def _moved(self, fixed: int, of_sample: int) -> TracedWork:
        size = self._itemsize
        return TracedWork(
            unit="vector", shape=(Poly(coefficients=(fixed, of_sample)),), flops=Poly(),
            hbm_bytes=Poly(coefficients=(fixed * size, of_sample * size)),
            launches=Poly.constant(_LAUNCHES if of_sample else 1), dtype=self._model.dtype,
        )  # fmt: skip


def _made(number: int) -> str:
    return f"block.{number}.0"


def _each(size: int) -> Poly:
    """As much for each sample of a chunk."""
    return Poly(coefficients=(0, size))


def _row(size: int) -> Poly:
    """As much for each row of the postlude."""
    return Poly(coefficients=(0, 0, size))


def _shape(part: LayerPart) -> tuple[int, ...]:
    """A table's rows and columns; of what is multiplied, all parameters one after the other."""
    is_table = part.row and part.parameters % part.row == 0
    return (part.parameters // part.row, part.row) if is_table else (part.parameters,)
