"""The demands of the seed system's kernels, where they are not ours.

Source: als244/ml_dataflow, libdataflowmodels/src/transformer/src/dataflow_transformer.c and
backends/nvidia/src/ops/src/native (July 2025). It multiplies by Wq, Wk, Wv, W1 and W3 apart, copies
K and V into the context of packed sequences too, keeps and copies the incoming gradient, sums norm
weights in kernels of their own, computes SwiGLU again beside its gradient, and its softmax reads
the logits twice, after which the loss touches one element of a row.
"""

from collections.abc import Callable, Mapping

from twinstream.models.kernel_costs.work import ChunkWork
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.cost import Work
from twinstream.schedule.document import RankSchedule

_COPY = "vector"
_RECIPE = Recipe(kernels=KernelChoice(attention="flash3"))  # what the recorded runs called


def with_its_kernels(schedule: RankSchedule, spec: ModelSpec) -> RankSchedule:
    """The schedule with the demands of the seed system's kernels in place of ours.

    It times what was measured. It no longer conforms to the chain, whose demands are those of the
    kernels that our executor would run.
    """
    calls = {}
    for name, call in schedule.calls.items():
        demand = _DEMANDS.get(call.kernel.split("/")[0])
        if demand is not None:
            start = call.attributes.get("chunk_start", 0)
            assert isinstance(start, int)
            cost = demand(ChunkWork(spec, schedule.workload, start, _RECIPE))
            call = call.model_copy(update={"cost": cost})
        calls[name] = call
    return schedule.model_copy(update={"calls": calls})


def _block_forward(chunk: ChunkWork) -> tuple[Work, ...]:
    t, s = chunk.tokens, chunk.spec
    return (
        chunk.vector("rms_norm", 4 * t * s.d_model, launches=2),
        *_projections(chunk),
        chunk.vector("rope", 2 * t * (s.d_q + s.d_kv)),
        *_context(chunk),
        chunk.attention_forward(),
        chunk.matmul(t, s.d_model, s.d_q, accumulate=True),
        chunk.matmul(t, s.d_ff, s.d_model),
        chunk.matmul(t, s.d_ff, s.d_model),
        chunk.vector("swiglu", 3 * t * s.d_ff),
        chunk.matmul(t, s.d_model, s.d_ff, accumulate=True),
    )


def _projections(chunk: ChunkWork) -> tuple[Work, ...]:
    s = chunk.spec
    return tuple(chunk.matmul(chunk.tokens, n, s.d_model) for n in (s.d_q, s.d_kv, s.d_kv))


def _context(chunk: ChunkWork) -> tuple[Work, ...]:
    """The copies of K and V that are no ops of the schedule: of a sequence's last chunk."""
    if chunk.start + chunk.tokens < chunk.workload.seq_len:
        return ()
    return (chunk.vector(_COPY, 4 * chunk.tokens * chunk.spec.d_kv, launches=2),)


def _recompute_attention(chunk: ChunkWork) -> tuple[Work, ...]:
    return _recompute(chunk, ())


def _recompute_input(chunk: ChunkWork) -> tuple[Work, ...]:
    return _recompute(chunk, (chunk.attention_forward(),))


def _recompute(chunk: ChunkWork, attention: tuple[Work, ...]) -> tuple[Work, ...]:
    t, s = chunk.tokens, chunk.spec
    return (
        chunk.vector("rms_norm", 4 * t * s.d_model, launches=2),
        chunk.matmul(t, s.d_q, s.d_model),
        chunk.vector("rope", 2 * t * s.d_q),
        *attention,
        chunk.matmul(t, s.d_model, s.d_q, accumulate=True),
        chunk.matmul(t, s.d_ff, s.d_model),
        chunk.matmul(t, s.d_ff, s.d_model),
    )


def _block_backward(chunk: ChunkWork) -> tuple[Work, ...]:
    return (*_input_gradients(chunk), *_weight_gradients(chunk))


def _input_gradients(chunk: ChunkWork) -> tuple[Work, ...]:
    t, s = chunk.tokens, chunk.spec
    d, f, q, k = s.d_model, s.d_ff, s.d_q, s.d_kv
    return (
        chunk.vector(_COPY, 2 * t * d),
        chunk.matmul(t, f, d),
        chunk.vector("swiglu", 5 * t * f),
        chunk.matmul(t, d, f),
        chunk.matmul(t, d, f, accumulate=True),
        *_norm_backward(chunk),
        chunk.vector(_COPY, 2 * t * d),
        chunk.matmul(t, q, d),
        chunk.attention_backward(),
        chunk.vector(_COPY, 6 * t * k, launches=4),
        chunk.vector("rope", 2 * t * (q + k)),
        chunk.matmul(t, d, q),
        chunk.matmul(t, d, k, accumulate=True),
        chunk.matmul(t, d, k, accumulate=True),
        *_norm_backward(chunk),
    )


def _norm_backward(chunk: ChunkWork) -> tuple[Work, ...]:
    """Reads x, the gradient, what it adds to; writes the sum and the norm. Then dW of the norm."""
    elements = chunk.tokens * chunk.spec.d_model
    return (
        chunk.vector("rms_norm", 5 * elements),
        chunk.vector("rms_norm", 2 * elements, launches=2),
    )


def _weight_gradients(chunk: ChunkWork) -> tuple[Work, ...]:
    t, s = chunk.tokens, chunk.spec
    d, f = s.d_model, s.d_ff
    shapes = ((f, d), (d, f), (d, f), (d, s.d_q), (s.d_kv, d), (s.d_kv, d), (s.d_q, d))
    matmuls = (chunk.matmul(m, n, t, accumulate=True) for m, n in shapes)
    return (chunk.vector("swiglu", 3 * t * f), *matmuls)


def _head_loss(chunk: ChunkWork) -> tuple[Work, ...]:
    t, d, v = chunk.tokens, chunk.spec.d_model, chunk.spec.vocab_size
    return (
        chunk.vector("rms_norm", 2 * t * d),
        chunk.matmul(t, v, d),
        chunk.vector("cross_entropy", 3 * t * v),
        chunk.matmul(v, d, t, accumulate=True),
        chunk.matmul(t, d, v),
        *_norm_backward(chunk),
    )


_DEMANDS: Mapping[str, Callable[[ChunkWork], tuple[Work, ...]]] = {
    "block_forward": _block_forward,
    "block_recompute_attention": _recompute_attention,
    "block_recompute_input": _recompute_input,
    "block_backward": _block_backward,
    "head_loss": _head_loss,
}
