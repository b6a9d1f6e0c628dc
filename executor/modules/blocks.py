"""Which blocks a module has, or is made of; the refusal of those that cannot be run one by one."""

import os
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import nn

from twinstream.schedule.errors import TwinstreamError

OWN_LOSS = "twinstream_loss"  # attribute of a module whose loss is a person's own
_FEWEST = 3  # modules of a list
_NOT_THEIRS = ("torch", "twinstream", "executor")  # folders of a frame's file

RowLosses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of logits [R, V], float32, and labels [R], a loss of each row [R]."""


class ModuleRefusal(TwinstreamError):
    """A module cannot be run block by block: says what, where, and what to do."""


def what_a_newer_does() -> str:
    """What to do where transformers 4 loops over the experts that have tokens."""
    major = version("transformers").partition(".")[0] if find_spec("transformers") else ""
    return "; transformers 5 computes experts without that: update it" if major == "4" else ""


def told_of(error: Exception) -> str:
    """An exception of other people's code, and where in that code it was raised."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(f"{os.sep}{part}{os.sep}" in frame.filename for part in _NOT_THEIRS)
    ]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def blocks_of(module: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of blocks and its name: `blocks` of the module, or the largest outermost list.

    Raises:
        ModuleRefusal: there is none.
    """
    own = getattr(module, "blocks", None)
    if isinstance(own, nn.ModuleList):
        return "blocks", own
    lists: dict[str, nn.ModuleList] = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and not any(name.startswith(f"{n}.") for n in lists):
            lists[name] = part
    if not lists:
        raise ModuleRefusal(
            f"{type(module).__name__} has no torch.nn.ModuleList of blocks: put its blocks into "
            "one, as attribute `blocks`"
        )

    def size(name: str) -> int:
        return sum(parameter.numel() for parameter in lists[name].parameters())

    name = max(lists, key=size)
    return name, lists[name]


class BlockList(nn.Module):
    """The first makes hidden states of token ids [B, S], the last one logits [B, S, V]; those in
    between are the blocks that are moved and run one by one."""

    def __init__(self, modules: Sequence[nn.Module], loss: RowLosses | None) -> None:
        super().__init__()
        wrong = [one for one in modules if not isinstance(one, nn.Module)]
        if wrong or len(modules) < _FEWEST:
            what = f"{wrong[0]!r:.60}" if wrong else f"{len(modules)} of them"
            raise ModuleRefusal(
                f"from_blocks got {what}: give at least {_FEWEST} modules: the first takes "
                "token ids, the last one makes logits"
            )
        self.first, self.last = modules[0], modules[-1]
        self.blocks = nn.ModuleList(modules[1:-1])
        if loss is not None:
            setattr(self, OWN_LOSS, loss)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.first(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.last(x)
        return logits
