"""What experts do with their rows: matmuls by each row's expert, and sums of a token's rows.

One product for each expert that has rows; where they end is read by the host, which waits for it.
(`torch.nn.functional.grouped_mm` would not, but takes its result from torch's allocator, of which
no plan knows, and rounds twice where it adds.) Legend: T tokens, K experts of each, S = T K rows in
the order of experts, E experts, I and O widths.
"""

from collections.abc import Iterator

import torch

from twinstream.executor.kernels.vector.gradients import add_matmul
from twinstream.executor.kernels.vector.row_blocks import row_blocks
from twinstream.schedule.ops import Mode


def grouped_matmul(
    x_SI: torch.Tensor, matrices_EIO: torch.Tensor, ends_E: torch.Tensor, out_SO: torch.Tensor,
    *, scale: float = 1.0, accumulate: bool = False,
) -> None:  # fmt: skip
    for expert, rows in _rows_of_experts(ends_E):
        x, matrix, out = x_SI[rows], matrices_EIO[expert], out_SO[rows]
        torch.addmm(out, x, matrix, beta=float(accumulate), alpha=scale, out=out)


def add_grouped_gradient(
    gradient_EOI: torch.Tensor, d_SO: torch.Tensor, x_SI: torch.Tensor, ends_E: torch.Tensor,
    mode: Mode,
) -> None:  # fmt: skip
    for expert, rows in _rows_of_experts(ends_E, with_empty=mode == "write"):
        add_matmul(gradient_EOI[expert], d_SO[rows].t(), x_SI[rows], mode)


def add_rows(
    x_SO: torch.Tensor, weights_TK: torch.Tensor | None, places_S: torch.Tensor,
    residual_TO: torch.Tensor | None, out_TO: torch.Tensor,
) -> None:  # fmt: skip
    per_token = x_SO.shape[0] // out_TO.shape[0]
    places_TK = places_S.view(-1, per_token)
    for rows in row_blocks(out_TO.shape[0], per_token * out_TO.shape[1]):
        each_RKO = x_SO[places_TK[rows]].float()
        if weights_TK is not None:
            each_RKO.mul_(weights_TK[rows][:, :, None])
        total = each_RKO.sum(1)
        out_TO[rows].copy_(total if residual_TO is None else total.add_(residual_TO[rows]))


def weigh_rows(
    d_SI: torch.Tensor, product_SI: torch.Tensor, weights_TK: torch.Tensor, places_S: torch.Tensor,
    d_weights_TK: torch.Tensor,
) -> None:  # fmt: skip
    weights_S = torch.empty_like(places_S, dtype=torch.float32)
    weights_S.scatter_(0, places_S, weights_TK.reshape(-1))
    d_weights_S = torch.empty_like(weights_S)
    for rows in row_blocks(*d_SI.shape):
        weights_R1 = weights_S[rows, None]
        d, product = d_SI[rows].float(), product_SI[rows].float()
        torch.sum(d * product, 1, out=d_weights_S[rows])
        d_SI[rows].copy_(d.mul_(weights_R1))
        product_SI[rows].copy_(product.mul_(weights_R1))
    torch.index_select(d_weights_S, 0, places_S, out=d_weights_TK.view(-1))


def _rows_of_experts(
    ends_E: torch.Tensor, *, with_empty: bool = False
) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start or with_empty:
            yield expert, slice(start, end)
        start = end
