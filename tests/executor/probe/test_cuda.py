"""The probe of a CUDA device, as far as a CPU goes: samples, curves, the profile they make."""

import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.plans import planned
from twinstream.executor.probe import cuda
from twinstream.executor.probe.chains import expert_chains
from twinstream.executor.probe.cuda import ProbeRequest, kernel_samples
from twinstream.executor.probe.cuda_links import Copies, Links
from twinstream.executor.probe.tasks import trial
from twinstream.executor.probe.tasks.curves import Ceilings, fit_curves
from twinstream.executor.probe.tasks.task_samples import (
    TaskSample,
    best_matmul_flop_per_s,
    grouped_samples,
    listed_grouped,
)
from twinstream.executor.probe.timing.device_timing import DeviceTimer
from twinstream.executor.probe.timing.fit import Line
from twinstream.hardware_profiles import cost
from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.schema import Efficiency, Machine
from twinstream.models.kernel_costs.work import ChunkWork
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipe import KernelChoice
from twinstream.schedule.chain import Chain
from twinstream.schedule.cost import GROUPED_TILE_ROWS, Work
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate_rank

CPU = torch.device("cpu")
CEILINGS = Ceilings(8e14, 4.8e12, 4.3e12, launch_ns=2000.0)


def chain_of(preset: str, seq_len: int, chunk_tokens: int) -> Chain:
    spec = load_preset(preset).model_copy(update={"num_layers": 1})
    chunks = max(1, seq_len // chunk_tokens)
    return lower(spec, Workload(seq_len=seq_len, chunk_tokens=chunk_tokens,
                                chunks_per_round=chunks, rounds_per_step=1))  # fmt: skip


TINY = (chain_of("tiny", 32, 64), chain_of("tiny", 64, 32))
REAL = (chain_of("8b", 8192, 16384), chain_of("8b", 65536, 16384), chain_of("1b", 1024, 8192))


def a_machine(**curves: Efficiency) -> Machine:
    """An H200 whose curves of compute and memory are known."""
    known = load_machine("h200_datasheet")
    kept = {k: v for k, v in known.efficiency.items() if k in ("hbm", "h2d", "d2h", "duplex")}
    sustained = curve(1.0).model_copy(update={"max": 8e14 / 9.89e14, "of": "flops"})
    return known.model_copy(update={"efficiency": kept | {"sustained": sustained} | curves})


def curve(maximum: float, half: float = 0.0, half_depth: float = 0.0, of: str = "bytes"):
    return Efficiency.model_validate(
        {"max": maximum, "half": half, "half_depth": half_depth, "of": of, "kind": "measured",
         "source": "test"}
    )  # fmt: skip


KNOWN = {
    "matmul": curve(0.93, 3e9, 150.0, "flops"),
    "attention_forward": curve(0.7, 2e9, 500.0, "flops"),
    "attention_backward": curve(0.6, 2e9, 700.0, "flops"),
    "vector": curve(0.8),
}


def samples_of(machine: Machine) -> list[TaskSample]:
    """What a machine with these curves would measure: products alone, and whole kernels."""
    found = []
    for chain in REAL:
        prefix = f"{chain.model.name} S{chain.workload.seq_len}"
        for name, call in chain.calls.items():
            works = [w for w in call.cost if w.unit.startswith(("matmul", "attention"))]
            for i, work in enumerate(works):
                time_ns = cost_alone_ns((work,), machine)
                found.append(TaskSample(f"{prefix} {name} {i}", (work,), time_ns))
            time_ns = cost_alone_ns(call.cost, machine)
            found.append(TaskSample(f"{prefix} {name}", call.cost, time_ns))
    return found


def test_curves_are_found_again_from_products_and_whole_kernels():
    truth = a_machine(**KNOWN)
    samples = samples_of(truth)
    found = a_machine(**fit_curves(samples, CEILINGS, "test").curves)
    for sample in samples:
        assert cost_alone_ns(sample.works, found) == pytest.approx(sample.time_ns, rel=0.01)
    fitted = found.efficiency["matmul/bfloat16"]
    assert fitted.max == pytest.approx(0.93, rel=0.01)
    assert fitted.half_depth == pytest.approx(150.0, rel=0.1)


def test_what_starting_attention_costs_is_found_where_it_is_asked_for():
    """Times by hand: 2 us a call, 1 us a GFLOP, and as much again at a depth of 512 keys."""
    shapes = [(256, 256), (256, 1024), (1024, 1024), (512, 2048)]
    samples = []
    for queries, keys in shapes:
        depth = keys - queries / 2
        gflop = 4 * 8 * 64 * queries * depth / 1e9
        work = Work(
            unit="attention_forward", shape=(queries, keys, 8, 64, 1), flops=round(gflop * 1e9),
            hbm_bytes=1, launches=1,
        )  # fmt: skip
        time_ns = 2000.0 + 1000.0 * gflop * (1 + 512 / depth)
        samples.append(TaskSample(f"{queries} of {keys}", (work,), time_ns))
    ceilings = Ceilings(2e15, 1e12, 1e12, launch_ns=0.0)
    fitted = fit_curves(samples, ceilings, "test", attention_starts=True)
    (found,) = fitted.curves.values()
    assert fitted.worst_residual < 1e-3
    assert found.max == pytest.approx(0.5, rel=0.01)
    assert found.half_depth == pytest.approx(512.0, rel=0.02)
    assert found.half == pytest.approx(2000.0 * 1e6, rel=0.02)  # 2 us at 1 GFLOP a us
    assert fit_curves(samples, ceilings, "test").worst_residual > 0.1


def test_one_disturbed_sample_does_not_pull_the_others_along():
    truth = a_machine(**KNOWN)
    samples = samples_of(truth)
    disturbed = [
        TaskSample(s.name, s.works, s.time_ns * (4.0 if i == 7 else 1.0))
        for i, s in enumerate(samples)
    ]
    fit = fit_curves(disturbed, CEILINGS, "test")
    found = a_machine(**fit.curves)
    off = [abs(cost_alone_ns(s.works, found) / s.time_ns - 1.0) for s in samples]
    assert sorted(off)[len(off) * 9 // 10] < 0.02
    assert fit.ratios[samples[7].name] == pytest.approx(4.0, rel=0.1)


def test_a_unit_that_the_samples_hardly_tell_stays_near_the_copy_rate():
    truth = a_machine(**KNOWN)
    work = Work(unit="odd", shape=(10,), flops=10, hbm_bytes=10, launches=0)
    whole = next(s for s in samples_of(truth) if s.name.endswith("block_forward@0"))
    both = TaskSample("both", (*whole.works, work), whole.time_ns)
    found = fit_curves([*samples_of(truth), both], CEILINGS, "test").curves["odd/bfloat16"]
    assert found.max == pytest.approx(4.3 / 4.8, rel=0.3)


@pytest.fixture(scope="module")
def samples() -> list[TaskSample]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = list(kernel_samples(TINY, DeviceTimer(CPU, budget_s=0.002)))
    torch.set_num_threads(threads)
    return found


def test_every_call_of_a_chain_is_timed_once_and_every_product_alone(samples):
    """Equal work once, in whatever chain and under whatever name it is."""
    tasks = {(c.kernel, c.cost) for chain in TINY for c in chain.calls.values()}
    named = [s for s in samples if s.name.startswith("tiny S")]
    assert len(named) == len(tasks) < sum(len(chain.calls) for chain in TINY)
    assert {s.works for s in named} == {cost for _, cost in tasks}
    assert all(sample.time_ns > 0 for sample in samples)
    alone = {s.works[0].shape for s in samples if s.name.startswith("matmul")}
    products = {w.shape for c in TINY for call in c.calls.values() for w in call.cost
                if w.unit == "matmul"}  # fmt: skip
    assert alone == products
    assert {s.works[0].unit for s in samples if s.name.startswith("attention")} == {
        "attention_forward", "attention_backward"
    }  # fmt: skip


def test_products_of_experts_are_timed_alone(one_thread):
    """By the kernels that a run has; what the work says is the FLOPs that were done."""
    spec = load_preset("tiny-experts").model_copy(update={"num_layers": 1})
    workload = Workload(seq_len=64, chunk_tokens=128, chunks_per_round=1, rounds_per_step=1)
    chain = lower(spec, workload)
    alone = list(grouped_samples(chain, DeviceTimer(CPU, budget_s=0.002)))
    assert {s.works[0].unit for s in alone} == {"grouped_matmul", "grouped_matmul_gradient"}
    shapes = {(w.unit, w.shape) for call in chain.calls.values() for w in call.cost
              if w.unit.startswith("grouped")}  # fmt: skip
    assert {(s.works[0].unit, s.works[0].shape) for s in alone} == shapes
    rows = workload.chunk_tokens * spec.experts.per_token
    for sample in alone:
        n, k = sample.works[0].shape[1:3]
        if sample.works[0].unit.endswith("gradient"):
            n, k = sample.works[0].shape[:2]
        assert sample.works[0].flops == 2 * rows * n * k
        assert sample.time_ns > 0
    assert [s.name for s in alone] == [name for name, _ in listed_grouped(chain)]


def test_products_of_experts_have_curves_of_their_own_and_leave_the_others_as_they_are(
    monkeypatch,
):
    """Their tiles are full, so that time has none of the padding that a price has."""
    monkeypatch.setattr(cost, "_padding", lambda work: 1.0)
    for chain in expert_chains(KernelChoice(vector="triton")):
        for _, (work,) in listed_grouped(chain):
            rows = work.shape[2 if work.unit.endswith("gradient") else 0]
            assert rows % GROUPED_TILE_ROWS == 0
    truth = a_machine(
        **KNOWN, grouped_matmul=curve(0.6, 4e8, 100.0, of="flops"),
        grouped_matmul_gradient=curve(0.5, 3e8, 200.0, of="flops"),
    )  # fmt: skip
    products = [
        TaskSample(f"{chain.workload.chunk_tokens} {name}", works, cost_alone_ns(works, truth))
        for chain in expert_chains(KernelChoice(vector="triton"))
        for name, works in listed_grouped(chain)
    ]
    dense = fit_curves(samples_of(truth), CEILINGS, "test").curves
    both = fit_curves([*samples_of(truth), *products], CEILINGS, "test").curves
    assert both.keys() - dense.keys() == {
        "grouped_matmul/bfloat16", "grouped_matmul_gradient/bfloat16"
    }  # fmt: skip
    for key, before in dense.items():
        assert both[key].max == pytest.approx(before.max, rel=1e-6)
        assert both[key].half == pytest.approx(before.half, rel=1e-4, abs=1.0)
    assert both["grouped_matmul/bfloat16"].max == pytest.approx(0.6, rel=0.05)
    assert both["grouped_matmul_gradient/bfloat16"].max == pytest.approx(0.5, rel=0.05)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_sample_of_a_product_counts_one_launch(samples):
    head = [s for s in samples if s.name.startswith("matmul") and s.works[0].shape[1] == 256]
    assert head
    for sample in head:
        m, n, k = sample.works[0].shape
        assert (sample.works[0].flops, sample.works[0].launches) == (2 * m * n * k, 1)


def test_attention_alone_is_priced_as_the_cost_model_does(samples):
    spec = load_preset("tiny")
    for chunk, start in ((0, 0), (1, 32)):
        work = ChunkWork(spec, TINY[1].workload, start)
        name = f"32/{start + 32}x1 "
        found = [s.works[0] for s in samples if name in s.name]
        assert work.attention_forward().flops == found[0].flops, chunk
        assert work.attention_backward() == found[1]


LINKS = Links(
    Copies(
        (Line(8000.0, 1e9 / 55e9, 0.0), Line(7000.0, 1e9 / 56e9, 0.0)), (42e9, 48e9),
        (("h2d", 2**20, 50.0),),
    ),
    hbm_copy_bytes_per_s=4.3e12, launch_ns=2000.0, event_wait_ns=1500.0,
)  # fmt: skip


SUSTAINED = cuda.Sustained(6.5e14)


def test_the_rate_kept_up_is_of_the_later_half_of_the_load():
    class Timer(DeviceTimer):
        def rates_ns(self, call, seconds):
            call()
            return [100.0, 100.0] if len(called) == 1 else [200.0, 300.0]

    called: list[int] = []
    found = cuda.sustained_rate(Timer(CPU), lambda: called.append(1), 1000, 4.0)
    assert found.flop_per_s == 1000 / 250.0 * 1e9
    assert found.state is None


def test_the_profile_states_the_capability_of_the_device(monkeypatch):
    monkeypatch.setattr(cuda.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda.torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(cuda.torch.cuda, "get_device_capability", lambda: (12, 1))
    request = ProbeRequest(REAL, None, commit="abc", date="2026-01-01")
    machine, _ = cuda._machine(
        request, LINKS, (samples_of(a_machine(**KNOWN)), SUSTAINED), "a test"
    )
    assert machine.compute_capability.value == "12.1"


@pytest.mark.parametrize("datasheet", ["h200_datasheet", None])
def test_the_profile_prices_every_op_and_survives_its_file(datasheet, tmp_path):
    sheet = load_machine(datasheet) if datasheet else None
    request = ProbeRequest(REAL, sheet, commit="abc", date="2026-01-01")
    measured = samples_of(a_machine(**KNOWN))
    machine, fit = cuda._machine(request, LINKS, (measured, SUSTAINED), "a test")
    assert fit.worst_residual < 0.02
    fields = ("device_memory_bytes", "device_reserve_bytes", "host_memory_bytes")
    memory = {name: getattr(load_machine("h200_datasheet"), name) for name in fields}
    machine = machine.model_copy(update=memory)
    save_machine(machine, tmp_path / "profile.toml")
    assert load_machine(tmp_path / "profile.toml") == machine
    schedule = planned(REAL[0], machine, Caps(), "streaming")
    whole = sum(cost_alone_ns(schedule.calls[task.call].cost, machine) for task in REAL[0].tasks)
    assert simulate_rank(schedule, machine).step_ns >= whole
    peak = 9.89e14 if datasheet else best_matmul_flop_per_s(measured)
    assert machine.number("peak_bf16_flop_per_s") == peak
    assert machine.rate("peak_bf16_flop_per_s") == pytest.approx(6.5e14), "not the best burst"
    assert machine.rate("pcie_h2d_bytes_per_s") == pytest.approx(55e9)
    assert machine.rate("pcie_duplex_bytes_per_s") == pytest.approx(90e9)
    assert machine.duplex_h2d_share.value == pytest.approx(42 / 90)


def test_both_directions_together_are_no_faster_than_their_sum():
    """A measured rate of both may be above it by noise, and no profile may state that."""
    fast = replace(LINKS, copies=replace(LINKS.copies, both_bytes_per_s=(100e9, 100e9)))
    request = ProbeRequest(REAL, None, commit="abc", date="2026-01-01")
    machine, _ = cuda._machine(request, fast, (samples_of(a_machine(**KNOWN)), SUSTAINED), "a test")
    assert machine.number("pcie_duplex_bytes_per_s") == pytest.approx(55e9 + 56e9)


def test_right_kernels_are_near_the_eager_ones_and_wrong_ones_are_not(monkeypatch):
    choice = KernelChoice(attention="sdpa_cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = trial.differs_from_eager(choice, CPU, "float32")
    assert 0.0 < found.relative < trial.TOLERANCE["float32"]
    right = trial.round_results
    calls = []

    def wrong(chain: Chain, device: torch.device) -> dict[str, torch.Tensor]:
        calls.append(chain)
        results = right(chain, device)
        if len(calls) == 3:
            results["grad.1"][5] = math.nan
        return results

    monkeypatch.setattr(trial, "round_results", wrong)
    found = trial.differs_from_eager(choice, CPU, "float32")
    torch.set_num_threads(threads)
    assert found.tensor == "grad.1"
    assert math.isnan(found.relative)


def test_a_gpu_that_uses_the_hosts_memory_has_a_share_of_what_is_free():
    own = {"device_memory_bytes": 100.0, "host_memory_bytes": 80.0}
    assert cuda.memory_bytes(100, 80, is_unified=False) == own
    found = cuda.memory_bytes(100, 80, is_unified=True)
    one = {"device_memory_bytes": 40.0, "host_memory_bytes": 40.0, "unified_memory_bytes": 80.0}
    assert found == one
