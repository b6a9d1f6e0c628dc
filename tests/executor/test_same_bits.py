"""Same recipe, same bits: caps, policy, offload and recompute change no loss and no weight."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from tests.helpers.machines_for_plans import fast_link_machine, slow_link_machine
from tests.helpers.plans import (
    MACHINE,
    copied_tensors,
    enough_device_bytes,
    enough_host_bytes,
    planned,
    recompute_levels,
)
from tests.helpers.runs import Bits, assert_same_bits, bits_of
from tests.helpers.tiny_chains import WORKLOADS as WORKLOADS_BY_NAME
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.models.lowering.declarations import Shapes, optimizer_parts
from twinstream.models.lowering.lower import lower
from twinstream.models.recipe import Recipe
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE

MODELS = [("tiny", "float32"), ("tiny", "bfloat16"), ("tiny-qwen3", "float32")]
WORKLOADS = ["packed", "sliced"]  # two rounds each
RECIPES = {
    "float32": Recipe(),
    "bfloat16": Recipe(stochastic_rounding=True),
    "gradients as m": Recipe(beta1=0.0, weight_decay=0.0),
}


def chain_of(workload: str, preset: str, dtype: str, recipe: str | None = None) -> Chain:
    return tiny_chain(workload, preset, RECIPES[recipe or dtype], dtype=dtype)


@cache
def resident_bits(workload: str, preset: str, dtype: str) -> Bits:
    chain = chain_of(workload, preset, dtype)
    return bits_of(planned(chain, MACHINE, Caps(), "resident"))


def recomputing_resident_plans(chain: Chain) -> Iterator[RankSchedule]:
    """Everything on the device, recomputed from ATTENTION, then from INPUT."""
    schedule = planned(chain, MACHINE, Caps(), "resident")
    for level in ("ATTENTION", "INPUT"):
        less = Caps(device_bytes=arena_bytes(schedule, DEVICE) - 1)
        schedule = planned(chain, MACHINE, less, "resident")
        assert recompute_levels(schedule) == {level}
        yield schedule


def other_plans(chain: Chain) -> Iterator[RankSchedule]:
    """State at home on the host; activations kept, offloaded, and recomputed from both levels."""
    least = enough_device_bytes(chain, "streaming")
    host = enough_host_bytes(chain, "streaming", least)
    yield planned(chain, MACHINE, Caps(), "streaming")
    yield planned(chain, MACHINE, Caps(device_bytes=least * 3 // 2), "streaming")
    machine = fast_link_machine()
    roomy = planned(chain, machine, Caps(device_bytes=least), "streaming")
    assert any(name.startswith("projections") for name in copied_tensors(roomy, "h2d"))
    yield roomy
    tight = Caps(device_bytes=least, host_bytes=host * 102 // 100)
    mixed = planned(chain, machine, tight, "streaming")
    assert "ATTENTION" in recompute_levels(mixed)
    yield mixed
    lowest = planned(chain, slow_link_machine(), Caps(device_bytes=least), "streaming")
    assert recompute_levels(lowest) == {"INPUT"}
    yield lowest
    yield planned(chain, MACHINE, Caps(device_bytes=least * 5 // 4), "optimal")


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("preset", "dtype"), MODELS)
def test_recompute_at_either_level_changes_no_bit(workload, preset, dtype):
    for schedule in recomputing_resident_plans(chain_of(workload, preset, dtype)):
        assert_same_bits(bits_of(schedule), resident_bits(workload, preset, dtype))


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("preset", "dtype"), MODELS)
def test_no_policy_and_no_cap_changes_a_bit_or_touches_what_poison_fills(workload, preset, dtype):
    for schedule in other_plans(chain_of(workload, preset, dtype)):
        found = bits_of(schedule, poison=True)
        assert_same_bits(found, resident_bits(workload, preset, dtype))


def test_rounds_that_are_repeated_change_no_bit():
    seven_rounds = WORKLOADS_BY_NAME["packed"].model_copy(update={"rounds_per_step": 7})
    chain = lower(small("tiny"), seven_rounds)
    least = enough_device_bytes(tiny_chain("packed"), "streaming")
    schedule = planned(chain, MACHINE, Caps(device_bytes=least * 5 // 4), "optimal")
    assert copied_tensors(schedule, "h2d")
    assert any(op.label.round == 6 for op in schedule.ops if isinstance(op, Compute))
    resident = bits_of(planned(chain, MACHINE, Caps(), "resident"))
    assert_same_bits(bits_of(schedule, poison=True), resident)


def test_one_run_of_three_steps_and_steps_one_by_one_end_in_the_same_state():
    """Passes overlap, and yet nothing of one leaks into the next."""
    chain = chain_of("packed", "tiny", "float32")
    schedule = planned(chain, MACHINE, Caps(), "streaming")
    first = bits_of(schedule, num_steps=1)
    three = resident_bits("packed", "tiny", "float32")
    assert first.losses == three.losses[:1]
    assert not torch.equal(first.state["param.0"], three.state["param.0"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_have_the_same_bits(dtype):
    """With beta1 = 0 the first moment is the gradient of the last step."""
    chain = chain_of("sliced", "tiny-qwen3", dtype, "gradients as m")
    caps = Caps(device_bytes=enough_device_bytes(chain, "streaming"))
    found, expected = (
        gradients(chain, bits_of(planned(chain, MACHINE, of, policy), num_steps=1))
        for of, policy in ((caps, "streaming"), (Caps(), "resident"))
    )
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values)
        assert values.count_nonzero() > 0.1 * values.numel(), name


def gradients(chain: Chain, bits: Bits) -> dict[str, torch.Tensor]:
    """The first moments, by group; each part's lie before its second moments."""
    spec = small(chain.model.name, dtype=chain.model.spec["dtype"])
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[spec.dtype]
    shapes = Shapes(spec, chain.workload)
    found = {}
    for group in shapes.groups:
        flat = bits.state[f"opt.{group}"].view(dtype)
        parts = [
            flat[2 * part.element_offset :][: part.num_elements]
            for part in optimizer_parts(spec, group)
        ]
        found[group] = torch.cat(parts)
    return found


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_order_of_the_optimizers_tasks_changes_no_bit(workload):
    chain = tiny_chain(workload, "tiny", Recipe(optimizer="device_after_backward"))
    least = enough_device_bytes(chain, "streaming")
    schedule = planned(chain, MACHINE, Caps(device_bytes=least * 5 // 4), "optimal")
    assert copied_tensors(schedule, "h2d")
    assert_same_bits(bits_of(schedule), resident_bits(workload, "tiny", "float32"))
