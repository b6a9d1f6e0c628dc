"""torch's FlashAttention-2 on the fake device, by plain arithmetic on the CPU.

Legend: B batch, H query heads, K key heads, S tokens, D head_dim, T tokens of all sequences.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from values import enqueue, on_cpu

Tensors = tuple[torch.Tensor, ...]


def _scores(
    q_BHSD: torch.Tensor, k_BKSD: torch.Tensor, scale: float | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """[B, H, S, S], and the keys of every query head."""
    k_BHSD = k_BKSD.repeat_interleave(q_BHSD.shape[1] // k_BKSD.shape[1], 1).float()
    factor = scale or q_BHSD.shape[-1] ** -0.5
    scores = q_BHSD.float() @ k_BHSD.transpose(-1, -2) * factor
    if causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores, k_BHSD, factor


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores, _, _ = _scores(q, k, scale, causal)
    lse = scores.logsumexp(-1)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1).float()
    return ((scores - lse[..., None]).exp() @ values).to(q.dtype), lse


def _backward(  # noqa: PLR0913 (those of torch)
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, causal: bool, scale: float | None,
) -> Tensors:  # fmt: skip
    key_heads = k.shape[1]
    group = q.shape[1] // key_heads
    scores, keys, factor = _scores(q, k, scale, causal)
    weights = (scores - lse[..., None]).exp()
    values, grad = v.repeat_interleave(group, 1).float(), grad.float()
    row_sums = (grad * out.float()).sum(-1, keepdim=True)
    d_scores = weights * (grad @ values.transpose(-1, -2) - row_sums) * factor

    def of_key_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (key_heads, group)).sum(2)

    dk, dv = d_scores.transpose(-1, -2) @ q.float(), weights.transpose(-1, -2) @ grad
    return (d_scores @ keys).to(q.dtype), of_key_heads(dk).to(k.dtype), of_key_heads(dv).to(v.dtype)


def _random_state(device: torch.device) -> Tensors:
    """Seed and offset of dropout, which nobody uses."""
    return (
        torch.empty(2, dtype=torch.uint64, device=device),
        torch.empty(0, dtype=torch.uint64, device=device),
    )


def _dense(  # noqa: PLR0913
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    batch, heads, tokens, head_dim = q.shape
    out = torch.empty(batch, tokens, heads, head_dim, dtype=q.dtype, device=q.device).transpose(
        1, 2
    )
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    inputs, results = [on_cpu(x) for x in (q, k, v)], [on_cpu(x) for x in (out, lse)]

    def body() -> None:
        for to, value in zip(results, _forward(*inputs, is_causal, scale), strict=True):
            to.copy_(value)

    enqueue("flash forward", body)
    seed, offset = _random_state(q.device)
    empty = torch.empty(0, dtype=q.dtype, device=q.device)
    return out, lse, None, None, tokens, k.shape[2], seed, offset, empty


def _dense_backward(  # noqa: PLR0913
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, cq: Any, ck: Any, mq: int, mk: int, dropout_p: float, is_causal: bool,
    seed: Any, offset: Any, *, scale: float | None = None,
) -> Tensors:  # fmt: skip
    results = tuple(torch.empty_like(x) for x in (q, k, v))
    inputs, into = [on_cpu(x) for x in (grad_out, q, k, v, out, lse)], [on_cpu(x) for x in results]

    def body() -> None:
        for to, value in zip(into, _backward(*inputs, is_causal, scale), strict=True):
            to.copy_(value)

    enqueue("flash backward", body)
    return results


def _sequences(starts: torch.Tensor) -> Iterator[slice]:
    """Of cu_seqlens, whose last value is repeated."""
    ends = starts.tolist()
    return (slice(a, b) for a, b in pairwise(ends) if b > a)


def _as_batch(x_THD: torch.Tensor, where: slice) -> torch.Tensor:
    """[1, H, S, D]"""
    return x_THD[where].transpose(0, 1)[None]


def _packed(  # noqa: PLR0913
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cq: torch.Tensor, ck: Any, mq: int, mk: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    **_: Any,
) -> Any:  # fmt: skip
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    *inputs, starts, out_T, lse_T = (on_cpu(x) for x in (q, k, v, cq, out, lse))

    def body() -> None:
        for where in _sequences(starts):
            found, sums = _forward(*(_as_batch(x, where) for x in inputs), is_causal, scale)
            out_T[where] = found[0].transpose(0, 1)
            lse_T[:, where] = sums[0]

    enqueue("flash packed forward", body)
    seed, offset = _random_state(q.device)
    return out, lse, seed, offset, torch.empty(0, dtype=q.dtype, device=q.device)


def _packed_backward(  # noqa: PLR0913
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, cq: torch.Tensor, ck: Any, mq: int, mk: int, dropout_p: float,
    is_causal: bool, seed: Any, offset: Any, *, scale: float | None = None, **_: Any,
) -> Tensors:  # fmt: skip
    results = tuple(torch.empty_like(x) for x in (q, k, v))
    *inputs, lse_T, starts = (on_cpu(x) for x in (grad_out, q, k, v, out, lse, cq))
    into = [on_cpu(x) for x in results]

    def body() -> None:
        for to in into:
            to.zero_()
        for where in _sequences(starts):
            found = _backward(
                *(_as_batch(x, where) for x in inputs), lse_T[:, where][None], is_causal, scale
            )
            for to, value in zip(into, found, strict=True):
                to[where] = value[0].transpose(0, 1)

    enqueue("flash packed backward", body)
    return results


FLASH: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _dense,
    "_scaled_dot_product_flash_attention_backward": _dense_backward,
    "_flash_attention_forward": _packed,
    "_flash_attention_backward": _packed_backward,
}
