"""A checkpoint's tensors: the model or its adapter as people have it, a file for each other."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from twinstream.executor.weights.durable_files import make_room, sync, write_files, writing
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.hf_writer import HfOutline, write_hf_folder
from twinstream.executor.weights.model_files import tokenizer_files
from twinstream.executor.weights.peft.peft_folder import BASE
from twinstream.executor.weights.peft.peft_writer import write_peft_folder
from twinstream.executor.weights.traced.module_folder import ModuleOutline, write_module_folder
from twinstream.models.adapters.lora import Lora
from twinstream.models.adapters.quantized_base import BaseFormat
from twinstream.models.model import AnyModel
from twinstream.models.spec import ModelSpec
from twinstream.models.traced import TracedModel
from twinstream.schedule.files import open_file, reason_of

OPTIMIZER = "optimizer"
_SUFFIX = ".bin"


@dataclass(frozen=True)
class CheckpointFiles:
    """The tensors beside the weights, as they lie in the arenas: bytes without a header."""

    folder: Path

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor, 1-D uint8.

        Raises:
            WeightsError: it is not there, or cannot be read.
        """
        path = self._path(name)
        try:
            size_bytes = path.stat().st_size
            flat = torch.empty(size_bytes, dtype=torch.uint8)
            with open_file(path) as file:
                read_bytes = file.readinto(flat.numpy().data)
        except OSError as error:
            raise WeightsError(path, f"cannot be read: {reason_of(error)}") from None
        if read_bytes != size_bytes:
            raise WeightsError(path, "has changed while it was read")
        return flat

    def write(self, names: Sequence[str], pieces: Callable[[str], Iterable[torch.Tensor]]) -> None:
        """Write tensors one after another; all are on the disk when this returns.

        Args:
            pieces: the bytes of a tensor in order, 1-D uint8 on the host.

        Raises:
            WeightsError: one cannot be written.
        """
        with writing(self.folder / OPTIMIZER, 0):
            (self.folder / OPTIMIZER).mkdir(exist_ok=True)
        for name in names:
            path, size_bytes = self._path(name), 0
            with writing(path, 0):
                file = path.open("wb")
            with file:
                for piece in pieces(name):
                    size_bytes += piece.numel()
                    with writing(path, size_bytes):
                        file.write(piece.numpy().data)
                        file.flush()
            with writing(path, size_bytes):
                sync(path)
        with writing(self.folder, 0):
            sync(self.folder / OPTIMIZER)

    def _path(self, name: str) -> Path:
        return self.folder / OPTIMIZER / f"{name}{_SUFFIX}"


@dataclass(frozen=True)
class AdapterOutline:
    """The adapters that are trained beside a frozen base, and all of their folder but values.

    Attributes:
        base: the base's folder, so that PEFT finds it.
        files: tokenizer and so on, by name.
    """

    spec: ModelSpec
    lora: Lora
    base: str | None
    files: Mapping[str, bytes]


Outline = HfOutline | AdapterOutline | ModuleOutline


def outline_of(
    spec: AnyModel, like: Path | None, lora: Lora | None, base: str | None,
    base_format: BaseFormat = "model",
) -> Outline:  # fmt: skip
    """Return the outline of a run's checkpoints, read before the run begins.

    Args:
        like: the folder whose config, tokenizer and division into files are taken over.
        lora, base: of adapters.
        base_format: in which they are trained beside their base; the folder says so.

    Raises:
        WeightsError: the folder does not say where a tensor belongs, or cannot be read.
        HfConfigError: there is no `like`, and no family of transformers is like this model.
    """
    if isinstance(spec, TracedModel):
        return ModuleOutline.of(spec, like, base)
    if lora is None:
        return HfOutline.of(spec, like)
    told = {} if base_format == "model" else {BASE: json.dumps({"base": base_format}).encode()}
    return AdapterOutline(spec, lora, base, tokenizer_files(like) | told)


def write_tensors(
    folder: Path,
    outline: Outline,
    names: Sequence[str],
    take: Callable[[str], torch.Tensor],
    pieces: Callable[[str], Iterable[torch.Tensor]],
    size_bytes: int,
) -> None:
    """Write all tensors that a run trains: parameters a group at a time, others in pieces.

    With adapters the model, which is frozen, is not written: the folder is one that PEFT loads.

    Args:
        names: those that the run carries, `param.GROUP` and others.
        take: gives one of them, 1-D uint8 on the host.
        pieces: gives the same in pieces, in order.
        size_bytes: of what is written, for which there has to be room.

    Raises:
        WeightsError: there is too little room, or a file cannot be written.
    """
    make_room(folder, size_bytes)

    def parameters(group: str) -> torch.Tensor:
        return take(f"param.{group}")

    if isinstance(outline, HfOutline):
        write_hf_folder(folder, outline, parameters)
    elif isinstance(outline, ModuleOutline):
        write_module_folder(folder, outline, parameters)
    else:
        write_peft_folder(folder, outline.spec, outline.lora, parameters, outline.base)
        write_files(folder, outline.files)
    others = [name for name in names if not name.startswith("param.")]
    CheckpointFiles(folder).write(others, pieces)
