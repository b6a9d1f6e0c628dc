"""Requests carried out on a CPU, and what is special on machines that are lent."""

import os

import pytest
import torch

from benchmarks.gpu.device import check, device_side, facts, requests
from benchmarks.gpu.device.device_side import DeviceSide
from benchmarks.gpu.device.measuring import MeasuringSession
from benchmarks.gpu.jobs.results import AttentionChecked, CheckFound
from benchmarks.gpu.report import page
from tests.helpers.fake_cudart import FakeCudart
from twinstream.executor.memory import arena_memory
from twinstream.executor.memory.host_limits import AvailableMemoryError, HostMemoryError
from twinstream.executor.memory.pinned import Pinning
from twinstream.executor.probe import cuda_links
from twinstream.executor.probe import device as probed_device
from twinstream.executor.probe.timing.device_timing import DeviceTimer
from twinstream.executor.probe.timing.fit import UnsteadyLinkError
from twinstream.executor.run.execute import NoCudaError


def test_memory_that_grows_as_it_is_used_is_taken_all_the_same(monkeypatch):
    asked = []

    def take(self, size_bytes, *, heeds_available=True):
        asked.append((size_bytes, heeds_available))
        if heeds_available:
            raise AvailableMemoryError("available memory leaves 20.00 GiB.")

    monkeypatch.setattr(MeasuringSession, "take_host", take)
    taken = DeviceSide("cpu").answer(requests.TakeHostMemory(2**36))
    assert isinstance(taken, requests.Taken)
    assert asked == [(2**36, True), (2**36, False)]
    assert "leaves 20.00 GiB" in taken.note


@pytest.mark.parametrize(("has_cuda", "expected"), [(True, ["set", "described"]), (False, [])])
def test_a_process_sets_the_allocator_before_anything_else_as_a_run_does(
    monkeypatch, has_cuda, expected
):
    """Of both processes, that of cells and that of peers."""
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(probed_device, "expand_segments", lambda: done.append("set"))
    monkeypatch.setattr(device_side, "describe", lambda backend: done.append("described"))
    side = DeviceSide("cuda")
    if has_cuda:
        side.answer(requests.DescribeDevice())
    assert done == expected
    DeviceSide("cpu")
    assert done == expected


def test_without_a_device_the_first_request_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoCudaError, match="no CUDA device"):
        DeviceSide("cuda").answer(requests.DescribeDevice())


def test_facts_are_noted_and_what_cannot_be_found_out_is_said(tmp_path, monkeypatch):
    found = DeviceSide("cpu").answer(requests.NoteFacts(2**20))
    assert isinstance(found, requests.Facts)
    assert f"torch {torch.__version__}" in found.facts["packages"]
    assert "in all, available" in found.facts["host memory"]
    assert not any(name.startswith("pinning") for name in found.facts), "nothing to pin for"
    monkeypatch.setattr(facts, "_HUGE_PAGES", tmp_path)
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setattr(facts, "_CGROUP", tmp_path / "nowhere")
    told = facts.facts_of("cpu", 0)
    assert told["huge pages"] == "enabled always [madvise] never"
    assert told["cgroup"] == f"nothing in {tmp_path / 'nowhere'}"


def test_attention_is_checked_before_it_is_relied_on():
    found = DeviceSide("cpu").answer(requests.CheckDevice())
    assert isinstance(found, CheckFound) and found.links == ()
    places = [(one.name, one.head_dim, one.seq_len) for one in found.attention]
    assert places == [
        (name, dim, n) for dim in (128, 64) for n in (64, 128) for name in ("eager", "sdpa_cpu")
    ]
    for one in found.attention:
        assert one.same_bits and one.error is not None and one.error < 1e-4
        assert one.num_sequences * one.seq_len == 128
        seen = one.num_sequences * sum(range(1, one.seq_len + 1))  # pairs under the mask
        assert one.backward_ns and one.backward_flop_per_s == pytest.approx(
            10 * 32 * one.head_dim * seen / one.backward_ns * 1e9
        )


def test_a_link_or_library_that_breaks_takes_no_other_part_of_the_check_with_it(monkeypatch):
    def unsteady(*_):
        raise UnsteadyLinkError("copies H2D are 37% off any line")

    def broken(*_):
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(cuda_links, "measure_copies", unsteady)
    assert check._links("cuda") == ((), "copies H2D are 37% off any line")
    monkeypatch.setattr(check, "_links", lambda _: ((), "copies H2D are 37% off any line"))
    real = check._measured
    monkeypatch.setattr(
        check, "_measured", lambda name, *rest: broken() if name == "eager" else real(name, *rest)
    )
    found = check.check_device("cpu")
    assert [one.name for one in found.attention if one.same_bits] == ["sdpa_cpu"] * 4
    told = page.check_lines(found)
    assert told[0] == "links have no figures: copies H2D are 37% off any line"
    assert told[1].endswith("eager, head_dim 128, 2 of 64 tokens: cuDNN error: "
                            "CUDNN_STATUS_NOT_SUPPORTED")  # fmt: skip


def test_attention_that_is_not_here_or_wrong_is_said(monkeypatch):
    shape = next(check.attention_shapes("cuda"))
    timer = DeviceTimer(torch.device("cpu"))
    found = check.checked("cudnn_sliced", shape, timer)
    assert found.same_bits is None and "cudnn_sliced" in page.checked_line(found)
    wrong = AttentionChecked(
        name="x", seq_len=8192, num_sequences=2, head_dim=128, same_bits=False, error=0.5,
        forward_ns=1e6, backward_ns=4e6, backward_flop_per_s=4.4e14,
    )  # fmt: skip
    assert page.checked_line(wrong) == (
        "x, head_dim 128, 2 of 8,192 tokens: OTHER BITS THE SECOND TIME, error 5.0e-01, forward "
        "1.00 ms, backward 4.00 ms, 440 TFLOP/s"
    )


def test_pinning_is_timed_and_a_driver_that_refuses_is_a_fact(monkeypatch):
    cudart = FakeCudart()
    monkeypatch.setattr(
        arena_memory, "arena_pinning",
        lambda note: Pinning(cudart, on_progress=note, clear_error=cudart.clear_error),
    )  # fmt: skip
    told = facts._pinned(2**22)
    assert "GB/s), of which" in told and "in 1 piece(s)" in told
    assert cudart.locked == {}
    cudart = FakeCudart(fails_at=0)
    assert "HostMemoryError: the driver cannot pin" in facts._told(lambda: facts._pinned(2**22))


def test_torchs_compiler_gets_few_processes_unless_the_user_says(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    DeviceSide("cpu")
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "4"
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
    DeviceSide("cpu")
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "7"


def test_memory_that_the_driver_refuses_is_not_pinned_again(monkeypatch):
    asked = []

    def take(self, size_bytes, *, heeds_available=True):
        asked.append(heeds_available)
        raise HostMemoryError("the driver refuses.")

    monkeypatch.setattr(MeasuringSession, "take_host", take)
    with pytest.raises(HostMemoryError):
        DeviceSide("cpu").answer(requests.TakeHostMemory(2**36))
    assert asked == [True]
