"""What lowering, planner and executor ask of a model, and who answers: our decoders, and traced
modules."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypeVar

from pydantic import JsonValue, PlainValidator, ValidationError

from twinstream.models.decoders.config import Dtype
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layered.model import layered_names, load_layered
from twinstream.models.layout import FlatLayout
from twinstream.models.options import Experts, PositionLimit
from twinstream.models.presets import load_model
from twinstream.models.providers.of_layers import layered_module
from twinstream.models.providers.traced import TracedModel
from twinstream.models.providers.traced_parts import TracedInput
from twinstream.models.recipes.lora import ModuleLora
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.schedule.workload import ModelRef


class NotExecutableError(TwinstreamError):
    """A model of which sizes are known, and what is asked of it is not here."""


class Model(Protocol):
    """A model whose step is a chain of tasks, and all that is asked of one.

    Its parameters are groups, each one flat tensor of one dtype. The base's groups are in the order
    of the forward pass; a recipe may add adapters (`models.trained`).

    A provider is a class of models: `ModelSpec`, `TracedModel`. Another one is a class with these
    answers among `KINDS`, and by the name of its `provider` the tasks of its step in
    `models.lowering` and what runs them in `executor.providers`.
    """

    @property
    def provider(self) -> str:
        """The key of what lowers and what runs its tasks."""

    @property
    def name(self) -> str:
        """The name that people call it by."""

    @property
    def dtype(self) -> str:
        """Of parameters and activations."""

    @property
    def itemsize(self) -> int:
        """Bytes per element of parameters."""

    @property
    def num_layers(self) -> int:
        """Number of blocks."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def head_dim(self) -> int | None:
        """Width of a head of attention; None where no attention of ours computes it."""

    @property
    def parameter_groups(self) -> tuple[str, ...]:
        """Groups of parameters, in the order of the forward pass."""

    @property
    def untrained_groups(self) -> tuple[str, ...]:
        """Those of them that are never trained, whatever a recipe says."""

    def group_layout(self, group: str) -> FlatLayout:
        """Return how the parameters of a group lie in its flat tensor."""

    def layer_of(self, group: str) -> int | None:
        """Return the block that alone reads a group; None of those outside and of shared ones."""

    @property
    def layer_bytes(self) -> int:
        """Of the flat parameters of the largest block."""

    @property
    def slices_sequences(self) -> bool:
        """A chunk may be a slice of a sequence."""

    @property
    def is_packed(self) -> bool:
        """Documents that are packed in a chunk do not see each other."""

    @property
    def inputs(self) -> tuple[TracedInput, ...]:
        """Tensors that each sample has, of a model that takes them in place of token ids."""

    @property
    def position_limit(self) -> PositionLimit | None:
        """The longest sequence that it has positions for, and why; None where there is no end."""

    def size_refusal(self, seq_len: int, chunk_tokens: int) -> str | None:
        """Say why its costs are not those of such chunks."""

    @property
    def executor_refusal(self) -> str | None:
        """Why nothing here runs it; None of what runs."""

    @property
    def ranks_refusal(self) -> str | None:
        """Why it does not run on several GPUs, if on one."""

    @property
    def decoder(self) -> ModelSpec | None:
        """The model as a decoder of our kernels: those have layouts, recipes' adapters, and bases
        in few bits."""

    @property
    def own_code(self) -> str | None:
        """The family whose modules compute its blocks; None where our kernels do."""

    @property
    def attention(self) -> str | None:
        """The attention of its own code."""

    @property
    def own_lora(self) -> ModuleLora | None:
        """Adapters that are a part of it."""

    @property
    def is_tried_in_peft(self) -> bool:
        """PEFT has been seen to load an adapter of it with the loss that it had here."""

    @property
    def python_files(self) -> tuple[tuple[str, str], ...]:
        """Path and digest of each file or folder of Python that it is built of."""

    @property
    def unread_told(self) -> str | None:
        """A sentence about parameters that forward does not read; None where it reads all."""

    @property
    def identity(self) -> Mapping[str, object]:
        """What a run that goes on must find as it was."""

    def ref(self) -> ModelRef:
        """Return what documents say of it, from which `model_of` makes it again."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Return it with other fields."""


_Node = TypeVar("_Node", bound=Node)
KINDS: tuple[type[ModelSpec | TracedModel], ...] = (TracedModel, ModelSpec)
"""Classes of models; a document is one of the first that it describes."""


def _of_document(given: object) -> object:
    """A model from its fields."""
    if not isinstance(given, Mapping):
        return given
    return _kind_of(given).model_validate_json(json.dumps(given))


def _kind_of(fields: Mapping[str, object]) -> type[ModelSpec | TracedModel]:
    return next((kind for kind in KINDS if fields.keys() >= kind.MARKS), ModelSpec)


AnyModel = Annotated[Model, PlainValidator(_of_document)]
"""One of any class, also as a field of a document."""


def load_any_model(
    name_or_path: str | Path | AnyModel, *, dtype: Dtype | None = None, longest: int | None = None
) -> AnyModel:
    """Load what `load_model` does, a traced model's document by its path, or a model of layers.

    Raises:
        UnknownModelError: neither a preset nor an existing path.
        HfConfigError: the config.json cannot be read, or asks for what is not supported.
        DocumentError: the document of a traced model cannot be read.
    """
    found = name_or_path
    if isinstance(found, str | Path) and is_traced(found):
        found = TracedModel.load(Path(found))
    if found in layered_names():
        found = layered_module(load_layered(found))
    if isinstance(found, str | Path | ModelSpec):
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
    fields = ref.spec if isinstance(ref, ModelRef) else ref
    return node_in(fields, _kind_of(fields), "model")


def provider_named(ref: ModelRef) -> str:
    """Return the provider of the model that a document is about, if only its sizes stand there."""
    return _kind_of(ref.spec).provider


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
    model: Model, seq_len: int, chunk_tokens: int, longest: int | None = None
) -> str | None:
    """Say why a model has no such chunks; None where it has them.

    Args:
        longest: of a sequence, where S is of several that lie side by side.
    """
    why = length_refusal(model, longest or seq_len)
    return why or model.size_refusal(seq_len, chunk_tokens)


def length_refusal(model: Model, seq_len: int) -> str | None:
    """Say why a model has no positions for sequences of that length; None where it has."""
    limit = model.position_limit
    if limit is None or seq_len <= limit.tokens:
        return None
    return (
        f"'{model.name}' takes sequences of up to {limit.tokens:,} tokens, not {seq_len:,}: "
        f"{limit.why}; --seq-len {limit.tokens}"
    )


def with_aux_loss(model: Model, coefficient: float | None) -> Model:
    """Return the model with a load-balancing loss that counts so much; as its config has it
    without.

    Raises:
        NotExecutableError: it has no experts of our kernels.
    """
    if coefficient is None:
        return model
    if model.decoder is None or (experts := model.decoder.experts) is None:
        raise NotExecutableError(
            f"--aux-loss is of experts that our own kernels run, and '{model.name}' has none: "
            "leave it out"
        )
    fields = experts.model_dump() | {"aux_loss": coefficient}
    return model.model_copy(update={"experts": Experts.model_validate(fields)})


def require_executable(model: Model) -> None:
    """Refuse a model that nothing here runs.

    Raises:
        NotExecutableError: says which fields stand in the way.
    """
    if (reason := model.executor_refusal) is not None:
        raise NotExecutableError(
            f"'{model.name}' is planned for clusters only (--cluster), since nothing here runs it: "
            f"{reason}"
        )


def require_decoder(model: Model) -> ModelSpec:
    """Return the model, where only twinstream's own kernels will do.

    Raises:
        NotExecutableError: other code computes it.
    """
    if model.decoder is not None:
        return model.decoder
    raise NotExecutableError(
        f"'{model.name}' is a traced module: it is planned and trained on one device; this takes "
        "twinstream's own kernels, which compute llama, mistral, qwen2, qwen3 and some with experts"
    )
