"""A Hugging Face folder's weights, checked by their headers and read into flat tensors."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Self

import torch

from twinstream.executor.kernels.base_codes import quantized_group
from twinstream.executor.kernels.operand import DTYPES
from twinstream.executor.weights.carried_tensors.carried import require_tied
from twinstream.executor.weights.codes.coded_tensor import STORED_DTYPES, CodedTensor, fill
from twinstream.executor.weights.disk_reader import FileExtent
from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.executor.weights.hf_files import INDEX, SINGLE, as_values, weight_map
from twinstream.executor.weights.model_files import CONFIG
from twinstream.executor.weights.nf4_files import FourBitTensor
from twinstream.executor.weights.safetensors_header import StoredTensor, read_header
from twinstream.executor.weights.weight_file import fill_from_stored
from twinstream.models.decoders.config import codes_of, next_token_count, read_json_object
from twinstream.models.decoders.hf_weights import (
    LM_HEAD,
    HfWeight,
    has_fused_experts,
    hf_weights,
    hf_weights_of,
)
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.recipes.quantized_base import (
    BLOCK_ELEMENTS,
    SCALE_BYTES,
    SCALES,
    quantized_layout,
)
from twinstream.schedule.files import open_file, reason_of

EMBEDDING = "model.embed_tokens.weight"
_HARMLESS = ("rotary_emb.inv_freq",)  # buffers that old versions of transformers saved
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_BLOCK_ELEMENTS = 2**22  # converted at a time, 8 or 16 MiB


@dataclass(frozen=True)
class HfFolder:
    """Weights that are all there, in the shapes of `spec`; nothing but headers has been read."""

    path: Path
    spec: ModelSpec
    stored: Mapping[str, StoredTensor]
    fused: bool = False

    @classmethod
    def open(cls, path: str | Path, spec: ModelSpec) -> Self:
        """Check a folder's weights against a model, from the headers of its files alone.

        float16, bfloat16 and float32 are taken, whatever the dtype of `spec`, and matrices that are
        stored as codes (`stored_tensors`). The `lm_head.weight` of tied embeddings is compared with
        them and left out, as are saved RoPE frequencies; layers for a token further on are carried.

        Raises:
            WeightsError: no safetensors, a file that is missing, broken or cut off, tensors that
                are missing, not the model's, of another shape, or of another dtype.
        """
        folder = Path(path)
        stored = stored_tensors(folder)
        fused = has_fused_experts(spec, stored)
        _check(folder, spec, stored, fused=fused)
        return cls(folder, spec, stored, fused)

    def read_group(self, group: str, destination: torch.Tensor) -> None:
        """Fill the flat parameters of `embedding`, a layer by its number, or `head`.

        Values are converted to the model's dtype, rounded to nearest; padding is zeroed. Beyond
        the destination this takes a block of 16 MiB at most.

        Args:
            destination: 1-D uint8 on the host, of the size of the group's layout.

        Raises:
            WeightsError: a file has gone or changed since the folder was opened.
        """
        size_bytes = self.spec.group_layout(group).size_bytes
        assert destination.dtype == torch.uint8 and destination.shape == (size_bytes,)
        assert destination.device.type == "cpu" and destination.is_contiguous()
        weights = hf_weights_of(self.spec, group, fused=self.fused)
        read_weights(self.stored, weights, self.spec.dtype, destination)

    def extents(self, group: str) -> tuple[FileExtent, ...] | None:
        """Return where the files have a group's values in the model's dtype and order; None where
        they have others."""
        found = []
        for weight in hf_weights_of(self.spec, group, fused=self.fused):
            stored, dtype = self.stored[weight.name], DTYPES[weight.dtype or self.spec.dtype]
            is_coded = isinstance(stored, CodedTensor)
            if is_coded or weight.axes or STORED_DTYPES.get(stored.dtype) != dtype:
                return None
            found.append(
                FileExtent(stored.file, stored.start_bytes, stored.size_bytes, weight.offset_bytes)
            )
        return tuple(sorted(found, key=lambda one: one.at_bytes))

    def has_nf4(self, group: str) -> bool:
        """Return whether the folder stores matrices of a group in NF4."""
        return bool(self._nf4(group))

    def _nf4(self, group: str) -> list[tuple[HfWeight, FourBitTensor]]:
        """Matrices of a group that are stored as a base in nf4 is kept."""
        weights = hf_weights_of(self.spec, group, fused=self.fused)
        found = ((weight, self.stored[weight.name]) for weight in weights)
        return [
            (weight, one) for weight, one in found if isinstance(one, FourBitTensor) and one.is_base
        ]

    def read_nf4(self, group: str) -> torch.Tensor:
        """The flat parameters of a block in NF4, 1-D uint8: the codes and scales of the files where
        they have some.

        Raises:
            WeightsError: a file has gone or changed since the folder was opened.
        """
        layout = self.spec.group_layout(group)
        flat = torch.empty(layout.size_bytes, dtype=torch.uint8)
        self.read_group(group, flat)
        made = quantized_group(flat, layout, DTYPES[self.spec.dtype], "nf4")
        quantized = quantized_layout(layout, "nf4")
        coded = {inner.name for inner in quantized.tensors if inner.name.endswith(SCALES)}
        for weight, matrix in self._nf4(group):
            inside = next(i for i in layout.tensors if i.offset_bytes <= weight.offset_bytes
                          < i.offset_bytes + i.size_bytes)  # fmt: skip
            if f"{inside.name}{SCALES}" not in coded:  # a router, which stays as it is
                continue
            before = (weight.offset_bytes - inside.offset_bytes) // self.spec.itemsize
            starts = (before // 2, before // BLOCK_ELEMENTS["nf4"] * SCALE_BYTES)
            names = (inside.name, f"{inside.name}{SCALES}")
            stored = matrix.read()
            for name, start, values in zip(names, starts, stored, strict=True):
                at = quantized.tensor(name).offset_bytes + start
                made[at : at + values.nbytes].copy_(values.view(torch.uint8))
        return made


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder's files, by their headers alone; of a matrix that is stored as codes
    (`hf_files.as_values`) those of its values.

    Raises:
        WeightsError: no safetensors, a file that is missing, broken or cut off, or codes that are
            not read or not whole.
        QuantizedConfigError: config.json says that weights are codes that are not read.
    """
    mapped = weight_map(folder)
    stored = read_header(folder / SINGLE) if mapped is None else _sharded(folder, mapped)
    config = folder / CONFIG
    told = codes_of(config) if config.exists() else None
    return as_values(stored, None if told is None else told.tile)


def read_weights(
    stored: Mapping[str, StoredTensor],
    inside: Sequence[HfWeight],
    dtype: str,
    destination: torch.Tensor,
) -> None:
    """Fill a flat tensor of `dtype` with the weights in it; what lies between them is zeroed.

    Args:
        destination: 1-D uint8 on the host.

    Raises:
        WeightsError: a file has gone or changed since its header was read.
    """
    by_file: dict[Path, list[HfWeight]] = defaultdict(list)
    end_bytes = 0
    for weight in sorted(inside, key=lambda weight: weight.offset_bytes):
        destination[end_bytes : weight.offset_bytes].zero_()
        end_bytes = weight.end_bytes
        by_file[stored[weight.name].file].append(weight)
    destination[end_bytes:].zero_()
    for path, weights in by_file.items():
        try:
            with open_file(path) as file:
                for weight in weights:
                    flat = destination[weight.offset_bytes : weight.end_bytes]
                    if weight.axes:
                        flat = torch.empty_like(flat)
                    values = flat.view(getattr(torch, weight.dtype or dtype))
                    _read(file, stored[weight.name], values, weight.name)
                    if weight.axes:
                        fill_from_stored(weight, flat, destination)
        except OSError as error:
            raise WeightsError(path, f"cannot be read: {reason_of(error)}") from None


def _read(file: BufferedReader, stored: StoredTensor, values: torch.Tensor, name: str) -> None:
    """Read a tensor, converting its values if they are of another dtype, or codes."""
    if isinstance(stored, CodedTensor):
        stored.decode_into(values)
        return
    source = torch.int64 if stored.dtype == "I64" else STORED_DTYPES[stored.dtype]
    file.seek(stored.start_bytes)
    if source == values.dtype:
        fill(file, values.view(torch.uint8), name)
        return
    block = torch.empty(min(_BLOCK_ELEMENTS, values.numel()), dtype=source)
    for part in torch.split(values, _BLOCK_ELEMENTS):
        read = block[: part.numel()]
        fill(file, read.view(torch.uint8), name)
        part.copy_(read)


def _sharded(folder: Path, mapped: Mapping[str, str]) -> dict[str, StoredTensor]:
    """The tensors of all shards, each from the file that the index says."""
    files = sorted(set(mapped.values()))
    if missing := [file for file in files if not (folder / file).exists()]:
        raise WeightsError(
            folder,
            f"{INDEX} names {len(files)} files, and {some_of(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; fetch what is missing",
        )
    shards = {file: read_header(folder / file) for file in files}
    for name, file in mapped.items():
        if name not in shards[file]:
            raise WeightsError(
                folder / file, f"lacks {name}, which {INDEX} says is there; fetch both again"
            )
    unlisted = {name: stored for shard in shards.values() for name, stored in shard.items()}
    return unlisted | {name: shards[file][name] for name, file in mapped.items()}


def _check(
    folder: Path, spec: ModelSpec, stored: Mapping[str, StoredTensor], *, fused: bool
) -> None:
    """Refuse weights that are not those of the model."""
    harmless = {name for name in stored if name == LM_HEAD or name.endswith(_HARMLESS)}
    harmless |= next_token_layers(folder, spec, stored).keys()
    weights = hf_weights(spec, fused=fused)
    if problems := stored_problems(weights, stored, harmless):
        missing = [weight.name for weight in weights if weight.name not in stored]
        raise WeightsError(
            folder, f"not the weights of '{spec.name}': {'; '.join(problems)}. {_advice(missing)}"
        )
    if spec.tied_embeddings and LM_HEAD in stored:
        require_tied(folder, [(LM_HEAD, EMBEDDING)], stored)


def next_token_layers(
    folder: Path, spec: ModelSpec, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors of layers behind the last one that predict a token further on, as config.json
    counts them: they are not trained.

    Raises:
        HfConfigError: config.json is broken.
    """
    config = folder / CONFIG
    more = next_token_count(read_json_object(config)) if config.exists() else 0
    numbers = {str(spec.num_layers + number) for number in range(more)}
    return {
        name: one
        for name, one in stored.items()
        if (match := _LAYER.match(name)) is not None and match[1] in numbers
    }


def stored_problems(
    expected: Sequence[HfWeight],
    stored: Mapping[str, StoredTensor],
    harmless: Collection[str] = (),
) -> list[str]:
    """Return all that is wrong with the tensors of files; empty if they are those expected.

    What is `harmless` may be there too.
    """
    weights = {weight.name: weight for weight in expected}
    missing = [name for name in weights if name not in stored]
    extra = [
        f"{name} ({tensor.file.name})"
        for name, tensor in stored.items()
        if name not in weights and name not in harmless
    ]
    here = [(weight, stored[name]) for name, weight in weights.items() if name in stored]
    misshapen = [
        f"{weight.name} ({tensor.file.name}) is {list(tensor.shape)}, not {list(weight.shape)}"
        for weight, tensor in here
        if weight.shape != tensor.shape
    ]
    other_dtype = [
        f"{weight.name} ({tensor.file.name}) is {tensor.dtype}"
        for weight, tensor in here
        if not has_dtype(weight, tensor)
    ]
    return _describe_problems(missing, extra, misshapen, other_dtype)


def has_dtype(weight: HfWeight, stored: StoredTensor) -> bool:
    """Return whether a weight can be read from the dtype that is stored; int64 only as it is."""
    if weight.dtype == "int64":
        return stored.dtype == "I64"
    return stored.dtype in STORED_DTYPES


def _describe_problems(
    missing: Sequence[str],
    extra: Sequence[str],
    misshapen: Sequence[str],
    other_dtype: Sequence[str],
) -> list[str]:
    problems = []
    if missing:
        problems.append(f"missing: {some_of(missing)}")
    if extra:
        problems.append(f"not part of it: {some_of(extra)}")
    if misshapen:
        problems.append(some_of(misshapen))
    if other_dtype:
        problems.append(f"only {', '.join(STORED_DTYPES)} are read: {some_of(other_dtype)}")
    return problems


def _advice(missing: Sequence[str]) -> str:
    if list(missing) == [LM_HEAD]:
        return "If its embeddings are tied, set tie_word_embeddings to true in config.json"
    return "Do config.json and the weights belong together?"
