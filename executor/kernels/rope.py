"""Rotary position embedding, Hugging Face's rotate_half convention, angles in float32.

Legend: R rows (tokens), H heads, D head_dim.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rope:
    """The angles of a chunk: token t of it has position chunk_start + t % seq_len."""

    theta: float
    head_dim: int
    seq_len: int
    chunk_start: int

    def angles(self, rows: slice, device: torch.device) -> torch.Tensor:
        """Angles of a range of the chunk's tokens, [R, 1, D / 2]."""
        positions = torch.arange(rows.start, rows.stop, device=device)
        positions = positions.remainder_(self.seq_len).add_(self.chunk_start).float()
        exponents = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float64)
        frequencies = self.theta ** -(exponents / self.head_dim)
        return positions[:, None, None] * frequencies.float()


def rotate(x_RHD: torch.Tensor, angles: torch.Tensor) -> None:
    """Rotate float32 heads in place; the negative angles rotate back, which is the backward."""
    half = x_RHD.shape[-1] // 2
    first, second = x_RHD[..., :half], x_RHD[..., half:]
    cos, sin = angles.cos(), angles.sin()
    rotated = (first * cos).sub_(second * sin)
    second.mul_(cos).add_(first * sin)
    first.copy_(rotated)
