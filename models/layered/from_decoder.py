"""A decoder as layers: tokens, blocks, head."""

from typing import Any

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layered.model import LayeredModel, LayeredModelError


def layered_decoder(spec: ModelSpec, seq_len: int) -> LayeredModel:
    """Return a decoder as layers, whose sample is one sequence.

    Norms and biases are left out, as they are of other layered models. A head that is tied to the
    embedding has its parameters.

    Raises:
        LayeredModelError: it has attention that layers do not: latent, within a window, with sinks.

    >>> from twinstream.models.presets import load_preset
    >>> layered_decoder(load_preset("8b"), 4096).parameters
    8029995008
    """
    if spec.latent is not None or spec.window is not None or spec.sinks:
        raise LayeredModelError(
            f"{spec.name} has latent attention, windows or sinks, which layers have no sizes for: "
            "twinstream plan --cluster prices them"
        )
    width, vocab = spec.d_model, spec.vocab_size
    return LayeredModel.model_validate(
        {
            "name": spec.name,
            "dtype": spec.dtype,
            "layers": [
                {
                    "kind": "tokens", "vocab": vocab, "width": width, "seq_len": seq_len,
                    "positions": spec.positions == "learned", "tied": spec.tied_embeddings,
                },
                *[_blocks(kind, count, seq_len) for kind, count in spec.layer_kinds],
                {"kind": "mlp", "name": "head", "widths": [width, vocab], "rows": seq_len},
            ],
        }
    )  # fmt: skip


def _blocks(spec: ModelSpec, count: int, seq_len: int) -> dict[str, Any]:
    experts = spec.experts
    found: dict[str, Any] = {
        "kind": "transformer", "layers": count, "heads": spec.num_heads, "width": spec.d_model,
        "kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "ffn": spec.d_ff,
        "seq_len": seq_len, "causal": True, "gated": spec.gated,
    }  # fmt: skip
    if experts is None:
        return found
    return found | {
        "ffn": experts.d_ff, "experts": experts.count, "active": experts.per_token,
        "shared": experts.shared_d_ff,
    }  # fmt: skip
