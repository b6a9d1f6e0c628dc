"""The parts of a traced module, and what each task costs: polynomials in B and S of the chunk."""

import math
from typing import Any, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer
from pydantic_core import PydanticCustomError

from twinstream.schedule.cost import Work
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import Index, PositiveSize, Size

SHARED = "shared."
TIED = "tied"
UNUSED = "unused"
PRELUDE = "prelude."
BLOCK = "block."
SAMPLE = "sample."  # begins the name of a tensor that a chunk is fed of its samples
STATE = "state."  # begins the name of a group of buffers that a block changes

BYTES_OF_DTYPE = {
    **{"float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4},
    **{"bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
_PRICED = ("bfloat16", "float16", "float32")  # masks and indices move as float32 does


def require_size(dtype: str) -> str:
    """The dtype; raises a PydanticCustomError if its size is unknown."""
    if dtype not in BYTES_OF_DTYPE:
        raise PydanticCustomError("dtype", "the size of {dtype} is unknown", {"dtype": dtype})
    return dtype


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
            dtype=self.dtype if self.dtype in _PRICED else "float32",
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
    Adapters beside a block's layers are a group of their own, `lora.` and its name; so are buffers
    that a block changes in training, `state.` and its name, which nothing trains.
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
        return require_size(dtype)

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


class TracedKind(Node):
    """Blocks that do the same: equal class, shapes of parameters, inputs and arguments.

    `forward` runs without autograd. `backward` runs the block again under autograd and takes the
    gradients of its inputs and parameters.
    """

    name: str
    forward: TracedTask
    backward: TracedTask


class TracedCall(Node):
    """The call of one block. `inputs` are in the order in which its arguments are flattened;
    `state` is the group of what its forward changes."""

    kind: Index
    groups: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    state: tuple[str, ...] = ()

    @model_serializer(mode="wrap")
    def _without_no_state(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in whole(self).items() if v or k != "state"}


class TracedPrelude(Node):
    """What comes before the blocks. `backward` is None where none of its parameters is trained."""

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


class TracedInput(Node):
    """A tensor of a person's data that each sample has, and the module's forward an argument for.

    `shape` is of one sample; `fill` is what stands where a sample has less than that, and in
    samples that only fill up a chunk.
    """

    name: str
    shape: tuple[PositiveSize, ...]
    dtype: str
    fill: int | float = 0

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, dtype: str) -> str:
        return require_size(dtype)

    @property
    def size_bytes(self) -> int:
        """Of one sample."""
        return math.prod(self.shape) * BYTES_OF_DTYPE[self.dtype]


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
