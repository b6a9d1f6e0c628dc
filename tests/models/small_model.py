"""A model small enough for reckoning by hand: d_q = 24 and d_kv = 12 differ from d_model = 10."""

from twinstream.models.decoders.spec import ModelSpec

SMALL = ModelSpec(
    name="small",
    num_layers=3,
    d_model=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    d_ff=7,
    vocab_size=11,
)
