"""Chains whose optimizer runs on the host, for the policies that want them."""

from random import Random

from tests.helpers.flat_machine import DRAM_PER_NS, FLOP_PER_NS
from tests.helpers.small_chains import MIB
from tests.helpers.tiny_chains import tiny_chain
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.policies import optimizer_place
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import KernelCall, Label, Mode, TaskOperand
from twinstream.schedule.tensors import Role, Tensor
from twinstream.schedule.workload import ModelRef, Workload

Uses = tuple[tuple[str, int, Mode], ...]


def tiny_chain_of(policy: str, workload: str, preset: str = "tiny") -> Chain:
    """The tiny chain with the optimizer where the policy has it."""
    return tiny_chain(workload, preset, Recipe(optimizer=optimizer_place(policy)))


def preset_chain_of(policy: str, preset: str, rounds: int = 1, tokens: int = 2048) -> Chain:
    """A preset's chain with the optimizer where the policy has it."""
    workload = Workload(
        seq_len=tokens, chunk_tokens=tokens, chunks_per_round=1, rounds_per_step=rounds
    )
    return lower(load_preset(preset), workload, Recipe(optimizer=optimizer_place(policy)))


def two_task_chain(policy: str, compute_ns: int, update_ns: int, size_bytes: int) -> Chain:
    """The device reads a parameter and makes its gradient, the host updates it from that.

    On the flat machine, alone, they take so many ns (the device's launch not counted).
    """
    compute = Work(
        unit="matmul", shape=(), flops=compute_ns * FLOP_PER_NS, hbm_bytes=0, launches=1
    )  # fmt: skip
    update = Work(
        unit="adamw", shape=(), flops=0, hbm_bytes=0, launches=1,
        host_dram_bytes=update_ns * DRAM_PER_NS,
    )  # fmt: skip
    return Chain(
        tensors=(_tensor("p", "parameter", size_bytes), _tensor("g", "gradient", size_bytes)),
        calls={
            "compute": KernelCall(kernel="compute", attributes={}, cost=(compute,)),
            "update": KernelCall(kernel="u", attributes={}, cost=(update,), processor="host"),
        },
        tasks=(
            _task("compute", (("p", 0, "read"), ("g", 1, "write"))),
            _task("update", (("p", 0, "update"), ("g", 1, "read"))),
        ),
        recomputes=(),
        inputs=(),
        outputs=(),
        persistent=("p",),
        round_starts=(0,),
        workload=Workload(seq_len=1, chunk_tokens=1, chunks_per_round=1, rounds_per_step=1),
        model=ModelRef(name="two tasks", content_hash="0", spec={}),
        recipe={"optimizer": optimizer_place(policy)},
        model_flops=1,
    )


def some_on_host(chain: Chain, random: Random) -> Chain:
    """A small chain of which some tasks, never all, run on the host; without recomputes."""
    calls, tasks = dict(chain.calls), []
    spared = random.randrange(len(chain.tasks))
    for i, task in enumerate(chain.tasks):
        if i != spared and random.random() < 0.5:
            work = Work(
                unit="adamw", shape=(), flops=0, hbm_bytes=0, launches=1,
                host_dram_bytes=random.randrange(1, 20) * 64 * MIB,
            )  # fmt: skip
            name = f"host.{task.call}"
            calls[name] = KernelCall(kernel="u", attributes={}, cost=(work,), processor="host")
            task = task.model_copy(update={"call": name})
        tasks.append(task)
    return chain.model_copy(update={"calls": calls, "tasks": tuple(tasks), "recomputes": ()})


def _tensor(name: str, role: Role, size_bytes: int) -> Tensor:
    return Tensor(
        tensor_id=name, size_bytes=size_bytes, role=role, dtype="uint8", shape=(size_bytes,)
    )


def _task(name: str, uses: Uses) -> Task:
    operands = tuple(
        TaskOperand(name=tensor, tensor=tensor, version=version, mode=mode)
        for tensor, version, mode in uses
    )
    return Task(task_id=name, call=name, operands=operands, label=Label(kind=name))
