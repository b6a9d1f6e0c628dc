"""The chains whose kernels a probe measures: one layer of each preset, the shapes its runs have."""

from collections.abc import Sequence

from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.chain import Chain
from twinstream.schedule.workload import Workload

# (preset, sequence length, tokens of a chunk); 15b has the layers of 8b.
_SHAPES = (
    ("8b", 8192, 16384),
    ("8b", 8192, 8192),
    ("8b", 1024, 8192),
    ("8b", 65536, 16384),
    ("1b", 8192, 16384),
    ("1b", 1024, 8192),
    ("32b", 8192, 8192),
    ("tiny", 64, 128),
    ("tiny", 256, 64),
)
PRESETS = ("8b", "1b", "32b")
# Of these attention is timed alone: the rest is the work of the others of their preset, by rows.
_ATTENTION_ALONE = (("8b", 65536), ("1b", 1024))
_OF_EXPERTS = (("qwen3-30b-a3b", 4096, 16384), ("qwen3-30b-a3b", 4096, 4096))


def probe_chains(kernels: KernelChoice, presets: tuple[str, ...]) -> tuple[Chain, ...]:
    """One round each, of one chunk or of one sequence in slices; all in bf16."""
    return _chains(kernels, [shape for shape in _SHAPES if shape[0] in presets])


def check_chain(attention: str, head_dim: int, *, is_small: bool) -> Chain:
    """One sequence of 8b, or of the tiny model, with heads of another size."""
    preset, tokens = ("tiny", 64) if is_small else ("8b", 8192)
    changes = {"num_layers": 1, "dtype": "bfloat16", "head_dim": head_dim}
    spec = load_preset(preset).model_copy(update=changes)
    work = Workload(seq_len=tokens, chunk_tokens=tokens, chunks_per_round=1, rounds_per_step=1)
    return lower(spec, work, Recipe(kernels=KernelChoice(attention=attention)))


def whole_chains(kernels: KernelChoice, presets: tuple[str, ...]) -> tuple[Chain, ...]:
    """Those of `probe_chains` whose products and whole tasks are timed too."""
    whole = [one for one in _SHAPES if one[0] in presets and one[:2] not in _ATTENTION_ALONE]
    return _chains(kernels, whole)


def expert_chains(kernels: KernelChoice) -> tuple[Chain, ...]:
    """The same whose experts' products are measured: of 1,024 and of 256 rows an expert."""
    return _chains(kernels, _OF_EXPERTS)


def _chains(kernels: KernelChoice, shapes: Sequence[tuple[str, int, int]]) -> tuple[Chain, ...]:
    chains = []
    for preset, seq_len, chunk_tokens in shapes:
        spec = load_preset(preset).model_copy(update={"num_layers": 1, "dtype": "bfloat16"})
        workload = Workload(
            seq_len=seq_len,
            chunk_tokens=chunk_tokens,
            chunks_per_round=max(1, seq_len // chunk_tokens),
            rounds_per_step=1,
        )
        chains.append(lower(spec, workload, Recipe(kernels=kernels)))
    return tuple(chains)
