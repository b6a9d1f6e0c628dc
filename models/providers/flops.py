"""What training asks of a model: FLOPs of a sequence and of a step, bytes of saved activations.

Legend: S tokens per sequence, d model width, d_q width of all query heads, d_kv of all key heads,
f FFN width, V vocabulary, L layers. A multiply-add is 2 FLOPs; only matrix products count, so
norms, RoPE, softmax, SwiGLU, embedding lookups and the optimizer are zero. Attention is causal:
half of the S x S scores count.
"""

from enum import StrEnum

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import EXPERTS, dense_width
from twinstream.models.providers.trained import first_backward_layer, trained_groups
from twinstream.models.recipes.adapter_layout import adapter_sites, expert_sites
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.workload import Workload

FP32_BYTES = 4
ROUTE_BYTES = 8  # of an expert that a token goes to: its number, and the weight of its output


class SavedLevel(StrEnum):
    """How much of a block's forward pass is kept for its backward pass, least first."""

    INPUT = "INPUT"
    ATTENTION = "ATTENTION"
    EXPERTS = "EXPERTS"
    FULL = "FULL"


def model_flops_per_sequence(spec: ModelSpec, seq_len: int, recipe: Recipe | None = None) -> int:
    """Model FLOPs of training on one sequence: forward and backward, nothing recomputed.

    L (3 matmul + 3 attention) + 3 head, since backward takes two products for each of forward's:
    matmul 2 S d (2 d_q + 2 d_kv + 3 f) is Q, K, V, output, gate, up and down (2 f without a gate;
    of routed experts those that a token goes to, and the router; of latent attention all of its
    projections); attention 0.5 x 2 x (2 S S d_q) is QK^T and PV (w (2 S - w) for S S with a window
    w); head 2 S d V is the LM head, tied or not.

    Of what a recipe freezes, backward takes the product for the gradient of the input only, and
    none below the first layer that is trained or has something trained below it. Adapters take
    3 x 2 S r (in + out) for each target, forward and backward.

    Returns:
        FLOPs, a count (not FLOP/s).

    Source: Korthikanti et al., arXiv:2205.05198, appendix A, with grouped K and V and a gated FFN;
    Dao, FlashAttention-2, arXiv:2307.08691, section 4.1, whose fifth product of backward (the
    scores again) is not the model's.

    >>> from twinstream.models.presets import load_preset
    >>> model_flops_per_sequence(load_preset("tiny"), 1024)
    8254390272
    """
    recipe = recipe or Recipe()
    trained = trained_groups(spec, recipe)
    head = 2 * seq_len * spec.d_model * spec.vocab_size
    first = first_backward_layer(spec, recipe)
    blocks = weights = 0
    for layer in range(spec.num_layers):
        kind = spec.layer(layer)
        for group, elements in _weights(kind, layer).items():
            matmul = 2 * seq_len * elements
            blocks += matmul * (2 if layer >= first else 1)
            weights += matmul if group in trained else 0
        attention = (kind.d_q + kind.d_o) * kind.doubled_pairs(seq_len)
        blocks += attention * (3 if layer >= first else 1)
    head_trains = ("embedding" if spec.tied_embeddings else "head") in trained
    adapters = _adapter_flops(spec, seq_len, recipe)
    return blocks + weights + (3 if head_trains else 2) * head + adapters


def forward_flops_per_sequence(
    spec: ModelSpec, seq_len: int, recipe: Recipe | None = None, filled: int = 0
) -> int:
    """FLOPs of the forward pass of blocks over `seq_len` tokens behind `filled` others, whose keys
    and values are there; the head is not counted. Attention has 4 d_q FLOPs for each query and key.

    >>> from twinstream.models.presets import load_preset
    >>> tiny = load_preset("tiny")
    >>> head = 2 * 1024 * tiny.d_model * tiny.vocab_size
    >>> 3 * (forward_flops_per_sequence(tiny, 1024) + head) == model_flops_per_sequence(tiny, 1024)
    True
    """
    blocks = 0
    for layer in range(spec.num_layers):
        kind = spec.layer(layer)
        blocks += (kind.d_q + kind.d_o) * kind.doubled_pairs(seq_len, filled)
        blocks += 2 * seq_len * sum(_weights(kind, layer).values())
    return blocks + _adapter_flops(spec, seq_len, recipe or Recipe()) // 3


def _weights(spec: ModelSpec, layer: int) -> dict[str, int]:
    """Elements of matrices that a token is multiplied with in a layer, by their group."""
    each = spec.d_model * (3 if spec.gated else 2)
    own = spec.attention_weights + each * dense_width(spec)
    experts = spec.experts
    if experts is None:
        return {str(layer): own}
    routed = each * experts.per_token * experts.d_ff
    return {str(layer): own + spec.d_model * experts.count, f"{layer}{EXPERTS}": routed}


def _adapter_flops(spec: ModelSpec, seq_len: int, recipe: Recipe) -> int:
    """Of both products, forward, and of their four in backward."""
    if recipe.lora is None:
        return 0
    total = 0
    for kind, count in spec.layer_kinds:
        total += count * sum(site.num_parameters for site in adapter_sites(kind, recipe.lora))
        for each in expert_sites(kind, recipe.lora):
            assert kind.experts is not None
            total += count * each.num_parameters // each.count * kind.experts.per_token
    return 3 * 2 * seq_len * total


def model_flops_per_step(spec: ModelSpec, workload: Workload, recipe: Recipe | None = None) -> int:
    """Model FLOPs of all sequences of one training step, each by its own (expected) length.

    Of a step that is forward only those of forward; generating text, the head has one row of each
    sequence.

    >>> from twinstream.models.presets import load_preset
    >>> from twinstream.schedule.workload import Packing
    >>> unequal = Workload(seq_len=3, chunk_tokens=4, chunks_per_round=1, rounds_per_step=2,
    ...                    packing=Packing.of((3, 1)))
    >>> tiny = load_preset("tiny")
    >>> once = model_flops_per_sequence(tiny, 3) + model_flops_per_sequence(tiny, 1)
    >>> model_flops_per_step(tiny, unequal) == 2 * once
    True
    """
    cache, packing = workload.cache, workload.packing
    lengths = (workload.seq_len,) if packing is None else packing.expected_lengths
    packs = workload.sequences_per_step // len(lengths)
    if not workload.forward_only:
        return packs * sum(model_flops_per_sequence(spec, one, recipe) for one in lengths)
    filled = 0 if cache is None else cache.filled
    blocks = sum(forward_flops_per_sequence(spec, one, recipe, filled) for one in lengths)
    rows = len(lengths) if cache is not None else sum(lengths)
    return packs * (blocks + 2 * rows * spec.d_model * spec.vocab_size)


def saved_bytes_per_token(spec: ModelSpec, level: SavedLevel) -> int:
    """Bytes that one layer keeps of one token between its forward and its backward.

    | level | saved |
    |---|---|
    | INPUT | layer input [d], two fp32 norm scalars, K and V [d_kv] |
    | ATTENTION | + fp32 log-sum-exp per head, attention output [d_q] |
    | EXPERTS | + Q [d_q], residual stream after attention [d], gate and up projections [f] of the
      network that all tokens go through |
    | FULL | + those of routed experts |

    Norm outputs and the SwiGLU product are recomputed by every backward. The K and V counted here
    are also the context of later chunks, not a second copy. With experts INPUT has which a token
    goes to and their weights, too, and f is that of all that it goes through.

    >>> from twinstream.models.presets import load_preset
    >>> [saved_bytes_per_token(load_preset("8b"), level) for level in SavedLevel]
    [12296, 20616, 94344, 94344]
    """
    experts = spec.experts
    saved_bytes = spec.itemsize * (spec.d_model + 2 * spec.d_kv) + 2 * FP32_BYTES
    saved_bytes += experts.per_token * ROUTE_BYTES if experts else 0
    if level is SavedLevel.INPUT:
        return saved_bytes
    saved_bytes += FP32_BYTES * spec.num_heads + spec.itemsize * spec.d_q
    if level is SavedLevel.ATTENTION:
        return saved_bytes
    routed = experts.per_token * experts.d_ff if experts and level is SavedLevel.FULL else 0
    d_ff = dense_width(spec) + routed
    return saved_bytes + spec.itemsize * (spec.d_q + spec.d_model + 2 * d_ff)
