"""What libraries want beside the tensors: where sequences start, and a dense log-sum-exp."""

from dataclasses import dataclass

import torch

from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.demand.attention_shape import equal_runs


@dataclass(frozen=True)
class Starts:
    """Where each sequence starts, as libraries are told it: 0, and the sums of the lengths."""

    tensor: torch.Tensor  # [B + 1], int32
    longest: int

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device, workspace: Workspace) -> "Starts":
        """Made on the device, by a launch for each run of equal lengths: nothing is copied."""
        starts = workspace.take((len(lengths) + 1,), torch.int32)
        index = position = 0
        for length, count in equal_runs(lengths):
            end = position + count * length
            out = starts[index : index + count + 1]
            torch.arange(position, end + 1, length, out=out, device=device)
            index, position = index + count, end
        return cls(starts, max(lengths))


def dense_lse(lse_BHS: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """The log-sum-exp as libraries want it; a copy only for packed sequences."""
    if lse_BHS.shape[0] == 1 and lse_BHS.is_contiguous():
        return lse_BHS
    return workspace.take(tuple(lse_BHS.shape), torch.float32).copy_(lse_BHS)
