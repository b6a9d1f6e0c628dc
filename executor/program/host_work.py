"""The host's work for a schedule: feed inputs, fetch results, notify the training loop."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from twinstream.schedule.ops import Feed, Fetch


@dataclass(frozen=True)
class HostWork:
    """`feed` gives the bytes of an input of a pass; `fetch` takes a result of a pass.

    `flushed` is told of how many passes all updates are made: the one after them has none to make.
    """

    feed: Callable[[Feed, int], torch.Tensor]
    fetch: Callable[[Fetch, int, torch.Tensor], None]
    flushed: Callable[[int], None] = lambda num_passes: None

    def of_pass(self, number: int) -> Self:
        """What the host does for one pass of this number."""
        return replace(
            self,
            feed=lambda op, _: self.feed(op, number),
            fetch=lambda op, _, taken: self.fetch(op, number, taken),
        )

    def run(self, op: Feed | Fetch, pass_index: int, slot: torch.Tensor) -> None:
        if isinstance(op, Feed):
            slot.copy_(self.feed(op, pass_index))
        else:
            self.fetch(op, pass_index, slot.clone())
