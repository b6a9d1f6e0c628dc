"""A kernel is bound to its operands once: a pass makes no views and reads no attributes."""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.executor.kernels.families import tiny_spec
from tests.helpers.plans import MACHINE, planned
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.kernels import registry
from twinstream.executor.kernels.block import block_backward, block_forward
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.probe.tasks.chain_memory import ChainMemory, in_order
from twinstream.executor.program.host_work import HostWork
from twinstream.executor.run.work import bind_works
from twinstream.models.lowering.lower import lower
from twinstream.models.recipes.lora import Lora
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload


class Nothing:
    """Vector operations and an attention that do nothing."""

    product_with_backward = True

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lora", [None, Lora(rank=2, alpha=4.0)], ids=["full", "LoRA"])
def test_a_pass_of_a_block_is_its_products_and_operations_alone(lora, monkeypatch):
    monkeypatch.setattr(registry, "vector_ops", lambda name: Nothing())
    for module in (block_forward, block_backward):
        monkeypatch.setattr(module, "attention_implementation", lambda name: Nothing())
    spec = tiny_spec("qwen3")
    workload = Workload(seq_len=16, chunk_tokens=8, chunks_per_round=2, rounds_per_step=1)
    chain = lower(spec, workload, Recipe(lora=lora))
    memory = ChainMemory(chain, torch.device("cpu"))
    tasks = {chain.calls[task.call].kernel: task for task in in_order(chain)}
    found = {}
    for kernel, task in tasks.items():
        if kernel.startswith("block"):
            attributes = chain.calls[task.call].attributes
            with Counted() as binding:
                calls = registry.registered_kernel(kernel)(memory.operands(task), attributes)
            assert not binding.ops.keys() & {"mm", "addmm", "copy_", "zero_"}
            with Counted() as found[kernel]:
                calls()
    assert len(found) == 4
    for kernel, counted in found.items():
        assert counted.ops.keys() <= {"mm", "addmm", "copy_", "zero_"}, kernel
    # Q, KV, the output of attention, gate and up, and down.
    forward = found["block_forward/eager"].ops
    assert forward["mm"] + forward["addmm"] >= 5


class Bytes(bytearray):
    """Can be watched."""


def test_memory_is_given_back_with_a_runs_works():
    """At once, and not when cycles are collected."""
    schedule = planned(tiny_chain("packed"), MACHINE, Caps(), "resident")
    raw = {tier: Bytes(size) for tier, size in Arenas.sizes(schedule).items()}
    alive = [weakref.ref(of_tier) for of_tier in raw.values()]
    memory = {tier: torch.frombuffer(raw.pop(tier), dtype=torch.uint8) for tier in list(raw)}
    host_work = HostWork(lambda op, number: torch.empty(0), lambda op, number, taken: None)
    gc.disable()
    try:
        works = bind_works(schedule, Arenas(schedule, memory), host_work)
        del memory
        assert len(works) == len(schedule.ops) and all(watched() for watched in alive)
        del works
        assert not any(watched() for watched in alive)
    finally:
        gc.enable()
