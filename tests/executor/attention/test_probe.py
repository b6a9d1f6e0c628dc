"""The probe chooses the fastest implementation that is right, and says why not the others."""

from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from twinstream.executor.kernels.attention import implementation, registry
from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.executor.probe.tasks import attention as probe
from twinstream.executor.probe.tasks.attention import (
    NoAttentionError,
    attention_cases,
    attention_curves,
    probe_attention,
    reduced,
)
from twinstream.executor.probe.tasks.kernels import Sample
from twinstream.hardware_profiles.loader import load_machine, load_machine_text, machine_toml
from twinstream.models.demand.attention_library import attention_library_bytes
from twinstream.models.demand.attention_limits import attention_limits
from twinstream.models.presets import load_preset
from twinstream.schedule.workload import Workload

SPEC = load_preset("tiny").model_copy(update={"num_heads": 4, "num_kv_heads": 2, "head_dim": 16})
SLICED = Workload(seq_len=96, chunk_tokens=32, chunks_per_round=3, rounds_per_step=1)
UNEQUAL = Workload(
    seq_len=300, chunk_tokens=507, chunks_per_round=1, rounds_per_step=1,
    sequence_lengths=(200, 7, 300),
)  # fmt: skip
PACKED = Workload(seq_len=16, chunk_tokens=64, chunks_per_round=1, rounds_per_step=1)


def counting_timer():
    """Times that grow from call to call: the implementation that is tried first is the fastest."""
    told = iter(range(1, 1000))
    return lambda call: float(next(told)) * 1e3


def broken(monkeypatch, name, **changes):
    """Replace what the registry has by that name."""
    known = dict(registry._IMPLEMENTATIONS)
    known[name] = copy(known[name])
    vars(known[name]).update(changes)
    monkeypatch.setattr(registry, "_IMPLEMENTATIONS", known)


def refusals(probed):
    return {candidate.name: candidate.refused for candidate in probed.candidates}


@pytest.mark.parametrize("first", ["eager", "sdpa_cpu"])
def test_the_fastest_that_is_right_is_chosen(first):
    names = (first, *({"eager", "sdpa_cpu"} - {first}))
    probed = probe_attention(
        attention_cases(SPEC, SLICED), "cpu", names=names, timer=counting_timer()
    )
    assert probed.best.name == first
    assert refusals(probed) == {"eager": None, "sdpa_cpu": None}
    assert all(0 <= candidate.error < 1e-4 for candidate in probed.candidates)


def test_implementations_are_compared_on_unequal_lengths(monkeypatch):
    """One that looks across the border of two sequences is wrong."""
    right = attention_implementation("sdpa_cpu")
    broken(
        monkeypatch, "sdpa_cpu",
        forward=lambda inputs, result, workspace: right.forward(
            replace(inputs, lengths=()), result, workspace
        ),
    )  # fmt: skip
    (case,) = attention_cases(SPEC, UNEQUAL)
    assert case.shape.lengths == UNEQUAL.sequence_lengths
    assert reduced(case.shape).lengths == (192, 7, 190)
    names = ("sdpa_cpu", "eager")
    probed = probe_attention([case], "cpu", names=names, timer=counting_timer())
    assert probed.best.name == "eager"
    assert "off the reference at a reduced size" in refusals(probed)["sdpa_cpu"]


def test_what_cannot_run_here_is_listed_with_the_reason():
    probed = probe_attention(attention_cases(SPEC, PACKED), "cpu", timer=counting_timer())
    found = refusals(probed)
    assert found["flash4"] == "it runs on cuda, not on cpu"
    assert found["eager"] is None


def test_one_that_is_wrong_is_not_chosen_however_fast(monkeypatch):
    right = attention_implementation("sdpa_cpu")

    def top_left(inputs, result, workspace):
        q = inputs.q
        seen = replace(inputs, k=inputs.k[:, : q.shape[1]], v=inputs.v[:, : q.shape[1]])
        right.forward(seen, result, workspace)

    broken(monkeypatch, "sdpa_cpu", forward=top_left)
    names = ("sdpa_cpu", "eager")
    cases = attention_cases(SPEC, SLICED)
    probed = probe_attention(cases, "cpu", names=names, timer=counting_timer())
    assert probed.best.name == "eager"
    assert "off the reference at a reduced size" in refusals(probed)["sdpa_cpu"]


def test_one_that_differs_from_run_to_run_is_chosen_only_if_asked_for(monkeypatch):
    right, runs = attention_implementation("sdpa_cpu"), iter(range(1000))

    def jitter(inputs, result, workspace):
        right.forward(inputs, result, workspace)
        result.out.mul_(1 + 1e-6 * (next(runs) % 2))

    names, cases = ("sdpa_cpu", "eager"), attention_cases(SPEC, PACKED)
    broken(monkeypatch, "sdpa_cpu", forward=jitter)
    probed = probe_attention(cases, "cpu", names=names, timer=counting_timer())
    assert "differ from run to run" in refusals(probed)["sdpa_cpu"]
    broken(monkeypatch, "sdpa_cpu", forward=right.forward)
    not_so = replace(attention_limits("sdpa_cpu"), deterministic=False)
    limits = {"sdpa_cpu": not_so, "eager": attention_limits("eager")}
    monkeypatch.setattr(implementation, "attention_limits", limits.__getitem__)
    probed = probe_attention(cases, "cpu", names=names, timer=counting_timer())
    assert refusals(probed)["sdpa_cpu"] == "it is not deterministic"
    probed = probe_attention(
        cases, "cpu", names=names, timer=counting_timer(), allow_nondeterministic=True
    )
    assert probed.best.name == "sdpa_cpu"


def test_one_that_leaves_nan_at_the_size_asked_for_is_not_chosen(monkeypatch):
    right = attention_implementation("sdpa_cpu")
    long = Workload(seq_len=256, chunk_tokens=256, chunks_per_round=1, rounds_per_step=1)

    def forgets_the_last_row_of_long_sequences(inputs, result, workspace):
        right.forward(inputs, result, workspace)
        if inputs.q.shape[1] > 200:
            result.lse[:, :, -1] = float("nan")

    broken(monkeypatch, "sdpa_cpu", forward=forgets_the_last_row_of_long_sequences)
    names, cases = ("sdpa_cpu", "eager"), attention_cases(SPEC, long)
    probed = probe_attention(cases, "cpu", names=names, timer=counting_timer())
    assert "NaN or infinity in log-sum-exp, dQ, dK and dV" in refusals(probed)["sdpa_cpu"]


def test_memory_beyond_what_is_declared_is_told_of_the_worst_pass_and_rounding_is_not(monkeypatch):
    shape = attention_cases(SPEC, PACKED)[0].shape
    trial = SimpleNamespace(forward="forward", backward="backward")
    declared = {p: attention_library_bytes("sdpa_flash", p, shape) for p in ("forward", "backward")}
    over = {"forward": 2**20, "backward": 2**24}
    monkeypatch.setattr(probe, "taken_bytes", lambda call: declared[call] + over[call])
    assert probe._excess_bytes("sdpa_flash", trial, shape) == 0
    over["backward"] += 1
    assert probe._excess_bytes("sdpa_flash", trial, shape) == 2**24 + 1


def test_where_none_is_right_the_error_says_why_of_each():
    with pytest.raises(NoAttentionError, match=r"flash4: it runs on cuda.*flash2: it runs on cuda"):
        probe_attention(attention_cases(SPEC, PACKED), "cpu", names=("flash4", "flash2"))


def test_the_reduced_shape_keeps_groups_of_heads_and_fewer_queries_than_keys():
    large = Workload(seq_len=65536, chunk_tokens=8192, chunks_per_round=8, rounds_per_step=1)
    first, last = (case.shape for case in attention_cases(load_preset("8b"), large))
    assert (first.num_keys, last.num_keys) == (8192, 65536)
    small = reduced(last)
    assert (small.num_queries, small.num_keys) == (192, 512)
    assert (small.num_heads, small.num_kv_heads, small.head_dim) == (8, 2, 128)
    assert small.sliced and reduced(first).sliced


def test_the_choice_and_its_efficiencies_go_into_a_profile_and_back():
    cases = attention_cases(SPEC, SLICED)
    probed = probe_attention(cases, "cpu", names=("sdpa_cpu",), timer=lambda call: 1e6)
    machine = probed.machine(load_machine("cpu"), 1e12)
    assert machine.attention.name == "sdpa_cpu"
    assert f"torch {torch.__version__}" in machine.attention.source
    assert load_machine_text(machine_toml(machine)) == machine
    assert machine.content_hash != load_machine("cpu").content_hash


def test_curves_give_back_the_times_that_were_measured():
    """10 us a call and 2 TFLOP/s, as a fraction of a nominal 4."""
    (case,) = attention_cases(SPEC, PACKED)
    samples = []
    for factor in (10**5, 10**6, 10**7):
        for work in (case.forward, case.backward):
            flops = work.flops * factor
            samples.append(
                Sample(work.model_copy(update={"flops": flops}), 1e4 + flops / 2e12 * 1e9)
            )
    curves = dict(attention_curves(samples, 4e12, "by hand"))
    assert set(curves) == {
        "attention_forward/eager/float32", "attention_backward/eager/float32"
    }  # fmt: skip
    for curve in curves.values():
        assert curve.max == pytest.approx(0.5, rel=1e-3)
        assert curve.half == pytest.approx(1e-5 * 2e12, rel=1e-2)
