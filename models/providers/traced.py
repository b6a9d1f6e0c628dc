"""A model that is a list of somebody's blocks, as data; tracing writes it once, without weights.

Legend: a chunk is B sequences of S tokens (B is 1 where documents are packed). Sizes, FLOPs, bytes
and launches are polynomials in B and S. Costs stand once per kind of block.

A step of such a model is: the prelude makes values (embedded tokens, masks, rotary angles) of a
batch; each block makes new values of values; the postlude makes logits of the last ones, in slices
of rows. Backward of a block runs it again under autograd, from its inputs.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from twinstream.models.layout import ADAPTERS, FlatLayout, packed_layout
from twinstream.models.options import PositionLimit
from twinstream.models.providers.traced_parts import (
    BLOCK,
    BYTES_OF_DTYPE,
    STATE,
    UNUSED,
    TracedBuffer,
    TracedCall,
    TracedGroup,
    TracedInput,
    TracedKind,
    TracedPostlude,
    TracedPrelude,
    TracedValue,
)
from twinstream.models.recipes.lora import ModuleLora
from twinstream.schedule.files import read_document, write_text
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveSize
from twinstream.schedule.python_file import OwnFunction
from twinstream.schedule.sizes import brief
from twinstream.schedule.workload import ModelRef

# Families by their own code of which PEFT 0.21 had the loss of the run, with all targets.
TRIED_IN_PEFT = frozenset({
    "afmoe", "cohere2_moe", "deepseek_v3", "ernie4_5_moe", "exaone_moe", "gemma3_text", "glm4_moe",
    "hunyuan_v1_moe", "minimax_m2", "phi3", "qwen3_next",
})  # fmt: skip


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if value != value else f"{'-' * (value < 0)}Infinity"}
    return value


class ModuleSource(Node):
    """How any process builds the module again, without weights.

    `transformers`: from a whole config. `python`: by a function of a file without other arguments;
    `remote`: by the config and the code that are in a folder, which a person trusts: both are
    refused if their bytes have changed. `layers`: of sizes alone, none is built. `lora`: adapters
    are put into its blocks. `loss`: of rows of logits, in place of cross entropy. `rotary`:
    frequencies of long sequences (`longrope`) are chosen for each document; else they are those of
    short ones.
    """

    kind: Literal["transformers", "python", "remote", "layers"] = "transformers"
    config: dict[str, Any] | None = None
    path: str | None = None
    function: str | None = None
    sha256: str | None = None
    lora: ModuleLora | None = None
    loss: OwnFunction | None = None
    rotary: Literal["by_document"] | None = None

    @model_serializer(mode="wrap")
    def _without_no_rotary(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in whole(self).items() if v is not None or k != "rotary"}

    @field_validator("config")
    @classmethod
    def _as_in_a_file(cls, config: dict[str, Any] | None) -> dict[str, Any] | None:
        """Keys that are numbers become text, tuples lists, and what is infinite as transformers
        writes it, since JSON has no word for it."""
        return config and json.loads(json.dumps(_finite(config)))

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        needed = {
            "transformers": ("config",), "python": ("path", "function", "sha256"),
            "remote": ("path", "sha256"), "layers": (),
        }[self.kind]  # fmt: skip
        if missing := [field for field in needed if getattr(self, field) is None]:
            told = {"kind": self.kind, "missing": missing[0]}
            raise PydanticCustomError("source", "a source of kind {kind} needs {missing}", told)
        return self


class TracedModel(Node):
    """Any module that is a list of blocks, traced: all that planning and predicting ask of it.

    `is_packed`: chunks are one row of documents whose positions restart, and masks keep them apart
    as far as the model lets them (`packing`: whether it does). S is `min_seq_len` to `max_seq_len`:
    others have other masks (a window); of a document or sequence no more than `positions` are
    there, which older files do not say. With `inputs` a chunk is B samples of so many tensors, and
    S is the labels of a sample. `captured_size` is the (B, S) of the run that showed which
    values there are. `has_randomness`: training draws random numbers (dropout).
    """

    schema_version: Literal[1] = 1
    name: str
    model_type: str
    source: ModuleSource
    dtype: str
    attention: Literal["eager", "sdpa"]
    is_packed: bool = False
    packing: Literal["isolated", "isolated_by_mask", "leaks", "unknown"] = "unknown"
    vocab_size: PositiveSize
    min_seq_len: PositiveSize = 1
    max_seq_len: PositiveSize | None = None
    positions: PositionLimit | None = None
    captured_size: tuple[PositiveSize, PositiveSize]
    num_parameters: PositiveSize
    groups: tuple[TracedGroup, ...]
    values: tuple[TracedValue, ...]
    kinds: tuple[TracedKind, ...]
    prelude: TracedPrelude
    calls: tuple[TracedCall, ...]
    postlude: TracedPostlude
    buffers: tuple[TracedBuffer, ...] = ()
    inputs: tuple[TracedInput, ...] = ()
    has_randomness: bool = False
    notes: tuple[str, ...] = ()
    torch_version: str
    transformers_version: str | None = None

    provider: ClassVar[str] = "module"
    slices_sequences: ClassVar[bool] = False  # blocks see whole sequences
    decoder: ClassVar[None] = None
    head_dim: ClassVar[None] = None
    executor_refusal: ClassVar[None] = None
    ranks_refusal: ClassVar[str] = "a traced module (it is run on one device)"
    MARKS: ClassVar[frozenset[str]] = frozenset({"calls"})
    NO_HASH: ClassVar[frozenset[str]] = frozenset(
        {"notes", "torch_version", "transformers_version"}
    )

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        made: set[str] = set(self.prelude.outputs)
        groups = {group.name for group in self.groups}
        for place, read, used, outputs in self._parts():
            if unknown := (set(read) - made) | (set(used) - groups):
                raise PydanticCustomError(
                    "traced_name",
                    "{place} reads '{name}', which nothing before it makes",
                    {"place": place, "name": min(unknown)},
                )
            made |= set(outputs)
        if unknown := made ^ {value.name for value in self.values}:
            raise PydanticCustomError(
                "traced_value", "'{name}' is made or described, not both", {"name": min(unknown)}
            )
        if any(call.kind >= len(self.kinds) for call in self.calls):
            raise PydanticCustomError("traced_kind", "a block is of a kind that is not described")
        return self

    def _parts(self) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
        yield "the prelude", (), self.prelude.groups, ()
        for index, call in enumerate(self.calls):
            yield f"block {index}", call.inputs, call.groups + call.state, call.outputs
        yield "the postlude", self.postlude.inputs, self.postlude.groups, ()

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in whole(self).items() if v or k not in ("positions", "inputs")}

    @property
    def content_hash(self) -> str:
        """16 hex digits that change with anything that a plan or a run follows from."""
        document = self.model_dump(mode="json", exclude=set(self.NO_HASH))
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._digest == other._digest

    @cached_property
    def _digest(self) -> str:
        return self.content_hash

    @property
    def own_code(self) -> str:
        """The type of the model whose code runs."""
        return self.model_type

    @property
    def own_lora(self) -> ModuleLora | None:
        """Adapters that it was traced with."""
        return self.source.lora

    @property
    def is_tried_in_peft(self) -> bool:
        """Whether PEFT was seen to load its adapters."""
        return self.source.kind == "transformers" and self.model_type in TRIED_IN_PEFT

    @property
    def position_limit(self) -> PositionLimit | None:
        """The longest sequence that it has positions for; None where there is no end."""
        return self.positions

    def size_refusal(self, seq_len: int, chunk_tokens: int) -> str | None:
        """Lengths of chunks' rows for which masks and costs were not traced."""
        low, high = self.min_seq_len, self.max_seq_len
        length, what = (chunk_tokens, "chunks") if self.is_packed else (seq_len, "sequences")
        if low <= length <= (length if high is None else high):
            return None
        lengths = f"{low:,} tokens or more" if high is None else f"{low:,} to {high:,} tokens"
        return (
            f"'{self.name}' was traced for {what} of {lengths}, not {length:,}: trace it with "
            f"--seq-len {length}"
        )

    @property
    def python_files(self) -> tuple[tuple[str, str], ...]:
        """Its code, unless that is of transformers, and its loss."""
        source, found = self.source, list[tuple[str, str]]()
        if source.path is not None and source.sha256 is not None:
            found.append((source.path, source.sha256))
        if source.loss is not None:
            found.append((source.loss.path, source.loss.sha256))
        return tuple(found)

    @property
    def identity(self) -> Mapping[str, object]:
        """Its description, by hash."""
        return {"description": self._digest}

    @property
    def num_layers(self) -> int:
        """How many blocks it has."""
        return len(self.calls)

    @cached_property
    def saved_bytes_per_token(self) -> int:
        """Bytes of what blocks read, of a token, on the mean over blocks; the largest chunk."""
        read = {name for call in self.calls for name in call.inputs if name.startswith(BLOCK)}
        read |= set(self.calls[0].inputs[:1])
        total = sum(self.value(name).size_bytes(1, 1024) for name in read) // 1024
        return max(1, total // self.num_layers)

    @property
    def itemsize(self) -> int:
        """Bytes per element of parameters."""
        return BYTES_OF_DTYPE[self.dtype]

    @cached_property
    def parameter_groups(self) -> tuple[str, ...]:
        """Names of all groups in the order of the forward pass, by who reads them first."""
        blocks = (call.groups + call.state for call in self.calls)
        reads = [self.prelude.groups, *blocks, self.postlude.groups]
        first = {group.name: len(reads) for group in self.groups if group.name == UNUSED}
        first |= {group: at for at, groups in reversed(list(enumerate(reads))) for group in groups}
        names = (group.name for group in self.groups)
        return tuple(sorted(names, key=lambda name: (first[name], self.layer_of(name) is not None)))

    @property
    def untrained_groups(self) -> tuple[str, ...]:
        """Those that nothing reads, that are state, or beside which adapters are trained."""
        names = [group.name for group in self.groups]
        if self.source.lora is not None:
            return tuple(name for name in names if not name.startswith(ADAPTERS))
        return tuple(name for name in names if name == UNUSED or name.startswith(STATE))

    @property
    def unread_told(self) -> str | None:
        """A sentence about parameters that forward does not read; None where it reads all."""
        unread = [tensor for g in self.groups if g.name == UNUSED for tensor in g.tensors]
        if not unread:
            return None
        numbers = sum(tensor.num_elements for tensor in unread)
        more = f" and {len(unread) - 1:,} more" if len(unread) > 1 else ""
        return (
            f"forward does not read {unread[0].name}{more} ({numbers:,} parameters, "
            f"{brief(numbers * self.itemsize)}): carried as they are, without gradient and "
            "optimizer state"
        )

    def group_layout(self, group: str) -> FlatLayout:
        """How the parameters of a group lie in its flat tensor."""
        return self._layouts[group]

    @cached_property
    def _layouts(self) -> dict[str, FlatLayout]:
        return {
            group.name: packed_layout(((t.name, t.shape) for t in group.tensors), self.itemsize)
            for group in self.groups
        }

    @cached_property
    def layer_bytes(self) -> int:
        """Of the flat parameters of the largest block; of the largest group without any."""
        blocks = [group.name for group in self.groups if group.layer is not None]
        names = blocks or [group.name for group in self.groups]
        return max(self.group_layout(name).size_bytes for name in names)

    def layer_of(self, group: str) -> int | None:
        """The block that alone reads a group; None of those outside blocks and of shared ones."""
        return self._layers[group]

    @cached_property
    def _layers(self) -> dict[str, int | None]:
        return {group.name: group.layer for group in self.groups}

    def ref(self) -> ModelRef:
        """What documents say of it: all that a plan or a run follows from."""
        return self._ref

    @cached_property
    def _ref(self) -> ModelRef:
        fields = self.model_dump(mode="json", exclude={"notes"})
        return ModelRef(name=self.name, content_hash=self._digest, spec=fields)

    def value(self, name: str) -> TracedValue:
        """The description of a value."""
        return next(value for value in self.values if value.name == name)

    def group(self, name: str) -> TracedGroup:
        """The parameters of a group."""
        return next(group for group in self.groups if group.name == name)

    def forward_flops(self, batch: int, seq_len: int) -> int:
        """FLOPs of the forward pass of a chunk, loss included."""
        kinds = [kind.forward.flops(batch, seq_len) for kind in self.kinds]
        blocks = sum(kinds[call.kind] for call in self.calls)
        head = self.postlude.evaluation.flops(1, batch * seq_len)
        return self.prelude.forward.flops(batch, seq_len) + blocks + head

    def training_flops(self, batch: int, seq_len: int) -> int:
        """Model FLOPs of a chunk, forward and backward: what is recomputed counts once."""
        kinds = [kind.backward.flops(batch, seq_len) for kind in self.kinds]
        blocks = sum(kinds[call.kind] for call in self.calls)
        head = self.postlude.training.flops(1, batch * seq_len)
        backward = self.prelude.backward
        prelude = (backward or self.prelude.forward).flops(batch, seq_len)
        return prelude + blocks + head

    def save(self, path: Path) -> None:
        """Write the document."""
        write_text(self.model_dump_json() + "\n", path)  # with what is None in the config

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the document.

        Raises:
            DocumentError: says what is wrong with it.
        """
        return read_document(cls, path)
