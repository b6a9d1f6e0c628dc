"""Layers that are not alike, latent attention and windows, laid out over ranks."""

import pytest

from tests.clusters.random_jobs import DENSE, LATENT, MIXTURE, WINDOWED, job_of, lowered
from tests.clusters.test_flops import computed
from tests.models.active_parameters import active_parameters
from twinstream.clusters.conforms import require_conforming
from twinstream.clusters.predict import predict
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.models.layouts.work import ShapeWork
from twinstream.models.lowering.parts.groups import groups_of_layer
from twinstream.models.lowering.parts.layer_parts import layer_parts
from twinstream.models.options import SlidingWindow
from twinstream.models.providers.flops import model_flops_per_sequence
from twinstream.schedule.cluster.verify import require_safe

CLUSTER = load_cluster("h100_dgx")
LAYOUTS = [
    {}, {"tp": 2}, {"tp": 2, "ep": 2, "dp": 2}, {"pp": 3, "dp": 2, "ep": 2, "zero": 3},
    {"tp": 2, "sequence_parallel": False, "pp": 2}, {"cp": 2, "dp": 2, "tp": 2},
    {"pp": 2, "recompute": "full", "tp": 2, "pipeline": "zero_bubble"},
]  # fmt: skip


@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [LATENT, WINDOWED], ids=["latent", "windows"])
def test_layouts_are_safe_and_are_the_whole_models_step(shape, fields) -> None:
    document = lowered(job_of(4, shape, **fields))
    require_safe(document)
    require_conforming(document)


@pytest.mark.parametrize("shape", [LATENT, WINDOWED], ids=["latent", "windows"])
@pytest.mark.parametrize("tp", [1, 2])
def test_all_ranks_compute_the_models_flops(shape, tp) -> None:
    """And backward, as fused kernels do, the scores once more: queries by keys."""
    seq_len = 192
    found = computed(lowered(job_of(2, shape, seq_len, tp=tp)))
    again = sum(kind.d_q * kind.doubled_pairs(seq_len) * count for kind, count in shape.layer_kinds)
    assert found == 2 * (model_flops_per_sequence(shape, seq_len) + again)


def test_layers_that_are_all_dense_are_those_of_the_dense_model() -> None:
    assert MIXTURE.experts is not None
    experts = MIXTURE.experts.model_copy(update={"dense_layers": tuple(range(8))})
    shape = MIXTURE.model_copy(update={"experts": experts})
    fields = {"tp": 2, "pp": 2, "dp": 2, "zero": 3}
    found, dense = (predict(job_of(8, one, **fields), CLUSTER) for one in (shape, DENSE))
    assert found.step_s == dense.step_s and found.memory == dense.memory


def test_a_window_as_long_as_the_sequence_is_full_attention() -> None:
    fields = {"tp": 2, "ep": 2, "dp": 2}
    wide = MIXTURE.model_copy(update={"window": SlidingWindow(tokens=192)})
    full, same = (predict(job_of(4, one, **fields), CLUSTER) for one in (MIXTURE, wide))
    assert full.step_s == same.step_s
    narrow = MIXTURE.model_copy(update={"window": SlidingWindow(tokens=16)})
    (work,) = ShapeWork(shape=narrow, seq_len=192).core_attention().forward
    assert work.flops == 4 * 256 * 16 * (2 * 192 - 16) // 2
    assert work.shape == (16, 24, 8, 32, 12)  # 12 windows of 16 queries, 16 keys each


def test_ranks_hold_as_many_parameters_as_the_model_has() -> None:
    """With tp 1 and experts over ep: the dense layers' and attention's on every rank."""
    job = job_of(1, LATENT, dp=4, ep=4)
    held = [
        {group.name: group.num_parameters for group in groups_of_layer(job.of_kind(kind))}
        for kind in (0, 1)
    ]
    attention = 256 + 256 * (96 + 64 + 16) + 96 + 64  # norm, projections to few columns, norms
    attention += 96 * 8 * 48 + 64 * 8 * (32 + 32) + 8 * 32 * 256
    ffn = 3 * 256 * 128
    assert held[0] == {
        "layer": attention + 256 + 256 * 8, "experts": 2 * ffn + ffn  # 2 of 8, and the shared one
    }  # fmt: skip
    assert held[1] == {"layer": attention + 256 + 3 * 256 * 512}
    assert LATENT.num_parameters == (
        6 * attention + 2 * (256 + 3 * 256 * 512) + 4 * (256 + 256 * 8 + 9 * ffn)
        + 2 * 1024 * 256 + 256
    )  # fmt: skip
    assert LATENT.num_parameters - active_parameters(LATENT) == 4 * 6 * ffn


def test_over_tp_only_the_few_columns_are_gathered() -> None:
    document = lowered(job_of(1, LATENT, tp=2))
    part = next(iter(document.schedules.values()))
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in part.tensors}
    gathered = {
        sizes[op.operands[-1].tensor]
        for op in part.ops
        if op.kind == "communicate" and op.collective == "all_gather"
    }
    assert 192 * (96 + 64 + 16) * 2 in gathered  # bf16, of 192 tokens


@pytest.mark.parametrize("fields", [{}, {"ep": 2, "dp": 2}], ids=str)
def test_what_a_layer_keeps_lies_in_a_tensor_of_its_kinds_size(fields) -> None:
    job = job_of(3, LATENT, **fields)
    part = next(iter(lowered(job).schedules.values()))
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in part.tensors}
    expected = [layer_parts(job.of_kind(kind)).parts[1].saved_bytes for kind in (0, 1)]
    found = {
        (int(use.name.split(".")[1]), sizes[use.tensor])
        for op in part.ops
        if op.kind == "compute"
        for use in op.operands
        if use.name.startswith("saved.") and use.name.endswith(".mlp")
    }
    assert found == {(layer, expected[layer < 2]) for layer in range(6)}
