"""Parameters and optimizer state: fresh ones, into the carried slots, and back."""

import struct

import pytest
import torch

from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.run.training import step_state
from twinstream.executor.state.random_weights import RandomWeights
from twinstream.executor.state.training_state import (
    State,
    fill_carried,
    initial_state,
    read_carried,
)
from twinstream.models.layout import block_layout
from twinstream.models.recipe import Recipe
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.errors import TwinstreamError

SPEC = small("tiny")


def arenas_of(schedule: RankSchedule) -> Arenas:
    memory = {
        tier: torch.zeros(size, dtype=torch.uint8) for tier, size in Arenas.sizes(schedule).items()
    }
    return Arenas(schedule, memory)


def numbered_state() -> State:
    """Bytes that tell tensors and places apart."""
    return {
        name: (torch.arange(flat.numel()) * 7 + number).to(torch.uint8)
        for number, (name, flat) in enumerate(initial_state(SPEC, 0).items())
    }


@pytest.fixture(scope="module", params=["resident", "streaming"])
def schedule(request) -> RankSchedule:
    chain = tiny_chain("packed")
    caps = Caps(device_bytes=enough_device_bytes(chain, request.param))
    return planned(chain, MACHINE, caps, request.param)


# --- fresh state


def test_fresh_norms_are_one_weights_are_small_and_moments_are_zero():
    state = initial_state(SPEC, seed=4)
    flat = state["param.0"]
    layout = block_layout(SPEC)
    for tensor in layout.tensors:
        raw = flat[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        values = raw.view(torch.float32)
        if tensor.name.endswith("norm"):
            assert (values == 1).all()
        else:
            assert values.std().item() == pytest.approx(0.02, rel=0.1)
            assert abs(values.mean().item()) < 0.02 * 5 / values.numel() ** 0.5
    for group in ("embedding", "0", "1", "head"):
        assert not state[f"opt.{group}"].any()
        assert state[f"opt.{group}"].numel() == 2 * state[f"param.{group}"].numel()


def test_the_same_seed_gives_the_same_state_and_another_seed_another():
    first, again, other = (initial_state(SPEC, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["param.0"], other["param.0"])
    assert not torch.equal(first["param.0"], first["param.1"])


def test_any_stretch_of_the_weights_is_as_in_the_whole():
    spec = small("tiny-qwen3", qkv_bias=True)
    layout = block_layout(spec)
    weights = RandomWeights(spec, seed=3, num_elements=1000)  # shorter than any matrix
    whole = torch.full((layout.size_bytes,), 0xFF, dtype=torch.uint8)
    weights.write("0", 0, whole)
    for start in range(0, layout.size_bytes, 4 * 1111):
        part = torch.empty(min(4 * 1111, layout.size_bytes - start), dtype=torch.uint8)
        weights.write("0", start, part)
        assert torch.equal(part, whole[start : start + part.numel()])
    for inner in layout.tensors:
        values = whole[inner.offset_bytes : inner.offset_bytes + inner.size_bytes]
        values = values.view(torch.float32)
        if inner.name.endswith("norm"):
            assert (values == 1).all()
        elif inner.name.endswith("bias"):
            assert (values == 0).all()
        else:
            assert 0.015 < values.std() < 0.025


# --- carried slots


def test_what_is_filled_in_reads_back_and_lies_in_every_carried_slot(schedule):
    arenas, state = arenas_of(schedule), numbered_state()
    fill_carried(schedule, arenas, state)
    blank = {name: torch.zeros_like(flat) for name, flat in state.items()}
    back = read_carried(schedule, arenas, blank)
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert not any(flat.any() for flat in blank.values())
    tensors = {t.tensor_id: t for t in schedule.tensors}
    for item in schedule.carried:
        tensor = tensors[item.tensor]
        flat = state[tensor.parent or item.tensor]
        part = flat[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        assert torch.equal(arenas.view(item.tensor, item.slot), part)


@pytest.mark.parametrize(
    ("name", "flat", "message"),
    [
        ("param.1", None, r"carries 'param.1' with \d+ bytes, but the state has nothing for it"),
        ("opt.0", torch.zeros(12, dtype=torch.uint8), r"but the state has 12 bytes for it"),
    ],
)
def test_a_state_that_lacks_a_tensor_or_has_another_size_is_refused(schedule, name, flat, message):
    state = initial_state(SPEC, 0)
    if flat is None:
        del state[name]
    else:
        state[name] = flat
    with pytest.raises(TwinstreamError, match=message):
        fill_carried(schedule, arenas_of(schedule), state)


# --- what the optimizer tasks read


def test_the_step_state_holds_learning_rate_corrections_step_and_seed():
    recipe = Recipe(beta1=0.5, beta2=0.75, weight_decay=0.125)
    packed = step_state(recipe, step=3, learning_rate=0.25, seed=-9, num_targets=8, max_norm=1.5)
    assert len(packed) == 64
    assert struct.unpack_from("<ffff", packed) == (0.25, 1 - 0.5**3, 1 - 0.75**3, 0.125)
    assert struct.unpack_from("<qq", packed, 16) == (3, -9)
    assert struct.unpack_from("<ff", packed, 32) == (0.125, 1.5)
    assert packed[40:] == bytes(24)
