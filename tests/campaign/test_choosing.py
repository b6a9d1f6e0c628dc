"""The kernels a campaign runs with: the fastest right ones, whatever else breaks."""

import pytest

from tests.campaign.stand_ins import Clock, FakeDevice
from twinstream.campaign import requests
from twinstream.campaign.choosing import choose_kernels
from twinstream.campaign.worker import JobFailed, JobRefused
from twinstream.models.attention_scratch import attention_names
from twinstream.models.recipe import KernelChoice

RIGHT = {"triton": 0.0, "eager": 0.0}


def device(**known: tuple[float, str | None]) -> FakeDevice:
    absent = dict.fromkeys(attention_names(), (0.0, "it is not installed"))
    return FakeDevice(Clock(), attention=absent | known, off=RIGHT)


def test_the_fastest_attention_that_is_right_is_chosen_and_the_others_explained():
    found = device(sdpa_flash=(9e6, None), flash4=(7e6, None), flash2=(1e6, "it is wrong"))
    kernels, notes = choose_kernels(found, "cuda", "auto", "auto")
    assert kernels == KernelChoice(vector="triton", attention="flash4")
    assert "attention flash2 is left out: it is wrong" in notes
    assert "attention sdpa_flash: 9.00 ms" in notes


@pytest.mark.parametrize("off", [0.5, float("nan")])
def test_triton_kernels_that_are_wrong_are_left_out(off):
    found = device(sdpa_flash=(9e6, None))
    found.off = {"triton": off, "eager": 0.0}
    kernels, notes = choose_kernels(found, "cuda", "auto", "auto")
    assert kernels == KernelChoice(vector="eager", attention="sdpa_flash")
    assert any("triton kernels" in note and "off the eager kernels" in note for note in notes)


def test_a_try_that_breaks_the_process_leaves_the_rest():
    found = device()
    found.instead = {requests.TryAttention: lambda: JobFailed("illegal access")}
    kernels, notes = choose_kernels(found, "cuda", "auto", "auto")
    assert kernels.attention == "eager"
    assert "attention flash4 is left out: illegal access" in notes


def test_what_is_asked_for_is_not_replaced():
    found = device()
    found.off = {"triton": 0.5, "eager": 0.0}
    with pytest.raises(JobRefused, match="triton kernels with attention sdpa_flash"):
        choose_kernels(found, "cuda", "triton", "sdpa_flash")
    assert found.names() == ["TryKernels"]
    with pytest.raises(JobRefused, match="no vector kernels 'none'"):
        choose_kernels(found, "cuda", "none", "sdpa_flash")


def test_a_cpu_has_eager_kernels_without_a_try():
    found = device()
    assert choose_kernels(found, "cpu", "auto", "auto") == (KernelChoice(), ())
    assert found.asked == []
