"""What the host does for a schedule, and what it is told by the training loop."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from twinstream.schedule.ops import Feed, Fetch


@dataclass(frozen=True)
class HostWork:
    """`feed` gives the bytes of an input of a pass; `fetch` takes a result of a pass."""

    feed: Callable[[Feed, int], torch.Tensor]
    fetch: Callable[[Fetch, int, torch.Tensor], None]

    def run(self, op: Feed | Fetch, pass_index: int, slot: torch.Tensor) -> None:
        if isinstance(op, Feed):
            slot.copy_(self.feed(op, pass_index))
        else:
            self.fetch(op, pass_index, slot.clone())
