"""A recommendation model in plain torch: embedding tables with pooled lookups, two networks, dots.

    python examples/dlrm.py clicks
    twinstream train examples/dlrm.py:build clicks -o run --loss examples/dlrm.py:click_loss \\
        --tokens-per-step 256 --chunk-tokens 64 --steps 50 --device-mem 12MiB

Each table is a block: what trains it moves between memories as a layer's weights do. A user has
between none and `MOST` lookups in a table, which `lookups.npy` has one behind the other, and
`lookups.offsets.npy` says where each list begins; a list is filled up with the row that no table
adds (`padding_idx`).

Source of the model: Naumov et al., Deep learning recommendation model, arXiv:1906.00091.
"""

import sys
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

NUMBERS, TABLES, ROWS, MOST, WIDTH = 13, 8, 4000, 6, 16
NO_ROW = ROWS  # what lists of lookups are filled up with


class Interaction(nn.Module):
    """The dot products of all pairs of vectors, beside the first one."""

    def forward(self, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        vectors = torch.stack([first, *others], dim=1)
        dots = vectors @ vectors.transpose(1, 2)
        above = torch.triu_indices(vectors.shape[1], vectors.shape[1], offset=1)
        return torch.cat([first, dots[:, above[0], above[1]]], dim=1)


def network(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU behind each."""
    layers = ((nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths))
    return nn.Sequential(*chain.from_iterable(layers))


class Dlrm(nn.Module):
    """Clicks of users, by thirteen numbers and lookups in tables."""

    def __init__(self) -> None:
        super().__init__()
        self.sample_inputs = {
            "dense": torch.zeros(NUMBERS),
            "lookups": torch.full((TABLES, MOST), NO_ROW),
        }
        tables = [
            nn.EmbeddingBag(ROWS + 1, WIDTH, mode="sum", padding_idx=NO_ROW) for _ in range(TABLES)
        ]
        width = WIDTH + (TABLES + 1) * TABLES // 2
        self.blocks = nn.ModuleList(
            [network(NUMBERS, 64, WIDTH), *tables, Interaction(), network(width, 64, 32)]
        )
        self.click = nn.Linear(32, 1)

    def forward(self, dense: torch.Tensor, lookups: torch.Tensor) -> torch.Tensor:
        bottom, *tables, interaction, top = self.blocks
        first = bottom(dense)
        pooled = [table(lookups[:, number]) for number, table in enumerate(tables)]
        return self.click(top(interaction(first, *pooled)))


def build() -> nn.Module:
    """The model, for `twinstream train examples/dlrm.py:build`."""
    return Dlrm()


def click_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of each row with a logit whether it was clicked, 1 or 0."""
    return F.binary_cross_entropy_with_logits(logits[:, 0], labels.float(), reduction="none")


def write_samples(folder: Path, count: int = 2048, seed: int = 0) -> None:
    """Random users, whose clicks follow from a number and from rows of the first table."""
    draw = np.random.default_rng(seed)
    dense = draw.standard_normal((count, NUMBERS)).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(draw.integers(0, MOST + 1, count * TABLES))])
    lookups = draw.integers(0, ROWS, offsets[-1])
    first_lists = zip(offsets[:-1:TABLES], offsets[1::TABLES], strict=True)
    liked = [np.count_nonzero(lookups[start:end] % 2) for start, end in first_lists]
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "dense.npy", dense)
    np.save(folder / "lookups.npy", lookups)
    np.save(folder / "lookups.offsets.npy", offsets)
    np.save(folder / "labels.npy", (dense[:, 0] + np.array(liked) > 1.5).astype(np.int64))


if __name__ == "__main__":
    write_samples(Path(sys.argv[1]))
