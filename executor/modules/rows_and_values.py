"""How values are kept between parts of a module, and the loss of rows of the last ones."""

import torch
from torch.nn import functional as F  # noqa: N812

from twinstream.executor.modules.blocks import ModuleRefusal, RowLosses, told_of
from twinstream.models.providers.traced_parts import (
    TracedValue,
)

IGNORED = -100
_TRIED_ROWS, _SAME = 16, 1e-4


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
        losses = _of_rows(own, rows, target.clamp(min=0))
        return torch.where(counts, losses, torch.zeros_like(losses)).sum() * scale
    target = target.masked_fill(target < 0, IGNORED)
    return F.cross_entropy(rows, target, ignore_index=IGNORED, reduction="sum") * scale


def row_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each row; 0 where its label is below 0."""
    rows = logits.reshape(-1, logits.shape[-1]).float()
    target = labels.reshape(-1).long()
    target = target.masked_fill(target < 0, IGNORED)
    return F.cross_entropy(rows, target, ignore_index=IGNORED, reduction="none")


def check_own_loss(own: RowLosses, vocab_size: int) -> None:
    """Try a loss on random rows: together, in two halves, in another order. It may not mix them.

    The head is computed in slices of rows, whose number the plan chooses.

    Raises:
        ModuleRefusal: it fails, mixes rows, or its gradient to the logits is none, nothing or not
            finite.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_TRIED_ROWS, vocab_size, generator=generator)
    target = torch.randint(vocab_size, (_TRIED_ROWS,), generator=generator)
    name = getattr(own, "__name__", "the loss")

    def run(rows: torch.Tensor) -> torch.Tensor:
        """Losses and, beside them, gradients of these rows."""
        given = logits[rows].clone().requires_grad_()
        with torch.enable_grad():
            losses = _of_rows(own, given, target[rows])
            if not losses.requires_grad:
                raise ModuleRefusal(
                    f"the loss {name} has no gradient: what it makes does not follow from the "
                    "logits by operations that torch differentiates, so nothing would be learned"
                )
            (gradient,) = torch.autograd.grad(losses.sum(), given, allow_unused=True)
        if gradient is None or not gradient.any():
            raise ModuleRefusal(f"the loss {name} has a gradient of 0: nothing would be learned")
        return torch.cat([losses.detach()[:, None], gradient], dim=1)

    order = torch.arange(_TRIED_ROWS)
    turned, half = order.flip(0), _TRIED_ROWS // 2
    whole = run(order)
    if not bool(whole.isfinite().all()):
        raise ModuleRefusal(f"the loss {name} or its gradient is no finite number on random rows")
    halves = torch.cat([run(order[:half]), run(order[half:])])
    for other in (halves, run(turned).flip(0)):
        if not torch.allclose(whole, other, rtol=_SAME, atol=_SAME):
            raise ModuleRefusal(
                f"the loss {name} mixes rows, or draws at random: what it makes of one row may not "
                "depend on others, because rows are computed in slices. Weigh each row by itself"
            )


def _of_rows(own: RowLosses, rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
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
            "gradient: nothing would be learned"
        )
    return losses.float()


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
