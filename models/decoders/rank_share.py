"""What a rank of tensor and pipeline parallel ranks has of a decoder, as a decoder of its own."""

from itertools import pairwise

from twinstream.models.decoders.spec import ModelSpec
from twinstream.schedule.errors import TwinstreamError


class RankShareError(TwinstreamError):
    """A decoder that cannot be split so."""


def rank_share(
    spec: ModelSpec, tp: int, layers: range, *, embeds: bool = True, has_head: bool = True
) -> ModelSpec:
    """The decoder of a rank: so many layers, with its share of heads, FFN width and vocabulary.

    Key and value heads of which there are fewer than ranks are held by each. A stage that does not
    embed has its head's matrix alone, and one without a head a vocabulary of one token: then the
    embedding is beside it (`table_bytes`), of which a pass reads only rows.

    Raises:
        RankShareError: heads or widths do not divide by tp.

    >>> from twinstream.models.presets import load_preset
    >>> rank_share(load_preset("8b"), 8, range(16, 32), embeds=False).num_parameters
    502009856
    """
    experts = spec.experts
    widths = {"num_heads": spec.num_heads, "d_ff": spec.d_ff}
    if experts is not None:
        widths |= {"experts.d_ff": experts.d_ff, "experts.shared_d_ff": experts.shared_d_ff}
    for name, width in widths.items():
        if width % tp:
            raise RankShareError(
                f"{spec.name} has {name} {width:,}, which {tp} ranks of tp cannot share: give a "
                "--tp that divides it"
            )
    if max(spec.num_kv_heads, tp) % min(spec.num_kv_heads, tp):
        raise RankShareError(
            f"{spec.name} has {spec.num_kv_heads} heads of keys, and tp is {tp}: one needs to be a "
            "multiple of the other"
        )
    changes: dict[str, object] = {
        "num_layers": len(layers), "num_heads": spec.num_heads // tp, "d_ff": spec.d_ff // tp,
        "num_kv_heads": max(1, spec.num_kv_heads // tp),
        "vocab_size": -(-spec.vocab_size // tp) if has_head else 1,
        "tied_embeddings": spec.tied_embeddings or not (embeds and has_head),
    }  # fmt: skip
    if experts is not None:
        dense = tuple(one - layers.start for one in experts.dense_layers if one in layers)
        of_experts = {
            "d_ff": experts.d_ff // tp, "shared_d_ff": experts.shared_d_ff // tp,
            "dense_layers": dense,
        }  # fmt: skip
        changes["experts"] = experts.model_copy(update=of_experts)
    return spec.model_copy(update=changes)


def even_stages(spec: ModelSpec, pp: int) -> tuple[range, ...]:
    """The layers of each stage, so that all stages hold about as many bytes with the embedding in
    the first and the head in the last.

    Raises:
        RankShareError: there are fewer layers than stages.

    >>> from twinstream.models.presets import load_preset
    >>> [len(layers) for layers in even_stages(load_preset("llama3-70b"), 6)]
    [12, 14, 14, 14, 14, 12]
    """
    if not 1 <= pp <= spec.num_layers:
        raise RankShareError(f"{spec.name} has {spec.num_layers} layers, fewer than --pp {pp}")
    table = table_bytes(spec, 1)
    each = (spec.num_parameters * spec.itemsize - 2 * table) / spec.num_layers
    held = [0.0] * pp
    held[0] += table
    held[-1] += table
    counts = [1] * pp
    for _ in range(spec.num_layers - pp):
        loads = [beside + count * each for beside, count in zip(held, counts, strict=True)]
        counts[loads.index(min(loads))] += 1
    ends = [sum(counts[:stage]) for stage in range(pp + 1)]
    return tuple(range(*pair) for pair in pairwise(ends))


def table_bytes(spec: ModelSpec, tp: int) -> int:
    """Bytes of a rank's rows of the embedding."""
    return -(-spec.vocab_size // tp) * spec.d_model * spec.itemsize
