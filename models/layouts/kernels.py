"""The kernels that a rank's work is made of: matrix products, and passes over memory."""

from dataclasses import dataclass

from twinstream.models.layouts.rank_sizes import BITS_OF_DTYPE
from twinstream.schedule.cost import Work


@dataclass(frozen=True)
class Kernels:
    """Work of kernels whose activations are of `dtype`; linear layers multiply `linear_dtype`, the
    gradients of their weights `weight_dtype`."""

    dtype: str
    linear_dtype: str
    gradient_dtype: str
    weight_dtype: str

    def linear(self, m: int, n: int, k: int, groups: int = 1) -> Work:
        """[m, k] x [k, n] of a linear layer or its input's gradient; `groups` of them."""
        return self.matmul(m, n, k, self.linear_dtype, groups)

    def matmul(self, m: int, n: int, k: int, dtype: str | None = None, groups: int = 1) -> Work:
        """[m, k] x [k, n]; reads `dtype`, writes the activations' dtype."""
        read = groups * (m * k + k * n) * BITS_OF_DTYPE[dtype or self.dtype] // 8
        return self._matmul(
            (m, n, k), dtype or self.dtype, groups, read + self._bytes(m * n) * groups
        )

    def weight_gradient(
        self, m: int, n: int, k: int, dtype: str | None = None, groups: int = 1
    ) -> Work:
        """[m, k] x [k, n], added to the gradient of a linear layer's weight."""
        taken = dtype or self.weight_dtype
        read = groups * (m * k + k * n) * BITS_OF_DTYPE[taken] // 8
        summed = 2 * groups * m * n * BITS_OF_DTYPE[self.gradient_dtype] // 8
        return self._matmul((m, n, k), taken, groups, read + summed)

    def vector(self, unit: str, elements: int, *, extra_bytes: int = 0, launches: int = 1) -> Work:
        """Reads and writes so many elements in all, and `extra_bytes` of other widths."""
        return Work(
            unit=unit,
            shape=(elements,),
            flops=elements,
            hbm_bytes=self._bytes(elements) + extra_bytes,
            launches=launches,
            dtype=self.dtype,
        )

    def casts(self, *elements: int) -> tuple[Work, ...]:
        """Linear inputs or output gradients in another dtype: read, written as they are and, for
        the gradients of weights, transposed; none where the dtype is the same."""
        if self.linear_dtype == self.dtype:
            return ()
        copies = 1 + (self.weight_dtype == self.linear_dtype)
        written = copies * BITS_OF_DTYPE[self.linear_dtype] // 8  # of fp4 1: two halves
        return tuple(
            self.vector("cast", count, extra_bytes=written * count) for count in elements if count
        )

    def _bytes(self, elements: int) -> int:
        return elements * BITS_OF_DTYPE[self.dtype] // 8

    def _matmul(self, shape: tuple[int, int, int], dtype: str, groups: int, moved: int) -> Work:
        m, n, k = shape
        return Work(
            unit="matmul",
            shape=shape,
            flops=2 * m * n * k * groups,
            hbm_bytes=moved,
            launches=groups,
            dtype=dtype,
        )


def times(work: Work, count: int) -> Work:
    """`count` such kernels, one after the other."""
    return work.model_copy(
        update={
            "flops": work.flops * count,
            "hbm_bytes": work.hbm_bytes * count,
            "launches": work.launches * count,
        }
    )
