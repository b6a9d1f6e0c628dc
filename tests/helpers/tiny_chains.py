"""Task chains of the byte-level presets, small enough to plan and run in a test."""

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.chain import Chain
from twinstream.schedule.workload import Packing, Workload

WORKLOADS = {
    # two chunks of two sequences each, two rounds
    "packed": Workload(seq_len=16, chunk_tokens=32, chunks_per_round=2, rounds_per_step=2),
    # one sequence in three slices, two rounds
    "sliced": Workload(seq_len=48, chunk_tokens=16, chunks_per_round=3, rounds_per_step=2),
    # two sequences in two slices each, one round
    "sliced in pairs": Workload(seq_len=32, chunk_tokens=16, chunks_per_round=4, rounds_per_step=1),
    # two chunks of four sequences of unequal lengths, two rounds
    "unequal": Workload(
        seq_len=16,
        chunk_tokens=29,
        chunks_per_round=2,
        rounds_per_step=2,
        packing=Packing(most_sequences=6, expected_lengths=(5, 1, 16, 7)),
    ),
    # the smallest step there is
    "one chunk": Workload(seq_len=16, chunk_tokens=16, chunks_per_round=1, rounds_per_step=1),
}


def small(preset: str, **changes: object) -> ModelSpec:
    """A preset with two layers of narrow matrices; `tiny-qwen3` has QK-norm and tied embeddings."""
    known: dict[str, object] = {"num_layers": 2, "d_model": 32, "head_dim": 8, "d_ff": 48}
    return load_preset(preset).model_copy(update={**known, **changes})


def tiny_chain(
    workload: str, preset: str = "tiny", recipe: Recipe | None = None, **changes: object
) -> Chain:
    return lower(small(preset, **changes), WORKLOADS[workload], recipe)
