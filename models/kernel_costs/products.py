"""What a matrix product amounts to, whoever asks for it."""

from twinstream.models.decoders.sizes import ITEMSIZE_BYTES
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cost import Work


def matmul_work(spec: ModelSpec, m: int, n: int, k: int, *, accumulate: bool = False) -> Work:
    """[m, k] x [k, n]; with `accumulate` the result is read as well as written."""
    moved = m * k + k * n + (2 if accumulate else 1) * m * n
    return _product(spec, m, n, k, moved * spec.itemsize)


def gradient_work(spec: ModelSpec, recipe: Recipe, m: int, n: int, k: int) -> Work:
    """[m, k] x [k, n], added to weight gradients in place."""
    gradient = ITEMSIZE_BYTES[recipe.gradient_dtype(spec.dtype)]
    return _product(spec, m, n, k, (m * k + k * n) * spec.itemsize + 2 * m * n * gradient)


def _product(spec: ModelSpec, m: int, n: int, k: int, hbm_bytes: int) -> Work:
    return Work(
        unit="matmul", shape=(m, n, k), flops=2 * m * n * k, hbm_bytes=hbm_bytes, launches=1,
        dtype=spec.dtype,
    )  # fmt: skip
