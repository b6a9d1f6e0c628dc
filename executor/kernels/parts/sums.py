"""Sums over parts, in their order, in float32; through residual streams and norms.

Legend: N pieces, T tokens, D d_model, E head_dim, S slices of a rank's tokens.
"""

from collections.abc import Mapping, Sequence

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.experts.routing import routes_of
from twinstream.executor.kernels.operand import DTYPES, KernelOperand, Operands
from twinstream.executor.kernels.parts.expert_parts import RouterBackward, route_shares
from twinstream.executor.kernels.vector.gradients import (
    add_vector,
    gradient_views,
    weight_views,
)
from twinstream.executor.kernels.vector.row_blocks import float32_copy, row_blocks
from twinstream.executor.kernels.vector.vector_ops import (
    NormGradients,
    RmsNorm,
    VectorGradient,
    VectorOps,
)
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attributes import (
    NUM_SLICES,
    PIECE_GROUPS,
    QK_NORM_WIDTHS,
    Attributes,
    count_of,
    experts_of,
    typed_attribute,
)
from twinstream.models.layout import FlatLayout, packed_layout

FINAL_NORM = "final_norm"


def add_parts(operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls) -> None:
    """Write the sum of pieces and, where there is one, of what they are added to."""
    pieces_NTD, _ = _pieces(operands, attributes)
    shape, dtype = tuple(pieces_NTD[0].shape), pieces_NTD[0].dtype
    residual = operands["hidden"].view(dtype, shape) if "hidden" in operands else None
    calls.add(write_sum, pieces_NTD, residual, operands["output"].view(dtype, shape))


def norm_parts_backward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Take the sum of pieces, the gradient of normed rows, through the norm of a block or the last.

    That of a block adds to the gradient of hidden states; the last writes it. Of several slices of
    rows each has gradients of norms by itself, one behind the other.
    """
    name = typed_attribute(attributes, "norm", str)
    eps = typed_attribute(attributes, "norm_eps", float)
    pieces_NTD, heads = _pieces(operands, attributes)
    shape, dtype = tuple(pieces_NTD[0].shape), pieces_NTD[0].dtype
    has_routes = "routes" in operands
    layout, slices = _norms(name, attributes), count_of(attributes, NUM_SLICES)
    x_TD, d_hidden_TD = (operands[n].view(dtype, shape) for n in ("hidden", "d_hidden"))
    workspace = Workspace(operands["scratch"].bytes)
    num_rows = shape[0] // slices
    total_TD = workspace.take((num_rows, shape[1]), dtype)
    rstd_T = workspace.take((num_rows,), torch.float32)
    weights = weight_views(operands["parameters"], layout, dtype)
    weight = weights[name]
    normed_TD = workspace.take((num_rows, shape[1]), dtype) if has_routes else total_TD
    for number in range(slices):
        rows = slice(number * num_rows, (number + 1) * num_rows)
        norm = RmsNorm(x_TD[rows], rstd_T, weight)
        calls.add(vector.write_normed, norm, normed_TD, eps=eps)  # for its rstd, and a router
        calls.add(write_sum, [piece[rows] for piece in pieces_NTD], None, total_TD)
        d_weight, gradients = None, dict[str, torch.Tensor]()
        if (flat := _of_slice(operands.get("gradients"), number, slices)) is not None:
            gradients = gradient_views(flat, layout, attributes, calls)
            for other in gradients if flat.mode == "write" else ():
                calls.add(gradients[other].zero_)
            d_weight = VectorGradient(gradients[name], "update")
            if name == "attention_norm":
                for of_head, pieces in heads.items():
                    calls.add(_add_heads, gradients[of_head], pieces)
        if has_routes:
            router = _router(operands, attributes, weights, workspace, calls)
            router.run(normed_TD, total_TD, gradients, calls)
        d_x = d_hidden_TD[rows]
        of_norm = NormGradients(total_TD, d_x, d_weight, accumulate=name != FINAL_NORM)
        calls.add(vector.rms_norm_backward, norm, of_norm, workspace.remaining())


def _router(
    operands: Operands, attributes: Attributes, weights: Mapping[str, torch.Tensor],
    workspace: Workspace, calls: Calls,
) -> RouterBackward:  # fmt: skip
    """With the sums of what pieces have of routes, which lies last behind them."""
    experts = experts_of(attributes)
    assert experts is not None
    all_NP, (tokens, width) = _all_pieces(operands, attributes)
    heads = sum(_head_widths(attributes))
    shares = route_shares(all_NP[:, tokens * width + heads :], experts, tokens)
    routed, gate = (tokens, experts.per_token), (tokens, int(experts.shared_gate))
    made = RouterBackward(
        experts, routes_of(operands["routes"], routed), weights,
        workspace.take(routed, torch.float32), workspace.take(gate, all_NP.dtype),
        workspace.take((tokens, experts.count), all_NP.dtype),
    )  # fmt: skip
    for pieces, total in zip(shares, (made.d_weights, made.d_gate), strict=True):
        if total.numel():
            calls.add(write_sum, pieces, None, total)
    return made


def _of_slice(flat: KernelOperand | None, number: int, slices: int) -> KernelOperand | None:
    return None if flat is None else KernelOperand(flat.bytes.chunk(slices)[number], flat.mode)


def _pieces(
    operands: Operands, attributes: Attributes
) -> tuple[Sequence[torch.Tensor], dict[str, torch.Tensor]]:
    """Of hidden states, N of [T, D]; and the gradients of norms of heads that are behind them, [N,
    E] each."""
    all_NP, (tokens, width) = _all_pieces(operands, attributes)
    pieces_NTD = torch.unflatten(all_NP[:, : tokens * width], 1, (tokens, width))
    ranks = len(all_NP) // count_of(attributes, PIECE_GROUPS)
    hidden = [piece_TD for rank in range(ranks) for piece_TD in pieces_NTD[rank::ranks]]
    widths = _head_widths(attributes)
    if not widths or NUM_SLICES in attributes:
        return hidden, {}
    q, k = torch.split(all_NP[:, tokens * width :][:, : sum(widths)], widths, 1)
    return hidden, {"q_norm": q, "k_norm": k}


def _head_widths(attributes: Attributes) -> list[int]:
    """Of the norms of Q and K; none without them."""
    if isinstance(told := attributes.get(QK_NORM_WIDTHS), tuple):
        return [int(str(width)) for width in told]
    return [typed_attribute(attributes, "head_dim", int)] * 2 if "head_dim" in attributes else []


def _all_pieces(operands: Operands, attributes: Attributes) -> tuple[torch.Tensor, tuple[int, int]]:
    """[N, elements of a piece], and the shape of the hidden states at its beginning."""
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    count, elements, tokens, width = (
        typed_attribute(attributes, name, int)
        for name in ("num_pieces", "piece_elements", "num_tokens", "d_model")
    )
    return operands["pieces"].view(dtype, (count, elements)), (tokens, width)


def _norms(name: str, attributes: Attributes) -> FlatLayout:
    """The layout of the group that a norm is in."""
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    width = (typed_attribute(attributes, "d_model", int),)
    shapes: list[tuple[str, tuple[int, ...]]] = [(FINAL_NORM, width)]
    if name != FINAL_NORM:
        widths = _head_widths(attributes)
        of_heads = [
            (norm, (wide,)) for norm, wide in zip(("q_norm", "k_norm"), widths, strict=False)
        ]
        shapes = [("attention_norm", width), *of_heads, ("ffn_norm", width)]
        if (experts := experts_of(attributes)) is not None:
            gate = [("shared_gate", (1, *width))] if experts.shared_gate else []
            shapes += [("router", (experts.count, *width)), *gate]
    return packed_layout(shapes, dtype.itemsize)


def write_sum(
    pieces_NTD: Sequence[torch.Tensor] | torch.Tensor,
    residual_TD: torch.Tensor | None,
    out_TD: torch.Tensor,
) -> None:
    """out = the sum of pieces, in their order, and of what they are added to; rounded once."""
    first_TD, *others = pieces_NTD
    for rows in row_blocks(*out_TD.shape):
        total = float32_copy(first_TD[rows])
        for piece_TD in others:
            total.add_(piece_TD[rows])
        if residual_TD is not None:
            total.add_(residual_TD[rows])
        out_TD[rows].copy_(total)


def _add_heads(gradient_E: torch.Tensor, pieces_NE: torch.Tensor) -> None:
    total = float32_copy(pieces_NE[0])
    for piece_E in pieces_NE[1:]:
        total.add_(piece_E)
    add_vector(gradient_E, total, "update")
