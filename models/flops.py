"""The metrics of a training step: model FLOPs, MFU, HFU, and bytes of saved activations.

Legend: S tokens per sequence, d model width, d_q width of all query heads, d_kv of all key heads,
f FFN width, V vocabulary, L layers. A multiply-add is 2 FLOPs; only matrix products count, so
norms, RoPE, softmax, SwiGLU, embedding lookups and the optimizer are zero. Attention is causal:
half of the S x S scores count.
"""

from enum import StrEnum

from twinstream.models.spec import ModelSpec
from twinstream.schedule.workload import Workload

FP32_BYTES = 4


class SavedLevel(StrEnum):
    """How much of a block's forward pass is kept for its backward pass, least first."""

    INPUT = "INPUT"
    ATTENTION = "ATTENTION"
    FULL = "FULL"


def layer_matmul_flops(spec: ModelSpec, seq_len: int) -> int:
    """FLOPs of the projections of one layer in the forward pass of one sequence.

    2 S d (2 d_q + 2 d_kv + 3 f): Q, K, V, output, gate, up and down. Backward costs twice this.

    Raises:
        ValueError: seq_len is not positive.

    Source: Korthikanti et al., arXiv:2205.05198, appendix A, with grouped K and V and a gated FFN.
    """
    _check_positive(seq_len)
    return 2 * seq_len * spec.d_model * (2 * spec.d_q + 2 * spec.d_kv + 3 * spec.d_ff)


def attention_forward_flops(spec: ModelSpec, seq_len: int) -> int:
    """FLOPs of QK^T and PV of one layer in the forward pass of one sequence.

    0.5 x 2 x (2 S S d_q): two products, half of each for the causal mask.

    Raises:
        ValueError: seq_len is not positive.

    Source: Dao, FlashAttention-2, arXiv:2307.08691, section 4.1.
    """
    _check_positive(seq_len)
    return 2 * seq_len * seq_len * spec.d_q


def attention_backward_flops(spec: ModelSpec, seq_len: int) -> int:
    """FLOPs of dV, dP, dQ and dK of one layer in the backward pass of one sequence.

    0.5 x 4 x (2 S S d_q). The scores that a flash kernel recomputes are hardware FLOPs, see
    `flash_backward_recompute_flops`.

    Raises:
        ValueError: seq_len is not positive.

    Source: as `attention_forward_flops`, whose 2.5 x forward for a flash backward is this plus the
    recomputed scores.
    """
    return 2 * attention_forward_flops(spec, seq_len)


def flash_backward_recompute_flops(spec: ModelSpec, seq_len: int) -> int:
    """FLOPs of the scores QK^T that one layer's flash backward recomputes, for one sequence.

    0.5 x (2 S S d_q). Counts in HFU, not in MFU.

    Raises:
        ValueError: seq_len is not positive.

    Source: Dao, FlashAttention-2, arXiv:2307.08691, section 4.1: five products in backward.
    """
    _check_positive(seq_len)
    return seq_len * seq_len * spec.d_q


def head_flops(spec: ModelSpec, seq_len: int) -> int:
    """FLOPs of the LM head, forward and backward, for one sequence: 3 x (2 S d V).

    Tied or not, the product is the same.

    Raises:
        ValueError: seq_len is not positive.
    """
    _check_positive(seq_len)
    return 3 * 2 * seq_len * spec.d_model * spec.vocab_size


def model_flops_per_sequence(spec: ModelSpec, seq_len: int) -> int:
    """Model FLOPs of training on one sequence: forward and backward, nothing recomputed.

    L (3 layer matmul + attention forward + attention backward) + head.

    Returns:
        FLOPs, a count (not FLOP/s).

    Raises:
        ValueError: seq_len is not positive.

    >>> from twinstream.models.presets import load_preset
    >>> model_flops_per_sequence(load_preset("tiny"), 1024)
    8254390272
    """
    per_layer = (
        3 * layer_matmul_flops(spec, seq_len)
        + attention_forward_flops(spec, seq_len)
        + attention_backward_flops(spec, seq_len)
    )
    return spec.num_layers * per_layer + head_flops(spec, seq_len)


def model_flops_per_step(spec: ModelSpec, workload: Workload) -> int:
    """Model FLOPs of all sequences of one training step, each by its own length.

    >>> from twinstream.models.presets import load_preset
    >>> unequal = Workload(seq_len=3, chunk_tokens=4, chunks_per_round=1, rounds_per_step=2,
    ...                    sequence_lengths=(3, 1))
    >>> tiny = load_preset("tiny")
    >>> once = model_flops_per_sequence(tiny, 3) + model_flops_per_sequence(tiny, 1)
    >>> model_flops_per_step(tiny, unequal) == 2 * once
    True
    """
    if not workload.sequence_lengths:
        return workload.sequences_per_step * model_flops_per_sequence(spec, workload.seq_len)
    per_chunk = sum(model_flops_per_sequence(spec, n) for n in workload.sequence_lengths)
    return workload.chunks_per_round * workload.rounds_per_step * per_chunk


def model_flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Model FLOPs of training on one token, the mean over a sequence of seq_len tokens.

    Raises:
        ValueError: seq_len is not positive.

    >>> from twinstream.models.presets import load_preset
    >>> round(model_flops_per_token(load_preset("8b"), 8192) / 1e9, 2)
    51.47
    """
    return model_flops_per_sequence(spec, seq_len) / seq_len


def model_flops_utilization(*, model_flops: float, time_ns: float, peak_flop_per_s: float) -> float:
    """MFU: model FLOPs / (time x peak), a fraction.

    Args:
        model_flops: of all sequences trained on in that time.
        time_ns: wall time, stalls and optimizer included.
        peak_flop_per_s: dense peak in the dtype of the matrix products, of all devices together.

    Raises:
        ValueError: time or peak is not positive.

    Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
    """
    _check_positive(time_ns)
    _check_positive(peak_flop_per_s)
    return model_flops / (time_ns * 1e-9 * peak_flop_per_s)


def hardware_flops_utilization(
    *, model_flops: float, recomputed_flops: float, time_ns: float, peak_flop_per_s: float
) -> float:
    """HFU: as MFU, with recomputed FLOPs added to the model FLOPs.

    Args:
        model_flops: as in `model_flops_utilization`.
        recomputed_flops: of all recompute tasks in that time, plus
            `flash_backward_recompute_flops` of every layer and sequence if attention is flash.
        time_ns: as in `model_flops_utilization`.
        peak_flop_per_s: as in `model_flops_utilization`.

    Raises:
        ValueError: time or peak is not positive.

    Source: as `model_flops_utilization`.
    """
    return model_flops_utilization(
        model_flops=model_flops + recomputed_flops, time_ns=time_ns, peak_flop_per_s=peak_flop_per_s
    )


def saved_bytes_per_token(spec: ModelSpec, level: SavedLevel) -> int:
    """Bytes that one layer keeps of one token between its forward and its backward.

    | level | saved |
    |---|---|
    | INPUT | layer input [d], two fp32 norm scalars, K and V [d_kv] |
    | ATTENTION | + fp32 log-sum-exp per head, attention output [d_q] |
    | FULL | + Q [d_q], residual stream after attention [d], gate and up projections [f] |

    Norm outputs and the SwiGLU product are recomputed by every backward. The K and V counted here
    are also the context of later chunks, not a second copy.

    >>> from twinstream.models.presets import load_preset
    >>> [saved_bytes_per_token(load_preset("8b"), level) for level in SavedLevel]
    [12296, 20616, 94344]
    """
    saved_bytes = spec.itemsize * (spec.d_model + 2 * spec.d_kv) + 2 * FP32_BYTES
    if level is SavedLevel.INPUT:
        return saved_bytes
    saved_bytes += FP32_BYTES * spec.num_heads + spec.itemsize * spec.d_q
    if level is SavedLevel.ATTENTION:
        return saved_bytes
    return saved_bytes + spec.itemsize * (spec.d_q + spec.d_model + 2 * spec.d_ff)


def _check_positive(value: float) -> None:
    if not value > 0:
        raise ValueError(f"{value} is not positive")
