"""Peers compute the same model: their losses and updates are ours, from the same weights."""

import pytest
import torch

from benchmarks.gpu.peers.measure import PeerDoesNotFit, PeerWork, measure_peer
from benchmarks.gpu.peers.trainers import trainer
from tests.helpers.hf_weights import unpack_hf_state
from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import random_tokens
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.execute import execute
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import State, initial_state
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import Caps

KINDS = ["plain", "compiled", "fsdp_offload"]
CPU = torch.device("cpu")
RATE = 1e-3
SPEC = small("tiny")
RECIPE = Recipe(stochastic_rounding=False)


def by_hf_names(state: State) -> dict[str, torch.Tensor]:
    flats = {"embedding": state["param.embedding"], "head": state["param.head"]}
    layers = {f"layer.{i}": state[f"param.{i}"] for i in range(SPEC.num_layers)}
    return unpack_hf_state(SPEC, flats | layers)


@pytest.fixture(scope="module")
def ours():
    """Losses of three steps, the weights before and after, the tokens of each chunk."""
    schedule = planned(tiny_chain("packed", recipe=RECIPE), MACHINE, Caps(), "resident")
    tokens = random_tokens(schedule, SPEC.vocab_size)
    per_step = schedule.workload.chunks_per_round * schedule.workload.rounds_per_step
    loop = Training(lambda step, index: tokens[(step - 1) * per_step + index], RATE, seed=3)
    start = initial_state(SPEC, seed=1)
    before = {name: value.clone() for name, value in by_hf_names(start).items()}
    run = execute(schedule, start, loop.host_work(schedule), RunOptions(num_passes=3))
    return loop.losses, before, by_hf_names(run.state), tokens.view(-1, per_step, 2, 2, 16)


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own use of old functions
@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_trains_as_we_do(ours, kind):
    """float32, sums in another order: losses to 1e-5, weights to a tenth of a step's size."""
    losses, before, after, tokens = ours
    peer = trainer(kind, SPEC, RECIPE, CPU, before, RATE)
    try:
        for step, expected in enumerate(losses):
            chunks = tokens[step]
            found = [float(peer.micro_batch(chunk, 1 / len(chunks))) for chunk in chunks]
            peer.update()
            assert sum(found) / len(found) == pytest.approx(expected, rel=1e-5)
        named = dict(peer.model.named_parameters())
        for name, expected in after.items():
            value = named[name].full_tensor() if kind == "fsdp_offload" else named[name]
            moved = (expected - before[name]).abs().max()
            assert moved > RATE / 2
            close = ((value.detach() - expected).abs() < RATE / 10).float().mean()
            assert close > 0.99, f"'{name}' differs"
    finally:
        peer.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_without_weights_is_timed_on_random_ones(kind):
    times = measure_peer(PeerWork(kind, SPEC, 16, 32, num_micro_batches=2), CPU)
    assert times.micro_batch_s > 0 and times.update_s > 0
    assert times.loss == pytest.approx(5.6, abs=0.2)  # ln 256, and random weights
    assert times.device_used_bytes is None


def test_a_peer_that_does_not_fit_is_a_sentence(monkeypatch):
    from benchmarks.gpu.peers import measure

    def too_much(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB.\nmore")

    monkeypatch.setattr(measure, "_measure", too_much)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80 * 2**30))
    with pytest.raises(PeerDoesNotFit, match=r"does not fit the device's 80.0 GiB: CUDA out of"):
        measure_peer(PeerWork("plain", SPEC, 16, 32), CPU)


def test_only_llamas_have_peers():
    with pytest.raises(ValueError, match="is no Llama"):
        trainer("plain", small("tiny-qwen3"), RECIPE, CPU)
