"""Stand-ins for libraries that need a GPU: they compute on the CPU what the library promises.

They hold our calls to the libraries' interfaces (argument by argument; torch's operators even by
their own schemas, on which the stand-ins are registered for the CPU). They cannot show that a
library keeps its promises: tests marked gpu do that.

Legend: B sequences, S queries and C keys of each, H query heads, K key heads, D head_dim.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType

import pytest
import torch


def forward(q, k, v, scale, *, causal, top_left):
    """Output [B, S, H, D] in the dtype of q and log-sum-exp [B, H, S] in float32."""
    scores, values = _scores(q, k, v, scale, causal=causal, top_left=top_left)
    out = torch.einsum("bhsc,bchd->bshd", scores.softmax(-1), values)
    return out.to(q.dtype), scores.logsumexp(-1).float()


def backward(d_out, q, k, v, out, lse, scale, *, causal, top_left):  # noqa: PLR0913
    """Gradients of q, k and v from the log-sum-exp and output given, as flash kernels do."""
    scores, values = _scores(q, k, v, scale, causal=causal, top_left=top_left)
    probabilities = (scores - lse.double()[..., None]).exp()
    d_out = d_out.double()
    delta = (d_out * out.double()).sum(-1).transpose(1, 2)[..., None]
    d_probabilities = torch.einsum("bshd,bchd->bhsc", d_out, values)
    d_scores = probabilities * (d_probabilities - delta) * scale
    keys = _by_query_head(k, q)
    d_q = torch.einsum("bhsc,bchd->bshd", d_scores, keys)
    d_k = torch.einsum("bhsc,bshd->bchd", d_scores, q.double())
    d_v = torch.einsum("bhsc,bshd->bchd", probabilities, d_out)
    heads = (k.shape[2], -1)
    d_k, d_v = (torch.unflatten(x, 2, heads).sum(3) for x in (d_k, d_v))
    return d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype)


def varlen_forward(q, k, v, starts, longest, scale):
    """Of unequal lengths: Q [T, H, D], K and V [T, K, D]; output [T, H, D], log-sum-exp [H, T]."""
    found = [
        forward(*(x[None, rows] for x in (q, k, v)), scale, causal=True, top_left=False)
        for rows in _rows(q, starts, longest)
    ]
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs, dim=1)[0], torch.cat(lses, dim=2)[0]


def varlen_backward(d_out, q, k, v, out, lse, starts, longest, scale):  # noqa: PLR0913
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
    found = []
    for rows in _rows(q, starts, longest):
        of_one = (x[None, rows] for x in (d_out, q, k, v, out))
        lse_of_one = lse[None, :, rows]
        found.append(backward(*of_one, lse_of_one, scale, causal=True, top_left=False))
    return tuple(torch.cat(each, dim=1)[0] for each in zip(*found, strict=True))


def _rows(q, starts, longest):
    """The rows of each sequence, as the cumulative lengths say; a host that knows the longest."""
    assert starts.dtype == torch.int32 and starts.is_contiguous() and starts.device == q.device
    ends = starts.tolist()
    assert ends[0] == 0 and ends[-1] == q.shape[0]
    assert longest >= max(after - before for before, after in pairwise(ends))
    return [slice(before, after) for before, after in pairwise(ends) if before < after]


def _scores(q, k, v, scale, *, causal, top_left):
    keys, values = _by_query_head(k, q), _by_query_head(v, q)
    scores = torch.einsum("bshd,bchd->bhsc", q.double(), keys) * scale
    if causal:
        offset = 0 if top_left else k.shape[1] - q.shape[1]
        seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril(offset)
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores, values


def _by_query_head(x, q):
    return x.double().repeat_interleave(q.shape[2] // x.shape[2], dim=2)


@contextmanager
def torch_cuda_kernels(seen: list[dict]) -> Iterator[None]:
    """Torch's CUDA-only attention operators, on the CPU; what they were called with is recorded."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "_scaled_dot_product_flash_attention": _flash_forward,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_flash_attention_forward": _varlen_flash_forward,
        "_flash_attention_backward": _varlen_flash_backward,
        "_scaled_dot_product_cudnn_attention": _cudnn_forward,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    }.items():
        library.impl(name, _recorded(function, seen), "CPU")
    try:
        yield
    finally:
        library._destroy()


def _recorded(function: Callable, seen: list[dict]) -> Callable:
    def call(*arguments, **named):
        found, facts = function(*arguments, **named)
        facts["deterministic"] = torch.get_deterministic_debug_mode() == 2
        facts["fills"] = torch.utils.deterministic.fill_uninitialized_memory
        seen.append({"name": function.__name__, **facts})
        return found

    return call


def _swapped(*tensors):
    return tuple(x.transpose(1, 2) for x in tensors)


def _flash_forward(  # noqa: PLR0913
    q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    assert dropout_p == 0.0 and not return_debug_mask
    out, lse = forward(*_swapped(q, k, v), scale, causal=is_causal, top_left=False)
    seed = torch.empty(2, dtype=torch.int64)
    found = (*_swapped(out), lse, None, None, q.shape[2], k.shape[2], seed, seed, q.new_empty(0))
    return found, {"causal": is_causal, "keys": k.shape[2]}


def _flash_backward(  # noqa: PLR0913
    d_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed,
    offset, *, scale=None,
):  # fmt: skip
    assert (cum_seq_q, cum_seq_k, max_q, max_k) == (None, None, q.shape[2], k.shape[2])
    assert dropout_p == 0.0 and lse.is_contiguous()
    swapped = _swapped(d_out, q, k, v, out)
    found = backward(*swapped, lse, scale, causal=is_causal, top_left=False)
    return _swapped(*found), {"causal": is_causal, "keys": k.shape[2]}


def _varlen_flash_forward(  # noqa: PLR0913
    q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None,
):  # fmt: skip
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, True, False)
    assert cum_seq_q.equal(cum_seq_k) and max_q == max_k
    out, lse = varlen_forward(q, k, v, cum_seq_q, max_q, scale)
    state = torch.empty(2, dtype=torch.int64)
    return (out, lse, state, state.clone(), q.new_empty(0)), {"causal": True, "longest": max_q}


def _varlen_flash_backward(  # noqa: PLR0913
    d_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None,
):  # fmt: skip
    assert (dropout_p, is_causal) == (0.0, True)
    assert cum_seq_q.equal(cum_seq_k) and max_q == max_k
    found = varlen_backward(d_out, q, k, v, out, lse, cum_seq_q, max_q, scale)
    return found, {"causal": True, "longest": max_q}


def _cudnn_forward(  # noqa: PLR0913
    q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
    return_debug_mask=False, *, scale=None,
):  # fmt: skip
    assert attn_bias is None and compute_log_sumexp and dropout_p == 0.0
    out, lse = forward(*_swapped(q, k, v), scale, causal=is_causal, top_left=True)
    seed = torch.empty((), dtype=torch.int64)
    lse_BHS1 = lse[..., None]
    found = (*_swapped(out), lse_BHS1, None, None, q.shape[2], k.shape[2], seed, seed, None)
    return found, {"causal": is_causal, "keys": k.shape[2]}


def _cudnn_backward(  # noqa: PLR0913
    d_out, q, k, v, out, lse, seed, offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k,
    dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    assert (attn_bias, cum_seq_q, cum_seq_k) == (None, None, None)
    assert (max_q, max_k, dropout_p) == (q.shape[2], k.shape[2], 0.0)
    assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
    swapped = _swapped(d_out, q, k, v, out)
    found = backward(*swapped, lse[..., 0], scale, causal=is_causal, top_left=True)
    return _swapped(*found), {"causal": is_causal, "keys": k.shape[2]}


# What our calls must say wherever a library asks for it.
ALWAYS = {
    "alibi": None, "block_table": None, "generator": None, "leftpad_k": None, "rng_state": None,
    "seqused_k": None, "k_new": None, "v_new": None, "q_v": None, "p": 0.0, "softcap": 0.0,
    "left": -1, "right": -1, "return_softmax": False, "zero_tensors": False, "causal": True,
    "num_splits": 1, "return_lse": True, "deterministic": True,
}  # fmt: skip
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def flash2_module() -> ModuleType:
    """flash_attn_2_cuda of flash-attn 2.8, whose arguments have no names."""
    rest = "alibi p scale causal left right softcap"
    lengths = "alibi max_seqlen_q max_seqlen_k p scale zero_tensors causal left right softcap"
    starts, gradients = "cu_seqlens_q cu_seqlens_k", "dout q k v out lse dq dk dv"
    kept = "seqused_k leftpad_k block_table"
    return module_of(
        "flash_attn_2_cuda",
        fwd=_stand_in(f"q k v out {rest} return_softmax generator"),
        bwd=_stand_in(f"{gradients} {rest} deterministic generator rng_state"),
        varlen_fwd=_stand_in(f"q k v out {starts} {kept} {lengths} return_softmax generator"),
        varlen_bwd=_stand_in(f"{gradients} {starts} {lengths} deterministic generator rng_state"),
    )


def flash4_module() -> ModuleType:
    """flash_attn.cute.interface of flash-attn-4 4.0.0b36."""
    return module_of(
        "flash_attn.cute.interface",
        _flash_attn_fwd=_stand_in("q k v", "scale causal num_splits return_lse out lse"),
        _flash_attn_bwd=_stand_in("q k v out dout lse", "scale causal deterministic dq dk dv"),
    )


@contextmanager
def flash3_operators() -> Iterator[None]:
    """torch.ops.flash_attn_3, by the names and order of the arguments that we use."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, "
        "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, "
        "Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
        "float? softmax_scale=None, bool is_causal=False, int num_splits=0) "
        "-> (Tensor(out!), Tensor, Tensor, Tensor)"
    )
    library.define(
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        "Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, "
        "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, "
        "int? max_seqlen_k=None, float? softmax_scale=None, bool is_causal=False, "
        "bool deterministic=False) "
        "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!))"
    )
    lengths = " ".join(LENGTHS)
    forward_of = _stand_in(f"q k v k_new v_new q_v out {lengths} scale causal num_splits")
    library.impl("fwd", forward_of, "CPU")
    backward_of = _stand_in(f"dout q k v out lse dq dk dv {lengths} scale causal deterministic")
    library.impl("bwd", backward_of, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _stand_in(by_position: str, by_name: str = "") -> Callable:
    """Computes what a flash library promises from arguments of these names, and checks them."""
    positions, named = by_position.split(), set(by_name.split())

    def call(*arguments, **more):
        if by_name:
            more["scale"] = more.pop("softmax_scale")
        assert named <= more.keys() <= named | set(LENGTHS)
        given = dict(zip(positions, arguments, strict=True)) | more
        for name in given.keys() & ALWAYS.keys():
            assert given[name] == ALWAYS[name], name
        return _written(given) if "dout" in given else _found(given)

    return call


def _starts(given):
    """The cumulative lengths and the longest, or None where lengths are equal."""
    starts, other, longest, other_longest = (given.get(name) for name in LENGTHS)
    if starts is None:
        assert (other, longest, other_longest) == (None, None, None)
        return None
    assert starts.equal(other) and longest == other_longest
    return starts, longest


def _found(given):
    q, k, v, scale, starts = *(given[name] for name in ("q", "k", "v", "scale")), _starts(given)
    if starts is None:
        out, lse = forward(q, k, v, scale, causal=True, top_left=False)
    else:
        out, lse = varlen_forward(q, k, v, *starts, scale)
    if "lse" in given:
        assert given["lse"].is_contiguous()
        given["lse"].copy_(lse)
    return given["out"].copy_(out), lse, q.new_empty(0), q.new_empty(0)


def _written(given):
    d_out, q, k, v, out, lse = (given[name] for name in ("dout", "q", "k", "v", "out", "lse"))
    into, starts = [given[name] for name in ("dq", "dk", "dv")], _starts(given)
    assert lse.is_contiguous() and lse.dtype == torch.float32
    assert {x.dtype for x in into} == {q.dtype}
    if starts is None:
        found = backward(d_out, q, k, v, out, lse, given["scale"], causal=True, top_left=False)
    else:
        found = varlen_backward(d_out, q, k, v, out, lse, *starts, given["scale"])
    for target, value in zip(into, found, strict=True):
        target.copy_(value)
    return tuple(into)


def module_of(name: str, **functions) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(functions)
    return module


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Put a module, and the packages it is in, where imports find them."""
    parts = module.__name__.split(".")
    for end in range(1, len(parts)):
        package = ModuleType(".".join(parts[:end]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
