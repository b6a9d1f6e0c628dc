"""A model that is a list of somebody's blocks, as data; tracing writes it once, without weights.

Legend: a chunk is B sequences of S tokens (B is 1 where documents are packed). Sizes, FLOPs, bytes
and launches are polynomials in B and S. Costs stand once per kind of block.

A step of such a model is: the prelude makes values (embedded tokens, masks, rotary angles) of a
batch; each block makes new values of values; the postlude makes logits of the last ones, in slices
of rows. Backward of a block runs it again under autograd, from its inputs.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.cost import Work
from twinstream.schedule.files import read_document, write_text
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import Index, PositiveSize, Size

EMBEDDING = "embedding"
HEAD = "head"
TIED = "tied"
UNUSED = "unused"
SHARED = "shared."
PRELUDE = "prelude."
BLOCK = "block."

BYTES_OF_DTYPE = {
    **{"float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4},
    **{"bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}


class Poly(Node):
    """c0 + c1 B + c2 S + c3 B S + c4 S S + c5 B S S; coefficients that are left out are 0.

    >>> Poly(coefficients=(0, 0, 0, 64)).at(2, 512)
    65536
    """

    coefficients: tuple[int | float, ...] = Field(default=(), max_length=6)

    def at(self, batch: int, seq_len: int) -> int:
        """The value for chunks of `batch` sequences of `seq_len` tokens; never below 0."""
        powers = (1, batch, seq_len, batch * seq_len, seq_len**2, batch * seq_len**2)
        terms = zip(self.coefficients, powers, strict=False)
        return max(0, round(sum(coefficient * power for coefficient, power in terms)))

    @classmethod
    def constant(cls, value: int) -> Self:
        """The same for every chunk."""
        return cls(coefficients=(value,) if value else ())


class Peak(Node):
    """The largest of several polynomials: which moment is the peak depends on the chunk."""

    moments: tuple[Poly, ...] = Field(min_length=1)

    def at(self, batch: int, seq_len: int) -> int:
        """The value for chunks of `batch` sequences of `seq_len` tokens."""
        return max(moment.at(batch, seq_len) for moment in self.moments)


class TracedTensor(Node):
    """A parameter, by its first name in the module's `named_parameters()`, in the model's dtype."""

    name: str
    shape: tuple[Size, ...]

    @property
    def num_elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


class TracedGroup(Node):
    """Parameters that the same parts of the model read: one flat tensor.

    Its name is `embedding` (the prelude reads it; so may the postlude, where it is tied), `tied`
    (both read it, and the prelude has others for itself), a block's number, `head` (only the
    postlude reads it), `shared.K` (several parts do), or `unused` (none does: no gradient).
    """

    name: str
    layer: Index | None = None
    tensors: tuple[TracedTensor, ...]

    @property
    def num_elements(self) -> int:
        """How many numbers its parameters have, without padding."""
        return sum(tensor.num_elements for tensor in self.tensors)


class TracedValue(Node):
    """A tensor that the prelude or a block makes, and blocks or the postlude read.

    Its name is `prelude.K` or `block.L.J`. `layout` is empty where it lies row by row, else its
    axes as they lie in memory, outermost first, without those along which it only repeats: a copy
    that lies otherwise may change the last bits of what is computed from it.
    """

    name: str
    shape: tuple[Poly, ...]
    dtype: str
    has_gradient: bool
    layout: tuple[Index, ...] = ()

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, dtype: str) -> str:
        if dtype not in BYTES_OF_DTYPE:
            raise PydanticCustomError("dtype", "the size of {dtype} is unknown", {"dtype": dtype})
        return dtype

    def shape_at(self, batch: int, seq_len: int) -> tuple[int, ...]:
        """Its shape in chunks of `batch` sequences of `seq_len` tokens."""
        return tuple(size.at(batch, seq_len) for size in self.shape)

    def stored_shape_at(self, batch: int, seq_len: int) -> tuple[int, ...]:
        """The shape of the contiguous tensor that has all of it, axes as in `layout`."""
        shape = self.shape_at(batch, seq_len)
        return tuple(shape[axis] for axis in self.layout) if self.layout else shape

    def size_bytes(self, batch: int, seq_len: int) -> int:
        """Its bytes there, contiguous and without repeating anything."""
        return math.prod(self.stored_shape_at(batch, seq_len)) * BYTES_OF_DTYPE[self.dtype]


class TracedWork(Node):
    """Like kernels of a task, summed; `Work` whose numbers depend on the chunk.

    `matmul` has shape (M, N, K), of one product; `grouped_matmul` (rows, N, K, groups);
    `attention_forward` and `attention_backward` (query tokens, context tokens, heads, head_dim,
    sequences); `vector` (elements,), and its bytes are what each operation reads and writes.
    """

    unit: str
    shape: tuple[Poly, ...]
    flops: Poly
    hbm_bytes: Poly
    launches: Poly
    dtype: str = "bfloat16"

    def at(self, batch: int, seq_len: int) -> Work:
        """The work for chunks of `batch` sequences of `seq_len` tokens."""
        return Work(
            unit=self.unit,
            shape=tuple(size.at(batch, seq_len) for size in self.shape),
            flops=self.flops.at(batch, seq_len),
            hbm_bytes=self.hbm_bytes.at(batch, seq_len),
            launches=self.launches.at(batch, seq_len),
            dtype=self.dtype,
        )


class TracedTask(Node):
    """What a task computes, and its temporaries.

    `peak_bytes` is the most that torch's allocator holds at once beyond what the task is given
    (inputs, parameters, gradients of outputs). What it makes is among it: outputs, gradients of
    inputs, and those of parameters, before they are copied or added to where they belong.
    """

    works: tuple[TracedWork, ...]
    peak_bytes: Peak

    def flops(self, batch: int, seq_len: int) -> int:
        """Its FLOPs; a multiply-add is 2."""
        return sum(work.flops.at(batch, seq_len) for work in self.works)

    def works_at(self, batch: int, seq_len: int) -> tuple[Work, ...]:
        """Its works for chunks of `batch` sequences of `seq_len` tokens."""
        return tuple(work.at(batch, seq_len) for work in self.works)


class TracedKind(Node):
    """Blocks that do the same: equal class, shapes of parameters, inputs and arguments.

    `forward` runs without autograd. `backward` runs the block again under autograd and takes the
    gradients of its inputs and parameters.
    """

    name: str
    forward: TracedTask
    backward: TracedTask


class TracedCall(Node):
    """The call of one block. `inputs` are in the order in which its arguments are flattened."""

    kind: Index
    groups: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class TracedPrelude(Node):
    """What comes before the blocks. `backward` is None where it has no parameters."""

    forward: TracedTask
    groups: tuple[str, ...]
    outputs: tuple[str, ...]
    backward: TracedTask | None = None


class TracedPostlude(Node):
    """What makes logits and loss of the last values, row by row: its S is rows, its B is 1.

    `training` is forward, loss and the gradients of inputs and parameters; `evaluation` is forward
    and loss.
    """

    training: TracedTask
    evaluation: TracedTask
    groups: tuple[str, ...]
    inputs: tuple[str, ...]


class TracedBuffer(Node):
    """A tensor of the module that is no parameter. `is_state`: a training step changes it."""

    name: str
    shape: tuple[Size, ...]
    dtype: str
    is_state: bool = False

    @property
    def size_bytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * BYTES_OF_DTYPE[self.dtype]


class ModuleSource(Node):
    """How any process builds the module again, without weights.

    `transformers`: from a whole config. `python`: a function of a file without other arguments;
    the file is refused if its bytes have changed.
    """

    kind: Literal["transformers", "python"] = "transformers"
    config: dict[str, Any] | None = None
    path: str | None = None
    function: str | None = None
    sha256: str | None = None

    @field_validator("config")
    @classmethod
    def _as_in_a_file(cls, config: dict[str, Any] | None) -> dict[str, Any] | None:
        """Keys that are numbers become text, and tuples lists."""
        return config and json.loads(json.dumps(config))

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        needed = {"transformers": ("config",), "python": ("path", "function", "sha256")}[self.kind]
        if missing := [field for field in needed if getattr(self, field) is None]:
            raise PydanticCustomError(
                "source",
                "a source of kind {kind} needs {missing}",
                {"kind": self.kind, "missing": missing[0]},
            )
        return self


class TracedModel(Node):
    """Any module that is a list of blocks, traced: all that planning and predicting ask of it.

    `is_packed`: chunks are one row of documents whose positions restart, and masks keep them apart
    as far as the model lets them (`packing`: whether it does). S is `min_seq_len` to `max_seq_len`:
    others have other masks (a window). `captured_size` is the (B, S) of the run that showed which
    values there are. `has_randomness`: training draws
    random numbers (dropout).
    """

    schema_version: Literal[1] = 1
    name: str
    model_type: str
    source: ModuleSource
    dtype: str
    attention: Literal["eager", "sdpa"]
    is_packed: bool = False
    packing: Literal["isolated", "isolated_by_mask", "leaks", "unknown"] = "unknown"
    vocab_size: PositiveSize
    min_seq_len: PositiveSize = 1
    max_seq_len: PositiveSize | None = None
    captured_size: tuple[PositiveSize, PositiveSize]
    num_parameters: PositiveSize
    groups: tuple[TracedGroup, ...]
    values: tuple[TracedValue, ...]
    kinds: tuple[TracedKind, ...]
    prelude: TracedPrelude
    calls: tuple[TracedCall, ...]
    postlude: TracedPostlude
    buffers: tuple[TracedBuffer, ...] = ()
    has_randomness: bool = False
    notes: tuple[str, ...] = ()
    torch_version: str
    transformers_version: str | None = None

    NO_HASH: ClassVar[frozenset[str]] = frozenset(
        {"notes", "torch_version", "transformers_version"}
    )

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        made: set[str] = set(self.prelude.outputs)
        groups = {group.name for group in self.groups}
        for place, read, used, outputs in self._parts():
            if unknown := (set(read) - made) | (set(used) - groups):
                raise PydanticCustomError(
                    "traced_name",
                    "{place} reads '{name}', which nothing before it makes",
                    {"place": place, "name": min(unknown)},
                )
            made |= set(outputs)
        if unknown := made ^ {value.name for value in self.values}:
            raise PydanticCustomError(
                "traced_value", "'{name}' is made or described, not both", {"name": min(unknown)}
            )
        if any(call.kind >= len(self.kinds) for call in self.calls):
            raise PydanticCustomError("traced_kind", "a block is of a kind that is not described")
        return self

    def _parts(self) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
        yield "the prelude", (), self.prelude.groups, ()
        for index, call in enumerate(self.calls):
            yield f"block {index}", call.inputs, call.groups, call.outputs
        yield "the postlude", self.postlude.inputs, self.postlude.groups, ()

    @property
    def content_hash(self) -> str:
        """16 hex digits that change with anything that a plan or a run follows from."""
        document = self.model_dump(mode="json", exclude=set(self.NO_HASH))
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def num_layers(self) -> int:
        """How many blocks it has."""
        return len(self.calls)

    def value(self, name: str) -> TracedValue:
        """The description of a value."""
        return next(value for value in self.values if value.name == name)

    def group(self, name: str) -> TracedGroup:
        """The parameters of a group."""
        return next(group for group in self.groups if group.name == name)

    def forward_flops(self, batch: int, seq_len: int) -> int:
        """FLOPs of the forward pass of a chunk, loss included."""
        kinds = [kind.forward.flops(batch, seq_len) for kind in self.kinds]
        blocks = sum(kinds[call.kind] for call in self.calls)
        head = self.postlude.evaluation.flops(1, batch * seq_len)
        return self.prelude.forward.flops(batch, seq_len) + blocks + head

    def training_flops(self, batch: int, seq_len: int) -> int:
        """Model FLOPs of a chunk, forward and backward: what is recomputed counts once."""
        kinds = [kind.backward.flops(batch, seq_len) for kind in self.kinds]
        blocks = sum(kinds[call.kind] for call in self.calls)
        head = self.postlude.training.flops(1, batch * seq_len)
        backward = self.prelude.backward
        prelude = (backward or self.prelude.forward).flops(batch, seq_len)
        return prelude + blocks + head

    def save(self, path: Path) -> None:
        """Write the document."""
        write_text(self.model_dump_json() + "\n", path)  # with what is None in the config

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the document.

        Raises:
            DocumentError: says what is wrong with it.
        """
        return read_document(cls, path)
