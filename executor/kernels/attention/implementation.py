"""The interface of attention implementations: their inputs, and what they say of themselves.

Causal attention of equally long sequences, aligned bottom-right: with fewer queries than keys,
the queries are the last positions. Packed sequences of any lengths lie one behind the other in a
batch of one. Legend: B sequences, S queries and C keys of each, H query
heads, K key heads (query heads h with h // (H / K) = k share key head k), D head_dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import torch

from twinstream.executor.kernels.operand import Pack
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.kernel_costs.attention_shape import room_for_longest, room_for_sequences

ALL_TOKENS = slice(None)


@dataclass(frozen=True)
class Starts:
    """The starts of packed sequences as libraries take them: 0, and the sums of their lengths.

    The last sum, that of all tokens, is repeated to the end of `cu_seqlens`. None is longer than
    `longest`. `pack` is asked at a call for what the host knows of them then.
    """

    cu_seqlens: torch.Tensor  # [most sequences + 1], int32
    longest: int
    pack: Callable[[], Pack | None] = lambda: None

    def narrowed(self, num_heads: int) -> "Starts":
        """With little more room than there are sequences now, and than the longest is long.

        For libraries that launch blocks for all there is room for. In a graph, which is captured
        before any are fed, the room is as planned.
        """
        pack = self.pack()
        if pack is None:
            return self
        count = room_for_sequences(pack.count, self.cu_seqlens.numel() - 1, num_heads)
        return Starts(self.cu_seqlens[: count + 1], room_for_longest(pack.longest, self.longest))

    @staticmethod
    def cumulative(lengths: Sequence[int], most_sequences: int) -> torch.Tensor:
        """`cu_seqlens` of these lengths, on the host."""
        ends = list(accumulate(lengths, initial=0))
        ends += [ends[-1]] * (most_sequences + 1 - len(ends))
        return torch.tensor(ends, dtype=torch.int32)

    def tokens_of_each(self) -> Iterator[slice]:
        """Those of each sequence; waits for the device, if it has the starts."""
        for start, end in pairwise(self.cu_seqlens.tolist()):
            if start < end:
                yield slice(start, end)


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, keys and values, and the factor on the scores; views may be strided.

    `starts` are of packed sequences whose tokens do not see one another: B is 1, and S = C the
    tokens of all. Where it is not `causal` every query sees all keys.
    """

    q: torch.Tensor  # [B, S, H, D]
    k: torch.Tensor  # [B, C, K, D]
    v: torch.Tensor  # [B, C, K, D]
    scale: float
    starts: Starts | None = None
    causal: bool = True


@dataclass(frozen=True)
class AttentionResult:
    """The output and, in float32, the log-sum-exp of each row of scaled scores."""

    out: torch.Tensor  # [B, S, H, D]
    lse: torch.Tensor  # [B, H, S]


@dataclass(frozen=True)
class AttentionGradients:
    """The gradient of the output, and where the backward leaves its results.

    d_q is overwritten. d_kv holds the gradient of K, then V; it is overwritten, or, with
    `accumulate`, it is float32 and added to.
    """

    d_out: torch.Tensor  # [B, S, H, D]
    d_q: torch.Tensor  # [B, S, H, D]
    d_kv: torch.Tensor  # [B, C, 2, K, D]
    accumulate: bool


class AttentionImplementation(ABC):
    """One way to compute attention.

    What it computes, and whether it gives the same bits from run to run, is in
    `twinstream.models.kernel_costs.attention_limits`. Where it does not take packed sequences it is
    called for one after the other, whose lengths the host then reads from the device.
    """

    name: ClassVar[str]
    takes_packed: ClassVar[bool] = False

    def missing(self) -> str | None:
        """Return what of the library is not installed, and how to install it; imports nothing."""
        library = attention_limits(self.name).library
        return None if library is None else library.missing()

    @property
    def deterministic(self) -> bool:
        return attention_limits(self.name).deterministic

    def forward(
        self, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> None:
        """Write the result."""
        for tokens in self._sequences(inputs):
            of_one = AttentionResult(result.out[:, tokens], result.lse[:, :, tokens])
            self._for(tokens)._forward(_inputs_of(inputs, tokens), of_one, workspace)

    def backward(
        self, inputs: AttentionInputs, result: AttentionResult, gradients: AttentionGradients,
        workspace: Workspace,
    ) -> None:  # fmt: skip
        """Write the gradients of the inputs."""
        for tokens in self._sequences(inputs):
            of_one = AttentionResult(result.out[:, tokens], result.lse[:, :, tokens])
            d_out, d_q = gradients.d_out[:, tokens], gradients.d_q[:, tokens]
            into = AttentionGradients(d_out, d_q, gradients.d_kv[:, tokens], gradients.accumulate)
            self._for(tokens)._backward(_inputs_of(inputs, tokens), of_one, into, workspace)

    @abstractmethod
    def _forward(
        self, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> None: ...

    @abstractmethod
    def _backward(
        self, inputs: AttentionInputs, result: AttentionResult, gradients: AttentionGradients,
        workspace: Workspace,
    ) -> None: ...  # fmt: skip

    def _for(self, tokens: slice) -> "AttentionImplementation":
        """Who computes a sequence with these tokens."""
        return self

    def _sequences(self, inputs: AttentionInputs) -> Iterator[slice]:
        """The tokens of each call."""
        if self.takes_packed or inputs.starts is None:
            yield ALL_TOKENS
        else:
            yield from inputs.starts.tokens_of_each()


def _inputs_of(inputs: AttentionInputs, tokens: slice) -> AttentionInputs:
    if tokens == ALL_TOKENS:
        return inputs
    q, k, v = (x[:, tokens] for x in (inputs.q, inputs.k, inputs.v))
    return AttentionInputs(q, k, v, inputs.scale)
