"""Values on the fake device: torch's CUDA operators and Triton's kernels, computed on the CPU.

Device memory is host memory here, so an operator's tensors are seen as CPU tensors; what it does is
put on the current stream of the fake device, which runs it when that stream comes to it.
"""

import ctypes
import itertools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

RUNTIME = ctypes.CDLL("libcudart.so.13")
RUNTIME.fake_cuda_room.restype = ctypes.c_void_p
_Body = ctypes.CFUNCTYPE(None, ctypes.c_uint64)
RUNTIME.fake_cuda_launch.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _Body, ctypes.c_uint64]
_ROOM_BYTES = 64 << 20
_DRAWN = 4  # by one operator, as a generator's offset counts

ERRORS: list[str] = []
"""Of kernels, which on a device would end the process."""
_numbers = itertools.count(1)
_bodies: dict[int, tuple[Callable[[], object], bool]] = {}
_registered: list[torch.library.Library] = []
# Results of a size that depends on values: whoever asks waits for the stream.
_DATA_DEPENDENT = frozenset(
    ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
     "repeat_interleave", "equal")
)  # fmt: skip
# Left as they are: they move no values, or come to the driver or cuBLAS by themselves.
_LEFT = frozenset(
    """empty empty_strided as_strided view _reshape_alias set_ resize_ resize_as_ unfold
    record_stream _local_scalar_dense copy_ is_set_to alias _pin_memory is_pinned mm addmm bmm
    baddbmm _addmm_activation _scaled_mm _grouped_mm _scaled_grouped_mm view_as_real view_as_complex
    _efficientzerotensor _sleep _debug_has_internal_overlap detach _to_copy clone lift lift_fresh
    _conj _neg_view item is_nonzero _nested_view_from_buffer _has_same_storage_numel
    _new_zeros_with_same_feature_meta to_padded_tensor diagonal select slice squeeze unsqueeze t
    transpose permute expand split unbind""".split()  # noqa: SIM905
)
# Nothing of the project uses these families.
_ALL_THE_SAME = ("linalg_vector_norm",)  # of a family that is left, Muon's
_LEFT_FAMILIES = (
    "cudnn", "_cudnn", "miopen", "_flash", "_scaled_dot", "_efficient", "_fused", "_fft",
    "_foreach", "_nested", "_thnn", "_cslt", "_sparse", "sparse", "_amp", "_cufft", "_triton",
    "_transform_bias", "_fill_mem", "_weight_int", "linalg", "_linalg", "_convolution", "nccl",
    "quantize", "_fake_q", "fake_q", "_fbgemm", "_grid", "_ctc", "_use_cudnn", "_embedding_bag",
    "_histogram", "histogram",
)  # fmt: skip


@_Body
def _run(number: int) -> None:
    body, is_captured = _bodies[number]
    if not is_captured:
        del _bodies[number]
    try:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            body()
    except BaseException:
        ERRORS.append(traceback.format_exc())
        print("[fake CUDA] a kernel failed:", ERRORS[-1], file=sys.stderr)


def enqueue(name: str, body: Callable[[], object]) -> None:
    """Have the current stream of the fake device run it in its turn."""
    number = next(_numbers)
    _bodies[number] = body, _is_capturing()
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    if RUNTIME.fake_cuda_launch(stream, name.encode(), _run, number):
        del _bodies[number]
        raise RuntimeError(f"CUDA error: {name} was refused")


def on_cpu(value: Any) -> Any:
    """A tensor of the device as one of the CPU, of the same bytes; others as they are.

    A generator draws on the CPU by its seed and what it has drawn so far.
    """
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        drawn = value.get_offset()
        value.set_offset(drawn + _DRAWN)
        return torch.Generator().manual_seed((value.initial_seed() + drawn) % 2**63)
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    if not value.numel():
        return torch.empty(value.shape, dtype=value.dtype)
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    raw = (ctypes.c_char * ((1 + last) * value.element_size())).from_address(value.data_ptr())
    flat = torch.frombuffer(raw, dtype=value.dtype)
    return torch.as_strided(flat, value.shape, value.stride())


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _is_capturing() -> bool:
    return bool(torch.cuda.is_current_stream_capturing())


def _wait() -> None:
    if _is_capturing():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    torch.cuda.current_stream().synchronize()


def _for_device(options: dict[str, Any], device: str) -> dict[str, Any]:
    changed = {"pin_memory": False} if "pin_memory" in options else {}
    if options.get("device") is not None:
        changed["device"] = torch.device(device)  # type: ignore[assignment]
    return options | changed


class _Operator:
    """One of torch's operators, on tensors of the fake device."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self._op, self._name = op, op.name()
        self._arguments = schema.arguments
        self._num_results = len(schema.returns)
        self._is_data_dependent = self._name.split("::")[1].split(".")[0] in _DATA_DEPENDENT

    def __call__(self, *given: Any, **options: Any) -> Any:
        arguments = [
            torch.tensor(value)
            if str(argument.type) == "Tensor" and isinstance(value, int | float | bool)
            else value
            for value, argument in zip(given, self._arguments, strict=False)
        ]
        written = [
            arguments[at] if at < len(arguments) else options.get(argument.name)
            for at, argument in enumerate(self._arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            return self._write(arguments, options, written)
        return self._compute(arguments, options)

    def _write(self, arguments: list[Any], options: dict[str, Any], written: list[Any]) -> Any:
        if len(written) == 1 and written[0] is options.get("out"):
            self._resize(arguments, options)
        on_host = tree_map(on_cpu, arguments), _for_device(tree_map(on_cpu, options), "cpu")
        enqueue(self._name, lambda: self._op(*on_host[0], **on_host[1]))
        if not self._num_results:
            return None
        return written[0] if self._num_results == 1 else tuple(written)

    def _resize(self, arguments: list[Any], options: dict[str, Any]) -> None:
        try:
            shape = self._shapes(arguments, options).shape
        except (NotImplementedError, RuntimeError):
            return
        if shape != options["out"].shape:
            options["out"].resize_(shape)

    def _compute(self, arguments: list[Any], options: dict[str, Any]) -> Any:
        """New tensors, whose values are there when the stream has come so far."""
        on_host = tree_map(on_cpu, arguments), _for_device(tree_map(on_cpu, options), "cpu")

        def compute() -> Any:
            return self._op(*on_host[0], **on_host[1])

        is_known = not _is_capturing() and not RUNTIME.fake_cuda_is_late()
        if self._is_data_dependent:
            _wait()
            found, is_known = compute(), True
        else:
            try:
                found = compute()  # where it is not its turn yet, for the shapes
            except (IndexError, RuntimeError):
                found, is_known = self._shapes(arguments, options), False
        results = tree_map(_dense_like, found)
        into = tree_map(on_cpu, results)

        def body() -> None:
            values = found if is_known else compute()
            for to, value in zip(_several(into), _several(values), strict=True):
                if isinstance(to, torch.Tensor):
                    to.copy_(value)

        enqueue(self._name, body)
        return results

    def _shapes(self, arguments: list[Any], options: dict[str, Any]) -> Any:
        on_meta = tree_map(_on_meta, arguments), _for_device(tree_map(_on_meta, options), "meta")
        return self._op(*on_meta[0], **on_meta[1])


def _dense_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else [value]


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    is_plain = to.dtype == source.dtype and to.shape == source.shape
    is_plain &= to.is_contiguous() and source.is_contiguous()
    if to.is_cuda and source.is_cuda and not is_plain:  # torch has a kernel for it
        on_host = on_cpu(to), on_cpu(source)
        enqueue("aten::copy_", lambda: on_host[0].copy_(on_host[1]))
        return to
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    copied: torch.Tensor = torch.ops.aten.copy_.default.redispatch(key, to, source, non_blocking)
    return copied


def _triton_values() -> None:
    """Triton's kernels are compiled and launched, which does nothing; the eager twins follow."""
    from twinstream.executor.kernels.triton_kernels.vector import TritonVector
    from twinstream.executor.kernels.vector.eager_vector import EagerVector
    from twinstream.executor.kernels.workspace import Workspace

    eager, rooms = EagerVector(), {}

    def roomy(value: Any) -> Any:
        """An eager twin takes more scratch than the kernel was given."""
        if not isinstance(value, Workspace):
            return value
        stream = torch._C._cuda_getCurrentRawStream(0)
        if stream not in rooms:
            rooms[stream] = _room()
        return Workspace(rooms[stream])

    def with_values(launched: Callable[..., Any], computed: Callable[..., Any]) -> Any:
        def both(*arguments: Any, **options: Any) -> Any:
            launched(*arguments, **options)
            return computed(
                *map(roomy, arguments), **{name: roomy(value) for name, value in options.items()}
            )

        return staticmethod(both)

    for name in [name for name in vars(TritonVector) if not name.startswith("_")]:
        if name != "product_with_backward":  # it calls others
            both = with_values(getattr(TritonVector, name), getattr(eager, name))
            setattr(TritonVector, name, both)


def _room() -> torch.Tensor:
    class Memory:
        __cuda_array_interface__: ClassVar = {
            "shape": (_ROOM_BYTES,), "typestr": "|u1", "version": 3, "strides": None,
            "data": (RUNTIME.fake_cuda_room(ctypes.c_size_t(_ROOM_BYTES)), False),
        }  # fmt: skip

    return torch.as_tensor(Memory(), device="cuda")


def install() -> None:
    """From now on operators and kernels compute."""
    from flash_values import FLASH

    library = torch.library.Library("aten", "IMPL", "CUDA")
    _registered.append(library)
    for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        space, _, name = full_name.partition("::")
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None) if space == "aten" else None
        left = base in _LEFT or base.startswith(_LEFT_FAMILIES)
        if packet is None or (left and base not in _ALL_THE_SAME):
            continue
        op = getattr(packet, overload or "default", None)
        if op is not None:
            library.impl(name, _Operator(op), allow_override=True)
    for name, function in {"copy_": _copy, **FLASH}.items():
        library.impl(name, function, allow_override=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # there is no cuDNN; torch would prefer it
    _triton_values()
