"""Compare kernels with the eager ones on a device, over a round of a small model."""

from dataclasses import dataclass

import torch

from twinstream.executor.kernels.operand import DTYPES
from twinstream.executor.probe.tasks.chain_memory import round_results
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.lowering.lower import lower
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.workload import Workload

# Two packed sequences, and one in two slices.
_WORKLOADS = (
    Workload(seq_len=128, chunk_tokens=256, chunks_per_round=1, rounds_per_step=1),
    Workload(seq_len=256, chunk_tokens=128, chunks_per_round=2, rounds_per_step=1),
)
# bf16 keeps 8 bits: sums of rounded products in another order differ by some of the last ones.
TOLERANCE = {"bfloat16": 6e-2, "float32": 1e-3}


@dataclass(frozen=True)
class Difference:
    """The tensor in which two kernels differ most: `relative` is max |a - b| / max |b|."""

    tensor: str
    relative: float


def differs_from_eager(
    kernels: KernelChoice, device: torch.device, dtype: str = "bfloat16"
) -> Difference:
    """The largest difference of loss, gradients and activations of a round, NaN if any is one."""
    worst = Difference("nothing", 0.0)
    for head_dim in (64, 128):
        spec = _spec(head_dim, dtype)
        for workload in _WORKLOADS:
            found, expected = (
                round_results(lower(spec, workload, Recipe(kernels=choice)), device)
                for choice in (kernels, KernelChoice())
            )
            for name, tensor in expected.items():
                relative = _relative(found[name], tensor)
                if not relative <= worst.relative:
                    worst = Difference(name, relative)
                if relative != relative:
                    return worst
    return worst


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.abs().max().clamp(min=1e-20)
    return float((found - expected).abs().max() / scale)


def _spec(head_dim: int, dtype: str) -> ModelSpec:
    assert dtype in DTYPES
    return ModelSpec.model_validate(
        {
            "name": "trial",
            "num_layers": 2,
            "d_model": 256,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": head_dim,
            "d_ff": 512,
            "vocab_size": 512,
            "dtype": dtype,
        }
    )
