"""Which blocks a module has, and the refusal of those that cannot be run one by one."""

import os
import traceback

from torch import nn

from twinstream.schedule.errors import TwinstreamError

_NOT_THEIRS = ("torch", "twinstream", "executor")  # folders of a frame's file


class ModuleRefusal(TwinstreamError):
    """A module cannot be run block by block: says what, where, and what to do."""


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
