"""The probe of this machine's CPU, at small sizes: a whole profile, and a true one of its fits."""

import pytest
import torch

from tests.helpers.plans import planned
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.probe import cpu, cpu_attention, links
from twinstream.executor.probe.cpu import probe_cpu
from twinstream.executor.probe.tasks import kernels
from twinstream.executor.probe.timing import timing
from twinstream.executor.probe.timing.fit import (
    Line,
    UnsteadyLinkError,
    fit_line,
    fit_link,
)
from twinstream.hardware_profiles.cost import cost_alone_ns, host_work_ns, work_time
from twinstream.hardware_profiles.curve_choice import curve_for
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.schema import Efficiency, Machine
from twinstream.models.kernel_costs.update_work import host_work
from twinstream.models.kernel_costs.work import adamw_work
from twinstream.models.options import Experts
from twinstream.models.recipes.recipe import BEFORE_NEXT_USE, KernelChoice, Recipe
from twinstream.schedule.document import Caps
from twinstream.simulator.costs import MachineCosts
from twinstream.simulator.replay import simulate_rank


@pytest.fixture(scope="module")
def probed() -> Machine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_SHAPES", ((32, 32, 4), (64, 64, 4)))
        patch.setattr(cpu_attention, "_SHAPES", ((32, 32, 32), (64, 64, 32), (64, 32, 64)))
        patch.setattr(links, "_SIZES", (2**12, 2**16, 2**20))
        patch.setattr(timing, "_BUDGET_S", 0.002)
        return probe_cpu(dtypes=("float32", "bfloat16"))


@pytest.mark.parametrize("policy", ["resident", "streaming"])
@pytest.mark.parametrize(
    ("preset", "dtype"), [("tiny", "float32"), ("tiny-qwen3", "float32"), ("tiny", "bfloat16")]
)
def test_every_op_of_a_preset_has_a_price(probed, preset, dtype, policy):
    schedule = planned(tiny_chain("sliced", preset, dtype=dtype), probed, Caps(), policy)
    costs = MachineCosts(schedule, probed)
    for op in schedule.ops:
        cost = costs.cost(op)
        assert cost.fixed_ns > 0 or cost.flow is not None
    assert simulate_rank(schedule, probed).step_ns > 0


NO_CURVE = {"gradient_norm"}  # of a number a group


@pytest.mark.parametrize("recipe", [
    Recipe(clips=True, kernels=KernelChoice()),
    Recipe(clips=True, kernels=KernelChoice(), optimizer=BEFORE_NEXT_USE),
    Recipe(kernels=KernelChoice(), optimizer_state="8bit"),
    Recipe(kernels=KernelChoice(), update="sgd"),
    Recipe(kernels=KernelChoice(), update="muon"),
])  # fmt: skip
def test_no_work_of_a_step_is_priced_by_another_units_curve(probed, recipe):
    experts = Experts(count=4, per_token=2, d_ff=16)
    for chain in (tiny_chain("sliced", recipe=recipe),
                  tiny_chain("packed", recipe=recipe, experts=experts)):  # fmt: skip
        works = [w for call in chain.calls.values() for w in call.cost if w.hbm_bytes]
        by = {w.unit: curve_for(w, probed).key.split("/")[0] for w in works}
        assert {unit: key for unit, key in by.items() if unit not in (key, *NO_CURVE)} == {}


@pytest.mark.parametrize(("recipe", "unit"), [
    (Recipe(kernels=KernelChoice(), optimizer=BEFORE_NEXT_USE), "adamw_may_skip"),
    (Recipe(kernels=KernelChoice(), optimizer_state="8bit"), "adamw_8bit"),
    (Recipe(kernels=KernelChoice()), "adamw"),
    (Recipe(kernels=KernelChoice(vector="triton"), optimizer=BEFORE_NEXT_USE), "adamw"),
])  # fmt: skip
def test_updates_that_code_or_keep_their_state_have_prices_of_their_own(probed, recipe, unit):
    calls = tiny_chain("packed", recipe=recipe).calls.values()
    works = [call.cost[0] for call in calls if call.kernel.startswith("adamw_step")]
    assert {work.unit for work in works} == {unit}
    gpu = load_machine("h100")  # it has one rate for all
    for work in works:
        assert curve_for(work, probed).key == f"{unit}/float32"
        plain = work.model_copy(update={"unit": "adamw"})
        assert cost_alone_ns([work], gpu) == cost_alone_ns([plain], gpu)


def test_every_number_says_that_it_was_measured_and_how(probed):
    stated = [value for _, value in probed if hasattr(value, "source")]
    assert len(stated) >= 10
    for number in [*stated, *probed.efficiency.values()]:
        assert number.kind == "measured"
        assert f"torch {torch.__version__}, 1 compute thread" in number.source
    assert probed.device == "cpu"


def test_backwards_and_head_dimensions_have_curves_of_their_own(probed):
    for dtype in ("float32", "bfloat16"):
        for unit in ("rms_norm", "swiglu", "rope"):
            assert f"{unit}_backward/{dtype}" in probed.efficiency
        for unit in ("attention_forward", "attention_backward"):
            widest = probed.efficiency[f"{unit}/eager/head_dim_64/{dtype}"]
            assert probed.efficiency[f"{unit}/eager/head_dim_32/{dtype}"] != widest
            assert probed.efficiency[f"{unit}/eager/{dtype}"] == widest


def test_a_probed_profile_survives_its_file(probed, tmp_path):
    save_machine(probed, tmp_path / "here.toml")
    loaded = load_machine(tmp_path / "here.toml")
    assert loaded == probed
    assert loaded.content_hash == probed.content_hash


def test_the_number_of_torch_threads_is_put_back(monkeypatch):
    class StopError(Exception):
        pass

    def stop() -> Line:
        assert torch.get_num_threads() == 1
        raise StopError

    monkeypatch.setattr(cpu, "copy_line", stop)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.raises(StopError):
        probe_cpu()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


# --- fits


def time_ns(line: Line, amount: float, nominal_per_s: float) -> float:
    """Time of one launch by the curve that the line becomes."""
    maximum, half = line.efficiency(nominal_per_s)
    curve = Efficiency(max=maximum, half=half, of="bytes", kind="measured", source="test")
    at_amount = curve.max * amount / (amount + curve.half)
    return amount / (nominal_per_s * at_amount) * 1e9


def test_a_line_is_found_again_and_its_curve_gives_the_same_times():
    amounts = [1e3, 1e4, 1e5, 1e6]
    line = fit_line(amounts, [500 + 0.25 * amount for amount in amounts])
    assert line.fixed_ns == pytest.approx(500)
    assert line.ns_per_unit == pytest.approx(0.25)
    assert line.residual == pytest.approx(0, abs=1e-9)
    for amount in amounts:
        assert time_ns(line, amount, 5e9) == pytest.approx(500 + 0.25 * amount)


H200_COPIES = {  # MiB: GB/s, H2D and D2H; docs/benchmarks/nvidia-h200.json
    2**-4: (5.525, 5.124), 2**-2: (22.02, 21.70), 1: (48.03, 50.46), 4: (53.27, 54.12),
    16: (54.67, 54.55), 64: (55.00, 54.77), 256: (54.97, 54.82),
}  # fmt: skip


@pytest.mark.parametrize(("direction", "rate"), [(0, 55.1), (1, 54.9)])
def test_a_links_line_is_of_copies_that_schedules_make(direction, rate):
    sizes = [mib * 2**20 for mib in H200_COPIES]
    times = [s / r[direction] for s, r in zip(sizes, H200_COPIES.values(), strict=True)]
    line = fit_link("of a test", sizes, times)
    assert 1 / line.ns_per_unit == pytest.approx(rate, abs=0.05)
    assert line.residual < 0.008 and 1e3 < line.fixed_ns < 3e3
    assert fit_line(sizes, times).residual > 0.15, "one line of all is no line"


def test_a_link_that_something_else_uses_is_refused_and_slow_small_copies_are_left_out():
    sizes = [2.0**power for power in (20, 22, 24, 26, 28)]
    slow = fit_link("of a test", sizes, [2e5, *(s / 50 for s in sizes[1:])])
    assert 1 / slow.ns_per_unit == pytest.approx(50)
    with pytest.raises(UnsteadyLinkError, match="something else uses the link"):
        fit_link("of a test", sizes, [s / (50 if i % 2 else 30) for i, s in enumerate(sizes)])


def test_a_fit_never_has_a_negative_fixed_part():
    amounts = [10.0, 100.0, 1000.0]
    line = fit_line(amounts, [1.0, 11.0, 130.0])
    assert line.fixed_ns == 0
    assert 0.1 < line.ns_per_unit < 0.13


@pytest.mark.parametrize("times", [[300.0, 300.0, 300.0], [320.0, 300.0, 280.0]])
def test_times_that_do_not_grow_are_a_fixed_cost(times):
    amounts = [10.0, 100.0, 1000.0]
    line = fit_line(amounts, times)
    assert line.ns_per_unit > 0
    for amount in amounts:
        assert line.fixed_ns + line.ns_per_unit * amount == pytest.approx(300, rel=0.02)


def test_a_rate_beyond_the_nominal_one_is_capped_and_the_fixed_part_kept():
    line = Line(fixed_ns=100, ns_per_unit=0.1, residual=0)
    nominal_per_s = 1e9  # 1 per ns: the line says 10
    maximum, half = line.efficiency(nominal_per_s)
    assert maximum == 1.5
    assert half / (nominal_per_s * maximum) * 1e9 == pytest.approx(100)


def test_updates_on_the_host_have_the_price_of_the_same_kernels(probed: Machine) -> None:
    """The device is the same CPU: AdamW takes about as long on either side."""
    work, *_ = adamw_work(2**22, "bfloat16", state="model")
    (on_host,) = host_work((work,))
    here = work_time(work, probed)
    on_device = max(here.compute_ns, here.memory_ns) + here.launch_ns
    assert host_work_ns(on_host, probed) == pytest.approx(on_device, rel=0.5)
