"""A module that is a list of blocks, called one after the other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from twinstream.executor.modules.blocks import ModuleRefusal
from twinstream.executor.modules.building import OWN_LOSS
from twinstream.executor.modules.rows_and_values import RowLosses

_FEWEST = 3


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

    def forward(self, input_ids: torch.Tensor) -> Any:
        x = self.first(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.last(x)
