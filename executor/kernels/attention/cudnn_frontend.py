"""cuDNN's fused attention by its own graphs, deterministic and written into slots.

Torch calls the same library, but cannot ask for its deterministic backward, and copies results.
A graph is of sizes and strides; the first call with some builds it, which takes the host a while.

Legend: B sequences, S queries and C keys of each, H query heads, K key heads, D head_dim.
"""

import importlib
from typing import Any

import torch

from twinstream.executor.kernels.attention.eager import EagerAttention
from twinstream.executor.kernels.attention.flash import Flash, FlashCall
from twinstream.executor.kernels.attention.implementation import (
    ALL_TOKENS,
    AttentionGradients,
    AttentionImplementation,
)
from twinstream.models.kernel_costs.attention_shape import cudnn_key_heads
from twinstream.schedule.errors import TwinstreamError

_Tensors = dict[str, torch.Tensor]


class CudnnGraphError(TwinstreamError):
    """cuDNN has no kernel for attention of these sizes."""


class CudnnFrontend(Flash):
    """`pygraph.sdpa` and `sdpa_backward` of nvidia-cudnn-frontend.

    Its causal mask is asked for bottom-right. Before cuDNN 9.25 the deterministic backward keeps
    all probabilities of a call, so it is called for a few key heads at a time. Packed sequences of
    unequal lengths are called one by one, and one of a single token is left to eager attention.

    Source of the interface: nvidia-cudnn-frontend 1.18.0 and 1.32.0, docs/operations/Attention.md.
    """

    name = "cudnn_frontend"
    takes_packed = False

    def __init__(self) -> None:
        self._graphs: dict[object, _Graph] = {}
        self._handle: Any = None

    def _for(self, tokens: slice) -> AttentionImplementation:
        of_one = tokens != ALL_TOKENS and tokens.stop - tokens.start == 1
        return EagerAttention() if of_one else self

    def _write_result(self, call: FlashCall) -> None:
        inputs, result = call.inputs, call.result
        lse = result.lse
        if lse.shape[0] > 1 or not lse.is_contiguous():  # log-sum-exps are wanted dense
            lse = call.workspace.take(tuple(lse.shape), torch.float32)
        operands = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
        results = {"o": result.out, "stats": lse.transpose(1, 2)[..., None]}
        self._run("sdpa", operands, results, inputs.scale)
        if lse is not result.lse:
            result.lse.copy_(lse)

    def _write_gradients(self, call: FlashCall, into: AttentionGradients) -> None:
        inputs, result = call.inputs, call.result
        num_sequences, num_queries, num_heads, _ = inputs.q.shape
        num_keys, num_kv_heads = inputs.k.shape[1:3]
        step = cudnn_key_heads(num_sequences, num_queries, num_keys, num_heads, num_kv_heads)
        group = num_heads // num_kv_heads
        for first in range(0, num_kv_heads, step):
            keys = slice(first, first + step)
            queries = slice(first * group, (first + step) * group)
            lse = result.lse[:, queries].contiguous()
            operands = {
                "q": inputs.q[:, :, queries], "k": inputs.k[:, :, keys],
                "v": inputs.v[:, :, keys], "o": result.out[:, :, queries],
                "dO": into.d_out[:, :, queries], "stats": lse.transpose(1, 2)[..., None],
            }  # fmt: skip
            d_k, d_v = into.d_kv[:, :, :, keys].unbind(-3)
            results = {"dQ": into.d_q[:, :, queries], "dK": d_k, "dV": d_v}
            self._run("sdpa_backward", operands, results, inputs.scale)

    def _run(self, operation: str, operands: _Tensors, results: _Tensors, scale: float) -> None:
        """All of [B, S, heads, D or 1]."""
        cudnn = importlib.import_module("cudnn")
        if self._handle is None:
            self._handle = cudnn.create_handle()
        device = operands["q"].device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        cudnn.set_stream(handle=self._handle, stream=stream)
        tensors = operands | results
        key = operation, scale, *((tuple(x.shape), x.stride()) for x in tensors.values())
        if key not in self._graphs:
            self._graphs[key] = _Graph(cudnn, self._handle, operation, operands, results, scale)
        self._graphs[key].execute(tensors, self._handle)


class _Graph:
    """One operation of fixed sizes and strides, built."""

    def __init__(
        self, cudnn: Any, handle: Any, operation: str, operands: _Tensors, results: _Tensors,
        scale: float,
    ) -> None:  # fmt: skip
        types = cudnn.data_type
        type_of = {torch.bfloat16: types.BFLOAT16, torch.float32: types.FLOAT}
        self._graph = cudnn.pygraph(
            io_data_type=types.BFLOAT16, intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT, handle=handle,
        )  # fmt: skip
        self._tensors = {
            name: self._graph.tensor(name=name, data_type=type_of[x.dtype], **_heads_first(x))
            for name, x in operands.items()
        }
        backward = "dQ" in results
        option = "use_deterministic_algorithm" if backward else "generate_stats"
        made = getattr(self._graph, operation)(
            **self._tensors, attn_scale=scale, name=operation,
            diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT, diagonal_band_right_bound=0,
            **{option: True},
        )  # fmt: skip
        for (name, x), result in zip(results.items(), made, strict=True):
            layout = _heads_first(x)
            result.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"])
            result.set_data_type(type_of[x.dtype])
            self._tensors[name] = result
        try:
            self._graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        except cudnn.cudnnGraphNotSupportedError as error:
            sizes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in operands.items())
            raise CudnnGraphError(
                f"cuDNN {cudnn.backend_version()} has no kernel for {operation} of {sizes}: "
                f"{str(error).strip().splitlines()[0]}; plan with another --attention"
            ) from None

    def execute(self, tensors: _Tensors, handle: Any) -> None:
        """The workspace is the library's own, from torch's allocator."""
        size_bytes, device = self._graph.get_workspace_size(), tensors["q"].device
        workspace = torch.empty(max(1, size_bytes), dtype=torch.uint8, device=device)
        bound = {self._tensors[name]: x for name, x in tensors.items()}
        self._graph.execute(bound, workspace, handle=handle)


def _heads_first(x_BSHD: torch.Tensor) -> dict[str, list[int]]:
    """Sizes and strides as [B, H, S, D]."""
    swapped = x_BSHD.transpose(1, 2)
    return {"dim": list(swapped.shape), "stride": list(swapped.stride())}
