"""Layouts of the flat tensors at both ends of the model, from a kernel's attributes."""

from twinstream.models.demand.workspace import Attributes, required_attributes, typed_attribute
from twinstream.models.layout import Layout, embedding_layout, head_layout
from twinstream.models.spec import ModelSpec


def head_layout_of(attributes: Attributes) -> Layout:
    return head_layout(_spec(attributes, tied=typed_attribute(attributes, "tied", bool)))


def embedding_layout_of(attributes: Attributes) -> Layout:
    return embedding_layout(_spec(attributes, tied=False))


def _spec(attributes: Attributes, *, tied: bool) -> ModelSpec:
    """A spec with the sizes that matter at the ends; those of its one block are arbitrary."""
    block = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "d_ff": 1}
    ends = required_attributes(attributes, "d_model", "vocab_size", "dtype")
    return ModelSpec.model_validate({"name": "ends", "tied_embeddings": tied, **block, **ends})
