"""The files of a Hugging Face folder that hold its weights, and their tensors as values.

Matrices that are stored as codes take the place of these. They are found by their dtypes and by
the names of what is stored beside them, whether config.json says so or not. What is left over of
codes is refused: none is ever taken for a value.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from twinstream.executor.weights.codes.coded_tensor import CodedTensor, read_bytes
from twinstream.executor.weights.codes.scaled import FP8, mxfp4_tensor, scaled_tensor
from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.executor.weights.nf4_files import names_of_parts, nf4_matrices
from twinstream.executor.weights.safetensors_header import StoredTensor
from twinstream.schedule.files import read_text, reason_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
_ANEW = "fetch the folder again, or give the one that is not quantised"
_LONGEST_NAME = 255  # bytes, of file systems
_BLOCKS, _SCALES = "_blocks", "_scales"  # of MXFP4
# What a scale beside NAME or STEM.weight is called.
_OF_NAME, _OF_STEM = ("_scale_inv", "_scale"), (".SCB", ".scale")
_OTHER_CODES = (*FP8, "I8", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0")
# Of activations and caches while a model answers: what is trained has none.
_OF_ACTIVATIONS = re.compile(
    r".*[._](input_scale|activation_scale|output_scale|input_scale_ub|input_global_scale|"
    r"[qkv]_scale|prob_output_scale)"
)
_UNREAD = re.compile(
    r".*\.(qweight|qzeros|g_idx|weight_packed|weight_shape|weight_global_scale|weight_scale_2|"
    r"weight_zero_point|bitmask|scales_and_zeros|W_q)"
)
_PARTS = re.compile(
    r".*(\.absmax|\.quant_map|\.nested_absmax|\.nested_quant_map|\.SCB|\.weight_format|"
    r"\.quant_state\..*|\.weight_scale|_scale_inv)"
)


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights under the names that transformers looks for."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def weight_map(folder: Path) -> dict[str, str] | None:
    """Return which file has which tensor, by the index; None where one file holds all.

    Where there are both, transformers takes the one file, and so does this.

    Raises:
        WeightsError: there are no safetensors, or the index is broken.
    """
    try:
        if (folder / SINGLE).exists():
            return None
        if not (folder / INDEX).exists():
            raise WeightsError(folder, _nothing_there(folder))
        return _read_index(folder / INDEX)
    except OSError as error:
        raise WeightsError(folder, f"cannot be read: {reason_of(error)}") from None


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(read_text(path, "utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(path, f"is not valid JSON ({error}); fetch it again") from None
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not found:
        raise WeightsError(
            path, "has no 'weight_map', which says which file has which tensor; fetch it again"
        )
    for name, file in found.items():
        if not _is_file_name(file):
            raise WeightsError(
                path, f"weight_map names {file!r:.80} for {name}; it needs a file of this folder"
            )
    return found


def _is_file_name(file: object) -> bool:
    """Whether a folder can have a file of this name: one part, of at most 255 bytes."""
    if not isinstance(file, str) or "\0" in file or Path(file).name != file:
        return False
    return len(file.encode("utf-8", "replace")) <= _LONGEST_NAME


def _nothing_there(folder: Path) -> str:
    if not folder.is_dir():
        return "is no folder; give the one with config.json and model.safetensors"
    names = sorted(entry.name for entry in folder.iterdir())
    needed = f"has neither {SINGLE} nor {INDEX}"
    if shards := [name for name in names if name.endswith(".safetensors")]:
        return f"{needed}, only {some_of(shards)}; fetch what is missing, or save the model again"
    if pickles := [name for name in names if Path(name).suffix in _PICKLES]:
        return (
            f"{needed}, only {some_of(pickles)}: pickles, which run code when they are read, and "
            "are refused. If you trust them, convert them once: AutoModelForCausalLM"
            f".from_pretrained({str(folder)!r}).save_pretrained(...) of transformers"
        )
    return f"{needed}; there is {some_of(names) or 'nothing'}. Fetch the weights"


def as_values(
    stored: Mapping[str, StoredTensor], tile: tuple[int, int] | None = None
) -> dict[str, StoredTensor]:
    """The tensors of files, with coded matrices under their own names, in the shapes of their
    values; what belongs to codes is not among them.

    Args:
        tile: rows and columns that share a scale, where config.json says it.

    Raises:
        WeightsError: codes that are not read, or a part of them is missing or of another size.
    """
    matrices, taken = dict[str, CodedTensor](), set[str]()
    for in_4_bits in nf4_matrices(stored).values():
        matrices[in_4_bits.name] = in_4_bits
        taken.update(names_of_parts(in_4_bits))
    for matrix, names in _others(stored, tile, taken):
        if matrix.name in stored and matrix.name not in names:
            raise WeightsError(matrix.file, f"has {matrix.name} twice, once as codes; {_ANEW}")
        matrices[matrix.name] = matrix
        taken.update(names)
    left = {name: one for name, one in stored.items() if name not in taken}
    if matrices:
        left = {name: one for name, one in left.items() if not _OF_ACTIVATIONS.fullmatch(name)}
    _refuse_codes(left)
    return left | matrices


def _others(
    stored: Mapping[str, StoredTensor], tile: tuple[int, int] | None, taken: set[str]
) -> Iterator[tuple[CodedTensor, tuple[str, ...]]]:
    """Matrices with scales and in MXFP4, with the names of all their parts."""
    for name, codes in stored.items():
        if name in taken:
            continue
        stem = name.removesuffix(".weight")
        if name.endswith(_BLOCKS) and codes.dtype == "U8":
            whole = name.removesuffix(_BLOCKS)
            scales = stored.get(f"{whole}{_SCALES}")
            if scales is None:
                problem = f"has {name}, codes of MXFP4, and no {whole}{_SCALES}; {_ANEW}"
                raise WeightsError(codes.file, problem)
            yield mxfp4_tensor(whole, codes, scales), (name, f"{whole}{_SCALES}")
        elif codes.dtype in FP8 or (codes.dtype == "I8" and len(codes.shape) > 1):
            of_stem = [f"{stem}{end}" for end in _OF_STEM] if stem != name else []
            beside = [f"{name}{end}" for end in _OF_NAME] + of_stem
            at = next((one for one in beside if one in stored), None)
            if at is None:
                raise WeightsError(
                    codes.file,
                    f"has {name} as {codes.dtype} codes, and no scales beside it "
                    f"({', '.join(one.removeprefix(f'{stem}.') for one in beside)}); {_ANEW}",
                )
            yield _scaled(name, at, stored, tile), (name, at, f"{stem}.weight_format")


def _scaled(
    name: str, at: str, stored: Mapping[str, StoredTensor], tile: tuple[int, int] | None
) -> CodedTensor:
    codes, stem = stored[name], name.removesuffix(".weight")
    of_bitsandbytes = at.endswith(".SCB")
    order = stored.get(f"{stem}.weight_format")
    if of_bitsandbytes and order is not None and read_bytes(order, f"{stem}.weight_format").any():
        raise WeightsError(
            codes.file,
            f"has {name} in int8 of bitsandbytes, in the order of a GPU's tiles (weight_format), "
            "which is not read: save it again with bitsandbytes 0.45 or later",
        )
    is_integer = codes.dtype == "I8" and not of_bitsandbytes
    return scaled_tensor(
        name, codes, stored[at], tile, of_bitsandbytes=of_bitsandbytes,
        is_packed=is_integer and at.endswith(("_scale_inv", ".scale")),
    )  # fmt: skip


def _refuse_codes(left: Mapping[str, StoredTensor]) -> None:
    """
    Raises:
        WeightsError: among what nothing took are codes, or parts of some.
    """
    for pattern, problem in (
        (_UNREAD, "of codes that are not read, as GPTQ, AWQ and packed formats have them"),
        (_PARTS, "of codes, and no codes that they belong to"),
    ):
        if names := [name for name in left if pattern.fullmatch(name)]:
            raise WeightsError(
                left[names[0]].file, f"has {some_of(names)}: parts {problem}; {_ANEW}"
            )
    for name, one in left.items():
        is_part = one.dtype == "U8" and name.endswith((_BLOCKS, _SCALES))
        if one.dtype in _OTHER_CODES or is_part:
            raise WeightsError(
                one.file, f"has {name} of {list(one.shape)} in {one.dtype}: codes, and none that "
                f"are read; {_ANEW}",
            )  # fmt: skip
