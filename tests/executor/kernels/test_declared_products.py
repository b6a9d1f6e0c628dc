"""Declared matrix products, FLOPs and bytes, against the calls of torch that the kernels make."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.executor.kernels.test_workspace import launch_nothing, step_of
from tests.helpers.tiny_chains import small
from twinstream.models.kernel_costs.work import ChunkWork
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.chain import Task
from twinstream.schedule.workload import Workload

Product = tuple[tuple[int, int, int], int]


class Products(TorchDispatchMode):
    """(m, n, k) and elements moved of each 2-D product: factors read, a result written, and read
    where it is added to. A bias counts for nothing; products of heads, attention's, are 3-D."""

    def __init__(self):
        super().__init__()
        self.found: Counter[Product] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in ("mm", "addmm", "addmm_"):
            (m, k), (_, n) = args[-2].shape, args[-1].shape
            is_added = name != "mm" and kwargs.get("beta", 1) != 0 and args[0].dim() == 2
            self.found[(m, n, k), m * k + k * n + (1 + is_added) * m * n] += 1
        return func(*args, **kwargs)


def declared(step, task) -> Counter[Product]:
    found = Counter()
    for work in step.chain.calls[task.call].cost:
        if work.unit != "matmul":
            continue
        m, n, k = work.shape
        elements, rest = divmod(work.hbm_bytes, step.spec.itemsize * work.launches)
        assert (work.flops, rest) == (2 * m * n * k * work.launches, 0)
        found[work.shape, elements] += work.launches
    return found


def called(step, monkeypatch) -> list[tuple[Task, Counter[Product]]]:
    """Products of each task of two chunks; Triton's kernels are not launched.

    The first backward of a step makes gradients, and later ones add to them, which is declared: it
    is left out.
    """
    pytest.importorskip("triton")
    launch_nothing(monkeypatch)
    twice = torch.cat([step.tokens, step.tokens], dim=1)
    step = replace(
        step, tokens=twice, row_slice=step.chain.calls["head_loss"].attributes["row_slice"]
    )
    found, run = [], step._run

    def watched(task):
        with Products() as products:
            run(task)
        if not any(o.name.endswith("gradients") and o.mode == "write" for o in task.operands):
            found.append((task, products.found))

    monkeypatch.setattr(step, "_run", watched)
    step.run()
    return found


TRAINED = {
    "all": {},
    "LoRA": {"lora": lora_of("r=5")},
    "LoRA of some": {"lora": lora_of("r=3,targets=q,k,o,gate")},
    "LoRA of others": {"lora": lora_of("r=4,targets=v,down")},
    "head": {"frozen": ("0", "embedding")},
    "block": {"frozen": ("head", "embedding")},
}


CASES = [
    *((trained, "llama", "packed", "ATTENTION") for trained in TRAINED),
    *((trained, family, "packed", "INPUT") for trained in ("all", "LoRA")
      for family in ("qwen2", "qwen3")),
    ("all", "qwen3", "sliced", "ATTENTION"),
]  # fmt: skip


@pytest.mark.parametrize(("trained", "family", "shape", "level"), CASES)
def test_what_is_declared_is_called(monkeypatch, trained, family, shape, level):
    step = step_of(shape, family, "float32", level, "triton", **TRAINED[trained])
    found = called(step, monkeypatch)
    for task, products in found:
        assert products == declared(step, task), task.task_id
    kinds = {"block_forward", "head_loss", *(() if trained == "head" else {"block_backward"})}
    assert kinds <= {task.label.kind for task, _ in found}


def test_gradients_in_float32_are_read_and_written_in_it():
    recipe = Recipe(gradients="float32", lora=lora_of("r=2,targets=v"))
    spec = small("tiny", dtype="bfloat16")  # 32 wide, V 16 wide
    workload = Workload(seq_len=8, chunk_tokens=24, chunks_per_round=1, rounds_per_step=1)
    work = ChunkWork(spec, workload, 0, recipe)
    assert work.gradient_matmul(5, 7, 24).hbm_bytes == 2 * (5 * 24 + 24 * 7) + 2 * 4 * 5 * 7
    *_, a, b = work.adapters.backward()  # [2, 32] and [16, 2]
    assert a.hbm_bytes == 2 * 24 * (2 + 32) + 2 * 4 * 2 * 32
    assert b.hbm_bytes == 2 * 24 * (16 + 2) + 2 * 4 * 16 * 2
