"""Cross entropy and its gradient in place. A program a row of logits; V vocabulary.

The row is read twice: first for its maximum and sum, then to be replaced by its gradient. With one
program of 32 warps a multiprocessor, 132 rows of 256 KiB (8B) are worked on at a time, 34 MiB,
so that the second read finds them in the L2 cache of an H100 (50 MB) or H200 (60 MB).
"""

import triton
import triton.language as tl

from twinstream.executor.kernels.triton_kernels.launch import launch
from twinstream.executor.kernels.triton_kernels.rounding import rounded
from twinstream.executor.kernels.vector.vector_ops import LogitRows
from twinstream.executor.kernels.workspace import Workspace

_BLOCK, _WARPS = 8192, 32


def cross_entropy(rows: LogitRows, workspace: Workspace) -> None:
    num_rows, vocab_size = rows.logits.shape
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    launch(
        _cross_entropy_kernel, (num_rows,), rows.logits, rows.labels, rows.losses,
        rows.logits.stride(0), vocab_size, rows.loss_scale, BLOCK=block,
        num_warps=max(1, _WARPS * block // _BLOCK),
    )  # fmt: skip


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, labels_ptr, losses_ptr, stride, vocab_size, loss_scale_ptr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride
    label = tl.load(labels_ptr + row)
    scale = tl.where(label >= 0, tl.load(loss_scale_ptr), 0.0)
    label = tl.maximum(label, 0)
    at_label = tl.load(logits + label).to(tl.float32)
    maximum = tl.full([], float("-inf"), tl.float32)
    totals = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf"))
        x = x.to(tl.float32)
        larger = tl.maximum(maximum, tl.max(x, axis=0))
        totals = totals * tl.exp(maximum - larger) + tl.exp(x - larger)
        maximum = larger
    total = tl.sum(totals, axis=0)
    tl.store(losses_ptr + row, (tl.log(total) - (at_label - maximum)) * scale)
    factor = scale / total
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocab_size
        x = tl.load(logits + columns, mask=inside, other=float("-inf")).to(tl.float32)
        d_logits = tl.exp(x - maximum) * factor
        d_logits = tl.where(columns == label, d_logits - scale, d_logits)
        tl.store(logits + columns, rounded(d_logits, logits_ptr.dtype.element_ty), mask=inside)
