"""Every kernel of a schedule of 8B on meta tensors: no host sync, no memory but what is declared.

A meta tensor has no values, so whatever has the host read one raises; and torch's own schemas check
shapes, strides and dtypes as on CUDA.
"""

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.memory.arenas import Arenas
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.kernel_costs.workspace import library_bytes
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.planner.policies import plan_by_rule
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.workload import Packing, Workload

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)
from tests.helpers.silent_triton import launched_into_nothing  # noqa: E402

MIB = 2**20
WORKLOADS = {
    "dense": Workload(seq_len=8192, chunk_tokens=8192, chunks_per_round=2, rounds_per_step=2),
    "packed": Workload(
        seq_len=8192, chunk_tokens=8192, chunks_per_round=2, rounds_per_step=2,
        packing=Packing(most_sequences=48, expected_lengths=(4000, 2600, 1592)),
    ),
    "sliced": Workload(seq_len=16384, chunk_tokens=8192, chunks_per_round=2, rounds_per_step=2),
}  # fmt: skip


class Allocations(TorchDispatchMode):
    """The most bytes that were alive at a time of tensors made while open."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {id(_storage(x)) for x in tree_leaves((args, kwargs)) if _is_tensor(x)}
        for made in filter(_is_tensor, tree_leaves(found)):
            storage = _storage(made)
            if id(storage) not in given | self._known and not func.is_view:
                self._take(storage)
        return found

    def _take(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        self._known.add(key)
        self.bytes += size
        self.most_bytes = max(self.most_bytes, self.bytes)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()


def schedule_of_8b(workload: str) -> RankSchedule:
    kernels = KernelChoice(vector="triton", attention="sdpa_flash")
    recipe = Recipe(kernels=kernels, clips=True)
    chain = lower(load_preset("8b"), WORKLOADS[workload], recipe)
    return plan_by_rule(chain, load_machine("h100"), Caps(device_bytes=30 * 2**30), "streaming")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_kernels_of_8b_read_nothing_on_the_host_and_allocate_what_is_declared(
    workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launched_into_nothing(monkeypatch)
    schedule = schedule_of_8b(workload)
    memory = {
        tier: torch.empty(size, dtype=torch.uint8, device="meta")
        for tier, size in Arenas.sizes(schedule).items()
    }
    arenas = Arenas(schedule, memory)
    tried: set[str] = set()
    for op in schedule.ops:
        if not isinstance(op, Compute) or op.call in tried:
            continue
        tried.add(op.call)
        call, operands = schedule.calls[op.call], arenas.operands(op)
        with torch.no_grad(), Allocations() as allocations:
            registered_kernel(call.kernel)(operands, call.attributes)()
        # Small results that nobody asked for: an operator's random state, an empty mask.
        assert allocations.most_bytes <= library_bytes(call) + MIB, call.kernel
        assert allocations.bytes == 0, call.kernel
    assert tried == set(schedule.calls)
    assert Counter(name for name, *_ in launched)["_adamw_kernel"] > 0


def test_a_kernel_that_reads_the_device_is_found() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device="meta").tolist()


def test_what_is_allocated_is_counted_once_and_as_long_as_it_lives() -> None:
    given = torch.empty(MIB, dtype=torch.uint8, device="meta")
    with Allocations() as found:
        first = given.view(torch.float32) * 2
        second = first[10:] + 1
        del first
        given.add_(second.view(torch.uint8)[0])
        del second
    assert (found.bytes, found.most_bytes) == (0, 2 * MIB - 40)
