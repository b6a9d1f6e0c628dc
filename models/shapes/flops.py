"""Model FLOPs of training on one sequence, of a model by its shape.

A multiply-add is 2 FLOPs; only matrix products count. Attention is causal: half of the S x S scores
count. Of routed experts those count that a token goes to, and the router.
"""

from twinstream.models.shapes.shape import ModelShape


def shape_flops_per_sequence(shape: ModelShape, seq_len: int) -> int:
    """Forward and backward, 3 x forward, nothing recomputed; the vocabulary not padded.

    Returns:
        FLOPs, a count (not FLOP/s).

    Source: as `twinstream.models.flops`, which it equals where both are defined.

    >>> from twinstream.models.flops import model_flops_per_sequence
    >>> from twinstream.models.presets import load_preset
    >>> spec = load_preset("8b")
    >>> shape_flops_per_sequence(ModelShape.of(spec), 8192) == model_flops_per_sequence(spec, 8192)
    True
    """
    matmul = 2 * seq_len * shape.d_model * (2 * shape.d_q + 2 * shape.d_kv + _mlp_width(shape))
    attention = 2 * seq_len * seq_len * shape.d_q
    head = 2 * seq_len * shape.d_model * shape.vocab_size
    return 3 * (shape.num_layers * (matmul + attention) + head)


def _mlp_width(shape: ModelShape) -> int:
    """Columns of width d_model that a token is multiplied with after attention."""
    matrices = 3 if shape.gated else 2
    experts = shape.experts
    if experts is None:
        return matrices * shape.d_ff
    return experts.count + matrices * (experts.per_token * experts.d_ff + experts.shared_d_ff)
