"""Embedding and head of some rows of the vocabulary; the loss of all, without their logits.

Of each row of logits a part tells its largest, the sum of exponentials below that, and the label's.
From those of all parts follows the loss, and from its log-sum-exp the gradient of each part's
logits, which are made once more. Legend: T tokens, R rows of a slice, D d_model, V rows of the
vocabulary that a part has, N parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.embedding import sort_tokens
from twinstream.executor.kernels.head_dpo import Pairs, write_pairs
from twinstream.executor.kernels.operand import DTYPES, Operands
from twinstream.executor.kernels.step_state import StepState
from twinstream.executor.kernels.vector.gradients import add_matmul, add_vector, gradient_dtype
from twinstream.executor.kernels.vector.vector_ops import RmsNorm, SortedTokens, VectorOps
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attributes import Attributes, typed_attribute
from twinstream.models.kernel_costs.scratch_sizes import head_block_rows


def embed_part_forward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the rows of the part's ids, and zero for all others."""
    end = _End.of(operands, attributes)
    output = operands["output"]
    out_TD = output.view(end.dtype, (end.num_tokens, end.d_model))
    if (behind := output.bytes[out_TD.numel() * end.dtype.itemsize :]).numel():
        calls.add(behind.zero_)
    weight_VD = operands["parameters"].view(end.dtype, end.shape)
    calls.add(_write_rows, weight_VD, end.tokens[0], end.first_row, out_TD)


def embed_part_backward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Add the gradients of the part's ids to their rows, each row's sum rounded once."""
    end, gradients = _End.of(operands, attributes), operands["gradients"]
    gradient_VD = gradients.view(gradient_dtype(attributes), end.shape)
    if gradients.mode == "write":
        calls.add(gradients.bytes.zero_)
    shape = (end.num_tokens, end.d_model)
    d_hidden_TD = operands["d_hidden"].view(end.dtype, shape)
    workspace = Workspace(operands["scratch"].bytes)
    tokens = SortedTokens(*(workspace.take(shape[:1], torch.int64) for _ in range(3)))
    own_TD = workspace.take(shape, end.dtype)
    calls.add(_own_rows, d_hidden_TD, end.tokens[0], end, tokens, own_TD)
    calls.add(vector.add_token_gradients, own_TD, tokens, gradient_VD, workspace.remaining())


def head_part_sums(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the sums of the part's logits, [3, T]."""
    head = _HeadPart.of(operands, attributes)
    sums_3T = operands["output"].view(torch.float32, (3, head.end.num_tokens))
    for rows, _, logits_RV in head.slices(vector, calls):
        labels_R, block = head.end.tokens[1][rows], head.block
        calls.add(_write_row_sums, logits_RV, labels_R, head.end.first_row, sums_3T[:, rows], block)


def parts_loss(operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls) -> None:
    """Write the log-sum-exp of each row over all parts; write or add the loss."""
    num_parts, num_tokens = (
        typed_attribute(attributes, name, int) for name in ("num_pieces", "num_tokens")
    )
    sums_N3T = operands["pieces"].view(torch.float32, (num_parts, 3, num_tokens))
    labels_T = operands["tokens"].view(torch.int32, (2, num_tokens))[1]
    lse_T = operands["lse"].view(torch.float32, (num_tokens,))
    losses_T = Workspace(operands["scratch"].bytes).take((num_tokens,), torch.float32)
    scale = StepState(operands["step_state"].bytes).loss_scale
    calls.add(_write_losses, sums_N3T, labels_T, scale, lse_T, losses_T)
    loss = operands["loss"]
    value = loss.view(torch.float32, (1,))
    calls.add(lambda: add_vector(value, losses_T.sum(0, keepdim=True), loss.mode))


def parts_dpo(operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls) -> None:
    """The same of DPO's loss of pairs; write each row's scale and the log-probabilities."""
    num_parts, num_tokens = (
        typed_attribute(attributes, name, int) for name in ("num_pieces", "num_tokens")
    )
    sums_N3T = operands["pieces"].view(torch.float32, (num_parts, 3, num_tokens))
    labels_T = operands["tokens"].view(torch.int32, (2, num_tokens))[1]
    lse_T, scales_T = (operands[n].view(torch.float32, (num_tokens,)) for n in ("lse", "scales"))
    take = Workspace(operands["scratch"].bytes).take
    losses_T = take((num_tokens,), torch.float32)
    scale = StepState(operands["step_state"].bytes).loss_scale
    pairs = Pairs.of(num_tokens, scale, take, operands, attributes)
    one = take((1,), torch.float32)
    calls.add(one.fill_, 1.0)
    calls.add(_write_losses, sums_N3T, labels_T, one, lse_T, losses_T)
    calls.add(write_pairs, pairs, losses_T)
    calls.add(scales_T.copy_, pairs.scales)


def head_part_backward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Add the gradient of the part's rows, unless they are frozen; write its piece of the normed
    rows' gradient."""
    head = _HeadPart.of(operands, attributes)
    end, output = head.end, operands["output"]
    piece_TD = output.view(end.dtype, (end.num_tokens, end.d_model))
    if (behind := output.bytes[piece_TD.numel() * end.dtype.itemsize :]).numel():
        calls.add(behind.zero_)
    lse_T = operands["lse"].view(torch.float32, (end.num_tokens,))
    scale = StepState(operands["step_state"].bytes).loss_scale.expand(end.num_tokens)
    if "scales" in operands:
        scale = operands["scales"].view(torch.float32, (end.num_tokens,))
    gradient_VD, mode = None, "update"
    if (gradients := operands.get("gradients")) is not None:
        gradient_VD, mode = gradients.view(gradient_dtype(attributes), end.shape), gradients.mode
        if mode == "write":  # padding of shards
            calls.add(gradients.bytes[gradient_VD.nbytes :].zero_)
    for rows, normed_RD, logits_RV in head.slices(vector, calls):
        labels_R = end.tokens[1][rows]
        told = (lse_T[rows], scale[rows], head.block)
        calls.add(_turn_into_gradients, logits_RV, labels_R, end.first_row, *told)
        calls.add(torch.mm, logits_RV, head.weight, out=piece_TD[rows])
        if gradient_VD is not None:
            calls.add(add_matmul, gradient_VD, logits_RV.t(), normed_RD, mode)
        mode = "update"


@dataclass(frozen=True)
class _End:
    """Which rows of the vocabulary a part has, and the ids and labels of a chunk."""

    dtype: torch.dtype
    num_tokens: int
    d_model: int
    num_rows: int
    first_row: int
    tokens: torch.Tensor  # [2, T], int32: ids, then labels

    @classmethod
    def of(cls, operands: Operands, attributes: Attributes) -> "_End":
        num_tokens, d_model, rows, first = (
            typed_attribute(attributes, name, int)
            for name in ("num_tokens", "d_model", "vocab_size", "first_row")
        )
        dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
        tokens = operands["tokens"].view(torch.int32, (2, num_tokens))
        return cls(dtype, num_tokens, d_model, rows, first, tokens)

    @property
    def shape(self) -> tuple[int, int]:
        """[V, D], of the part's rows."""
        return self.num_rows, self.d_model


@dataclass(frozen=True)
class _HeadPart:
    """What a call on a part of the head reads, and its temporaries."""

    end: _End
    hidden: torch.Tensor  # [T, D]
    norm: torch.Tensor  # [D]
    weight: torch.Tensor  # [V, D]
    eps: float
    normed: torch.Tensor  # [R, D]
    logits: torch.Tensor  # [R, V]
    rstd: torch.Tensor  # [R], float32
    block: torch.Tensor  # rows of logits in float32

    @classmethod
    def of(cls, operands: Operands, attributes: Attributes) -> "_HeadPart":
        end = _End.of(operands, attributes)
        rows = min(typed_attribute(attributes, "row_slice", int), end.num_tokens)
        workspace = Workspace(operands["scratch"].bytes)
        return cls(
            end=end,
            hidden=operands["hidden"].view(end.dtype, (end.num_tokens, end.d_model)),
            norm=operands["shared"].view(end.dtype, (end.d_model,)),
            weight=operands["parameters"].view(end.dtype, end.shape),
            eps=typed_attribute(attributes, "norm_eps", float),
            normed=workspace.take((rows, end.d_model), end.dtype),
            logits=workspace.take((rows, end.num_rows), end.dtype),
            rstd=workspace.take((rows,), torch.float32),
            block=workspace.take(
                (head_block_rows(end.num_rows, rows), end.num_rows), torch.float32
            ),
        )

    def slices(
        self, vector: VectorOps, calls: Calls
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Make normed rows and their logits, slice by slice, in the same temporaries."""
        for start in range(0, self.end.num_tokens, len(self.normed)):
            rows = slice(start, start + len(self.normed))
            count = len(self.hidden[rows])
            normed, logits = self.normed[:count], self.logits[:count]
            norm = RmsNorm(self.hidden[rows], self.rstd[:count], self.norm)
            calls.add(vector.write_normed, norm, normed, eps=self.eps)
            calls.add(torch.mm, normed, self.weight.t(), out=logits)
            yield rows, normed, logits


def _write_rows(
    weight_VD: torch.Tensor, ids_T: torch.Tensor, first: int, out_TD: torch.Tensor
) -> None:
    local_T, is_own_T = _local(ids_T, first, len(weight_VD))
    torch.index_select(weight_VD, 0, local_T, out=out_TD)
    out_TD.masked_fill_(~is_own_T[:, None], 0)


def _own_rows(
    d_hidden_TD: torch.Tensor, ids_T: torch.Tensor, end: _End, tokens: SortedTokens,
    own_TD: torch.Tensor,
) -> None:  # fmt: skip
    """Of other parts' ids the gradients are zeros of the first row."""
    local_T, is_own_T = _local(ids_T, end.first_row, end.num_rows)
    sort_tokens(local_T, tokens)
    own_TD.copy_(d_hidden_TD).masked_fill_(~is_own_T[:, None], 0)


def _local(ids_T: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a part by ids, 0 for those of other parts, and which are its own."""
    local_T = ids_T - first
    is_own_T = (local_T >= 0) & (local_T < count)
    return local_T.masked_fill_(~is_own_T, 0), is_own_T


def _write_row_sums(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, first: int, sums_3R: torch.Tensor,
    block: torch.Tensor,
) -> None:  # fmt: skip
    for rows, x_BV in _blocks(logits_RV, block):
        largest, total, at_label = sums_3R[:, rows]
        local, is_own = _local(labels_R[rows], first, x_BV.shape[1])
        torch.gather(x_BV, 1, local.long()[:, None], out=at_label[:, None])
        at_label.masked_fill_(~is_own, 0)
        torch.amax(x_BV, 1, out=largest)
        torch.sum(x_BV.sub_(largest[:, None]).exp_(), 1, out=total)


def _write_losses(
    sums_N3T: torch.Tensor, labels_T: torch.Tensor, loss_scale: torch.Tensor, lse_T: torch.Tensor,
    losses_T: torch.Tensor,
) -> None:  # fmt: skip
    """Sums over parts are in their order; of labels all but one part's are zero."""
    largest_T = sums_N3T[:, 0].amax(0)
    total_T, at_label_T = torch.zeros_like(largest_T), torch.zeros_like(largest_T)
    for largest, total, at_label in sums_N3T:
        total_T.add_(total * (largest - largest_T).exp_())
        at_label_T.add_(at_label)
    torch.add(largest_T, total_T.log_(), out=lse_T)
    scale_T = (labels_T >= 0).float().mul_(loss_scale)
    torch.mul(at_label_T.neg_().add_(lse_T), scale_T, out=losses_T)


def _turn_into_gradients(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, first: int, lse_R: torch.Tensor,
    scale_R: torch.Tensor, block: torch.Tensor,
) -> None:  # fmt: skip
    for rows, x_BV in _blocks(logits_RV, block):
        labels = labels_R[rows]
        scale = (labels >= 0).float().mul_(scale_R[rows])
        local, is_own = _local(labels, first, x_BV.shape[1])
        x_BV.sub_(lse_R[rows, None]).exp_().mul_(scale[:, None])
        x_BV.scatter_add_(1, local.long()[:, None], (-scale * is_own)[:, None])
        logits_RV[rows].copy_(x_BV)


def _blocks(logits_RV: torch.Tensor, block: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows of logits in float32, a few at a time."""
    for start in range(0, len(logits_RV), len(block)):
        rows = slice(start, min(start + len(block), len(logits_RV)))
        yield rows, block[: rows.stop - start].copy_(logits_RV[rows])
