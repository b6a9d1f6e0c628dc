"""Cross entropy and its gradient in place. A program a row of logits; V vocabulary.

The row is read twice: first for its maximum and sum, then to be replaced by its gradient. There is
a program of 32 warps for each of 132 multiprocessors, so that 132 rows of 256 KiB (8B) are at work
at a time, 34 MiB, which the second read finds in the L2 cache of an H100 (50 MB) or H200 (60 MB).
A maximum is kept for the elements of a thread alone: the first read waits for no other warp.
"""

import triton
import triton.language as tl

from twinstream.executor.kernels.triton_kernels.launch import launch
from twinstream.executor.kernels.triton_kernels.rounding import rounded
from twinstream.executor.kernels.vector.vector_ops import LogitRows
from twinstream.executor.kernels.workspace import Workspace

_BLOCK, _WARPS = 16384, 32
_PROGRAMS = 132  # which of them takes a row changes no bit
_GROUP = 8  # elements of one load of bf16
_LOWEST = tl.constexpr(-3.0e38)  # below any logit, and finite


def cross_entropy(rows: LogitRows, workspace: Workspace) -> None:
    num_rows, vocab_size = rows.logits.shape
    block = max(_GROUP, min(_BLOCK, triton.next_power_of_2(vocab_size)))
    launch(
        _cross_entropy_kernel, (min(_PROGRAMS, num_rows),), rows.logits, rows.labels, rows.losses,
        rows.logits.stride(0), num_rows, vocab_size, rows.loss_scale, BLOCK=block, GROUP=_GROUP,
        SCALES=rows.loss_scale.numel() > 1, num_warps=max(1, _WARPS * block // _BLOCK),
    )  # fmt: skip


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, labels_ptr, losses_ptr, stride, num_rows, vocab_size, loss_scale_ptr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = BLOCK // GROUP
    in_block = tl.arange(0, groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    for row_index in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(row_index, tl.int64)
        logits = logits_ptr + row * stride
        label = tl.load(labels_ptr + row)
        scale = tl.load(loss_scale_ptr + (row if SCALES else 0))
        scale = tl.where(label >= 0, scale, 0.0)
        label = tl.maximum(label, 0)
        at_label = tl.load(logits + label).to(tl.float32)
        maxima = tl.full([groups], _LOWEST, tl.float32)
        totals = tl.zeros([groups], dtype=tl.float32)
        for start in range(0, vocab_size, BLOCK):
            columns = start + in_block
            x = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf"))
            x = x.to(tl.float32)
            larger = tl.maximum(maxima, tl.max(x, axis=1))
            totals = totals * tl.exp(maxima - larger) + tl.sum(tl.exp(x - larger[:, None]), axis=1)
            maxima = larger
        maximum = tl.max(maxima, axis=0)
        total = tl.sum(totals * tl.exp(maxima - maximum), axis=0)
        tl.store(losses_ptr + row, (tl.log(total) - (at_label - maximum)) * scale)
        factor = scale / total
        for start in range(0, vocab_size, BLOCK):
            columns = start + in_block
            inside = columns < vocab_size
            x = tl.load(logits + columns, mask=inside, other=float("-inf")).to(tl.float32)
            d_logits = tl.exp(x - maximum) * factor
            d_logits = tl.where(columns == label, d_logits - scale, d_logits)
            tl.store(logits + columns, rounded(d_logits, dtype), mask=inside)
