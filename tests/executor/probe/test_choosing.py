"""The kernels chosen for a device: the fastest right ones, whatever else breaks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from twinstream.executor.kernels.attention.registry import AttentionNotAvailable
from twinstream.executor.kernels.availability import KernelsUnavailableError
from twinstream.executor.probe.choosing import (
    Tries,
    attention_try,
    choose_kernels,
    kernels_fault,
)
from twinstream.executor.probe.process import JobFailed, JobTimeout
from twinstream.executor.probe.tasks.attention import AttentionCandidate
from twinstream.models.kernel_costs.attention_limits import attention_names
from twinstream.models.recipes.recipe import KernelChoice

PRESETS = ("8b",)


@dataclass
class FakeProcess:
    """Answers every try after a second; `instead` are errors of attention by name."""

    attention: Mapping[str, AttentionCandidate]
    faults: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, Exception] = field(default_factory=dict)
    now_s: float = 0.0
    limits_s: dict[str, float] = field(default_factory=dict)

    def do(self, job: Any, limit_s: float) -> Any:
        self.now_s += 1.0
        if job.func is kernels_fault:
            kernels = job.keywords["kernels"]
            self.limits_s[f"{kernels.vector} {kernels.attention}"] = limit_s
            return self.faults.get(kernels.vector)
        assert job.func is attention_try and job.keywords["presets"] == PRESETS
        name = job.keywords["name"]
        self.limits_s[name] = limit_s
        if name in self.instead:
            raise self.instead[name]
        return self.attention[name]

    def tries(self, total_s: float = 1000.0) -> Tries:
        return Tries(self, lambda: total_s - self.now_s)


def process(*known: AttentionCandidate, **more: Any) -> FakeProcess:
    absent = {name: AttentionCandidate(name, "it is not installed") for name in attention_names()}
    return FakeProcess(absent | {candidate.name: candidate for candidate in known}, **more)


FLASH = AttentionCandidate("sdpa_flash", None, 9e6)


def test_the_fastest_attention_that_is_right_is_chosen_and_the_others_explained():
    found = process(
        FLASH,
        AttentionCandidate("flash4", None, 7e6),
        AttentionCandidate("flash2", "it is wrong", 1e6),
    )
    chosen = choose_kernels(found.tries(), PRESETS)
    assert chosen.kernels == KernelChoice(vector="triton", attention="flash4")
    assert "attention flash2 is left out: it is wrong" in chosen.notes
    assert "attention sdpa_flash: 9.00 ms" in chosen.notes


def test_triton_kernels_that_are_wrong_are_left_out():
    found = process(FLASH, faults={"triton": "grad.0 is 5.0e-01 off the eager kernels"})
    chosen = choose_kernels(found.tries(), PRESETS)
    assert chosen.kernels == KernelChoice(vector="eager", attention="sdpa_flash")
    assert any("triton kernels" in n and "off the eager kernels" in n for n in chosen.notes)


def test_a_try_that_breaks_the_process_leaves_the_rest():
    found = process(FLASH, instead={"flash4": JobFailed("illegal access")})
    chosen = choose_kernels(found.tries(), PRESETS)
    assert chosen.kernels.attention == "sdpa_flash"
    assert "attention flash4 is left out: illegal access" in chosen.notes


def test_what_is_asked_for_is_not_replaced():
    found = process(faults={"triton": "it is off"})
    with pytest.raises(JobFailed, match="triton kernels with attention sdpa_flash"):
        choose_kernels(found.tries(), PRESETS, "sdpa_flash", ("triton",))
    assert list(found.limits_s) == ["triton sdpa_flash"]


def test_attention_that_is_wrong_everywhere_chooses_nothing():
    found = process(AttentionCandidate("sdpa_flash", "it is 3.0e-01 off"))
    with pytest.raises(JobFailed, match=r"no attention is right here.*3.0e-01 off"):
        choose_kernels(found.tries(), PRESETS)


def test_memory_beyond_what_is_declared_is_told_and_kept_for_the_reserve():
    found = process(AttentionCandidate("sdpa_flash", None, 9e6, excess_bytes=2**25))
    chosen = choose_kernels(found.tries(), PRESETS)
    assert chosen.kernels.attention == "sdpa_flash"
    assert chosen.excess_bytes == 2**25
    assert any("33554432 bytes of device memory more" in note for note in chosen.notes)


def test_attention_that_is_right_but_not_deterministic_is_never_chosen_and_named():
    cudnn = AttentionCandidate("sdpa_cudnn", None, 4e6, 2**25, deterministic=False)
    chosen = choose_kernels(process(FLASH, cudnn).tries(), PRESETS)
    assert chosen.kernels.attention == "sdpa_flash"
    assert chosen.others == ("sdpa_cudnn",)
    assert chosen.excess_bytes == 2**25, "it is measured, too"
    assert any("4.00 ms, not deterministic" in note for note in chosen.notes)


def test_a_library_that_is_compiled_on_first_use_has_time_for_it():
    found = process(FLASH)
    choose_kernels(found.tries(), PRESETS)
    assert found.limits_s["flash4"] == 150.0


def test_tries_end_with_the_time_there_is_and_nothing_is_concluded():
    found = process(FLASH)
    with pytest.raises(JobTimeout, match="no time left"):
        choose_kernels(found.tries(2.5), PRESETS)
    assert list(found.limits_s.values()) == [2.5, 1.5, 0.5]
    found = process(FLASH, instead={"sdpa_cpu": JobTimeout("not done after 2 s")})
    with pytest.raises(JobTimeout, match="no time left"):
        choose_kernels(found.tries(2.5), PRESETS)


def test_attention_that_is_not_here_is_refused_with_the_reason():
    tried = attention_try("cpu", "flash4", ("tiny",))
    assert tried.refused == "it runs on cuda, not on cpu"


def test_kernels_that_cannot_run_here_are_refused_with_the_reason(monkeypatch):
    with pytest.raises(AttentionNotAvailable, match="flash4"):
        kernels_fault("cpu", KernelChoice(attention="flash4"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(KernelsUnavailableError, match="Triton"):
        kernels_fault("cpu", KernelChoice(vector="triton"))


def test_a_round_of_a_small_model_tells_right_kernels_from_wrong_ones(monkeypatch):
    assert kernels_fault("cpu", KernelChoice(attention="sdpa_cpu")) is None
    monkeypatch.setitem(kernels_fault.__globals__["TOLERANCE"], "float32", 0.0)
    fault = kernels_fault("cpu", KernelChoice(attention="sdpa_cpu"))
    assert fault is not None and "off the eager kernels, over 0e+00" in fault
