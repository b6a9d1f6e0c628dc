"""The kernels a campaign runs with: the fastest right ones, whatever else breaks."""

import pytest

from benchmarks.gpu import requests
from benchmarks.gpu.choosing import Tries, check_kernels, choose_kernels
from benchmarks.gpu.tests.stand_ins import Clock, FakeDevice
from benchmarks.gpu.worker import JobFailed, JobRefused, JobTimeout
from twinstream.models.demand.attention_limits import attention_names
from twinstream.models.recipe import KernelChoice
from twinstream.schedule.errors import TwinstreamError

RIGHT = {"triton": 0.0, "eager": 0.0}


def device(**known: tuple[float, str | None]) -> FakeDevice:
    absent = dict.fromkeys(attention_names(), (0.0, "it is not installed"))
    return FakeDevice(Clock(), attention=absent | known, off=RIGHT)


def tries(device: FakeDevice, total_s: float = 1000.0) -> Tries:
    return Tries(device, lambda: total_s - device.clock.now_s)


def test_the_fastest_attention_that_is_right_is_chosen_and_the_others_explained():
    found = device(sdpa_flash=(9e6, None), flash4=(7e6, None), flash2=(1e6, "it is wrong"))
    chosen = choose_kernels(tries(found), "cuda", "auto", "auto", ("8b",))
    kernels, notes = chosen.kernels, chosen.notes
    assert kernels == KernelChoice(vector="triton", attention="flash4")
    assert "attention flash2 is left out: it is wrong" in notes
    assert "attention sdpa_flash: 9.00 ms" in notes


@pytest.mark.parametrize("off", [0.5, float("nan")])
def test_triton_kernels_that_are_wrong_are_left_out(off):
    found = device(sdpa_flash=(9e6, None))
    found.off = {"triton": off, "eager": 0.0}
    chosen = choose_kernels(tries(found), "cuda", "auto", "auto", ("8b",))
    kernels, notes = chosen.kernels, chosen.notes
    assert kernels == KernelChoice(vector="eager", attention="sdpa_flash")
    assert any("triton kernels" in note and "off the eager kernels" in note for note in notes)


def test_a_try_that_breaks_the_process_leaves_the_rest():
    found = device()
    found.instead = {requests.TryAttention: lambda: JobFailed("illegal access")}
    chosen = choose_kernels(tries(found), "cuda", "auto", "auto", ("8b",))
    kernels, notes = chosen.kernels, chosen.notes
    assert kernels.attention == "sdpa_flash"
    assert "attention flash4 is left out: illegal access" in notes


def test_what_is_asked_for_is_not_replaced():
    found = device()
    found.off = {"triton": 0.5, "eager": 0.0}
    with pytest.raises(JobRefused, match="triton kernels with attention sdpa_flash"):
        choose_kernels(tries(found), "cuda", "triton", "sdpa_flash", ("8b",))
    assert found.names() == ["TryKernels"]
    with pytest.raises(JobRefused, match="no vector kernels 'none'"):
        choose_kernels(tries(found), "cuda", "none", "sdpa_flash", ("8b",))


def test_a_cpu_has_eager_kernels_without_a_try():
    found = device()
    assert choose_kernels(tries(found), "cpu", "auto", "auto", ("tiny",)).kernels == KernelChoice()
    assert found.asked == []


def test_attention_that_is_wrong_everywhere_chooses_nothing():
    found = device(sdpa_flash=(0.0, "it is 3.0e-01 off"))
    with pytest.raises(JobFailed, match=r"no attention is right here.*3.0e-01 off"):
        choose_kernels(tries(found), "cuda", "auto", "auto", ("8b",))


def test_memory_beyond_what_is_declared_is_told_and_kept_for_the_reserve():
    found = device(sdpa_flash=(9e6, None))
    found.excess["sdpa_flash"] = 2**25
    chosen = choose_kernels(tries(found), "cuda", "auto", "auto", ("8b",))
    assert chosen.kernels.attention == "sdpa_flash"
    assert chosen.excess_bytes == 2**25
    assert any("33554432 bytes of device memory more" in note for note in chosen.notes)


def test_attention_that_is_right_but_not_deterministic_is_never_chosen_and_named():
    found = device(sdpa_flash=(9e6, None), sdpa_cudnn=(4e6, None))
    found.excess["sdpa_cudnn"] = 2**25
    chosen = choose_kernels(tries(found), "cuda", "auto", "auto", ("8b",))
    assert chosen.kernels.attention == "sdpa_flash"
    assert chosen.others == ("sdpa_cudnn",)
    assert chosen.excess_bytes == 2**25, "cells of its own run with it"
    assert any("4.00 ms, not deterministic" in note for note in chosen.notes)


def test_a_library_that_is_compiled_on_first_use_has_time_for_it():
    found = device(sdpa_flash=(9e6, None))
    choose_kernels(tries(found), "cuda", "auto", "auto", ("8b",))
    limits = dict(zip([getattr(r, "name", "") for r in found.asked], found.limits_s, strict=True))
    assert limits["flash4"] == 150.0


def test_tries_end_with_the_time_there_is_and_nothing_is_concluded():
    found = device(sdpa_flash=(9e6, None))
    with pytest.raises(JobTimeout, match="no time left"):
        choose_kernels(tries(found, 2.5), "cuda", "auto", "auto", ("8b",))
    assert found.limits_s == [2.5, 1.5, 0.5]
    found = device(sdpa_flash=(9e6, None))
    found.instead = {requests.TryAttention: lambda: JobTimeout("not done after 2 s")}
    with pytest.raises(JobTimeout, match="no time left"):
        choose_kernels(tries(found, 2.5), "cuda", "auto", "auto", ("8b",))


@pytest.mark.parametrize(
    ("vector", "attention", "message"),
    [("cuda", "auto", "'cuda' is unknown; known: auto"), ("auto", "nosuch", "'nosuch' is unknown")],
)
def test_names_that_nobody_knows_are_refused_before_anything_starts(vector, attention, message):
    with pytest.raises(TwinstreamError, match=message):
        check_kernels(vector, attention)
    check_kernels("eager", "flash4")
