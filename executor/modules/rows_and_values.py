"""How values are kept between parts of a module, and the loss of rows of the last ones."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812

from twinstream.executor.modules.blocks import ModuleRefusal, RowLosses, told_of
from twinstream.models.traced_parts import (
    TracedValue,
)

IGNORED = -100
_ROWS = 16
_SPLITS = (8, 5)  # the second takes neighbours apart
_TOLERANCE = 1e-4  # of the largest: a matrix product may round otherwise with other rows


def row_loss(
    logits: torch.Tensor, labels: torch.Tensor, scale: float | torch.Tensor,
    own: RowLosses | None = None,
) -> torch.Tensor:  # fmt: skip
    """Sum of the losses of rows, times `scale`, of each row or of all; labels are shifted, below 0
    is ignored.

    Args:
        own: in place of cross entropy; rows whose label is ignored are given label 0, and what it
            makes of them does not count.

    Raises:
        ModuleRefusal: it fails, or does not return a loss for each row.
    """
    if isinstance(scale, torch.Tensor) and scale.dim():
        return (row_losses(logits, labels) * scale).sum()
    rows = logits.reshape(-1, logits.shape[-1]).float()
    target = labels.reshape(-1).long()
    if own is not None:
        counts = target >= 0
        losses = losses_of_rows(own, rows, target.clamp(min=0))
        return torch.where(counts, losses, torch.zeros_like(losses)).sum() * scale
    target = target.masked_fill(target < 0, IGNORED)
    return F.cross_entropy(rows, target, ignore_index=IGNORED, reduction="sum") * scale


def row_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each row; 0 where its label is below 0."""
    rows = logits.reshape(-1, logits.shape[-1]).float()
    target = labels.reshape(-1).long()
    target = target.masked_fill(target < 0, IGNORED)
    return F.cross_entropy(rows, target, ignore_index=IGNORED, reduction="none")


def losses_of_rows(own: RowLosses, rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Float32 [R], by a loss of a person's own.

    Raises:
        ModuleRefusal: it fails, or does not return a floating-point loss for each row.
    """
    name = getattr(own, "__name__", "the loss")
    try:
        losses = own(rows, target)
    except Exception as error:
        raise ModuleRefusal(f"the loss {name} fails: {told_of(error)}") from error
    if not isinstance(losses, torch.Tensor) or losses.shape != target.shape:
        made = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise ModuleRefusal(
            f"the loss {name} makes {made} of logits {tuple(rows.shape)} and labels "
            f"{tuple(target.shape)}: expected a loss for each row, {tuple(target.shape)}"
        )
    if not losses.is_floating_point():
        raise ModuleRefusal(
            f"the loss {name} makes {str(losses.dtype).removeprefix('torch.')}, which has no "
            "gradient: expected a floating-point loss for each row"
        )
    return losses.float()


def check_own_loss(loss: RowLosses, vocab_size: int) -> None:
    """Try random rows together, in parts and in another order: one's may not depend on others.

    Rows come in slices, whose ends hang on the plan and on the caps; a loss that looks at other
    rows would be another one in each.

    Raises:
        ModuleRefusal: it fails; its losses are not those of rows, no floats, not finite, without a
            gradient, or not the same twice; or it mixes rows.
    """
    name = getattr(loss, "__name__", type(loss).__name__)
    for trial in _trials(vocab_size):
        _check(loss, name, trial)


@dataclass(frozen=True)
class _Trial:
    logits: torch.Tensor  # [R, V]
    labels: torch.Tensor  # [R]
    is_usual: bool  # whether losses have to be finite, and to have a gradient

    def rows(self, chosen: torch.Tensor) -> "_Trial":
        return _Trial(self.logits[chosen], self.labels[chosen], self.is_usual)


def _trials(vocab_size: int) -> tuple[_Trial, _Trial]:
    """Rows as of a model that is new; and some that are sure of their label, or of another one,
    with labels that many rows share."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, _ROWS, vocab_size, generator=generator)
    labels = torch.randint(vocab_size, (2, _ROWS), generator=generator)
    labels[1] = labels[1, :4].repeat_interleave(torch.tensor([7, 5, 3, 1]))
    logits[1] *= torch.tensor([0.1, 1.0, 3.0, 9.0]).repeat(_ROWS // 4)[:, None]
    logits[1, 6:, :].scatter_add_(1, labels[1, 6:, None], torch.full((_ROWS - 6, 1), 12.0))
    return _Trial(logits[0], labels[0], True), _Trial(logits[1], labels[1], False)


def _check(loss: RowLosses, name: str, trial: _Trial) -> None:
    whole = _found(loss, name, trial)
    if trial.is_usual:
        _require_usual(name, *whole)
    if not _same(_found(loss, name, trial), whole):
        raise ModuleRefusal(
            f"the loss {name} is not the same twice for the same rows: it may neither draw random "
            "numbers nor remember calls, because rows are computed again"
        )
    order = torch.arange(_ROWS)
    parts = [[order[:at], order[at:]] for at in _SPLITS]
    for pieces in (*parts, [order.flip(0)]):
        found = [_found(loss, name, trial.rows(piece)) for piece in pieces]
        back = torch.cat(pieces).argsort()
        joined = [torch.cat(each)[back] for each in zip(*found, strict=True)]
        if not _same((joined[0], joined[1]), whole):
            raise ModuleRefusal(
                f"the loss {name} mixes rows: what it makes of one may not depend on others, nor "
                "on how many there are, because rows are computed in slices; their sum is divided "
                "by the labels of a step outside of it"
            )


def _found(loss: RowLosses, name: str, trial: _Trial) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [R], and their gradients by the logits of their rows [R, V]; zero without any."""
    with torch.enable_grad():
        leaf = trial.logits.clone().requires_grad_()
        rows = leaf * 1.0  # which may be changed in place, as those of a run
        losses = losses_of_rows(loss, rows, trial.labels.clone())
        gradient = None
        if losses.requires_grad:
            (gradient,) = torch.autograd.grad(losses.sum(), leaf, allow_unused=True)
    return losses.detach(), torch.zeros_like(trial.logits) if gradient is None else gradient


def _require_usual(name: str, losses: torch.Tensor, gradient: torch.Tensor) -> None:
    if not bool(losses.isfinite().all() and gradient.isfinite().all()):
        raise ModuleRefusal(
            f"the loss {name} makes numbers that are not finite of logits that are normally "
            "distributed"
        )
    if not bool(gradient.any()):
        raise ModuleRefusal(
            f"the loss {name} has no gradient: it does not depend on the logits by operations that "
            "torch differentiates (no argmax, no detach, no labels alone), so nothing would be "
            "learned"
        )


def _same(
    found: tuple[torch.Tensor, torch.Tensor], whole: tuple[torch.Tensor, torch.Tensor]
) -> bool:
    return all(
        torch.allclose(
            now, was, rtol=_TOLERANCE, equal_nan=True,
            atol=_TOLERANCE * float(was.nan_to_num(0.0, 0.0, 0.0).abs().max()),
        )
        for now, was in zip(found, whole, strict=True)
    )  # fmt: skip


def stored(value: TracedValue, tensor: torch.Tensor) -> torch.Tensor:
    """A value as it is kept: contiguous, with axes in the value's layout."""
    if not value.layout:
        return tensor.contiguous()
    repeated = [axis for axis in range(tensor.dim()) if axis not in value.layout]
    for axis in repeated:
        tensor = tensor.narrow(axis, 0, 1)
    return tensor.permute(*value.layout, *repeated).flatten(len(value.layout) - 1).contiguous()


def restored(value: TracedValue, kept: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """A view of what is kept, with the strides that the value had when it was made."""
    if not value.layout:
        return kept
    shape = value.shape_at(*size)
    strides = [0] * len(shape)
    for axis, stride in zip(value.layout, kept.stride(), strict=True):
        strides[axis] = stride
    return kept.as_strided(shape, strides)


def row_shape(shape: tuple[int, ...], size: tuple[int, int], rows: int) -> tuple[int, ...]:
    """The shape of a slice of rows of a value that has B and S side by side.

    Raises:
        ModuleRefusal: it has not, so that the postlude cannot run on rows.
    """
    axis = row_axis(shape, size)
    return (*shape[:axis], 1, rows, *shape[axis + 2 :])


def row_axis(shape: tuple[int, ...], size: tuple[int, int]) -> int:
    """The axis of B in a shape that has B and S side by side; raises as `row_shape`."""
    for axis in range(len(shape) - 1):
        if shape[axis : axis + 2] == size:
            return axis
    raise ModuleRefusal(
        f"what comes after the blocks reads a tensor of shape {shape}, in which {size[0]} "
        f"sequences of {size[1]} tokens are not side by side: it cannot run on slices of rows"
    )
