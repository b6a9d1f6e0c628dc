"""Adapters of each expert, as PEFT has them of experts that are modules, made those of all experts.

PEFT before 0.18 with transformers 4 wrote lora_A and lora_B for every expert and projection; since
then gate and up of all experts are one parameter. What stands one under the other there are two
products here, A = [A_gate; A_up] and B = diag(B_gate, B_up), of twice the rank. All other matrices
get as many rows and columns of zeros, which stay zero in training, and alpha keeps the scale.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.models.recipes.peft_weights import EXPERT_MODULES, EXPERT_PARAMETERS

_NAME = re.compile(
    r"(?P<layer>.+\.layers\.\d+)\.(mlp|block_sparse_moe|feed_forward)\.experts\.(?P<expert>\d+)"
    r"\.(?P<projection>w[123]|(gate|up|down)_proj)\.lora_(?P<matrix>[AB])\.weight"
)
_PROJECTIONS = {"w1": "gate", "w3": "up", "w2": "down"}
_GATE, _UP, _DOWN = "gate", "up", "down"


class OfExpert(NamedTuple):
    """The layer, expert, projection and matrix (A or B) that a tensor of PEFT belongs to."""

    layer: str
    expert: int
    projection: str
    matrix: str


def of_each_expert(names: Iterable[str]) -> dict[str, OfExpert]:
    """Those tensors of an adapter that belong to one expert.

    >>> of_each_expert(["model.layers.0.mlp.experts.3.up_proj.lora_A.weight"]).popitem()[1][1:]
    (3, 'up', 'A')
    """
    found = {}
    for name in names:
        if match := _NAME.fullmatch(name):
            projection = match["projection"]
            projection = _PROJECTIONS.get(projection, projection.removesuffix("_proj"))
            found[name] = OfExpert(
                match["layer"], int(match["expert"]), projection, match["matrix"]
            )
    return found


def joined_experts(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors of the same adapter with the matrices of all experts together.

    Raises:
        WeightsError: of an expert something is missing, or it has another shape than the others.
    """
    rank = int(config["r"])
    of_experts = of_each_expert(tensors)
    found = {
        name: _widened(tensor, rank, name)
        for name, tensor in tensors.items() if name not in of_experts
    }  # fmt: skip
    layers: dict[str, dict[tuple[int, str, str], torch.Tensor]] = defaultdict(dict)
    for name, one in of_experts.items():
        layers[one.layer][one.expert, one.projection, one.matrix] = tensors[name]
    for layer, matrices in layers.items():
        try:
            both = _of_layer(matrices, rank)
        except (KeyError, RuntimeError, ValueError) as error:
            raise WeightsError(
                path, f"has adapters of each expert, and those of {layer} make no whole ones of "
                f"rank {rank}, gate and up together: {error}",
            ) from None  # fmt: skip
        for module, (a_ERI, b_EOR) in zip(EXPERT_MODULES.values(), both, strict=True):
            found[f"{layer}.{module}.lora_A.weight"] = a_ERI.flatten(0, 1).contiguous()
            b_OK = b_EOR.permute(1, 2, 0).flatten(1).contiguous()
            found[f"{layer}.{module}.lora_B.weight"] = b_OK
    alpha = float(config["lora_alpha"]) * (sqrt(2) if config.get("use_rslora") else 2)
    more = {"r": 2 * rank, "lora_alpha": alpha, "target_parameters": [*EXPERT_PARAMETERS]}
    return {**config, **more}, found


def _widened(tensor: torch.Tensor, rank: int, name: str) -> torch.Tensor:
    """A or B of twice the rank, of which the second half adds nothing."""
    if ".lora_A." in name and tensor.ndim == 2:
        return pad(tensor, (0, 0, 0, rank))
    return pad(tensor, (0, rank)) if ".lora_B." in name else tensor


def _of_layer(
    matrices: Mapping[tuple[int, str, str], torch.Tensor], rank: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A [E, R, in] and B [E, out, R] of gate and up, and of down.

    A projection that no expert has is made of zeros.
    """
    there = {projection for _, projection, _ in matrices}
    if len(there & {_GATE, _UP}) == 1:
        raise ValueError("there is only one of gate and up, which are one matrix")
    experts = sorted({expert for expert, _, _ in matrices})
    whole = {(e, p, m) for e in range(len(experts)) for p in there for m in "AB"}
    if missing := [f"{m} of {p} of expert {e}" for e, p, m in sorted(whole - matrices.keys())]:
        raise ValueError(f"missing: {some_of(missing)}")

    def stacked(projection: str, matrix: str) -> torch.Tensor:
        return torch.stack([matrices[e, projection, matrix] for e in experts])

    found = []
    if _GATE in there:
        a = torch.cat([stacked(_GATE, "A"), stacked(_UP, "A")], 1)
        gate, up = stacked(_GATE, "B"), stacked(_UP, "B")
        found.append((a, torch.cat([pad(gate, (0, rank)), pad(up, (rank, 0))], 1)))
    if _DOWN in there:
        found.append(
            (pad(stacked(_DOWN, "A"), (0, 0, 0, rank)), pad(stacked(_DOWN, "B"), (0, rank)))
        )
    if _GATE not in there:
        (_, _, d_ff), (_, d, _) = (each.shape for each in found[0])
        found.insert(0, _zeros(len(experts), 2 * rank, d, 2 * d_ff, found[0][0].dtype))
    if _DOWN not in there:
        (_, _, d), (_, wide, _) = (each.shape for each in found[0])
        found.append(_zeros(len(experts), 2 * rank, wide // 2, d, found[0][0].dtype))
    if wrong := [list(a.shape) for a, b in found if {a.shape[1], b.shape[2]} != {2 * rank}]:
        raise ValueError(f"a matrix A of all experts is {wrong[0]}")
    return found


def _zeros(
    count: int, rank: int, inside: int, outside: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (count, rank, inside), (count, outside, rank)
    return torch.zeros(a, dtype=dtype), torch.zeros(b, dtype=dtype)
