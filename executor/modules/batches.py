"""The batch of a chunk: what a module is given, and how rows of logits are cut from what it makes.

Legend: a chunk is B sequences of S tokens, or B samples of S labels each; R rows a slice of its B S
rows of logits.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Protocol
from unittest.mock import patch

import torch
from torch import nn

from twinstream.executor.kernels.operand import KernelOperand
from twinstream.executor.modules.blocks import ModuleRefusal
from twinstream.models.kernel_costs.attributes import Attributes, typed_attribute
from twinstream.models.providers.traced_parts import BYTES_OF_DTYPE, SAMPLE, TracedInput

Batch = Mapping[str, torch.Tensor]
Size = tuple[int, int]  # B, S
Shape = tuple[int, ...]
SAMPLE_INPUTS = "sample_inputs"  # attribute of a module: tensors of one sample, by their names
NAMED = "twinstream_inputs"  # attribute of a module: what these say
LABELS = "labels"


class Batches(Protocol):
    """The batches of a module, by what its forward takes."""

    @property
    def inputs(self) -> tuple[TracedInput, ...]:
        """Tensors that each sample has beside labels; none where token ids are taken."""

    @property
    def labels(self) -> int | None:
        """Labels of a sample; None where sequences have any length."""

    def made(self, size: Size) -> Batch:
        """Return a batch of a chunk, under the mode that holds."""

    def rows_made(self, count: int) -> Batch:
        """Return a batch of `count` places along the axis of rows, under the device that holds."""

    def fed(
        self, operands: Mapping[str, KernelOperand], attributes: Attributes, size: Size
    ) -> Callable[[], Batch]:
        """Return what makes the batch of what has been fed into operands."""

    def masks(self, batch: Batch) -> AbstractContextManager[None]:
        """Return within what the module makes its masks of a batch."""

    def logits_refusal(self, shape: Shape, size: Size) -> str | None:
        """Say what is expected of the logits of a chunk, if these are of another shape."""

    def row_axis(self, shape: Shape, size: Size) -> int:
        """Return along which axis rows lie in the flat view of a value of this shape.

        Raises:
            ModuleRefusal: they lie along none.
        """

    def flat(self, value: torch.Tensor, axis: int) -> torch.Tensor:
        """Return a view of a value whose rows lie along that axis."""

    def places(self, rows: int) -> int:
        """Return how many places along that axis have so many rows."""


@dataclass(frozen=True)
class TokenIds:
    """Token ids [B, S], and positions where documents are packed; a row is of a token."""

    is_packed: bool = False
    inputs: ClassVar[tuple[()]] = ()
    labels: ClassVar[None] = None

    def made(self, size: Size) -> Batch:
        names = ("input_ids", "position_ids") if self.is_packed else ("input_ids",)
        return {name: torch.zeros(size, dtype=torch.int64) for name in names}

    def rows_made(self, count: int) -> Batch:
        return {"input_ids": torch.zeros(1, count, dtype=torch.int64)}

    def fed(
        self, operands: Mapping[str, KernelOperand], attributes: Attributes, size: Size
    ) -> Callable[[], Batch]:
        num_tokens = prod(size)
        ids_BS = operands["tokens"].view(torch.int32, (2, num_tokens))[0].view(size)
        if not self.is_packed:
            return lambda: {"input_ids": ids_BS.long()}
        if "sequences" not in operands:
            length = typed_attribute(attributes, "document_len", int)
            positions = torch.arange(num_tokens, device=ids_BS.device).view(1, -1) % length
            return lambda: {"input_ids": ids_BS.long(), "position_ids": positions}
        starts = typed_attribute(attributes, "most_sequences", int) + 1
        sequences = operands["sequences"].view(torch.int32, (starts + num_tokens,))
        positions_BS = sequences[starts:].view(1, -1)
        return lambda: {"input_ids": ids_BS.long(), "position_ids": positions_BS.long()}

    def masks(self, batch: Batch) -> AbstractContextManager[None]:
        return documents(batch.get("position_ids"))

    def logits_refusal(self, shape: Shape, size: Size) -> str | None:
        if len(shape) == 3 and shape[:2] == size:
            return None
        return (
            f"of {size[0]} sequences of {size[1]} tokens: expected [{size[0]}, {size[1]}, "
            "vocabulary], a prediction for every token"
        )

    def row_axis(self, shape: Shape, size: Size) -> int:
        for axis in range(len(shape) - 1):
            if shape[axis : axis + 2] == size:
                return axis + 1
        raise ModuleRefusal(
            f"what comes after the blocks reads a tensor of shape {shape}, in which {size[0]} "
            f"sequences of {size[1]} tokens are not side by side: it cannot run on slices of rows"
        )

    def flat(self, value: torch.Tensor, axis: int) -> torch.Tensor:
        """[..., 1, B S, ...] of a value [..., B, S, ...]."""
        return value.view(*value.shape[: axis - 1], 1, -1, *value.shape[axis + 1 :])

    def places(self, rows: int) -> int:
        return rows


@dataclass(frozen=True)
class NamedInputs:
    """Tensors by the names of forward's arguments, samples first; logits [B, ..., V] have a row for
    each label of a sample, whose shape is `label_shape`."""

    inputs: tuple[TracedInput, ...]
    label_shape: Shape = ()

    @property
    def labels(self) -> int:
        return prod(self.label_shape)

    def made(self, size: Size) -> Batch:
        return self.rows_made(size[0])

    def rows_made(self, count: int) -> Batch:
        return {
            one.name: torch.full((count, *one.shape), one.fill, dtype=getattr(torch, one.dtype))
            for one in self.inputs
        }

    def fed(
        self, operands: Mapping[str, KernelOperand], attributes: Attributes, size: Size
    ) -> Callable[[], Batch]:
        found = {
            one.name: operands[f"{SAMPLE}{one.name}"]
            .view(getattr(torch, one.dtype), (size[0], *one.shape))
            .data  # for which autograd does not count others' writes into the arena
            for one in self.inputs
        }
        return lambda: found

    def masks(self, batch: Batch) -> AbstractContextManager[None]:
        return masks_made()

    def logits_refusal(self, shape: Shape, size: Size) -> str | None:
        wanted = (size[0], *self.label_shape)
        if len(shape) == len(wanted) + 1 and shape[:-1] == wanted:
            return None
        of_labels = f"{', '.join(map(str, wanted))}, classes"
        return f"of {size[0]} samples: expected [{of_labels}], a row for every label"

    def row_axis(self, shape: Shape, size: Size) -> int:
        if shape[:1] == size[:1]:
            return 0
        raise ModuleRefusal(
            f"what comes after the blocks reads a tensor of shape {shape}, whose first axis is not "
            f"that of {size[0]} samples: it cannot run on some of them"
        )

    def flat(self, value: torch.Tensor, axis: int) -> torch.Tensor:
        """The value as it is."""
        return value

    def places(self, rows: int) -> int:
        return rows // self.labels


def batches_of(module: nn.Module, is_packed: bool = False) -> Batches:
    """The batches of a module that has been built."""
    return getattr(module, NAMED, None) or TokenIds(is_packed)


def named_inputs(module: nn.Module) -> NamedInputs | None:
    """What the `sample_inputs` of a module say; None where it takes token ids.

    Raises:
        ModuleRefusal: they say nothing that can be fed.
    """
    given = getattr(module, SAMPLE_INPUTS, None)
    if given is None:
        return None
    where = f"`{SAMPLE_INPUTS}` of {type(module).__name__}"
    if not isinstance(given, Mapping) or not given.keys() - {LABELS}:
        raise ModuleRefusal(
            f"{where} is no dictionary of tensors of one sample: write for example "
            '{"pixel_values": torch.zeros(3, 32, 32)}'
        )
    tensors = dict(given)
    labels = tensors.pop(LABELS, torch.zeros((), dtype=torch.int64))
    inputs = tuple(_input(name, tensor, where) for name, tensor in tensors.items())
    return NamedInputs(inputs, tuple(labels.shape))


def _input(name: object, tensor: object, where: str) -> TracedInput:
    """Described; `tensor` has one value, with which what a sample lacks is filled up."""
    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        raise ModuleRefusal(f"{where}: '{name}' is no tensor of one sample")
    dtype = str(tensor.dtype).removeprefix("torch.")
    fill = tensor.flatten()[0].item()
    is_known = dtype in BYTES_OF_DTYPE and not tensor.is_complex()
    if not is_known or not bool((tensor == fill).all()):
        raise ModuleRefusal(
            f"{where}: '{name}' is {dtype} {list(tensor.shape)}: give a tensor of real numbers and "
            "of one value, as torch.full makes it, which fills up samples that have fewer"
        )
    return TracedInput(name=str(name), shape=tuple(tensor.shape), dtype=dtype, fill=fill)


@contextmanager
def documents(position_ids: torch.Tensor | None) -> Iterator[None]:
    """Masks keep apart documents of a row whose positions restart; None: a row is one document.

    transformers looks at the positions itself, which would synchronise the device, and makes other
    masks for a row that happens to hold one document. Some classes do not tell their masks the
    positions; here every mask that transformers makes knows them.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    prepare = masking._preprocess_mask_arguments
    signature = inspect.signature(prepare)

    def find(positions: torch.Tensor) -> torch.Tensor | None:
        if position_ids is None:
            return None
        before = positions[:, :1] - 1
        return (torch.diff(positions, prepend=before, dim=-1) != 1).cumsum(-1)

    def told(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        mask = given.get("attention_mask")
        if mask is None or mask.dim() == 2:  # of ones: rows are not padded
            given["attention_mask"] = None
            if position_ids is not None:
                given["position_ids"] = position_ids
        return prepare(**given)

    with (
        patch.object(masking, "find_packed_sequence_indices", find),
        patch.object(masking, "_preprocess_mask_arguments", told),
    ):
        yield


@contextmanager
def masks_made() -> Iterator[None]:
    """Masks that transformers makes of a mask in the batch are there whatever is in it: it leaves
    them out where nothing is masked, for which it would look, and blocks be given nothing."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "is_tracing"):
        yield
        return
    own = masking.is_tracing
    with patch.object(masking, "is_tracing", lambda mask=None: mask is not None or own(mask)):
        yield
