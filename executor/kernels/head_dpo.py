"""DPO's loss of pairs of packed sequences, and its gradients, by two passes over the rows.

The first pass has the losses of all rows; added up they are the log-probability of each sequence,
and those of two sequences and of the reference make a pair's loss. What that changes with a row's
loss is the row's scale in the second pass, which is that of cross entropy.

Legend: T tokens of the chunk, P pairs that it has room for, of which the first may be there; their
sequences are the chunk's first, the chosen one of a pair before the rejected one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import logsigmoid

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.head_forward import HeadForward
from twinstream.executor.kernels.head_loss import add_balance, add_gradients
from twinstream.executor.kernels.operand import Operands
from twinstream.executor.kernels.vector.gradients import add_vector
from twinstream.executor.kernels.vector.vector_ops import VectorOps
from twinstream.models.kernel_costs.attributes import Attributes, typed_attribute
from twinstream.models.loss import Dpo
from twinstream.schedule.ops import Mode

Take = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def head_dpo(operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls) -> None:
    """Write d_hidden and the log-probabilities; write or add the loss and the weights' gradients.

    The loss is the sum over pairs of theirs (`Dpo`), times what `step_state` says: one over the
    number of pairs in the step.
    """
    head = HeadForward.of(operands, attributes)
    scales_T = _add_pairs(head, operands, attributes, vector, calls)
    add_gradients(replace(head, loss_scale=scales_T), operands, attributes, vector, calls)
    add_balance(operands, attributes, calls)


def head_dpo_evaluate(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the log-probabilities; write or add the loss: to the bit as `head_dpo` has them."""
    _add_pairs(HeadForward.of(operands, attributes), operands, attributes, vector, calls)


@dataclass(frozen=True)
class Pairs:
    """What is read and written of pairs."""

    starts: torch.Tensor  # [2 P + 1], int32: rows at which sequences start, and the last ends
    reference: torch.Tensor  # [3, P], float32: log-probabilities of chosen and rejected; 1 of pairs
    log_probs: torch.Tensor  # [2 P], float32
    loss: torch.Tensor  # [1], float32
    loss_mode: Mode
    loss_scale: torch.Tensor  # [1], float32
    wide_losses: torch.Tensor  # [T], float64
    rows: torch.Tensor  # [T], int32
    sequences: torch.Tensor  # [T], int32
    scales: torch.Tensor  # [T], float32
    dpo: Dpo

    @classmethod
    def of(
        cls, num_tokens: int, loss_scale: torch.Tensor, take: Take, operands: Operands,
        attributes: Attributes,
    ) -> "Pairs":  # fmt: skip
        """Of a chunk.

        Args:
            take: gives temporaries, of a shape and a dtype.
        """
        most = typed_attribute(attributes, "most_pairs", int)
        return cls(
            starts=operands["sequences"].view(torch.int32, (2 * most + 1,)),
            reference=operands["reference"].view(torch.float32, (3, most)),
            log_probs=operands["log_probs"].view(torch.float32, (2 * most,)),
            loss=operands["loss"].view(torch.float32, (1,)),
            loss_mode=operands["loss"].mode,
            loss_scale=loss_scale,
            wide_losses=take((num_tokens,), torch.float64),
            rows=take((num_tokens,), torch.int32),
            sequences=take((num_tokens,), torch.int32),
            scales=take((num_tokens,), torch.float32),
            dpo=Dpo(
                beta=typed_attribute(attributes, "beta", float),
                label_smoothing=typed_attribute(attributes, "label_smoothing", float),
            ),
        )


def _add_pairs(
    head: HeadForward, operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> torch.Tensor:
    """The first pass, and what pairs make of it; each row's scale, [T] float32."""
    take = head.workspace.take
    pairs = Pairs.of(len(head.labels), head.loss_scale, take, operands, attributes)
    one = take((1,), torch.float32)
    calls.add(one.fill_, 1.0)
    for _ in replace(head, loss_scale=one).slices(vector, calls):
        pass
    calls.add(write_pairs, pairs, head.losses)
    return pairs.scales


def write_pairs(pairs: Pairs, losses_T: torch.Tensor) -> None:
    """Writes log-probabilities, the loss and the rows' scales; sums are in float64."""
    beta, smoothing = pairs.dpo.beta, pairs.dpo.label_smoothing
    pairs.wide_losses.copy_(losses_T)
    sums_2P = torch.segment_reduce(
        pairs.wide_losses, "sum", offsets=pairs.starts, unsafe=True, initial=0
    )
    pairs.log_probs.copy_(sums_2P.neg_())

    # As they are kept, in float32: what has not changed has a margin of 0.
    gains_2P = pairs.log_probs.double() - pairs.reference[:2].t().flatten()
    margins_P = beta * (gains_2P[::2] - gains_2P[1::2])
    losses_P = -(1 - smoothing) * logsigmoid(margins_P) - smoothing * logsigmoid(-margins_P)
    shares_P = pairs.reference[2] * pairs.loss_scale
    loss = (losses_P * shares_P).sum(0, keepdim=True).float()
    add_vector(pairs.loss, loss, pairs.loss_mode)

    # With the loss of a chosen row a pair's loss grows by so much, with a rejected one's it falls.
    growth_P = beta * (1 - smoothing - margins_P.sigmoid()) * shares_P
    scales = torch.stack([growth_P, -growth_P], 1).flatten().float()
    scales = torch.cat([scales, scales.new_zeros(1)])  # of rows behind the last
    torch.arange(len(losses_T), out=pairs.rows)
    torch.bucketize(pairs.rows, pairs.starts[1:], right=True, out_int32=True, out=pairs.sequences)
    torch.index_select(scales, 0, pairs.sequences, out=pairs.scales)
