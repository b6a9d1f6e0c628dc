"""Folders whose matrices are codes, and the values that these stand for by their definitions.

Everything here is numpy, written from the published formats, and nothing is of twinstream.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Stored = dict[str, torch.Tensor]
Coded = tuple[Stored, np.ndarray]  # tensors of files, and float32 values
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], dtype=np.float32)  # fmt: skip
_FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], dtype=np.float32) / np.float32(12)
FP4 = np.concatenate([_FP4, -_FP4])  # dDequantizeFP4Tree of bitsandbytes
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
E2M1 = np.concatenate([_E2M1, -_E2M1])
STATE = "quant_state.bitsandbytes__"


def e4m3() -> np.ndarray:
    """Values of all 256 codes: 4 bits of exponent, biased by 7, and 3 of mantissa; OCP 8-bit FP."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    return (np.where(code > 127, -1, 1) * value).astype(np.float32)


def codes_below(limit: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, limit, shape)


def positive(shape: tuple[int, ...], seed: int = 1) -> np.ndarray:
    return (np.random.default_rng(seed).random(shape) * 0.02 + 0.001).astype(np.float32)


def bytes_of(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).astype(np.uint8))


def fp8(name: str, shape: tuple[int, ...], scales: np.ndarray, each: np.ndarray, end: str) -> Coded:
    """Codes of E4M3; `each` is the scale of every element."""
    codes = codes_below(127, shape)  # without the two codes that are no numbers
    stored = {name: bytes_of(codes).view(torch.float8_e4m3fn), end: torch.from_numpy(scales)}
    return stored, e4m3()[codes] * each


def fp8_blocks(name: str, shape: tuple[int, int], block: int) -> Coded:
    """`weight_scale_inv` of DeepSeek-V3: element (i, j) has that of (i // block, j // block)."""
    scales = positive((-(-shape[0] // block), -(-shape[1] // block)))
    each = scales[np.arange(shape[0])[:, None] // block, np.arange(shape[1])[None] // block]
    return fp8(name, shape, scales, each, f"{name}_scale_inv")


def fp8_rows(name: str, shape: tuple[int, int]) -> Coded:
    scales = positive((shape[0], 1))
    return fp8(name, shape, scales, scales, f"{name}_scale")


def fp8_experts(name: str, shape: tuple[int, ...], of_scales: tuple[int, ...]) -> Coded:
    """Of several matrices, as fbgemm_fp8 has Llama 4's."""
    scales = positive(of_scales)
    each = scales if len(of_scales) == len(shape) else scales[:, None, None]
    return fp8(name, shape, scales, each, f"{name}_scale")


def fp8_whole(name: str, shape: tuple[int, int]) -> Coded:
    scale = positive(())
    stored, values = fp8(name, shape, scale.reshape(1), scale, f"{name}_scale")
    return stored | {f"{name.removesuffix('weight')}input_scale": torch.ones(1)}, values


def mxfp8(name: str, shape: tuple[int, int]) -> Coded:
    """A byte for 32 columns, which is an exponent biased by 127."""
    exponents = codes_below(6, (shape[0], shape[1] // 32), 2) + 118
    each = np.float32(2) ** (exponents - 127).repeat(32, 1).astype(np.float32)
    stored, values = fp8(name, shape, each, each, f"{name}_scale_inv")
    return stored | {f"{name}_scale_inv": bytes_of(exponents)}, values


def packed_fp4(name: str, shape: tuple[int, int]) -> Coded:
    """Two codes in an int8, low half first, a power of two for 32 of them: DeepSeek-V4's."""
    codes = codes_below(16, shape)
    exponents = codes_below(6, (shape[0], shape[1] // 32), 2) + 118
    each = np.float32(2) ** (exponents - 127).repeat(32, 1).astype(np.float32)
    stored = {
        name: bytes_of(codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8),
        f"{name.removesuffix('weight')}scale": bytes_of(exponents).view(torch.float8_e8m0fnu),
    }
    return stored, E2M1[codes] * each


def int8(name: str, shape: tuple[int, int]) -> Coded:
    """CB and SCB of bitsandbytes: a row's largest magnitude is 127."""
    codes, largest = codes_below(255, shape) - 127, positive(shape[:1])
    stem = name.removesuffix("weight")
    stored = {
        name: torch.from_numpy(codes).to(torch.int8), f"{stem}SCB": torch.from_numpy(largest),
        f"{stem}weight_format": torch.tensor(0, dtype=torch.uint8),
    }  # fmt: skip
    return stored, (codes * largest[:, None].astype(np.float64) / 127).astype(np.float32)


def int8_rows(name: str, shape: tuple[int, int]) -> Coded:
    """w8a8 of compressed-tensors."""
    codes, scales = codes_below(255, shape) - 127, positive((shape[0], 1))
    stored = {
        name: torch.from_numpy(codes).to(torch.int8),
        f"{name}_scale": torch.from_numpy(scales),
    }
    return stored, codes.astype(np.float32) * scales


def four_bits(
    name: str, shape: tuple[int, ...], kind: str = "nf4", block: int = 64, *, double: bool = False,
    storage: torch.dtype = torch.uint8,
) -> Coded:  # fmt: skip
    count = int(np.prod(shape))
    codes, levels = codes_below(16, (count,)), NF4 if kind == "nf4" else FP4
    codes[::block] = np.argmax(levels)  # as it is where a block's largest value is its scale
    pairs = np.pad(codes, (0, count % 2)).reshape(-1, 2)
    told = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    scales = positive((-(-count // block),))
    stored = {
        name: bytes_of(pairs[:, 0] << 4 | pairs[:, 1]).view(storage)[:, None],
        f"{name}.quant_map": torch.from_numpy(levels.copy()),
        f"{name}.absmax": torch.from_numpy(scales),
    }
    if double:
        nested_map = np.linspace(-1, 1, 256).astype(np.float32)
        absmax, offset = codes_below(256, scales.shape, 3), np.float32(0.025)
        nested = positive((-(-len(scales) // 256),), 4)
        scales = nested_map[absmax] * nested.repeat(256)[: len(scales)] + offset
        stored |= {
            f"{name}.absmax": bytes_of(absmax), f"{name}.nested_absmax": torch.from_numpy(nested),
            f"{name}.nested_quant_map": torch.from_numpy(nested_map),
        }  # fmt: skip
        told |= {"nested_blocksize": 256, "nested_offset": float(offset), "nested_dtype": "float32"}
    stored[f"{name}.{STATE}{kind}"] = state(told)
    return stored, (levels[codes] * scales.repeat(block)[:count]).reshape(shape)


def state(told: object) -> torch.Tensor:
    text = told if isinstance(told, bytes) else json.dumps(told).encode()
    return torch.tensor(list(text), dtype=torch.uint8)


def mxfp4(name: str, shape: tuple[int, int, int]) -> Coded:
    """Experts of gpt-oss, [experts, columns, rows] as the module has them; rows of 32 codes, the
    low half first, and an exponent."""
    count, columns, rows = shape
    codes = codes_below(16, (count, rows, columns))
    exponents = codes_below(6, (count, rows, columns // 32), 2) + 118
    each = np.float32(2) ** (exponents - 127).repeat(32, 2).astype(np.float32)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(count, rows, -1, 16)
    stored = {f"{name}_blocks": bytes_of(packed), f"{name}_scales": bytes_of(exponents)}
    return stored, (E2M1[codes] * each).transpose(0, 2, 1)


Coder = Callable[[str, tuple[int, int]], Coded]
KINDS: dict[str, tuple[Coder, dict[str, object]]] = {
    "fp8": (
        lambda n, s: fp8_blocks(n, s, 8),
        {"quant_method": "fp8", "weight_block_size": [8, 8]},
    ),
    "fp8_rows": (fp8_rows, {"quant_method": "fbgemm_fp8"}),
    "fp8_whole": (fp8_whole, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "fp4": (
        lambda n, s: four_bits(n, s, "fp4"),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    ),
    "nf4": (
        lambda n, s: four_bits(n, s, double=True, storage=torch.bfloat16),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
}  # fmt: skip
"""What published folders hold, by name: how a matrix is coded, and what config.json says."""


def encode(folder: Path, values: Path, kind: str, coded: Callable[[str], bool]) -> None:
    """Put codes in the place of a folder's matrices; write one with their values, too."""
    coder, told = KINDS[kind]
    stored, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = plain[name] = weight
        if coded(name) and weight.dim() > 1:
            parts, made = coder(name, tuple(weight.shape))
            stored |= parts
            plain[name] = torch.from_numpy(np.ascontiguousarray(made))
    values.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (values / "config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": told}))
    save_file(plain, values / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
