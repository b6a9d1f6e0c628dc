"""The work of updates by other rules than AdamW."""

from collections import Counter
from collections.abc import Sequence

from twinstream.models.decoders.sizes import ITEMSIZE_BYTES
from twinstream.models.kernel_costs.attributes import Attributes, may_skip, optimizer_state
from twinstream.schedule.cost import Work

MUON_ITERATIONS = 5  # of Newton and Schulz: as many as its source has


def with_update_unit(cost: tuple[Work, ...], attributes: Attributes) -> tuple[Work, ...]:
    """The cost of an update in torch's operations, whose first work is under the unit of what it
    does beside the plain pass: it codes m and v again, or keeps what it may have to put back."""
    unit = "adamw_8bit" if optimizer_state(attributes) == "8bit" else "adamw_may_skip"
    if unit == "adamw_may_skip" and not may_skip(attributes):
        return cost
    return (cost[0].model_copy(update={"unit": unit}), *cost[1:])


def element_update_work(
    num_elements: int, dtype: str, gradient_dtype: str, state_bytes: int
) -> tuple[Work, ...]:
    """One pass of a rule that updates each element by itself, at the rate of AdamW's pass."""
    moved = (2 * ITEMSIZE_BYTES[dtype] + ITEMSIZE_BYTES[gradient_dtype]) * num_elements
    return (
        Work(
            unit="adamw", shape=(num_elements,), flops=8 * num_elements,
            hbm_bytes=moved + 2 * state_bytes, launches=1, dtype=dtype,
        ),
    )  # fmt: skip


def muon_work(
    num_elements: int, dtype: str, gradient_dtype: str, state_bytes: int,
    matrices: Sequence[tuple[int, int, int]],
) -> tuple[Work, ...]:  # fmt: skip
    """That pass, and of each matrix the products of Newton and Schulz's iteration, in bf16."""
    passes = element_update_work(num_elements, dtype, gradient_dtype, state_bytes)
    works = []
    for (rows, columns), count in Counter((min(r, c), max(r, c)) for _, r, c in matrices).items():
        for shape in ((rows, rows, columns), (rows, rows, rows), (rows, columns, rows)):
            m, n, k = shape
            times = MUON_ITERATIONS * count
            works.append(
                Work(
                    unit="matmul", shape=shape, flops=times * 2 * m * n * k,
                    hbm_bytes=times * 2 * (m * n + m * k + n * k), launches=times,
                    dtype="bfloat16",
                )
            )  # fmt: skip
    return (*passes, *works)


def muon_temporary_bytes(matrices: Sequence[tuple[int, int, int]]) -> int:
    """Of the largest matrix: a float32 update, three bf16 copies, and squares of the short side."""
    sizes = [14 * r * c + 8 * min(r, c) ** 2 for _, r, c in matrices]
    return max(sizes, default=0)


def host_work(cost: tuple[Work, ...]) -> tuple[Work, ...]:
    """The same work by the host CPU, through host DRAM."""
    return tuple(_on_host(work) for work in cost)


def host_accumulate_work(num_elements: int, dtype: str, itemsize: int) -> tuple[Work, ...]:
    """The host adds a gradient to another: reads both, writes one."""
    added = Work(
        unit="accumulate",
        shape=(num_elements,),
        flops=num_elements,
        hbm_bytes=3 * num_elements * itemsize,
        launches=1,
        dtype=dtype,
    )
    return (_on_host(added),)


def _on_host(work: Work) -> Work:
    return work.model_copy(update={"hbm_bytes": 0, "host_dram_bytes": work.hbm_bytes})
