"""Compile every Triton kernel for sm_90, as it is launched for Llama-3 8B in bf16; no GPU needed.

Run as a program without TRITON_INTERPRET: prints a JSON list of {name, stack_bytes, wide_loads,
grid, resident}, the last being how many programs a multiprocessor has registers for; of AdamW's
kernel also {issued, integer}, instructions an element.
"""

import contextlib
import importlib
import json
import re
from dataclasses import replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.executor.kernels.driver import LLAMA_3_1
from tests.executor.kernels.sass import disassembled, loop_count
from twinstream.executor.kernels.registry import vector_ops
from twinstream.executor.kernels.step_state import StepState
from twinstream.executor.kernels.vector.rope import Rope
from twinstream.executor.kernels.vector.updates import AdamwConstants, FlatUpdate
from twinstream.executor.kernels.vector.vector_ops import (
    HeadNorm,
    HeadNormBackward,
    LogitRows,
    NormGradients,
    RmsNorm,
    SortedTokens,
    VectorGradient,
)

MODULES = (
    "rms_norm column_sums query_key swiglu cross_entropy token_gradients ordered_sums adamw "
    "base_codes experts"
)
T, D, H, K, E, F, V = 8192, 4096, 32, 8, 128, 14336, 128256
TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


class NoWorkspace:
    """Hands out tensors without memory."""

    def frame(self):
        return contextlib.nullcontext()

    def take(self, shape, dtype):
        return meta(*shape, dtype=dtype)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(kernel, grid, arguments, options) -> dict:
    """What Triton's launcher would compile for these arguments."""
    names = [parameter.name for parameter in kernel.params]
    values = dict(zip([name for name in names if name not in options], arguments, strict=True))
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values.get(parameter.name, options.get(parameter.name))
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    settings = {name: value for name, value in options.items() if name not in names}
    settings.setdefault("enable_fp_fusion", True)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=settings)
    stack_bytes, registers = resources(found.asm["cubin"])
    is_adamw = kernel.fn.__name__ == "_adamw_kernel"
    return {
        **(counted(found.asm["cubin"], options) if is_adamw else {}),
        "name": kernel.fn.__name__,
        "grid": grid,
        "resident": 2**16 // (-(-registers // 8) * 8 * 32 * settings["num_warps"]),
        "stack_bytes": stack_bytes,
        "wide_loads": len(re.findall(r"ld\.global\.v4|cp\.async\.cg", found.asm["ptx"])),
    }


def resources(cubin: bytes) -> tuple[int, int]:
    """Bytes of a stack, to which registers spill and indexed arrays go; registers of a thread."""
    printed = disassembled(cubin, "-res-usage")
    stack, registers = (
        max(int(size) for size in re.findall(rf"{what}:(\d+)", printed))
        for what in ("STACK", "REG")
    )
    return stack, registers


def counted(cubin: bytes, options: dict) -> dict:
    """Of AdamW's kernel: which it is, and a thread's instructions an element."""
    elements = options["BLOCK"] / (32 * options["num_warps"])
    count = loop_count(disassembled(cubin, "-sass"))
    names = ("HAS_CODES", "HAS_MASTER", "CLIPS", "STOCHASTIC")
    return {
        **{name: options[name] for name in names},
        "issued": count.issued / elements,
        "integer": count.integer / elements,
    }


def launch_all(ops) -> None:
    """Every operation that launches a kernel, in each of its variants."""
    x, room, f32 = meta(T, D), NoWorkspace(), torch.float32
    norm = RmsNorm(x, meta(T, dtype=f32), meta(D))
    ops.write_normed(norm, x)
    ops.write_normed(norm, x, eps=1e-5, residual_TD=x)
    ops.rms_norm_backward(norm, NormGradients(x, x, VectorGradient(meta(D), "update"), True), room)
    rope, head_norm = Rope(5e5, E, T, 0), HeadNorm(meta(E), 1e-6)
    q, keys = meta(T, H, E), meta(T, 2, K, E)[:, 0]
    ops.write_rotated(q, None, rope, q)
    ops.write_rotated(q, None, replace(rope, scaling=LLAMA_3_1), q)
    ops.write_rotated(keys, head_norm, rope, keys)
    backward = HeadNormBackward(head_norm, q, VectorGradient(meta(E), "write"))
    ops.rotated_backward(q, rope, backward, room)
    ops.write_swiglu(meta(T, 2 * F), meta(T, F))
    ops.swiglu_backward(meta(T, 2 * F), meta(T, 2 * F), meta(T, F))
    row_norm = HeadNorm(meta(H * E), 1e-6)
    ops.write_rotated(q, row_norm, rope, q)
    row_backward = HeadNormBackward(row_norm, q, VectorGradient(meta(H * E), "write"))
    ops.rotated_backward(q, rope, row_backward, room)
    rows, experts, width = 8 * T, 128, 768
    ends, out, narrow = meta(experts, dtype=torch.int32), meta(rows, D), meta(rows, width)
    for matrices in (meta(experts, width, D), meta(experts, D, width).transpose(1, 2)):
        ops.grouped_matmul(narrow, matrices, ends, out)
        ops.grouped_matmul(narrow, matrices, ends, out, accumulate=True)
    ops.add_grouped_gradient(meta(experts, D, width), out, narrow, ends, "update")
    places, weights = meta(rows, dtype=torch.int64), meta(T, 8, dtype=f32)
    ops.add_rows(out, weights, places, x, x)
    ops.add_rows(out, None, places, None, x)
    ops.weigh_rows(narrow, narrow, weights, places, weights)
    for scale_of, levels in ((256, None), (64, meta(16, dtype=f32))):
        codes = meta(D * F // (1 if levels is None else 2), dtype=torch.uint8)
        scales = meta(D * F // scale_of, dtype=f32)
        ops.write_dequantized(codes, scales, meta(D, F), levels)
    ops.add_column_sums(x, VectorGradient(meta(D, dtype=f32), "update"), room)
    ops.cross_entropy(
        LogitRows(
            meta(1024, V), meta(1024, dtype=torch.int32), meta(1024, dtype=f32), meta(1, dtype=f32)
        ),
        room,
    )
    tokens = SortedTokens(*(meta(T, dtype=torch.int64) for _ in range(3)))
    ops.add_token_gradients(x, tokens, meta(V, D), room)
    norm = meta(1, dtype=f32)
    ops.sum_squares(meta(V * D), norm, room)
    ops.root_of_sum(meta(80, dtype=f32), norm)  # of a few numbers loads may be narrow
    n, step = 2**24, StepState(meta(64, dtype=torch.uint8))
    hyper = AdamwConstants(0.9, 0.999, 1e-8)
    half, whole = meta(n), meta(n, dtype=f32)
    for state, stream in (
        (FlatUpdate(half, half, (half, half), step), 6),
        (FlatUpdate(half, whole, (whole, whole), step, whole), None),
    ):
        ops.adamw(replace(state, stream=stream), hyper)
        ops.adamw(replace(state, stream=stream, norm=norm), hyper)
    codes, scale = meta(n, dtype=torch.uint8), meta(n // 256, dtype=f32)
    coded = FlatUpdate(half, half, (codes, codes), step, scales=(scale, scale), norm=norm)
    for stream in (6, None):
        ops.adamw(replace(coded, stream=stream), hyper)


def main() -> None:
    found = []

    def launch(kernel, grid, *arguments, **options):
        found.append(compiled(kernel, grid, arguments, options))

    for name in MODULES.split():
        module = importlib.import_module(f"twinstream.executor.kernels.triton_kernels.{name}")
        module.launch = launch
    launch_all(vector_ops("triton"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
