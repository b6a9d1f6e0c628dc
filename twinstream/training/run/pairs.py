"""Pairs of answers in chunks: which they are, and how far training has moved them."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from twinstream.data.packing import Chunk
from twinstream.log.metrics import PairMetrics

if TYPE_CHECKING:
    from twinstream.executor.run.evaluation import PassLoss

KEY_BYTES = 16
Floats = NDArray[np.float32]


def keys_of(chunk: Chunk) -> list[bytes]:
    """Of each pair of a chunk a hash of its ids and labels, wherever it is packed."""
    found = []
    places = list(chunk.documents)
    for pair in zip(places[::2], places[1::2], strict=True):
        digest = blake2b(digest_size=KEY_BYTES)
        for place in pair:
            digest.update((place.stop - place.start).to_bytes(8, "little"))
            digest.update(chunk.ids[place].tobytes() + chunk.labels[place].tobytes())
        found.append(digest.digest())
    return found


def log_probs_of(shares: "Sequence[Sequence[PassLoss]]") -> Iterator[Floats]:
    """Of what replicas have of passes, those of each chunk, in the order of the passes' chunks."""
    for replicas in zip(*shares, strict=True):
        for one in replicas:
            yield from one.log_probs


def pair_metrics(
    chunks: Sequence[Chunk], log_probs: Sequence[Floats], reference: Sequence[Floats], beta: float
) -> PairMetrics:
    """Means over the pairs of some chunks.

    Args:
        log_probs: of each chunk [2 P], of the first two of which each pair it has.
        reference: of each chunk [2, pairs].
    """
    pairs = [chunk.num_pairs for chunk in chunks]
    now = np.concatenate(
        [found[: 2 * n].reshape(n, 2).T for found, n in zip(log_probs, pairs, strict=True)], axis=1
    ).astype(np.float64)
    rewards = beta * (now - np.concatenate(reference, axis=1))
    counts = np.array([count for chunk in chunks for count in _learned(chunk)]).reshape(-1, 2).T
    losses = -now.sum(1) / np.maximum(1, counts.sum(1))
    margins = rewards[0] - rewards[1]
    return PairMetrics(
        pairs=sum(pairs),
        accuracy=_mean(margins > 0), margin=_mean(margins),
        chosen_reward=_mean(rewards[0]), rejected_reward=_mean(rewards[1]),
        chosen_loss=float(losses[0]), rejected_loss=float(losses[1]),
    )  # fmt: skip


def _learned(chunk: Chunk) -> Iterator[int]:
    """Labels of each document."""
    for place in chunk.documents:
        yield int(np.count_nonzero(chunk.labels[place] >= 0))


def _mean(values: NDArray[np.float64] | NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else 0.0
