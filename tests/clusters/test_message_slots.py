"""Slots of a pipeline's messages, and what else a stage's schedule has beside its plan."""

import pytest

from twinstream.clusters.conforms import conforms
from twinstream.clusters.pipeline import plan_pipeline
from twinstream.clusters.planned_stage import plan_stage, without_messages
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_model
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.chain import Chain
from twinstream.schedule.cluster.verify import may_deadlock, verify
from twinstream.schedule.document import Caps
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.workload import Workload

SPEC = load_model("tiny")
MICROBATCHES = 12
WORKLOAD = Workload(seq_len=64, chunk_tokens=64, chunks_per_round=1, rounds_per_step=MICROBATCHES)
ORDERS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("ring", 2)]


def stages(recipe: Recipe | None = None, **fields) -> Job:
    return Job.of_step(SPEC, WORKLOAD, recipe or Recipe(), Layout(pp=2, **fields))


def chain_of(one: Job) -> Chain:
    return lower(one.shape, one.workload, one.recipe, one.layout)


@pytest.mark.parametrize(("order", "virtual"), ORDERS)
def test_messages_that_follow_one_another_share_slots(order, virtual):
    document = plan_pipeline(stages(pipeline=order, virtual_stages=virtual), load_machine("cpu"))
    assert verify(document) == [] == conforms(document)
    assert not may_deadlock(document)
    for part in document.schedules.values():
        slots = [slot for slot in part.slots if slot.slot_id.startswith("message.")]
        sent = {
            operand.tensor for op in part.ops if op.kind == "communicate" for operand in op.operands
        }
        if order != "ring":  # breadth first all microbatches are under way at once
            assert len(slots) < len(sent)
        if order == "1f1b":  # two microbatches are under way, and three slots are spare or in use
            assert len(slots) <= 2 * 5 < MICROBATCHES * 2 == len(sent)


def test_shared_slots_take_less_memory():
    machine, taken = load_machine("cpu"), []
    for pooled in (True, False):
        chain = chain_of(stages())
        merged = without_messages(chain, overlaps=True, pooled=pooled)
        made = plan_stage(merged, machine, Caps())
        assert made is not None
        taken.append(arena_bytes(made.schedule, DEVICE))
    hidden_bytes = 64 * SPEC.d_model * SPEC.itemsize
    assert taken[1] - taken[0] > 10 * hidden_bytes


def test_caps_count_what_an_attention_library_allocates():
    kernels = KernelChoice(vector="triton", attention="sdpa_flash")
    wanted = stages(Recipe(kernels=kernels)).shape.model_copy(update={"dtype": "bfloat16"})
    of_gpu = Job.of_step(wanted, WORKLOAD, Recipe(kernels=kernels), Layout(pp=2))
    document = plan_pipeline(of_gpu, load_machine("h100"))
    assert conforms(document) == []
    chain = chain_of(of_gpu)
    assert document.schedules["stage 0"].caps.library_bytes == chain.library_bytes > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"name": "tiny"}}, "model and layout are none"),
        ({"layout": {"dp": 2, "shard": 7}}, "the document's layout cannot be: shard 7"),
        ({"layout": {"dp": 2}}, "the mesh is not that of the document's layout"),
    ],
)
def test_a_document_that_runs_here_and_says_it_is_another_is_told(changes, said):
    document = plan_pipeline(stages(), load_machine("cpu"))
    (found,) = conforms(document.model_copy(update=changes))
    assert said in found.message
