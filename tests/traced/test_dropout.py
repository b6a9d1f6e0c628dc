"""Random numbers of a step of several rounds: each draws its own, whatever plan carries it out."""

import zlib
from functools import partial

import pytest
import torch

from tests.traced.executed import RECIPE, state_bytes
from tests.traced.families import tiny_config
from twinstream.executor.modules.blocks import blocks_of
from twinstream.executor.modules.building import build_module
from twinstream.executor.modules.calling import evaluating
from twinstream.executor.modules.tracing import trace
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.execute import execute
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import initial_state
from twinstream.models.traced import ModuleSource, TracedModel
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.document import RankSchedule
from twinstream.simulator.replay import steady_state

SEQ_LEN, CHUNKS = 16, 6  # more rounds than are planned one by one
"""Chunks of a step, of one sequence each."""


@pytest.fixture(scope="module")
def model() -> TracedModel:
    config = tiny_config("gpt2", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    return trace(ModuleSource(config=config), dtype="float32", seq_len=SEQ_LEN)


def planned(model: TracedModel, policy: str, chunks: int, cap: int | None = None) -> RankSchedule:
    step = TrainingStep(SEQ_LEN, CHUNKS * SEQ_LEN, SEQ_LEN, chunks, recipe=RECIPE)
    request = PlanRequest.of(model, "cpu", step=step, policy=policy, device_mem=cap)
    return Planner(steady_state).plan(request).only


def fed(vocab_size: int, step: int, index: int) -> torch.Tensor:
    """Ids and labels [2, S] of a chunk."""
    generator = torch.Generator().manual_seed(100 * step + index)
    ids = torch.randint(0, vocab_size, (SEQ_LEN + 1,), generator=generator)
    return torch.stack([ids[:-1], ids[1:]]).int()


def test_each_round_draws_its_own_numbers_and_all_plans_the_same(model: TracedModel) -> None:
    feed, found = partial(fed, model.vocab_size), []
    for policy, chunks, share in (
        ("resident", 1, None), ("streaming", 1, None), ("optimal", 1, 0.35), ("optimal", 2, 0.5),
    ):  # fmt: skip
        cap = None
        if share is not None:
            beside = planned(model, "resident", chunks).caps.library_bytes or 0
            cap = round(share * state_bytes(model)) + beside
        schedule = planned(model, policy, chunks, cap)
        blocks = [name for name in schedule.calls if name.startswith("block.")]
        assert len(blocks) == chunks * model.num_layers  # rounds share them: they can repeat
        training = Training(feed, 1e-3, 0)
        state = initial_state(model, 0, RECIPE)
        options = RunOptions(num_passes=2, poison=True)
        final = execute(schedule, state, training.host_work(schedule), options).state
        found.append((training.losses, {name: bytes(flat.numpy()) for name, flat in final.items()}))
    assert all(one == found[0] for one in found[1:3])
    assert found[3][0] == pytest.approx(found[0][0], rel=1e-6)  # other sums of gradients
    assert found[0][0][0] == pytest.approx(own_loss(model), rel=1e-6)


def own_loss(model: TracedModel) -> float:
    """Of the first step: the mean of the module's own, seeded for each chunk and block."""
    module = build_module(model.source, torch.float32, model.attention, with_parameters=True)
    state, total = initial_state(model, 0, RECIPE), 0.0
    parameters = dict(module.named_parameters())
    for group in model.parameter_groups:
        for inner in model.group_layout(group).tensors:
            flat = state[f"param.{group}"][inner.offset_bytes :][: inner.size_bytes]
            parameters[inner.name].data.copy_(flat.view(torch.float32).view(inner.shape))
    for chunk in range(CHUNKS):
        hooks = [
            part.register_forward_pre_hook(lambda *_, _place=place * CHUNKS + chunk: seeded(_place))
            for place, part in enumerate([module, *blocks_of(module)[1]])
        ]
        ids, labels = fed(model.vocab_size, 1, chunk).long()
        with torch.no_grad(), evaluating(module, evaluates=False):
            logits = module(input_ids=ids[None]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, labels).item() / CHUNKS
        for hook in hooks:
            hook.remove()
    return total


def seeded(place: int) -> None:
    """As the chunk of a step that is at this place, counted over blocks and chunks, with seed 0."""
    torch.manual_seed(zlib.crc32(f"0 1 {place}".encode()))
