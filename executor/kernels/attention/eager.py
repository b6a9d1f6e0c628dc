"""Attention in plain torch, tile by tile as in FlashAttention-2; the oracle of all the others.

Scores, softmax and sums are float32; with bf16 inputs, probabilities and score gradients are
rounded to bf16 before the second matmul, as a tensor-core kernel must. The order of all sums is
fixed by the shapes, so the bits are the same from run to run.

Legend: B sequences, S queries, C keys, H query heads, K key heads, D head_dim, R rows of a tile.

Source: Dao, FlashAttention-2, arXiv:2307.08691.
"""

import torch

from twinstream.executor.kernels.attention.implementation import (
    AttentionGradients,
    AttentionImplementation,
    AttentionInputs,
    AttentionResult,
)
from twinstream.executor.kernels.attention.tiles import Sequence, key_tile, rounded, shaped
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attention_libraries import KEY_TILE, QUERY_TILE

_Buffers = dict[str, torch.Tensor]
"""Flat temporaries of the largest tile by name; `low` only where inputs are not float32."""


class EagerAttention(AttentionImplementation):
    name = "eager"

    def _forward(
        self, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> None:
        with workspace.frame():
            buffers = _buffers(
                inputs, workspace, of_rows="maximum new_maximum total", of_queries="q out",
                of_keys="k v", of_scores="scores",
            )  # fmt: skip
            for index in range(inputs.q.shape[0]):
                sequence = Sequence.of(inputs, index)
                out_SHD, lse_HS = result.out[index], result.lse[index]
                for queries in sequence.query_tiles():
                    _forward_tile(sequence, queries, out_SHD[queries], lse_HS[:, queries], buffers)

    def _backward(
        self, inputs: AttentionInputs, result: AttentionResult, gradients: AttentionGradients,
        workspace: Workspace,
    ) -> None:  # fmt: skip
        d_kv_BC2KD = gradients.d_kv
        with workspace.frame():
            if not gradients.accumulate:
                sums_C2KD = workspace.take(tuple(d_kv_BC2KD.shape[1:]), torch.float32)
            buffers = _buffers(
                inputs, workspace, of_rows="lse delta", of_queries="q d_out d_q",
                of_keys="k v d_k_or_v", of_scores="scores d_scores",
            )  # fmt: skip
            for index in range(inputs.q.shape[0]):
                if gradients.accumulate:
                    sums_C2KD = d_kv_BC2KD[index]
                else:
                    sums_C2KD.zero_()
                sequence = Sequence.of(inputs, index)
                for queries in sequence.query_tiles():
                    of_rows = AttentionResult(
                        result.out[index, queries], result.lse[index, :, queries]
                    )
                    into = AttentionGradients(
                        gradients.d_out[index, queries], gradients.d_q[index, queries], sums_C2KD,
                        accumulate=True,
                    )  # fmt: skip
                    _backward_tile(sequence, queries, of_rows, into, buffers)
                if not gradients.accumulate:
                    d_kv_BC2KD[index].copy_(sums_C2KD)


def _forward_tile(
    sequence: Sequence, queries: slice, out_SHD: torch.Tensor, lse_HS: torch.Tensor,
    buffers: _Buffers,
) -> None:  # fmt: skip
    """One tile of queries against all keys they see, with a running maximum and total."""
    q_KRD = sequence.scaled_queries(queries, buffers["q"])
    rows = (*q_KRD.shape[:2], 1)
    out_KRD = shaped(buffers["out"], *q_KRD.shape).zero_()
    maximum = shaped(buffers["maximum"], *rows).fill_(float("-inf"))
    new_maximum = shaped(buffers["new_maximum"], *rows)
    total = shaped(buffers["total"], *rows).zero_()
    for keys in sequence.key_tiles(queries):
        k_KCD = key_tile(sequence.k[keys], buffers["k"])
        v_KCD = key_tile(sequence.v[keys], buffers["v"])
        scores = sequence.scores(q_KRD, k_KCD, queries, keys, buffers["scores"])
        torch.amax(scores, dim=2, keepdim=True, out=new_maximum)
        torch.maximum(new_maximum, maximum, out=new_maximum)
        shrink = maximum.sub_(new_maximum).exp_()
        probabilities = scores.sub_(new_maximum).exp_()
        total.mul_(shrink).add_(probabilities.sum(2, keepdim=True))
        out_KRD.mul_(shrink).baddbmm_(rounded(probabilities, buffers.get("low")), v_KCD)
        maximum, new_maximum = new_maximum, maximum
    by_group = sequence.by_group(out_SHD)
    by_group.copy_(out_KRD.div_(total).view(by_group.shape))
    lse_KSG = sequence.rows_by_group(lse_HS)
    lse_KSG.copy_(total.log_().add_(maximum).view(lse_KSG.shape))


def _backward_tile(
    sequence: Sequence, queries: slice, result: AttentionResult, gradients: AttentionGradients,
    buffers: _Buffers,
) -> None:  # fmt: skip
    """Write dQ of one tile of queries and add its share of dK and dV, [C, 2, K, D]."""
    sums_C2KD = gradients.d_kv
    q_KRD = sequence.scaled_queries(queries, buffers["q"])
    d_out_KRD = sequence.grouped(gradients.d_out, buffers["d_out"])
    d_q_KRD = sequence.grouped(result.out, buffers["d_q"])
    # delta = sum of dO * O over a row; O borrows dQ's buffer.
    delta = shaped(buffers["delta"], *q_KRD.shape[:2], 1)
    torch.sum(d_q_KRD.mul_(d_out_KRD), 2, keepdim=True, out=delta)
    d_q_KRD.zero_()
    lse_KSG = sequence.rows_by_group(result.lse)
    lse = shaped(buffers["lse"], *lse_KSG.shape).copy_(lse_KSG).view(delta.shape)
    for keys in sequence.key_tiles(queries):
        k_KCD = key_tile(sequence.k[keys], buffers["k"])
        v_KCD = key_tile(sequence.v[keys], buffers["v"])
        d_tile = shaped(buffers["d_k_or_v"], *k_KCD.shape)
        scores = sequence.scores(q_KRD, k_KCD, queries, keys, buffers["scores"])
        probabilities = scores.sub_(lse).exp_()
        d_scores = shaped(buffers["d_scores"], *scores.shape)
        torch.bmm(d_out_KRD, v_KCD.transpose(1, 2), out=d_scores)
        d_scores.sub_(delta).mul_(probabilities)
        torch.bmm(rounded(probabilities, buffers.get("low")).transpose(1, 2), d_out_KRD, out=d_tile)
        sums_C2KD[keys, 1].transpose(0, 1).add_(d_tile)
        d_q_KRD.baddbmm_(rounded(d_scores, buffers.get("low")), k_KCD)
        torch.bmm(d_scores.transpose(1, 2), q_KRD, out=d_tile)
        sums_C2KD[keys, 0].transpose(0, 1).add_(d_tile)
    by_group = sequence.by_group(gradients.d_q)
    by_group.copy_(d_q_KRD.mul_(sequence.scale).view(by_group.shape))


def _buffers(
    inputs: AttentionInputs, workspace: Workspace, *, of_rows: str, of_queries: str, of_keys: str,
    of_scores: str,
) -> _Buffers:  # fmt: skip
    """Names, and of which size: a value a row, a head a row, all heads of keys, rows times keys."""
    _, num_queries, num_heads, head_dim = inputs.q.shape
    rows = min(QUERY_TILE, num_queries) * num_heads
    keys = min(KEY_TILE, inputs.k.shape[1])
    sizes = {
        of_rows: rows,
        of_queries: rows * head_dim,
        of_keys: keys * inputs.k.shape[2] * head_dim,
        of_scores: rows * keys,
    }
    taken = {
        name: workspace.take((size,), torch.float32)
        for names, size in sizes.items()
        for name in names.split()
    }
    if inputs.q.dtype != torch.float32:
        taken["low"] = workspace.take((rows * keys,), inputs.q.dtype)
    return taken
