"""What a traced module's tasks cost, as polynomials of the chunk: B sequences of S tokens."""

from typing import Self

from pydantic import Field

from twinstream.schedule.cost import Work
from twinstream.schedule.node import Node

_PRICED = ("bfloat16", "float16", "float32")  # masks and indices move as float32 does


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
