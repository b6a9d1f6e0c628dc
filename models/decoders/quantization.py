"""What a config.json says of codes: which are read as the values they stand for, which refused.

Of most methods codes mean nothing without kernels of their own, or can be read but not written
down shortly; they are refused by name, before anything is planned.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from twinstream.schedule.errors import TwinstreamError

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
QUANTIZATION_FILES = {  # beside an older config.json, which says nothing then
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
READ = (
    "bitsandbytes (NF4, FP4, int8), fp8, mxfp8, fbgemm_fp8, compressed-tensors of 8 bits, "
    "modelopt's FP8, mxfp4"
)
_BITS = 8  # of compressed-tensors, stored unpacked


class QuantizedConfigError(TwinstreamError):
    """A config.json says that weights are stored in codes that are not read."""

    def __init__(self, file: str | Path, problem: str) -> None:
        self.path, self.problem = Path(file), problem
        super().__init__(
            f"{file}: its weights are quantised {problem}. Give the unquantised folder that they "
            f"were made from (with --base nf4 its frozen matrices take 4.5 bits). Codes that are "
            f"read: {READ}"
        )


class StoredCodes(NamedTuple):
    """Codes that are read as the values they stand for.

    Attributes:
        what: their name, for people.
        tile: rows and columns that share a scale, where the config says it.
    """

    what: str
    tile: tuple[int, int] | None = None


def stored_codes(file: str | Path, config: Mapping[str, Any]) -> StoredCodes | None:
    """What a config.json says of codes; None where weights are stored as values.

    Raises:
        QuantizedConfigError: they are of a method that is not read.
    """
    for told in _told(config):
        if told in (None, {}):
            continue
        if not isinstance(told, Mapping):
            raise QuantizedConfigError(
                file, f"in a way that is not said: quantization_config is {told!r:.80}, no object"
            )
        found = _codes(told)
        if isinstance(found, str):
            raise QuantizedConfigError(file, found)
        if found is not None:
            return found
    return None


def without_codes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config of a model whose weights are values."""
    found = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    if isinstance(part := found.get("text_config"), dict):
        found["text_config"] = without_codes(part)
    return found


def _told(config: Mapping[str, Any]) -> list[object]:
    parts = [config, config.get("text_config")]
    return [part.get(key) for part in parts if isinstance(part, Mapping)
            for key in QUANTIZATION_KEYS]  # fmt: skip


def _codes(told: Mapping[str, Any]) -> StoredCodes | str | None:
    """Or, of a method that is not read, how it is called."""
    method = told.get("quant_method")
    if method is None and (told.get("load_in_4bit") or told.get("load_in_8bit")):
        method = "bitsandbytes"
    match method:
        case "bitsandbytes":
            return _of_bitsandbytes(told)
        case "fp8" | "mxfp8":
            return _of_fp8(told, str(method))
        case "fbgemm_fp8":
            return StoredCodes("fp8 (a scale for each row)")
        case "mxfp4":
            return StoredCodes("MXFP4")
        case "modelopt":
            part = told.get("quantization", told)
            kind = part.get("quant_algo") if isinstance(part, Mapping) else None
            return (
                StoredCodes("fp8 (modelopt)") if kind == "FP8" else f"by modelopt in {kind!r:.40}"
            )
        case "compressed-tensors":
            return _of_compressed_tensors(told)
        case None:
            return "in a way that is not said: quantization_config names no quant_method"
    bits = f" in {told['bits']} bits" if isinstance(told.get("bits"), int) else ""
    return f"by {method!s:.40}{bits} (quant_method of quantization_config), which is not read"


def _of_bitsandbytes(told: Mapping[str, Any]) -> StoredCodes | str | None:
    if told.get("load_in_8bit"):
        return StoredCodes("int8 of bitsandbytes")
    if not told.get("load_in_4bit"):
        return None
    kind = told.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        return f"by bitsandbytes in {kind!r:.40}, which is not read"
    return StoredCodes(f"{kind.upper()} of bitsandbytes")


def _of_fp8(told: Mapping[str, Any], method: str) -> StoredCodes | str:
    tile = told.get("weight_block_size")
    if tile is None:
        return StoredCodes(method)
    read = _tile(tile)
    if read is None:
        return f"by {method} with weight_block_size {tile!r:.40}, which is not two lengths"
    return StoredCodes(f"{method} (a scale for {read[0]} x {read[1]} weights)", read)


def _of_compressed_tensors(told: Mapping[str, Any]) -> StoredCodes | str | None:
    """Groups of layers, each with a scheme: those of 8 bits are stored as they are, not packed."""
    groups, found = told.get("config_groups"), None
    sparsity = told.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        return f"by compressed-tensors, sparse in {sparsity['format']!r:.40}, which is not read"
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        kind, bits = weights.get("type"), weights.get("num_bits")
        is_read = bits == _BITS and (
            kind == "float" or (kind == "int" and weights.get("symmetric") is not False)
        )
        if not is_read:
            way = told.get("format", "another format")
            return (
                f"by compressed-tensors in {kind} of {bits} bits ({way!s:.40}), which is not read"
            )
        tile = _tile(weights.get("block_structure"))
        if tile is None and weights.get("strategy") == "group":
            tile = _tile([1, weights.get("group_size")])
        found = found or StoredCodes("fp8" if kind == "float" else "int8", tile)
    return found and found._replace(what=f"{found.what} of compressed-tensors")


def _tile(told: object) -> tuple[int, int] | None:
    match told:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None
