"""The steps of one batch: weights gathered, then every layer for every token.

Letters name indices as in `extents`: the queries are BLETHK, the weights that make them LEDHK.
"""

from collections.abc import Iterator

from twinstream.cost.work.decoder import Decoder
from twinstream.cost.work.extents import AXIS_OF, Extents
from twinstream.cost.work.mesh import Axis
from twinstream.cost.work.steps import PassWork, Step

_PARTED = frozenset({Axis.DATA, Axis.SEQUENCE})  # along which each keeps a part of the weights


def batch_work(decoder: Decoder, extents: Extents) -> tuple[PassWork, PassWork]:
    """Forward and backward of one batch, on all devices together."""
    forward, backward = PassWork(), PassWork()
    for step in _steps(decoder, extents):
        forward, backward = forward + step.forward(), backward + step.backward()
    return forward, backward


def _steps(decoder: Decoder, extents: Extents) -> Iterator[Step]:
    yield from _gathered_weights(decoder, extents)
    yield from _attention(decoder, extents)
    if decoder.attention_first:
        yield from _completed(extents, "BLETDH", "H")
    yield from _feed_forward(decoder, extents)
    # Two sums into one output are one sum over both: heads and inner width, end to end.
    last = ("BLETDF", "F") if decoder.attention_first else ("BLETDJ", "J")
    yield from _completed(extents, *last, crossings=_crossings(decoder, extents))


def _gathered_weights(decoder: Decoder, extents: Extents) -> Iterator[Step]:
    """Weights are kept in parts; each device gathers those it works with, once a batch."""
    one_for_all_heads = _PARTED | {Axis.TENSOR_INTERNAL}
    for _ in ("query", "output"):
        yield extents.spread("LEDHK", _PARTED)
    for _ in ("key", "value"):
        if decoder.multi_query:
            yield extents.spread("LEDK", one_for_all_heads)
        else:
            yield extents.spread("LEDHK", _PARTED)
    for _ in range(3 if decoder.gated else 2):
        yield extents.spread("LEDF", _PARTED)


def _attention(decoder: Decoder, extents: Extents) -> Iterator[Step]:
    """Up to the products with the output projection, which are not yet summed over the heads.

    Every query meets every key, later ones too: no half of the scores is left out.
    """
    yield from _contracted(extents, "BLETDHK", "D")  # queries
    heads = "" if decoder.multi_query else "H"
    for _ in ("key", "value"):
        projected = f"BLETDK{heads}"
        yield extents.products_of(projected)
        yield extents.sum_of(projected, "D")
        # Tokens go where the summed width was; from there to all that attend to them.
        yield extents.spread(f"BLRSK{heads}", frozenset({Axis.EXPERT, Axis.SEQUENCE}))
    scores = "BLETHRS"
    yield from _contracted(extents, f"{scores}K", "K")
    yield extents.sum_of(scores, "R")  # of the softmax
    yield from _completed(extents, "BLETHS", "S")
    yield extents.products_of(scores)
    yield extents.products_of(f"{scores}K")  # values, weighted
    yield extents.sum_of(f"{scores}K", "R")
    yield from _completed(extents, "BLETHSK", "S")
    yield from _contracted(extents, "BLETDHK", "K")


def _feed_forward(decoder: Decoder, extents: Extents) -> Iterator[Step]:
    """Up to the products with the second matrix, not yet summed over the inner width."""
    for _ in range(2 if decoder.gated else 1):
        yield from _contracted(extents, "BLETDF", "D")
    if decoder.gated:
        yield extents.products_of("BLETF")
    yield extents.products_of("BLETDF")


def _contracted(extents: Extents, indices: str, summed: str) -> Iterator[Step]:
    """A matrix product: multiplied over all indices, one of them summed out, complete again."""
    yield extents.products_of(indices)
    yield from _completed(extents, indices, summed)


def _completed(
    extents: Extents,
    indices: str,
    summed: str,
    crossings: tuple[tuple[Axis, float], ...] = (),
) -> Iterator[Step]:
    """An index summed out, and the sums given to all along its axis: an all-reduce."""
    yield extents.sum_of(indices, summed)
    over = frozenset({AXIS_OF[summed]} if summed in AXIS_OF else set())
    yield extents.spread(indices.replace(summed, ""), over, crossings)


def _crossings(decoder: Decoder, extents: Extents) -> tuple[tuple[Axis, float], ...]:
    """Share of the layers' outputs that go on to the next stage, or there to another expert.

    Into the first stage and out of the last nothing is counted. Each layer routes anew, and a
    token is as likely to go to one group of experts as to any other.
    """
    stages, groups = extents.mesh.pipe, extents.mesh.exp
    to_next = (stages - 1) / decoder.num_layers
    elsewhere = (1 - to_next) * (1 - 1 / groups)
    return ((Axis.PIPE, to_next), (Axis.EXPERT, elsewhere))
