"""Packed sequences of unequal lengths: taken one by one, or told to a library that takes them all.

Legend: T tokens of all sequences, B sequences.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from twinstream.executor.kernels.attention.implementation import (
    AttentionCalls,
    AttentionGradients,
    AttentionInputs,
    AttentionResult,
)
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.demand.attention_shape import equal_runs

_ALL = slice(None)


@dataclass(frozen=True)
class OneByOne:
    """Forward and backward of those that take only equal lengths: a call for each sequence.

    Those of one token are called on `of_one_token`, where a library takes none so short.
    """

    equal: AttentionCalls
    of_one_token: AttentionCalls | None = None

    def forward(
        self, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> None:
        for tokens in _sequences(inputs):
            of_one = _result_of(result, tokens)
            self._for(tokens).forward(_inputs_of(inputs, tokens), of_one, workspace)

    def backward(
        self,
        inputs: AttentionInputs,
        result: AttentionResult,
        d_out_BSHD: torch.Tensor,
        gradients: AttentionGradients,
        workspace: Workspace,
    ) -> None:
        for tokens in _sequences(inputs):
            into = AttentionGradients(
                gradients.d_q[:, tokens], gradients.d_kv[:, tokens], gradients.accumulate
            )
            of_one, d_out = _result_of(result, tokens), d_out_BSHD[:, tokens]
            backward = self._for(tokens).backward
            backward(_inputs_of(inputs, tokens), of_one, d_out, into, workspace)

    def _for(self, tokens: slice) -> AttentionCalls:
        if self.of_one_token is not None and tokens != _ALL and tokens.stop - tokens.start == 1:
            return self.of_one_token
        return self.equal


@dataclass(frozen=True)
class Starts:
    """Where each sequence starts, as libraries are told it: 0, and the sums of the lengths."""

    tensor: torch.Tensor  # [B + 1], int32
    longest: int

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device, workspace: Workspace) -> "Starts":
        """Made on the device, by a launch for each run of equal lengths: nothing is copied."""
        starts = workspace.take((len(lengths) + 1,), torch.int32)
        index = position = 0
        for length, count in equal_runs(lengths):
            end = position + count * length
            out = starts[index : index + count + 1]
            torch.arange(position, end + 1, length, out=out, device=device)
            index, position = index + count, end
        return cls(starts, max(lengths))


def _sequences(inputs: AttentionInputs) -> Iterator[slice]:
    """The tokens of each sequence; of equal lengths all at once."""
    if not inputs.lengths:
        yield _ALL
        return
    ends = [0]
    for length in inputs.lengths:
        ends.append(ends[-1] + length)
    for start, end in pairwise(ends):
        yield slice(start, end)


def _inputs_of(inputs: AttentionInputs, tokens: slice) -> AttentionInputs:
    q, k, v = (x[:, tokens] for x in (inputs.q, inputs.k, inputs.v))
    return AttentionInputs(q, k, v, inputs.scale)


def _result_of(result: AttentionResult, tokens: slice) -> AttentionResult:
    return AttentionResult(result.out[:, tokens], result.lse[:, :, tokens])
