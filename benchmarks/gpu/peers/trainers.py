"""Train a Llama with plain PyTorch, or with FSDP2 and CPU offload: what others would write."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from benchmarks.gpu.jobs.campaign import PeerKind
from benchmarks.gpu.peers.llama import Llama
from twinstream.executor.kernels.operand import DTYPES
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.recipes.recipe import Recipe

_INIT_STD = 0.02


@dataclass
class Trainer:
    """A model, its optimizer, and one micro-batch or one update at a time."""

    model: Llama
    optimizer: torch.optim.Optimizer
    device: torch.device
    is_distributed: bool = False

    def micro_batch(self, tokens_2BS: torch.Tensor, share: float) -> torch.Tensor:
        """Add `share` of the mean loss's gradient of ids and labels; returns the mean loss.

        The loss stays on the device: to read it would wait for the device.
        """
        ids, labels = tokens_2BS.to(self.device, torch.int64, non_blocking=True).unbind()
        loss = self.model(ids, labels)
        (loss * share).backward()
        return cast(torch.Tensor, loss.detach())

    def update(self) -> None:
        """One step of AdamW, and gradients to none."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        if self.is_distributed:
            dist.destroy_process_group()


def trainer(
    kind: PeerKind,
    spec: ModelSpec,
    recipe: Recipe,
    device: torch.device,
    weights: Mapping[str, torch.Tensor] | None = None,
    learning_rate: float = 1e-5,
) -> Trainer:
    """A trainer with random weights, or those of a Hugging Face state dict.

    Parameters, gradients and optimizer state are of the spec's dtype. `compiled` compiles each
    block (only traced on a CPU); `fsdp_offload` shards over one rank, with parameters, gradients
    and the optimizer in pinned host memory.
    """
    with torch.device("meta"):
        model = Llama(spec).to(DTYPES[spec.dtype])
    offloads = kind == "fsdp_offload"
    if offloads:
        _shard(model, device)
    model.to_empty(device="cpu" if offloads else device)
    _initialize(model, weights)
    if kind == "compiled":
        for layer in model.model.layers:
            layer.compile(backend="inductor" if device.type == "cuda" else "eager")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps,
        weight_decay=recipe.weight_decay, fused=True,
    )  # fmt: skip
    return Trainer(model, optimizer, device, is_distributed=offloads)


def _shard(model: Llama, device: torch.device) -> None:
    """FSDP2 over a world of one: each block, then the rest."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)


def _initialize(model: Llama, weights: Mapping[str, torch.Tensor] | None) -> None:
    """Given weights, or one drawn block laid over each matrix: drawing 8e9 values takes minutes."""
    block = torch.empty(2**22).normal_(0.0, _INIT_STD, generator=torch.Generator().manual_seed(0))
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        flat = cast(torch.Tensor, local).detach().view(-1)
        if weights is not None:
            flat.copy_(weights[name].reshape(-1))
        elif name.endswith("norm.weight"):
            flat.fill_(1.0)
        else:
            for start in range(0, flat.numel(), block.numel()):
                piece = flat[start : start + block.numel()]
                piece.copy_(block[: piece.numel()])
