"""Warm-up runs every variant of every kernel, so that none is compiled in a capture or a pass."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.fake_gpu import FakeGpu
from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.runs import training
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.device_memory import DeviceMeter, MemoryReading
from twinstream.executor.program.compiled import compile_program
from twinstream.executor.program.options import RunOptions
from twinstream.executor.replay.warm_up import kernels_compiled
from twinstream.executor.run.cuda_run import CudaJob, run_on_gpu
from twinstream.executor.run.work import bind_works
from twinstream.models.recipes.recipe import KernelChoice, OptimizerState, Recipe
from twinstream.schedule.document import Caps

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)
from tests.helpers.silent_triton import launched_into_nothing  # noqa: E402


@pytest.mark.parametrize("policy", ["resident", "streaming"])
@pytest.mark.parametrize("state", ["model", "8bit", "float32_master"])
def test_no_variant_of_a_kernel_is_met_after_warm_up(
    policy: str, state: OptimizerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With clipping, whose sums lie four bytes apart."""
    launched = launched_into_nothing(monkeypatch)
    kernels = KernelChoice(vector="triton")
    recipe = Recipe(kernels=kernels, clips=True, optimizer_state=state)
    sizes = {"num_layers": 5, "vocab_size": 4096}  # a layer at 16 bytes, of another size than ends
    chain = tiny_chain("one chunk", recipe=recipe, dtype="bfloat16", **sizes)
    caps = Caps()
    if policy == "streaming":
        caps = Caps(device_bytes=enough_device_bytes(chain, policy))
    schedule = planned(chain, MACHINE, caps, policy)
    memory = {t: torch.zeros(n, dtype=torch.uint8) for t, n in Arenas.sizes(schedule).items()}
    arenas, program, gpu = Arenas(schedule, memory), compile_program(schedule), FakeGpu(eager=1.0)
    host_work = replace(training(schedule), max_norm=1.0).host_work(schedule)
    works = gpu.works(program, bind_works(schedule, arenas, host_work, RunOptions("cuda")), arenas)
    meter = DeviceMeter(Caps(), 0, lambda: MemoryReading(0, 0))
    warm = set()

    def fill() -> None:
        warm.update(launched)
        launched.clear()

    job = CudaJob(schedule, program, arenas, works, fill)
    run_on_gpu(gpu, job, RunOptions("cuda", num_passes=2, graphs="off"), meter)
    names = {name for name, *_ in launched}
    assert {"_sums_kernel", "_adamw_kernel"} <= names
    assert set(launched) <= warm


def test_kernels_that_are_compiled_late_are_named() -> None:
    runtime, said = triton.knobs.runtime, []
    before = runtime.jit_post_compile_hook
    runtime.jit_post_compile_hook = lambda **told: said.append(told["key"])

    class Compiled:
        name = "TestKernels._sums_kernel"

    try:
        with kernels_compiled() as late:
            runtime.jit_post_compile_hook(key="x", fn=Compiled())
        runtime.jit_post_compile_hook(key="y", fn=Compiled())
    finally:
        runtime.jit_post_compile_hook = before
    assert late == ["_sums_kernel"]
    assert said == ["x", "y"], "who listened before still does"
