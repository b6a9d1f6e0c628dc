"""Parameters that one token passes through: of the routed experts only its own."""

from twinstream.models.decoders.sizes import layer_parameters
from twinstream.models.decoders.spec import ModelSpec


def active_parameters(spec: ModelSpec) -> int:
    """Embedding and head count whole, as the published numbers of active parameters do."""
    per_token = spec.experts.per_token if spec.experts else 0
    idle = 0
    for kind, count in spec.layer_kinds:
        layer = layer_parameters(kind)
        idle += count * (layer.total - layer.active(per_token if kind.experts else 0))
    return spec.num_parameters - idle
