"""One stage of a pipeline: its microbatches forward and backward, and what it says to neighbours.

The driver is the same for every layout. Its blocks have two forms: one task for each block and
direction (`task_blocks`), or parts with collectives between them (`parts.part_blocks`).
"""

from collections.abc import Iterable
from typing import Protocol

from twinstream.models.lowering.chain_builder import OperandT, TaskBuilder
from twinstream.models.lowering.group_life import GroupLife
from twinstream.models.lowering.stage_cut import StageCut


class StageBlocks(Protocol[OperandT]):
    """What adds the tasks of a stage's layers, embedding and head, by virtual stage and microbatch.

    Messages of hidden states and of their gradients are operands, each by what tells its task
    apart. `other_phase` is what one form alone has: `evaluate` makes the loss alone, `weight` the
    gradients of weights that zero-bubble has put off.
    """

    @property
    def builder(self) -> TaskBuilder[OperandT]: ...

    @property
    def groups(self) -> GroupLife[OperandT]: ...

    def begin(self, chunk: int, j: int) -> None: ...

    def embed_forward(self, chunk: int, j: int) -> None: ...

    def hidden_in(self, chunk: int, j: int) -> Iterable[tuple[str, OperandT]]: ...

    def forward(self, chunk: int, j: int) -> None: ...

    def hidden_out(self, chunk: int, j: int) -> Iterable[tuple[str, OperandT]]: ...

    def head(self, chunk: int, j: int) -> None: ...

    def gradient_in(self, chunk: int, j: int) -> Iterable[tuple[str, OperandT]]: ...

    def backward(self, chunk: int, j: int) -> None: ...

    def gradient_out(self, chunk: int, j: int) -> Iterable[tuple[str, OperandT]]: ...

    def embed_backward(self, chunk: int, j: int) -> None: ...

    def other_phase(self, phase: str, chunk: int, j: int) -> None: ...


def run_stage(cut: StageCut, blocks: StageBlocks[OperandT], *, trains: bool = True) -> None:
    """Add all tasks of a stage's step.

    The head runs where its microbatch's backward begins, so that logits of one microbatch are there
    at a time.
    """
    exchange = blocks.builder.exchange
    for phase, chunk, j in cut.actions:
        place = cut.places[chunk]
        is_last = place == cut.num_places - 1
        match phase:
            case "forward":
                blocks.begin(chunk, j)
                if place == 0:
                    blocks.embed_forward(chunk, j)
                else:
                    exchange("recv", blocks.hidden_in(chunk, j), -1, j)
                blocks.forward(chunk, j)
                if not is_last:
                    exchange("send", blocks.hidden_out(chunk, j), 1, j)
            case "backward":
                if is_last:
                    blocks.head(chunk, j)
                else:
                    exchange("recv", blocks.gradient_in(chunk, j), 1, j)
                blocks.backward(chunk, j)
                if place == 0:
                    blocks.embed_backward(chunk, j)
                else:
                    exchange("send", blocks.gradient_out(chunk, j), -1, j)
            case _:
                blocks.other_phase(phase, chunk, j)
    if trains:
        blocks.groups.finish()
