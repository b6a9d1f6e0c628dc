"""The CUDA backend on a GPU of the tests: same bits as on the CPU, in whatever order streams run."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from tests.helpers.fake_gpu import FakeGpu
from tests.helpers.plans import MACHINE, planned, smallest_device_bytes
from tests.helpers.runs import Bits, assert_same_bits, bits_of, training
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.executor.arenas import Arenas
from twinstream.executor.cuda_run import Job, run_on_gpu
from twinstream.executor.device_memory import DeviceMeter, MemoryReading
from twinstream.executor.dispatch import Passes
from twinstream.executor.host_work import HostWork
from twinstream.executor.options import Graphs, RunOptions
from twinstream.executor.program import compile_program
from twinstream.executor.state import fill_carried, initial_state, read_carried
from twinstream.executor.work import OpRunner
from twinstream.models.spec import ModelSpec
from twinstream.schedule.document import Caps, Schedule

NUM_STEPS = 5


@cache
def schedule_of(policy: str, workload: str = "packed", preset: str = "tiny") -> Schedule:
    chain = tiny_chain(workload, preset)
    caps = Caps()
    if policy != "resident":
        caps = Caps(device_bytes=smallest_device_bytes(chain, "streaming") * 5 // 4)
    return planned(chain, MACHINE, caps, policy)


@cache
def expected_bits(policy: str, workload: str, preset: str) -> Bits:
    return bits_of(schedule_of(policy, workload, preset), NUM_STEPS)


@dataclass(frozen=True)
class Ran:
    bits: Bits
    passes: Passes
    graphs: str
    gpu: FakeGpu


def on_fake_gpu(
    schedule: Schedule, options: RunOptions, gpu: FakeGpu, host_work: HostWork | None = None
) -> Ran:
    loop = training(schedule)
    state = initial_state(small(schedule.model.name), seed=1)
    assert ModelSpec.model_validate(schedule.model.spec) == small(schedule.model.name)
    memory = {
        tier: torch.zeros(size, dtype=torch.uint8) for tier, size in Arenas.sizes(schedule).items()
    }
    arenas = Arenas(schedule, memory)
    runner = OpRunner(
        schedule, arenas, host_work or loop.host_work(schedule), poison=options.poison
    )
    program = compile_program(schedule)
    works = gpu.works(program, runner.bind_all())

    def fill() -> None:
        if options.poison:
            arenas.poison()
        fill_carried(schedule, arenas, state)

    meter = DeviceMeter(Caps(), 0, lambda: MemoryReading(0, 0))
    job = Job(schedule, program, arenas, works, fill)
    passes, graphs = run_on_gpu(gpu, job, options, meter)
    bits = Bits(tuple(loop.losses), read_carried(schedule, arenas, state))
    return Ran(bits, passes, graphs, gpu)


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("eager", [0.0, 0.5])
@pytest.mark.parametrize(
    ("policy", "workload", "preset"),
    [
        ("resident", "packed", "tiny"),
        ("streaming", "packed", "tiny"),
        ("streaming", "sliced", "tiny-qwen3"),
        ("optimal", "sliced", "tiny"),
    ],
)
def test_every_order_of_the_streams_gives_the_bits_of_the_cpu(
    policy, workload, preset, eager, graphs: Graphs
):
    schedule = schedule_of(policy, workload, preset)
    for seed in range(2):
        options = RunOptions(num_passes=NUM_STEPS, graphs=graphs, poison=seed == 1)
        found = on_fake_gpu(schedule, options, FakeGpu(seed, eager))
        assert_same_bits(found.bits, expected_bits(policy, workload, preset))
        assert bool(found.gpu.graphs) == (graphs == "on")
