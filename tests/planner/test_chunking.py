"""How a step is cut into rounds and chunks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstream.models.presets import load_preset
from twinstream.planner.search.chunking import (
    ChunkingError,
    TrainingStep,
    admissible,
    chunkings,
    possible,
)
from twinstream.schedule.workload import Packing, Workload

SPEC = load_preset("8b")


def sizes(**step: int) -> list[int]:
    return [found.chunk_tokens for found in chunkings(SPEC, TrainingStep(**step))]


def first(**step: int) -> Workload:
    return chunkings(SPEC, TrainingStep(**step))[0]


# --- preferred sizes, then ever smaller ones


@pytest.mark.parametrize(
    ("seq_len", "expected"),
    [
        (512, [512 * n for n in range(16, 0, -1)]),  # whole sequences up to 8,192 tokens
        (1024, [1024 * n for n in range(8, 0, -1)]),
        (3000, [6000, 3000, 1500]),  # two whole ones; half of one is still 1,024 or more
        (4096, [8192, 4096, 2048, 1024]),
        (8192, [8192, 4096, 2048, 1024]),
        (16384, [8192, 4096, 2048, 1024]),  # slices only
        (9000, [9000, 4500, 3000, 2250, 1800, 1500, 1125]),  # no slice of about 8,192
        (1_048_576, [8192, 4096, 2048, 1024]),
    ],
)
def test_chunks_of_about_8192_tokens_come_first_and_smaller_ones_follow(seq_len, expected):
    assert sizes(seq_len=seq_len) == expected


def test_packed_chunks_divide_the_step():
    assert sizes(seq_len=1024, tokens_per_step=1024 * 6) == [6144, 3072, 2048, 1024]


def test_without_tokens_per_step_a_step_is_one_round():
    for found in chunkings(SPEC, TrainingStep(seq_len=2048)):
        assert found.rounds_per_step == 1
        assert found.tokens_per_step >= 2048


def test_a_round_has_as_many_chunks_as_make_saved_activations_about_as_large_as_the_parameters():
    # 8B: 218,112,000 parameters of 2 bytes a layer; 94,344 bytes per token: 4,624 tokens
    layer_bytes, token_bytes = 218_112_000 * 2, 94_344
    for chunk_tokens in (512, 1024, 2048, 4096, 8192):
        found = first(seq_len=512, chunk_tokens=chunk_tokens)
        assert found.chunks_per_round == max(1, round(layer_bytes / token_bytes / chunk_tokens))


def test_rounds_are_what_is_left_of_the_step():
    found = first(seq_len=512, tokens_per_step=512 * 24, chunk_tokens=512)
    # 9 chunks would be about right; the largest divisor of 24 that is no more is 8
    assert (found.chunks_per_round, found.rounds_per_step) == (8, 3)


def test_a_round_of_slices_holds_whole_sequences():
    found = first(seq_len=16384, tokens_per_step=3 * 16384, chunk_tokens=4096)
    assert (found.chunks_per_round, found.rounds_per_step) == (4, 3)


# --- what the user fixes


def test_fixed_numbers_are_kept():
    step = TrainingStep(
        seq_len=1024, tokens_per_step=16384, chunk_tokens=2048, chunks_per_round=4
    )  # fmt: skip
    (found,) = chunkings(SPEC, step)
    assert found == Workload(seq_len=1024, chunk_tokens=2048, chunks_per_round=4, rounds_per_step=2)


def test_sizes_that_do_not_suit_the_fixed_chunks_per_round_are_left_out():
    # one chunk a round: slices of a sequence would split it
    assert sizes(seq_len=8192, chunks_per_round=1) == [8192]
    # 8 sequences in rounds of two chunks: chunks of 1, 2 or 4 sequences, not of 8
    found = chunkings(SPEC, TrainingStep(seq_len=512, tokens_per_step=4096, chunks_per_round=2))
    assert [(w.chunk_tokens, w.rounds_per_step) for w in found] == [(2048, 1), (1024, 2), (512, 4)]


@given(
    st.integers(1, 40).map(lambda n: 256 * n),
    st.integers(1, 24),
    st.sampled_from([None, 1, 2, 3, 4, 8]),
)
def test_every_chunking_is_of_the_very_step_that_was_asked_for(seq_len, sequences, chunks):
    step = TrainingStep(
        seq_len=seq_len, tokens_per_step=sequences * seq_len, chunks_per_round=chunks
    )  # fmt: skip
    try:
        found = chunkings(SPEC, step)
    except ChunkingError:
        assert chunks is not None
        return
    for workload in found:
        assert workload.seq_len == seq_len
        assert workload.sequences_per_step == sequences
        assert chunks in (None, workload.chunks_per_round)
    chunk_sizes = [workload.chunk_tokens for workload in found]
    assert chunk_sizes == sorted(set(chunk_sizes), reverse=True)


# --- numbers that contradict each other


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            TrainingStep(seq_len=512, tokens_per_step=1000),
            "1000 tokens .* not whole sequences of 512 tokens; the nearest are 512 and 1024",
        ),
        (
            TrainingStep(seq_len=512, tokens_per_step=100),
            "100 tokens per step are not whole sequences of 512 tokens; the nearest are 512",
        ),
        (
            TrainingStep(seq_len=512, chunk_tokens=768),
            "chunks of 768 tokens neither pack nor slice sequences of 512 tokens",
        ),
        (
            TrainingStep(seq_len=512, tokens_per_step=512 * 5, chunk_tokens=1024),
            "2560 tokens .* not whole chunks of 1024 tokens; the nearest are 2048 and 3072",
        ),
        (
            TrainingStep(seq_len=512, tokens_per_step=2048, chunk_tokens=512, chunks_per_round=3),
            "3 chunks .* a step of 4 chunks of 512 tokens; 2 or 4 would",
        ),
        (
            TrainingStep(seq_len=2048, chunk_tokens=1024, chunks_per_round=3),
            "3 chunks per round do not fit chunks of 1,024 tokens, 2 to a sequence",
        ),
        (
            TrainingStep(seq_len=512, tokens_per_step=512, chunks_per_round=2),
            "2 chunks .* a step of 1 chunk of 512 tokens; 1 would",
        ),
    ],
)
def test_contradictions_are_explained(step, message):
    with pytest.raises(ChunkingError, match=message):
        chunkings(SPEC, step)


# --- sequences of any lengths

PACKING = Packing(most_sequences=5, expected_lengths=(300, 1000, 200))


def test_unequal_lengths_are_packed_whole_and_in_order_over_and_over():
    step = TrainingStep(seq_len=1000, tokens_per_step=1500 * 12, packing=PACKING)
    found = chunkings(SPEC, step)
    assert [workload.chunk_tokens for workload in found] == [6000, 4500, 3000, 1500]
    assert found[0].packing == PACKING.times(4)
    assert {workload.tokens_per_step for workload in found} == {1500 * 12}
    assert {workload.sequences_per_step for workload in found} == {36}
    assert {w.chunk_tokens % 1500 for w in admissible(SPEC, step)} == {0}


def test_a_pack_larger_than_a_chunk_should_be_is_not_sliced():
    step = TrainingStep(seq_len=16384, packing=Packing.of((16384, 4096)))
    assert [workload.chunk_tokens for workload in chunkings(SPEC, step)] == [20480]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_step": 1501}, "1501 tokens per step are not whole sequences of 300, 1000, "
                                    "200 tokens, together 1500; the nearest are 1500 and 3000"),
        ({"chunk_tokens": 1000}, "chunks of 1000 tokens do not pack sequences of 300, 1000, 200"),
        ({"seq_len": 900}, "do not go with a seq_len of 900: it is the longest that there may be"),
        ({"seq_len": 1501}, "and all of it lies in a chunk"),
    ],
)  # fmt: skip
def test_what_does_not_fit_packing_is_refused(changes, message):
    known = {"seq_len": 1000, "packing": PACKING}
    with pytest.raises(ChunkingError, match=message):
        chunkings(SPEC, TrainingStep(**(known | changes)))


@pytest.mark.parametrize("seq_len", [64, 512, 8192])
def test_possible_are_all_ways_that_fixed_chunks_would_be_cut(seq_len):
    step = TrainingStep(seq_len=seq_len, tokens_per_step=8 * seq_len)
    found = possible(SPEC, step)
    assert len(set(found)) == len(found)
    by_size = [replace(step, chunk_tokens=one.chunk_tokens) for one in chunkings(SPEC, step)]
    assert set(found) == {w for one in (step, *by_size) for w in admissible(SPEC, one)}
    assert set(found) > set(chunkings(SPEC, step))
