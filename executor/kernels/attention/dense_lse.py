"""A dense log-sum-exp, which libraries want beside the tensors."""

import torch

from twinstream.executor.kernels.workspace import Workspace


def dense_lse(lse_BHS: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """The log-sum-exp as libraries want it; a copy only for packed sequences."""
    if lse_BHS.shape[0] == 1 and lse_BHS.is_contiguous():
        return lse_BHS
    return workspace.take(tuple(lse_BHS.shape), torch.float32).copy_(lse_BHS)
