"""What lowering, planner and executor ask of a model, and who answers: our decoders, and traced
modules."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import JsonValue, ValidationError

from twinstream.models.executable import NotExecutableError
from twinstream.models.hf.config import Dtype
from twinstream.models.layout import FlatLayout
from twinstream.models.options import Experts
from twinstream.models.presets import load_model
from twinstream.models.spec import ModelSpec
from twinstream.models.traced import TracedModel
from twinstream.models.traced_parts import PositionLimit
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
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

    @property
    def untrained_groups(self) -> tuple[str, ...]:
        """Those of them that are never trained, whatever a recipe says."""

    def group_layout(self, group: str) -> FlatLayout:
        """How the parameters of a group lie in its flat tensor."""

    def layer_of(self, group: str) -> int | None:
        """The block that alone reads a group; None of those outside blocks and of shared ones."""

    @property
    def slices_sequences(self) -> bool:
        """Whether a chunk may be a slice of a sequence."""

    @property
    def layer_bytes(self) -> int:
        """Of the flat parameters of the largest block."""

    def ref(self) -> ModelRef:
        """What documents say of it, from which `model_of` makes it again."""


_Node = TypeVar("_Node", bound=Node)
AnyModel = ModelSpec | TracedModel
"""All that there are."""


def load_any_model(
    name_or_path: str | Path | AnyModel, *, dtype: Dtype | None = None, longest: int | None = None
) -> AnyModel:
    """Load what `load_model` does, or a traced model's document by its path.

    Raises:
        UnknownModelError: neither a preset nor an existing path.
        HfConfigError: the config.json cannot be read, or asks for what is not supported.
        DocumentError: the document of a traced model cannot be read.
    """
    found = name_or_path
    if isinstance(found, str | Path) and is_traced(found):
        found = TracedModel.load(Path(found))
    if not isinstance(found, TracedModel):
        return load_model(found, dtype=dtype, longest=longest)
    if dtype not in (None, found.dtype):
        raise TwinstreamError(
            f"'{found.name}' was traced in {found.dtype}: trace it again with --dtype {dtype}"
        )
    return found


def is_traced(path: str | Path) -> bool:
    """Whether a path is that of a traced model's document."""
    file = Path(path)
    if file.suffix != ".json" or not file.is_file():
        return False
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "calls" in content and "prelude" in content


def model_of(ref: ModelRef | Mapping[str, JsonValue]) -> AnyModel:
    """The model that a document is about.

    Raises:
        TwinstreamError: it is not one that this version knows.
    """
    spec = ref.spec if isinstance(ref, ModelRef) else ref
    if "calls" in spec:
        return node_in(spec, TracedModel, "model")
    return node_in(spec, ModelSpec, "model")


def node_in(fields: Mapping[str, JsonValue], kind: type[_Node], what: str) -> _Node:
    """A part of a document that is kept as plain fields.

    Raises:
        TwinstreamError: it is not valid; says where.
    """
    try:
        return kind.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise TwinstreamError(
            f"the document's {what} is not valid at '{place}': {first['msg']}"
        ) from None


def chunk_refusal(
    model: AnyModel, seq_len: int, chunk_tokens: int, longest: int | None = None
) -> str | None:
    """Why a model has no such chunks; None where it has them.

    A traced module has so many positions; and its masks and costs are those of lengths that no
    window of it separates.

    Args:
        longest: of a sequence, where S is of several that lie side by side.
    """
    if (why := length_refusal(model, longest or seq_len)) is not None or isinstance(
        model, ModelSpec
    ):
        return why
    return traced_length_refusal(model, chunk_tokens if model.is_packed else seq_len)


def length_refusal(model: AnyModel, seq_len: int) -> str | None:
    """Why a model has no positions for sequences of that length; None where it has."""
    limit = position_limit(model)
    if limit is None or seq_len <= limit.tokens:
        return None
    return (
        f"'{model.name}' takes sequences of up to {limit.tokens:,} tokens, not {seq_len:,}: "
        f"{limit.why}; --seq-len {limit.tokens}"
    )


def position_limit(model: AnyModel) -> PositionLimit | None:
    """The longest sequence that a model has positions for, and why; None where there is no end."""
    if isinstance(model, TracedModel):
        return model.positions
    if not model.max_positions:
        return None
    why = f"its table of learned positions has {model.max_positions:,} rows"
    return PositionLimit(tokens=model.max_positions, why=why)


def traced_length_refusal(model: TracedModel, length: int) -> str | None:
    """Why a traced module's costs and masks are not those of a chunk of so long a row."""
    low, high = model.min_seq_len, model.max_seq_len
    what = "chunks" if model.is_packed else "sequences"
    if low <= length <= (length if high is None else high):
        return None
    lengths = f"{low:,} tokens or more" if high is None else f"{low:,} to {high:,} tokens"
    return (
        f"'{model.name}' was traced for {what} of {lengths}, not {length:,}: trace it with "
        f"--seq-len {length}"
    )


def is_traced_ref(ref: ModelRef) -> bool:
    """Whether a document is about a traced module."""
    return "calls" in ref.spec


def with_aux_loss(model: AnyModel, coefficient: float | None) -> AnyModel:
    """The model with a load-balancing loss that counts so much; as its config has it without.

    Raises:
        NotExecutableError: it has no experts of our kernels.
    """
    if coefficient is None:
        return model
    if not isinstance(model, ModelSpec) or model.experts is None:
        raise NotExecutableError(
            f"--aux-loss is of experts that our own kernels run, and '{model.name}' has none: "
            "leave it out"
        )
    fields = model.experts.model_dump() | {"aux_loss": coefficient}
    return model.model_copy(update={"experts": Experts.model_validate(fields)})


def require_decoder(model: AnyModel) -> ModelSpec:
    """The model, where only twinstream's own kernels will do.

    Raises:
        NotExecutableError: it is a traced module.
    """
    if isinstance(model, ModelSpec):
        return model
    raise NotExecutableError(
        f"'{model.name}' is a traced module: it is planned and trained on one device; this takes "
        "twinstream's own kernels, which compute llama, mistral, qwen2, qwen3 and some with experts"
    )
