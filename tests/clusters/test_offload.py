"""Stages that do not fit the device, planned with the host's memory."""

import itertools
from functools import cache

import pytest

from twinstream.clusters import predict as predicting
from twinstream.clusters.conforms import conforms
from twinstream.clusters.offload import OffloadError, offloaded
from twinstream.clusters.predict import predict
from twinstream.clusters.timed_step import document_of
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.options import Experts
from twinstream.models.recipes.recipe import megatron_recipe
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Communicate, Compute, Copy
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.simulator.replay import simulate

CLUSTER = load_cluster("h100_dgx")
NODE = machine_of(CLUSTER)
HOST_BYTES = 2**36
SHAPE = ModelSpec(
    name="toy", num_layers=8, d_model=1024, num_heads=16, num_kv_heads=8, head_dim=64, d_ff=4096,
    vocab_size=32000,
)  # fmt: skip
EXPERTS = Experts(count=8, per_token=2, d_ff=1024)
LAYOUTS = {
    "alone": Layout(offload=True),
    "1f1b": Layout(pp=2, micro_batch=2, offload=True),
    "ring": Layout(pp=2, virtual_stages=2, pipeline="ring", offload=True),
    "zero-bubble": Layout(pp=4, pipeline="zero_bubble", offload=True),
    "tp and dp": Layout(tp=2, pp=2, dp=2, offload=True),
    "cp": Layout(cp=2, dp=2, recompute="full", offload=True),
    "ep": Layout(dp=4, ep=2, zero=2, offload=True),
    "fsdp": Layout(dp=4, zero=3, offload=True),
}


def job_of(layout: Layout, num_microbatches: int = 4) -> Job:
    shape = SHAPE.model_copy(update={"experts": EXPERTS}) if layout.ep > 1 else SHAPE
    batch = layout.dp * layout.micro_batch * num_microbatches
    recipe = megatron_recipe()
    return Job(shape=shape, layout=layout, seq_len=2048, global_batch=batch, recipe=recipe)


@cache
def resident(name: str) -> Schedule:
    return document_of(job_of(LAYOUTS[name]), CLUSTER)


def fullest_bytes(document: Schedule) -> int:
    return max(arena_bytes(schedule, DEVICE) for schedule in document.schedules.values())


@cache
def within(name: str, share: float) -> Schedule:
    """With that share of what the fullest stage takes of the device."""
    caps = Caps(device_bytes=round(share * fullest_bytes(resident(name))), host_bytes=HOST_BYTES)
    return offloaded(resident(name), job_of(LAYOUTS[name]), CLUSTER, NODE, caps)


def step_ns(document: Schedule) -> float:
    return simulate(document, NODE, CLUSTER).step_ns


def copies(document: Schedule) -> list[Copy]:
    return [
        op
        for schedule in document.schedules.values()
        for op in schedule.ops
        if isinstance(op, Copy)
    ]


@pytest.mark.parametrize(
    ("name", "share"), [*((name, 0.7) for name in LAYOUTS), ("cp", 0.25), ("fsdp", 0.35)]
)
def test_every_stage_is_safe_within_its_caps_and_does_what_it_did(name, share):
    document = within(name, share)
    assert verify(document) == []
    assert conforms(document) == []
    assert fullest_bytes(document) <= share * fullest_bytes(resident(name))
    assert copies(document)
    for one in document.schedules.values():
        assert one.caps.device_bytes == round(share * fullest_bytes(resident(name)))
        assert arena_bytes(one, HOST) <= HOST_BYTES


@pytest.mark.parametrize("name", ["1f1b", "tp and dp", "fsdp"])
def test_exchanges_are_as_they_were(name):
    def said(document: Schedule, schedule: str) -> list[tuple[object, ...]]:
        return sorted(
            (op.stream.queue, op.sequence, op.op_id)
            for op in document.schedules[schedule].ops
            if isinstance(op, Communicate)
        )

    document = within(name, 0.7)
    for schedule in document.schedules:
        assert said(document, schedule) == said(resident(name), schedule)
    sides = [sorted(exchange.sides) for exchange in document.order]
    assert sorted(sides) == sorted(sorted(e.sides) for e in resident(name).order)


def test_without_its_copies_a_stage_is_not_safe():
    (schedule,) = within("alone", 0.7).schedules.values()
    gone = {op.op_id for op in schedule.ops if isinstance(op, Copy)}
    without = schedule.model_copy(
        update={
            "ops": tuple(
                op.model_copy(
                    update={
                        "waits": tuple(w for w in op.waits if w not in gone),
                        "waits_previous": tuple(w for w in op.waits_previous if w not in gone),
                    }
                )
                for op in schedule.ops
                if op.op_id not in gone
            )
        }
    )
    assert verify_rank(schedule) == []
    assert verify_rank(without)


def test_what_does_not_fit_crosses_the_link_in_every_step():
    """What is carried and is not on the device where a pass begins is loaded, and, updated in
    every step, written back: in the steady state links and step time show it."""
    document = within("alone", 0.5)
    (schedule,) = document.schedules.values()
    sizes = {t.tensor_id: t.size_bytes for t in schedule.tensors}
    carried = sum(sizes[name] for name in {item.tensor for item in schedule.carried})
    least = carried - arena_bytes(schedule, DEVICE)
    assert least > 0
    slots = {slot.slot_id: slot.tier for slot in schedule.slots}
    for tier, field in ((DEVICE, "pcie_h2d_bytes_per_s"), (HOST, "pcie_d2h_bytes_per_s")):
        copied = sum(sizes[op.tensor] for op in copies(document) if slots[op.destination] == tier)
        assert copied >= least
        assert step_ns(document) >= least * 1e9 / NODE.rate(field)


@pytest.mark.parametrize("name", ["alone", "1f1b", "tp and dp"])
def test_more_device_memory_is_never_much_slower(name):
    shares = (0.55, 0.7, 0.85, 1.0)
    steps = [step_ns(within(name, share)) for share in shares]
    assert all(more <= 1.05 * less for less, more in itertools.pairwise(steps)), steps
    assert steps[-1] == step_ns(resident(name))
    assert steps[0] > steps[-1]


def test_stages_that_fit_stay_as_they_are():
    document = within("1f1b", 1.0)
    assert copies(document) == []
    for name, schedule in document.schedules.items():
        assert schedule.slots == resident("1f1b").schedules[name].slots


def test_what_is_too_small_to_move_stays_carried():
    narrow = {"d_model": 256, "num_heads": 4, "num_kv_heads": 2, "d_ff": 1024}
    job = job_of(LAYOUTS["fsdp"])
    job = job.model_copy(update={"shape": SHAPE.model_copy(update=narrow)})
    document = document_of(job, CLUSTER)
    caps = Caps(device_bytes=round(0.6 * fullest_bytes(document)), host_bytes=HOST_BYTES)
    found = offloaded(document, job, CLUSTER, NODE, caps)
    (schedule,) = found.schedules.values()
    shards = {t.tensor_id for t in schedule.tensors if t.role == "parameter"}
    small = {t.tensor_id for t in schedule.tensors if t.size_bytes < 2**20} & shards
    assert small
    assert small <= {item.tensor for item in schedule.carried}
    assert verify(found) == []


def test_what_fits_no_memory_is_refused_with_bytes_by_class_and_the_least_that_would_do():
    job, document = job_of(LAYOUTS["alone"]), resident("alone")
    tiny = Caps(device_bytes=2**28, host_bytes=HOST_BYTES)
    with pytest.raises(OffloadError) as refused:
        offloaded(document, job, CLUSTER, NODE, tiny)
    error = refused.value
    assert "stage 0 does not fit" in str(error)
    assert f"optimizer_state {error.role_bytes['optimizer_state'] / 2**30:.2f} GiB" in str(error)
    parameters = error.role_bytes["parameter"]
    assert error.role_bytes["gradient"] == 2 * parameters  # float32
    assert error.role_bytes["optimizer_state"] == pytest.approx(6 * parameters, rel=1e-3)
    assert error.least_device_bytes is not None and error.least_device_bytes > 2**28
    # Any step has the logits and the head at once.
    assert error.least_device_bytes >= 2048 * 32000 * 4
    enough = tiny.model_copy(update={"device_bytes": round(1.3 * error.least_device_bytes)})
    assert verify(offloaded(document, job, CLUSTER, NODE, enough)) == []


def test_a_host_that_is_too_small_is_refused_too():
    job, document = job_of(LAYOUTS["alone"]), resident("alone")
    caps = Caps(device_bytes=round(0.5 * fullest_bytes(document)), host_bytes=2**27)
    with pytest.raises(OffloadError) as refused:
        offloaded(document, job, CLUSTER, NODE, caps)
    assert refused.value.least_host_bytes is not None
    assert "GiB of host memory a GPU" in str(refused.value)


def test_without_caps_a_gpu_has_its_share_of_the_node():
    for name, ranks in (("alone", 1), ("1f1b", 2), ("tp and dp", 8)):
        document = offloaded(resident(name), job_of(LAYOUTS[name]), CLUSTER, NODE)
        schedule = next(iter(document.schedules.values()))
        share = NODE.number("host_memory_bytes") / ranks
        assert schedule.caps.host_bytes == pytest.approx(0.8 * share, abs=1)
        assert schedule.caps.device_bytes == NODE.number("device_memory_bytes")


def small_node(device_bytes: int) -> Machine:
    memory = NODE.device_memory_bytes
    assert memory is not None
    update = {"device_memory_bytes": memory.model_copy(update={"value": device_bytes})}
    return NODE.model_copy(update=update)


def test_a_layout_that_fits_only_with_offload_is_predicted_so():
    reserve = round(NODE.number("device_reserve_bytes"))
    node = small_node(round(0.7 * fullest_bytes(resident("1f1b"))) + reserve)
    job = job_of(LAYOUTS["1f1b"])
    plain = job.model_copy(update={"layout": job.layout.model_copy(update={"offload": False})})
    without, found = predict(plain, CLUSTER, node), predict(job, CLUSTER, node)
    assert not without.fits and without.host_bytes == 0
    assert found.fits and found.host_bytes > 0
    assert found.step_s > without.step_s  # which has no device to run on
    document = offloaded(resident("1f1b"), job, CLUSTER, node)
    assert found.step_s == pytest.approx(step_ns(document) / 1e9, rel=1e-3)
    assert found.memory_bytes == fullest_bytes(document) + reserve


def test_many_microbatches_take_what_fewer_planned_ones_say(monkeypatch):
    monkeypatch.setattr(predicting, "_PLANNED_LAYER_PASSES", 0)  # of large models they are many
    reserve = round(NODE.number("device_reserve_bytes"))
    node = small_node(round(0.6 * fullest_bytes(resident("alone"))) + reserve)
    job = job_of(LAYOUTS["alone"], num_microbatches=20)
    found = predict(job, CLUSTER, node)
    whole = offloaded(document_of(job, CLUSTER), job, CLUSTER, node)
    assert found.step_s == pytest.approx(step_ns(whole) / 1e9, rel=0.03)
    assert found.step_s != step_ns(whole) / 1e9, "planned whole"


@pytest.mark.parametrize("name", ["alone", "tp and dp", "fsdp"])
def test_a_stage_lowered_for_offload_does_the_same_work_in_more_ops(name):
    """Layers have ops of their own, state is updated in parts, squares are summed by group: the
    work and the bytes of state are those of the layout without offload; but for FSDP's shards in
    the model's dtype, since a master on the host is not gathered from."""
    job = job_of(LAYOUTS[name])
    plain = job.model_copy(update={"layout": job.layout.model_copy(update={"offload": False})})
    for number, schedule in enumerate(document_of(plain, CLUSTER).schedules.values()):
        other = list(resident(name).schedules.values())[number]
        for role in ("optimizer_state",) if name == "fsdp" else ("parameter", "optimizer_state"):
            assert sum(t.size_bytes for t in schedule.tensors if t.role == role) == sum(
                t.size_bytes for t in other.tensors if t.role == role
            )
        for unit in ("matmul", "adamw", "gradient_squares"):
            assert _flops(schedule, unit) == _flops(other, unit)


def _flops(schedule, unit: str) -> int:  # type: ignore[no-untyped-def]
    return sum(
        work.flops
        for op in schedule.ops
        if isinstance(op, Compute)
        for work in schedule.calls[op.call].cost
        if work.unit == unit
    )
