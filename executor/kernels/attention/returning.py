"""Around libraries that allocate their results; each is copied, or added, once.

Some align a causal mask top-left, as `is_causal` of torch's SDPA does: right only for as many
queries as keys. They compute the keys before the first query without a mask and the others with
it, and the two parts are merged by their log-sum-exps. An explicit mask is never made: it would
take queries times keys, and cuDNN's backward has given NaN with one. The backward of a part is
right with the log-sum-exp and the output of the whole: probabilities come from the first, and
the sum of dO * O a row is that of the whole.

Legend: B sequences, S queries and C keys of each, H query heads, K key heads, D head_dim.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from twinstream.executor.kernels.attention.dense_lse import dense_lse
from twinstream.executor.kernels.attention.implementation import (
    AttentionGradients,
    AttentionImplementation,
    AttentionInputs,
    AttentionResult,
)
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attention_memory import MERGE_BLOCK_ELEMENTS


@dataclass(frozen=True)
class _Part:
    """Some of the keys, those from `start` on."""

    inputs: AttentionInputs
    keys: slice
    causal: bool


class Returning(AttentionImplementation):
    """An implementation whose library is called with a causal mask or with none."""

    masks_top_left: ClassVar[bool] = False

    @abstractmethod
    def _out_and_lse(
        self, inputs: AttentionInputs, workspace: Workspace, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [B, S, H, D] and the log-sum-exp [B, H, S]."""

    @abstractmethod
    def _gradients(
        self, inputs: AttentionInputs, result: AttentionResult, d_out_BSHD: torch.Tensor,
        workspace: Workspace, *, causal: bool,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Those of Q [B, S, H, D], and of K and V [B, C, K, D]."""

    def _forward(
        self, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> None:
        found = []
        for part in self._parts(inputs):
            with workspace.frame():
                returned = self._out_and_lse(part.inputs, workspace, causal=part.causal)
            found.append(AttentionResult(*returned))
        if len(found) == 1:
            result.out.copy_(found[0].out)
            result.lse.copy_(found[0].lse)
            return
        merge(found[0], found[1], result, workspace)

    def _backward(
        self, inputs: AttentionInputs, result: AttentionResult, gradients: AttentionGradients,
        workspace: Workspace,
    ) -> None:  # fmt: skip
        with workspace.frame():
            dense = AttentionResult(result.out, dense_lse(result.lse, workspace))
            for number, part in enumerate(self._parts(inputs)):
                with workspace.frame():
                    d_q, d_k, d_v = self._gradients(
                        part.inputs, dense, gradients.d_out, workspace, causal=part.causal
                    )
                _put(gradients.d_q, d_q, add=number > 0)
                _put(gradients.d_kv[:, part.keys, 0], d_k, add=gradients.accumulate)
                _put(gradients.d_kv[:, part.keys, 1], d_v, add=gradients.accumulate)
                del d_q, d_k, d_v  # before the next part allocates its own

    def _parts(self, inputs: AttentionInputs) -> Iterator[_Part]:
        num_keys = inputs.k.shape[1]
        num_past = num_keys - inputs.q.shape[1]
        if num_past == 0 or not (self.masks_top_left and inputs.causal):
            yield _Part(inputs, slice(0, num_keys), causal=inputs.causal)
            return
        for keys, causal in ((slice(0, num_past), False), (slice(num_past, num_keys), True)):
            some = AttentionInputs(inputs.q, inputs.k[:, keys], inputs.v[:, keys], inputs.scale)
            yield _Part(some, keys, causal)


def _put(into: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
    if add:
        into.add_(gradient)
    else:
        into.copy_(gradient)


def merge(
    past: AttentionResult, current: AttentionResult, result: AttentionResult, workspace: Workspace
) -> None:
    """The result over the keys of both parts, in float32, rounded once; it may be the first."""
    _, num_queries, num_heads, head_dim = current.out.shape
    torch.logaddexp(past.lse, current.lse, out=result.lse)
    with workspace.frame():
        share_BHS = workspace.take(tuple(current.lse.shape), torch.float32)
        torch.sub(current.lse, result.lse, out=share_BHS).exp_()
        step = max(1, min(num_queries, MERGE_BLOCK_ELEMENTS // (num_heads * head_dim)))
        shape = (step, num_heads, head_dim)
        past_block, current_block = (workspace.take(shape, torch.float32) for _ in range(2))
        for index in range(current.out.shape[0]):
            for start in range(0, num_queries, step):
                rows = slice(start, min(start + step, num_queries))
                count = rows.stop - rows.start
                share_SH1 = share_BHS[index, :, rows].t()[:, :, None]
                merged = past_block[:count].copy_(past.out[index, rows])
                merged.lerp_(current_block[:count].copy_(current.out[index, rows]), share_SH1)
                result.out[index, rows].copy_(merged)
