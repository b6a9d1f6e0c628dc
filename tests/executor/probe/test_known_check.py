"""A shipped profile, scaled by what a stand-in for the GPU says of its links and kernels."""

from dataclasses import replace

import pytest
import torch

from twinstream.executor.probe import cuda_links, known_check
from twinstream.executor.probe.chains import check_chain
from twinstream.executor.probe.cuda_links import Copies, measure_copies
from twinstream.executor.probe.known_check import (
    Checked,
    checked_machine,
    measured_check,
    scaled,
)
from twinstream.executor.probe.process import JobFailed
from twinstream.executor.probe.tasks.task_samples import TaskSample, listed_samples
from twinstream.executor.probe.timing.fit import Line, UnsteadyLinkError
from twinstream.hardware_profiles.cost import copy_alone_ns, work_time
from twinstream.hardware_profiles.curve_choice import with_own_rates
from twinstream.hardware_profiles.loader import load_machine
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.schedule.cost import Work

H200 = load_machine("h200_datasheet")
COPIES = Copies((Line(3000.0, 1 / 44, 0.0), Line(3000.0, 1 / 50, 0.0)), (36e9, 44e9))
PRODUCT = Work(
    unit="matmul", shape=(8192,) * 3, flops=2 * 8192**3, hbm_bytes=6 * 8192**2, launches=1
)


def found_by(head_dim: int) -> Checked:
    """650 TFLOP/s of products, attention at 400 and 300 TFLOP/s."""
    rates, samples = {"attention_forward": 4e14, "attention_backward": 3e14}, []
    for name, works in listed_samples(check_chain("cudnn_frontend", head_dim, is_small=False)):
        if name.startswith("attention"):
            samples.append(TaskSample(name, works, works[0].flops / rates[works[0].unit] * 1e9))
    assert len(samples) == 2
    return Checked(COPIES, 6.5e14, 8192, tuple(samples))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_profile_prices_what_was_checked_as_it_was_measured(head_dim):
    found = found_by(head_dim)
    machine, told = scaled(H200, found)
    size = 2**28
    for way, rate in (("h2d", 44e9), ("d2h", 50e9)):
        assert copy_alone_ns(size, way, machine) == pytest.approx(size / rate * 1e9, rel=0.002)
    duplex, (to, back) = machine.rate("pcie_duplex_bytes_per_s"), machine.duplex_weights()
    assert (duplex / 2 / to, duplex / 2 / back) == pytest.approx((36e9, 44e9))
    kept_up_ns = work_time(PRODUCT, machine).alone_ns / 0.981  # one of a step is faster
    assert kept_up_ns == pytest.approx(2 * 8192**3 / 6.5e5, rel=1e-3)
    for sample in found.attention:
        assert sample.works[0].shape[3] == head_dim
        assert work_time(sample.works[0], machine).alone_ns == pytest.approx(sample.time_ns, 1e-3)
    assert "h2d 44.0 GB/s" in told and "products 650 TFLOP/s" in told
    assert "attention backward" in told


def test_what_cannot_be_is_not_believed():
    """A clock that stood still, or a copy that was none: shipped curves stay, and that is said."""
    fast = (Line(0.0, 1 / 5000, 0.0), Line(0.0, 1 / 50, 0.0))
    whole = found_by(128)
    late = tuple(replace(one, time_ns=0.0) for one in whole.attention)
    machine, told = scaled(H200, replace(whole, copies=Copies(fast, (4e12, 4e12)), attention=late))
    base, _ = scaled(H200, replace(whole, attention=()))
    for sample in late:  # priced as without them
        before = work_time(sample.works[0], with_own_rates(base, sample.works)).compute_ns
        assert work_time(sample.works[0], machine).compute_ns == before
    assert all(machine.efficiency[way] == H200.efficiency[way] for way in ("h2d", "d2h", "duplex"))
    assert "links not believed" in told and told.count("not believed") >= 3
    slow = replace(whole, product_flop_per_s=1e9, attention=())
    assert scaled(H200, slow)[0].efficiency["sustained"] == H200.efficiency["sustained"]


def test_what_a_check_leaves_is_said_beside_the_speed():
    machine, _ = scaled(H200, found_by(128))
    assert uncertainty_of(machine).short == "+/- 2.1 %, checked here"
    known, _ = scaled(load_machine("h200"), found_by(128))
    assert uncertainty_of(known).short == "+/- 2.1 %, checked here"


def test_a_card_like_the_measured_one_keeps_its_curves():
    """The H200 that the profile is of: its own links and sustained rate leave its prices."""
    before = load_machine("h200")
    lines = (Line(2797.0, 1 / 55.1237, 0.0), Line(2797.0, 1 / 54.9318, 0.0))
    found = Checked(Copies(lines, (47.8e9, 51.1e9)), 6.7001e14, 8192)
    after, _ = scaled(before, found)
    for curve in ("sustained", "h2d", "d2h", "duplex"):
        same = pytest.approx(before.efficiency[curve].max, rel=2e-3)
        assert after.efficiency[curve].max == same
    assert after.duplex_h2d_share.value == pytest.approx(before.duplex_h2d_share.value, rel=1e-3)


class Device:
    answer: Checked | JobFailed

    def __init__(self, begin):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def do(self, job, limit_s):
        assert job.keywords == {"attention": "flash3", "head_dim": 128}
        if isinstance(self.answer, JobFailed):
            raise self.answer
        return self.answer


def test_the_gpu_is_asked_once_and_one_that_breaks_leaves_the_profile(monkeypatch):
    monkeypatch.setattr(known_check, "DeviceProcess", Device)
    told: list[str] = []
    Device.answer = replace(found_by(128), attention=())
    assert checked_machine(H200, 128, told.append) == scaled(H200, Device.answer)[0]
    Device.answer = JobFailed("the device's process died (exit code -11)")
    assert checked_machine(H200, 128, told.append) == H200
    assert told[0].startswith("checked here: h2d 44.0 GB/s (")
    assert told[1].endswith("is taken as it is: the device's process died (exit code -11)")


def test_the_check_runs_through_on_a_cpu():
    found = measured_check("cpu", "sdpa_cpu", 32, copies=lambda device: COPIES, seconds=0.02)
    assert found.copies == COPIES and found.product_flop_per_s > 0 and found.product_rows == 256
    assert [s.works[0].unit for s in found.attention] == ["attention_forward", "attention_backward"]
    assert all(sample.works[0].shape[3] == 32 for sample in found.attention)


@pytest.mark.parametrize("unsteady", [0, 2, 3])
def test_copies_beside_a_neighbours_burst_are_measured_again_and_refused_the_third_time(
    unsteady, monkeypatch
):
    copies = Copies((Line(0.0, 0.02, 0.0), Line(0.0, 0.02, 0.0)), (4e10, 4e10))
    answers = iter([*[UnsteadyLinkError("off any line")] * unsteady, copies])

    def once(_):
        answer = next(answers)
        if isinstance(answer, UnsteadyLinkError):
            raise answer
        return answer

    monkeypatch.setattr(cuda_links, "_measured_once", once)
    if unsteady < 3:
        assert measure_copies(torch.device("cpu")) == copies
    else:
        with pytest.raises(UnsteadyLinkError, match="off any line"):
            measure_copies(torch.device("cpu"))
