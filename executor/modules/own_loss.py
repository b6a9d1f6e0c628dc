"""The trial of a loss of a person's own: one row's may not depend on others, and it has a gradient.

Rows come in slices, whose ends hang on the plan and on the caps; a loss that looks at other rows
would be another one in each.
"""

from dataclasses import dataclass

import torch

from twinstream.executor.modules.blocks import ModuleRefusal, RowLosses
from twinstream.executor.modules.rows_and_values import losses_of_rows

_ROWS = 16
_SPLITS = (8, 5)  # the second takes neighbours apart
_TOLERANCE = 1e-4  # of the largest: a matrix product may round otherwise with other rows


def check_own_loss(loss: RowLosses, vocab_size: int) -> None:
    """Try random rows together, in parts and in another order.

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
