"""Parameters that one token passes through: of the routed experts only its own."""

from twinstream.models.decoders.spec import ModelSpec, layer_parameters


def active_parameters(spec: ModelSpec) -> int:
    """Embedding and head count whole, as the published numbers of active parameters do."""
    layer = layer_parameters(spec)
    per_token = spec.experts.per_token if spec.experts else 0
    return spec.num_parameters - spec.num_layers * (layer.total - layer.active(per_token))
