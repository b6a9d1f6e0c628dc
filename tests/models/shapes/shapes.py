"""Shapes with few round sizes, and their variants."""

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.options import Experts

GATED = ModelSpec(
    name="gated", num_layers=3, d_model=40, num_heads=8, num_kv_heads=2, head_dim=6, d_ff=56,
    vocab_size=200,
)  # fmt: skip
PLAIN = ModelSpec(
    name="plain", num_layers=3, d_model=48, num_heads=8, num_kv_heads=8, head_dim=6, d_ff=192,
    vocab_size=200, mlp="gelu", norm="layer", positions="learned", max_positions=64, biases=True,
    dropout=True, tied_embeddings=True,
)  # fmt: skip
ROUTED = GATED.model_copy(
    update={"experts": Experts(count=8, per_token=2, d_ff=24, shared_d_ff=16), "qk_norm": True}
)
