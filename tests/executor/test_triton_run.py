"""Schedules with Triton's kernels: the same bits from every plan, close to the eager kernels'.

On the CPU backend they run in Triton's interpreter, so steps are as short as can be.
"""

from dataclasses import replace

import pytest

from tests.helpers.plans import MACHINE, copied_tensors, enough_device_bytes, planned
from tests.helpers.runs import Bits, assert_same_bits, run, training
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.executor.kernels.availability import KernelsUnavailableError, vector_reason
from twinstream.executor.run.execute import RunOptions, execute
from twinstream.executor.state.training_state import initial_state
from twinstream.models.lowering.lower import lower
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.workload import Workload

KERNELS = {name: Recipe(kernels=KernelChoice(vector=name)) for name in ("eager", "triton")}
BACKENDS = pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


# two sequences in two slices each, one a round: eight tokens
SHORT = Workload(seq_len=4, chunk_tokens=2, chunks_per_round=2, rounds_per_step=2)


def chain_of(vector: str, backend: str) -> Chain:
    """On the CPU the shortest step that has slices and rounds."""
    if backend == "cuda":
        return tiny_chain("sliced", "tiny-qwen3", KERNELS[vector], dtype="bfloat16")
    return lower(small("tiny", dtype="bfloat16", num_layers=1), SHORT, KERNELS[vector])


@pytest.fixture
def chain(backend) -> Chain:
    """Of Triton's kernels, where they run."""
    pytest.importorskip("triton")
    if vector_reason("triton", backend):
        pytest.skip("TRITON_INTERPRET says otherwise")
    return chain_of("triton", backend)


def bits(
    schedule: RankSchedule, backend: str, num_passes: int = 2, *, poison: bool = False
) -> Bits:
    return run(schedule, RunOptions(backend=backend, num_passes=num_passes, poison=poison))[1]


@BACKENDS
def test_a_tight_optimal_plan_has_the_bits_of_resident(chain, backend):
    least = enough_device_bytes(chain, "streaming")
    tight = planned(chain, MACHINE, Caps(device_bytes=least), "optimal")
    assert copied_tensors(tight, "h2d")
    expected = bits(planned(chain, MACHINE, Caps(), "resident"), backend)
    assert_same_bits(bits(tight, backend, poison=True), expected)


@BACKENDS
def test_clipping_in_a_tight_plan_has_the_bits_of_resident(backend, chain):
    clipped = KERNELS["triton"].model_copy(update={"clips": True})
    spec = ModelSpec.model_validate(chain.model.spec)
    chain = lower(spec, chain.workload, clipped)
    least = enough_device_bytes(chain, "streaming")
    found = []
    for caps, policy in ((Caps(device_bytes=least), "optimal"), (Caps(), "resident")):
        schedule = planned(chain, MACHINE, caps, policy)
        loop = replace(training(schedule), max_norm=0.5, losses=[], norms=[])
        options = RunOptions(backend=backend, num_passes=2, poison=True)
        after = execute(
            schedule, initial_state(spec, 1, clipped), loop.host_work(schedule), options
        )
        found.append((Bits(tuple(loop.losses), after.state), loop.norms))
    (tight, tight_norms), (resident, norms) = found
    assert tight_norms == norms
    assert min(norms) > 0.5
    assert_same_bits(tight, resident)


def test_triton_kernels_are_refused_on_a_cpu_before_anything_is_touched(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    chain = chain_of("triton", "cpu")
    schedule = planned(chain, MACHINE, Caps(), "resident")
    with pytest.raises(KernelsUnavailableError, match=r"needs a CUDA device.*--kernels eager"):
        bits(schedule, "cpu")


def test_without_triton_its_kernels_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = vector_reason("triton", "cuda")
    assert reason is not None
    assert "pip install triton" in reason
    assert vector_reason("eager", "cpu") is None


def test_the_interpreter_is_not_taken_for_a_gpu(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "unset it" in str(vector_reason("triton", "cuda"))
    assert vector_reason("triton", "cpu") is None
