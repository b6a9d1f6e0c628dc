"""Rotary position embedding, Hugging Face's rotate_half convention, of exact angles.

Angles are computed in float64 and reduced to half a turn before they are rounded to float32: cosine
and sine are within 3e-7 of exact ones at any position. (Hugging Face rounds frequencies and angles
to float32, which is 0.06 off at position 1,000,000.)

Legend: R rows (tokens), H heads, D head_dim.
"""

from dataclasses import dataclass
from math import pi

import torch

from twinstream.models.options import RopeScaling


@dataclass(frozen=True)
class Rope:
    """The angles of a chunk: token t of it has position chunk_start + t % seq_len.

    Where sequences of any lengths are packed, its position is that of `positions`.
    """

    theta: float
    head_dim: int
    seq_len: int
    chunk_start: int
    positions: torch.Tensor | None = None  # [T], int32
    scaling: RopeScaling | None = None

    def angles(self, rows: slice, device: torch.device) -> torch.Tensor:
        """Angles of a range of the chunk's tokens, at most half a turn, [R, 1, D / 2]."""
        if self.positions is not None:
            positions = self.positions[rows]
        else:
            positions = torch.arange(rows.start, rows.stop, device=device)
            positions = positions.remainder_(self.seq_len).add_(self.chunk_start)
        frequencies = rope_frequencies(self.theta, self.head_dim, self.scaling, device)
        turns = positions.double()[:, None, None] * (frequencies / (2.0 * pi))
        return turns.sub_(turns.round()).mul_(2.0 * pi).float()


def rope_frequencies(
    theta: float, head_dim: int, scaling: RopeScaling | None, device: torch.device
) -> torch.Tensor:
    """Radians per position of each pair of elements, [D / 2], float64."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64)
    frequencies = theta ** -(exponents / head_dim)
    if scaling is None:
        return frequencies
    turns = frequencies * (scaling.original_max_position_embeddings / (2.0 * pi))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp_(0.0, 1.0)
    return frequencies * ((1.0 - kept) / scaling.factor + kept)


def rotate(x_RHD: torch.Tensor, angles: torch.Tensor) -> None:
    """Rotate float32 heads in place; the negative angles rotate back, which is the backward."""
    half = x_RHD.shape[-1] // 2
    first, second = x_RHD[..., :half], x_RHD[..., half:]
    cos, sin = angles.cos(), angles.sin()
    rotated = (first * cos).sub_(second * sin)
    second.mul_(cos).add_(first * sin)
    first.copy_(rotated)
