"""Kernels around experts that ranks share: their scratch, and rows that all go to one rank."""

import pytest
import torch

from tests.executor.ranks.one_process import ChainMemory
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.workspace import workspace_bytes
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.lower import lower
from twinstream.models.options import Experts
from twinstream.models.presets import load_preset
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.chain import COMMUNICATE, Chain
from twinstream.schedule.cluster.projecting import attributes_of_rank
from twinstream.schedule.workload import Workload

EP, COUNT, PER_TOKEN, D_MODEL, D_FF, TOKENS = 2, 8, 2, 128, 64, 48
ROWS = TOKENS * PER_TOKEN
GATED = Experts(count=COUNT, per_token=PER_TOKEN, d_ff=D_FF, shared_d_ff=32, shared_gate=True)


def chain_of(
    chunk_tokens: int = TOKENS, experts: Experts = GATED, lora: str | None = None,
    parts: int | None = None,
) -> Chain:  # fmt: skip
    """That of the second rank, whose experts are the last four."""
    spec = load_preset("tiny").model_copy(update={"experts": experts, "dtype": "float32"})
    workload = Workload(
        seq_len=TOKENS, chunk_tokens=chunk_tokens, chunks_per_round=TOKENS // chunk_tokens,
        rounds_per_step=1,
    )  # fmt: skip
    layout = Layout(dp=EP, ep=EP, zero=0, parts=parts)
    recipe = Recipe(kernels=KernelChoice(), lora=None if lora is None else lora_of(lora))
    chain = lower(spec, workload, recipe, layout)
    second = {
        name: call.model_copy(update={"attributes": attributes_of_rank(call.attributes, 1)})
        for name, call in chain.calls.items()
        if "first_expert" in call.attributes
    }
    return chain.model_copy(update={"calls": {**chain.calls, **second}})


@pytest.mark.parametrize("experts", [GATED, GATED.model_copy(update={"shared_gate": False})])
@pytest.mark.parametrize("chunk_tokens", [TOKENS, TOKENS // 3])
@pytest.mark.parametrize("lora", [None, "r=4,targets=q,down,experts"])
@pytest.mark.parametrize("parts", [None, 1])
def test_kernels_take_the_scratch_that_is_declared(experts, chunk_tokens, lora, parts, monkeypatch):
    if lora and parts:
        lora = lora.removesuffix(",experts")
    taken: list[Workspace] = []
    make = Workspace.__init__

    def noted(self: Workspace, scratch: torch.Tensor) -> None:
        make(self, scratch)
        taken.append(self)

    monkeypatch.setattr(Workspace, "__init__", noted)
    chain = chain_of(chunk_tokens, experts, lora, parts)
    memory, seen = ChainMemory(chain, {}), dict[str, tuple[int, int]]()
    for task in [*chain.tasks, *(again.task for again in chain.recomputes)]:
        call = chain.calls[task.call]
        if "ep" not in call.attributes or call.kernel == COMMUNICATE:
            continue
        taken.clear()
        declared = workspace_bytes(call.kernel, call.attributes)
        registered_kernel(call.kernel)(memory.operands_of(task), call.attributes)()
        most = max(one.high_water_bytes for one in taken)
        seen[call.kernel] = max(seen.get(call.kernel, (0, 0)), (most, declared))
    assert len(seen) == (10 if parts else 8), seen
    assert all(most == declared for most, declared in seen.values()), seen


def test_all_rows_of_all_ranks_may_come_to_one_rank():
    """Every row chooses the last expert; each rank's are multiplied by themselves."""
    chain = chain_of()
    memory = ChainMemory(chain, {}, fill=0xFF)
    task = next(one for one in chain.tasks if one.label.kind == "experts_forward")
    operands, call = memory.operands_of(task), chain.calls[task.call]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(EP * ROWS, D_MODEL, generator=generator)
    operands["rows"].bytes.copy_(rows.view(-1).view(torch.uint8))
    matrices = torch.randn(3 * COUNT // EP * D_FF * D_MODEL, generator=generator) / 8
    operands["experts"].bytes.copy_(matrices.view(torch.uint8))
    counts = torch.zeros(EP, COUNT, dtype=torch.int32)
    counts[:, -1] = ROWS
    operands["counts"].bytes.copy_(counts.view(-1).view(torch.uint8))
    registered_kernel(call.kernel)(operands, call.attributes)()
    split = 2 * COUNT // EP * D_FF * D_MODEL
    gate_up = matrices[:split].view(-1, 2 * D_FF, D_MODEL)[-1]
    down = matrices[split:].view(-1, D_MODEL, D_FF)[-1]
    gate, up = (rows @ gate_up.t()).chunk(2, 1)
    expected = (torch.nn.functional.silu(gate) * up) @ down.t()
    found = operands["rows"].bytes.view(torch.float32).view(EP * ROWS, D_MODEL)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
