"""The probe tells attention that is right on a device from attention that is not, and why."""

from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest

from twinstream.executor.kernels.attention import implementation, registry
from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.executor.kernels.attention.trial import mixed_lengths
from twinstream.executor.probe.tasks import attention as probe
from twinstream.executor.probe.tasks.attention import attention_cases, reduced, try_attention
from twinstream.models.kernel_costs.attention_libraries import SdpaCpuFacts
from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.presets import load_preset
from twinstream.schedule.workload import Packing, Workload

SPEC = load_preset("tiny").model_copy(update={"num_heads": 4, "num_kv_heads": 2, "head_dim": 16})
SLICED = Workload(seq_len=96, chunk_tokens=32, chunks_per_round=3, rounds_per_step=1)
UNEQUAL = Workload(
    seq_len=300, chunk_tokens=507, chunks_per_round=1, rounds_per_step=1,
    packing=Packing(most_sequences=4, expected_lengths=(200, 7, 300)),
)  # fmt: skip
PACKED = Workload(seq_len=16, chunk_tokens=64, chunks_per_round=1, rounds_per_step=1)


def broken(monkeypatch, name, **changes):
    """Replace what the registry has by that name."""
    known = dict(registry._IMPLEMENTATIONS)
    known[name] = copy(known[name])
    vars(known[name]).update(changes)
    monkeypatch.setattr(registry, "_IMPLEMENTATIONS", known)


def tried(workload: Workload):
    """`sdpa_cpu` on a workload's cases, a millisecond a call."""
    return try_attention("sdpa_cpu", attention_cases(SPEC, workload), "cpu", lambda call: 1e6)


def test_one_that_is_right_has_the_time_of_both_passes_of_every_case():
    assert tried(PACKED) == probe.AttentionCandidate("sdpa_cpu", None, 2e6)
    assert tried(SLICED) == probe.AttentionCandidate("sdpa_cpu", None, 4e6)


def test_implementations_are_compared_on_unequal_lengths(monkeypatch):
    """One that looks across the border of two sequences is wrong."""
    right = attention_implementation("sdpa_cpu")
    broken(
        monkeypatch, "sdpa_cpu",
        forward=lambda inputs, result, workspace: right.forward(
            replace(inputs, starts=None), result, workspace
        ),
    )  # fmt: skip
    (case,) = attention_cases(SPEC, UNEQUAL)
    assert mixed_lengths(case.shape) == (300, 1, 150, 56)
    assert mixed_lengths(reduced(case.shape)) == (192, 123, 192)
    assert "off the reference at a reduced size" in tried(UNEQUAL).refused


def test_what_cannot_run_here_is_refused_with_the_reason():
    found = try_attention("flash4", attention_cases(SPEC, PACKED), "cpu")
    assert found.refused == "it runs on cuda, not on cpu"


@pytest.mark.parametrize("first_is_right", [True, False])
def test_one_that_is_wrong_on_a_later_slice_or_gives_nan_is_refused(monkeypatch, first_is_right):
    right = attention_implementation("sdpa_cpu")

    def top_left(inputs, result, workspace):
        q = inputs.q
        seen = replace(inputs, k=inputs.k[:, : q.shape[1]], v=inputs.v[:, : q.shape[1]])
        right.forward(seen, result, workspace)
        if not first_is_right:
            result.out.fill_(float("nan"))

    broken(monkeypatch, "sdpa_cpu", forward=top_left)
    assert "off the reference at a reduced size" in tried(SLICED).refused


def test_one_that_differs_from_run_to_run_is_right_only_if_it_says_so(monkeypatch):
    right, runs = attention_implementation("sdpa_cpu"), iter(range(1000))

    def jitter(inputs, result, workspace):
        right.forward(inputs, result, workspace)
        result.out.mul_(1 + 1e-6 * (next(runs) % 2))

    broken(monkeypatch, "sdpa_cpu", forward=jitter)
    assert "differ from run to run" in tried(PACKED).refused
    not_so = SdpaCpuFacts()
    not_so.deterministic = False
    limits = {"sdpa_cpu": not_so, "eager": attention_limits("eager")}
    monkeypatch.setattr(implementation, "attention_limits", limits.__getitem__)
    found = tried(PACKED)
    assert found.refused is None and not found.deterministic


def test_one_that_leaves_nan_at_the_size_asked_for_is_refused(monkeypatch):
    right = attention_implementation("sdpa_cpu")
    long = Workload(seq_len=256, chunk_tokens=256, chunks_per_round=1, rounds_per_step=1)

    def forgets_the_last_row_of_long_sequences(inputs, result, workspace):
        right.forward(inputs, result, workspace)
        if inputs.q.shape[1] > 200:
            result.lse[:, :, -1] = float("nan")

    broken(monkeypatch, "sdpa_cpu", forward=forgets_the_last_row_of_long_sequences)
    assert "NaN or infinity in log-sum-exp, dQ, dK and dV" in tried(long).refused


def test_memory_beyond_what_is_declared_is_told_of_the_worst_pass_and_rounding_is_not(monkeypatch):
    shape = attention_cases(SPEC, PACKED)[0].shape
    trial = SimpleNamespace(forward="forward", backward="backward")
    declared = {
        p: attention_limits("sdpa_flash").allocates(p, shape) for p in ("forward", "backward")
    }
    over = {"forward": 2**20, "backward": 2**24}
    monkeypatch.setattr(probe, "taken_bytes", lambda call: declared[call] + over[call])
    assert probe._excess_bytes("sdpa_flash", trial, shape) == 0
    over["backward"] += 1
    assert probe._excess_bytes("sdpa_flash", trial, shape) == 2**24 + 1


def test_the_reduced_shape_keeps_groups_of_heads_and_fewer_queries_than_keys():
    large = Workload(seq_len=65536, chunk_tokens=8192, chunks_per_round=8, rounds_per_step=1)
    first, last = (case.shape for case in attention_cases(load_preset("8b"), large))
    assert (first.num_keys, last.num_keys) == (8192, 65536)
    small = reduced(last)
    assert (small.num_queries, small.num_keys) == (192, 512)
    assert (small.num_heads, small.num_kv_heads, small.head_dim) == (8, 2, 128)
    assert small.sliced and reduced(first).sliced
