"""A stand-in for nvidia-cudnn-frontend: it builds graphs, and computes them on the CPU.

It holds our calls to the library's interface, and the layouts that we declare to what lies at the
pointers that we give.
"""

from types import ModuleType, SimpleNamespace

import torch

from tests.executor.attention.fakes import backward, forward, module_of


class CudnnTensor:
    """A tensor of a graph, as nvidia-cudnn-frontend describes one."""

    def __init__(self, **given):
        self.given = given

    def __getattr__(self, name):
        assert name in ("set_output", "set_dim", "set_stride", "set_data_type"), name

        def put(value):
            self.given[name.removeprefix("set_")] = value
            return self

        return put

    def of(self, x):
        """What is at the pointer of `x`, as it was described, [B, S, H, D]; `x` is a view of it."""
        dtypes = {"BFLOAT16": torch.bfloat16, "FLOAT": torch.float32}
        assert dtypes[self.given["data_type"]] == x.dtype
        layout = self.given["dim"], self.given["stride"]
        return x.as_strided(*layout, x.storage_offset()).transpose(1, 2)


def cudnn_module(calls: list[dict], refuses: str | None = None) -> ModuleType:
    """The part of nvidia-cudnn-frontend that we call; graphs built and run are recorded.

    With `refuses` building a graph fails, with this for the reason.
    """

    class Unsupported(Exception):
        pass

    class Graph:
        def __init__(self, **given):
            expected = {"intermediate_data_type": "FLOAT", "compute_data_type": "FLOAT"}
            assert given == expected | {"io_data_type": "BFLOAT16", "handle": 7}
            self.built = False

        def tensor(self, *, name, dim, stride, data_type):
            return CudnnTensor(name=name, dim=dim, stride=stride, data_type=data_type)

        def sdpa(self, q, k, v, *, generate_stats, **more):
            assert generate_stats is True
            return self._made("sdpa", {"q": q, "k": k, "v": v}, ("o", "stats"), more)

        def sdpa_backward(self, q, k, v, o, dO, stats, *, use_deterministic_algorithm, **more):  # noqa: PLR0913
            assert use_deterministic_algorithm is True
            given = {"q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats}
            return self._made("sdpa_backward", given, ("dQ", "dK", "dV"), more)

        def _made(self, name, operands, results, more):
            self.scale = more["attn_scale"]
            assert more == {"attn_scale": self.scale, "name": name, "diagonal_band_right_bound": 0,
                            "diagonal_alignment": "BOTTOM_RIGHT"}  # fmt: skip
            self.name, self.tensors = name, operands | {n: CudnnTensor() for n in results}
            self.results = [self.tensors[n] for n in results]
            return self.results

        def build(self, modes):
            assert modes == ["A", "FALLBACK"]
            if refuses is not None:
                raise Unsupported(refuses)
            assert all(x.given["output"] is True for x in self.results)
            self.built = True
            calls.append({"name": "build", "of": self.name})

        def get_workspace_size(self):
            return 64

        def execute(self, bound, workspace, handle):
            assert self.built and handle == 7 and workspace.numel() == 64
            at = {n: x.of(bound[x]) for n, x in self.tensors.items()}
            calls.append({"name": self.name, "heads": at["q"].shape[2], "keys": at["k"].shape[1]})
            self._compute(**at)

        def _compute(self, q, k, v, stats, **rest):
            lse = stats[..., 0].transpose(1, 2)
            if self.name == "sdpa":
                out, found = forward(q, k, v, self.scale, causal=True, top_left=False)
                rest["o"].copy_(out)
                lse.copy_(found)
                return
            assert lse.is_contiguous()
            found = backward(rest["dO"], q, k, v, rest["o"], lse, self.scale, causal=True,
                             top_left=False)  # fmt: skip
            for name, gradient in zip(("dQ", "dK", "dV"), found, strict=True):
                rest[name].copy_(gradient)

    def names(*given):
        return SimpleNamespace(**{name: name for name in given})

    def set_stream(*, handle, stream):
        assert (handle, stream) == (7, 0)

    return module_of(
        "cudnn", pygraph=Graph, create_handle=lambda: 7, set_stream=set_stream,
        cudnnGraphNotSupportedError=Unsupported, backend_version=lambda: 91801,
        data_type=names("BFLOAT16", "FLOAT"), heur_mode=names("A", "FALLBACK"),
        diagonal_alignment=names("BOTTOM_RIGHT"),
    )  # fmt: skip
