"""What the host knows of packed sequences when it enqueues attention: right, or nothing."""

from dataclasses import replace

import pytest
import torch

from tests.executor.test_cuda_logic import on_fake_gpu, schedule_of
from tests.helpers.fake_gpu import FakeGpu
from tests.helpers.runs import training
from twinstream.executor.kernels.attention.eager import EagerAttention
from twinstream.executor.kernels.attention.implementation import Starts
from twinstream.executor.kernels.operand import Pack
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.execute import execute
from twinstream.executor.run.training import sequences_tensor
from twinstream.executor.state.training_state import initial_state
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.attention_shape import room_for_longest, room_for_sequences

LENGTHS = [(5, 1, 16, 7), (13, 16), (1, 1, 1, 16, 9, 1), (10, 10, 9)]  # 29 tokens, 6 at most


def changing(host_work):
    """Other lengths in every chunk of every pass."""

    def feed(op, pass_index):
        if op.source != "sequences":
            return host_work.feed(op, pass_index)
        lengths = LENGTHS[(op.index + 3 * pass_index) % len(LENGTHS)]
        return sequences_tensor(lengths, 6).view(torch.uint8)

    return replace(host_work, feed=feed)


@pytest.fixture
def seen(monkeypatch) -> list[tuple[Pack | None, Pack]]:
    """Of every call of attention what the host told, and what there is."""
    found: list[tuple[Pack | None, Pack]] = []

    def recorded(name):
        right = getattr(EagerAttention, name)

        def call(self, inputs, *rest):
            lengths = inputs.starts.cu_seqlens.diff()
            there = Pack(int(lengths.max()), int((lengths > 0).sum()))
            found.append((inputs.starts.pack(), there))
            return right(self, inputs, *rest)

        monkeypatch.setattr(EagerAttention, name, call)

    recorded("forward")
    recorded("backward")
    return found


@pytest.mark.parametrize("policy", ["resident", "streaming"])
def test_the_host_knows_the_packs_of_every_call(policy, seen):
    schedule = schedule_of(policy, "unequal")
    spec = ModelSpec.model_validate(schedule.model.spec)
    host_work = changing(training(schedule).host_work(schedule))
    execute(schedule, initial_state(spec, seed=1), host_work, RunOptions(num_passes=3))
    told, there = zip(*seen, strict=True)
    assert told == there and len(set(there)) == len(LENGTHS)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_note_follows_its_bytes_in_whatever_order_streams_run(seed, seen):
    """Before any are fed, kernels are warmed with the room that was planned."""
    schedule = schedule_of("streaming", "unequal")
    options = RunOptions(num_passes=4, graphs="off")
    on_fake_gpu(schedule, options, FakeGpu(seed, 0.5), changing)
    begin = next(number for number, (told, _) in enumerate(seen) if told is not None)
    told, there = zip(*seen[begin:], strict=True)
    assert told == there and len(set(there)) == len(LENGTHS)


def test_where_graphs_replay_copies_nothing_is_told(seen):
    schedule = schedule_of("streaming", "unequal")
    on_fake_gpu(schedule, RunOptions(num_passes=4, graphs="on"), FakeGpu(0, 0.5), changing)
    assert {told for told, _ in seen} == {None}


def test_starts_are_narrowed_to_what_there_is_and_never_below():
    lengths = (300, 7, 12)
    cu_seqlens = Starts.cumulative(lengths, 144)
    assert Starts(cu_seqlens, 8192).narrowed(32).cu_seqlens is cu_seqlens
    narrow = Starts(cu_seqlens, 8192, lambda: Pack(300, 3)).narrowed(32)
    assert narrow.longest == 512
    assert narrow.cu_seqlens.tolist() == [0, 300, 307, 319, 319, 319, 319, 319, 319]
    for longest in (1, 255, 256, 257, 4097, 8192):
        assert longest <= room_for_longest(longest, 8192) <= 8192
    for count in (1, 5, 6, 100, 144):
        room = room_for_sequences(count, 144, 32)
        assert count <= room <= 144
        assert room * 32 >= 192, "each sum of dQ stays whole, as with all the room"
