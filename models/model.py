"""What lowering, planner and executor ask of a model, and who answers: our decoders, and traced
modules."""

import json
from collections.abc import Mapping
from typing import Protocol

from pydantic import JsonValue, ValidationError

from twinstream.models.layout import FlatLayout
from twinstream.models.spec import ModelSpec
from twinstream.models.traced import TracedModel
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import ModelRef


class Model(Protocol):
    """A model whose step is a chain of tasks: `ModelSpec` or `TracedModel`.

    Its parameters are groups, each one flat tensor of one dtype. The base's groups are in the order
    of the forward pass; a recipe may add adapters (`models.trained`). The tasks of a step are made
    by `models.lowering`, which is the only one to know more of a model than this.
    """

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def dtype(self) -> str:
        """Of parameters and activations."""

    @property
    def itemsize(self) -> int:
        """Bytes per element of parameters."""

    @property
    def num_layers(self) -> int:
        """How many blocks it has."""

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""

    @property
    def parameter_groups(self) -> tuple[str, ...]:
        """Groups of parameters, in the order of the forward pass."""

    def group_layout(self, group: str) -> FlatLayout:
        """How the parameters of a group lie in its flat tensor."""

    def layer_of(self, group: str) -> int | None:
        """The block that alone reads a group; None of those outside blocks and of shared ones."""

    @property
    def layer_bytes(self) -> int:
        """Of the flat parameters of the largest block."""

    def ref(self) -> ModelRef:
        """What documents say of it, from which `model_of` makes it again."""


AnyModel = ModelSpec | TracedModel
"""All that there are."""


def model_of(ref: ModelRef | Mapping[str, JsonValue]) -> AnyModel:
    """The model that a document is about.

    Raises:
        TwinstreamError: it is not one that this version knows.
    """
    spec = ref.spec if isinstance(ref, ModelRef) else ref
    kind = TracedModel if "calls" in spec else ModelSpec
    try:
        return kind.model_validate_json(json.dumps(spec))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise TwinstreamError(
            f"the document's model is not valid at '{place}': {first['msg']}"
        ) from None


def decoder_of(ref: ModelRef | Mapping[str, JsonValue]) -> ModelSpec:
    """The decoder of ours that a document is about.

    Raises:
        TwinstreamError: it is another model, of which what is asked for is not known.
    """
    model = model_of(ref)
    if isinstance(model, ModelSpec):
        return model
    raise TwinstreamError(
        f"'{model.name}' is a traced module: this is possible with twinstream's own kernels only, "
        "which compute the families llama, mistral, qwen2 and qwen3"
    )
