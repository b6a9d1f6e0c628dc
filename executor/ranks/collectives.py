"""The collectives: what each does to the bytes of an op's operands, over torch.distributed.

On gloo a call returns when its part is done, and blocks the thread of its stream alone. On NCCL it
enqueues behind the current stream.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from twinstream.executor.kernels.operand import KernelOperand
from twinstream.executor.ranks.groups import ChannelGroup
from twinstream.executor.ranks.reductions import Reduction
from twinstream.schedule.ops import Communicate

Call = Callable[[], None]


@dataclass(frozen=True)
class Meeting:
    """An op bound: its operands in its order, among whom, and for sums the memory they take."""

    op: Communicate
    operands: Sequence[KernelOperand]
    group: ChannelGroup
    reductions: Sequence[Reduction]
    scratch: torch.Tensor


def calls_of(meeting: Meeting) -> list[Call]:
    """Return the calls of an op, one after the other; all views are made."""
    if meeting.op.shift:
        return [_message(meeting, operand.bytes) for operand in meeting.operands]
    if meeting.op.collective == "all_reduce":
        if meeting.group.size == 1:
            return []
        pairs = zip(meeting.operands, meeting.reductions, strict=True)
        return [
            call
            for operand, reduction in pairs
            for call in _all_reduce(meeting, operand.bytes, reduction)
        ]
    given, taken = _ends(meeting)
    if meeting.group.size == 1:
        return [] if len(meeting.operands) == 1 else [partial(_copy, taken, given)]
    match meeting.op.collective:
        case "all_gather":
            return [_gather(taken, given, meeting.group, last_first=meeting.op.last_first is True)]
        case "all_to_all" if meeting.op.counts is not None:
            return [_swap_rows(taken, given, meeting.operands[2].bytes, meeting.group)]
        case "all_to_all":
            return [_swap(taken, given, meeting.group)]
        case "send_recv":
            return [_pass_on(taken, given, meeting.group)]
        case _:
            return _reduce_scatter(meeting, given, taken)


def _ends(meeting: Meeting) -> tuple[torch.Tensor, torch.Tensor]:
    """What is given and what is taken; of an operand that holds both, the whole and the shard."""
    if len(meeting.operands) > 1:
        both = meeting.operands[:2]
        given, taken = sorted(both, key=lambda operand: operand.mode)  # read, write
        return given.bytes, taken.bytes
    whole = meeting.operands[0].bytes
    shard = _own_shard(whole, meeting.group)
    return (shard, whole) if meeting.op.collective == "all_gather" else (whole, shard)


def _own_shard(whole: torch.Tensor, group: ChannelGroup) -> torch.Tensor:
    size = whole.numel() // group.size
    return whole[group.place * size : (group.place + 1) * size]


def _message(meeting: Meeting, values: torch.Tensor) -> Call:
    """Its tag is the sequence number: a pair's messages may go through several streams."""
    sender, receiver = meeting.group.members
    group, tag = meeting.group.process_group, meeting.op.sequence
    if meeting.op.collective == "send":
        return lambda: dist.send(values, receiver, group=group, tag=tag)

    def receive() -> None:
        dist.recv(values, sender, group=group, tag=tag)

    return receive


def _all_reduce(meeting: Meeting, values: torch.Tensor, reduction: Reduction) -> list[Call]:
    """In rank order: shards change hands, are added up and gathered again; then the rest."""
    group, scratch = meeting.group, meeting.scratch
    if not reduction.in_rank_order:
        typed = values.view(reduction.dtype)
        return [lambda: dist.all_reduce(typed, group=group.process_group) and None]
    calls: list[Call] = []
    for begin, part in reduction.stretches():
        first = begin * group.size * reduction.dtype.itemsize
        stretch = values[first : first + part.pieces_bytes]
        shard = _own_shard(stretch, group)
        calls += [
            _swap(part.pieces(scratch), stretch, group),
            partial(part.add, scratch, shard.view(reduction.dtype)),
            _gather(stretch, shard, group),
        ]
    if reduction.rest.num_elements:
        rest = values[reduction.sharded_bytes :]
        calls += [
            _gather(reduction.rest.pieces(scratch), rest, group),
            partial(reduction.rest.add, scratch, rest.view(reduction.dtype)),
        ]
    return calls


def _reduce_scatter(meeting: Meeting, given: torch.Tensor, taken: torch.Tensor) -> list[Call]:
    (reduction,), group, scratch = meeting.reductions, meeting.group, meeting.scratch
    typed = taken.view(reduction.dtype)
    if not reduction.in_rank_order:
        assert not reduction.last_first, "a library scatters in rank order"
        scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
        whole = given.view(reduction.dtype)
        return [lambda: scatter(typed, whole, group=group.process_group) and None]
    calls: list[Call] = []
    shape = (reduction.pieces, group.size, reduction.shard_elements)
    shards = given.view(reduction.dtype).view(shape).transpose(0, 1)  # of each rank, by piece
    for begin, part in reduction.stretches():
        shard = slice(begin, begin + part.num_elements)
        sent = given
        if part.num_elements < reduction.shard_elements or reduction.is_sorted_first:
            # of each shard; to be sent it lies together, in rank order
            sent = scratch[part.scratch_bytes :][: part.pieces_bytes]
            rows = sent.view(reduction.dtype).view(group.size, reduction.pieces, -1)
            order = range(group.size)[:: -1 if reduction.last_first else 1]
            calls += [
                partial(_copy, rows[i], shards[place, :, shard]) for i, place in enumerate(order)
            ]
        calls += [
            _swap(part.pieces(scratch), sent, group),
            partial(part.add, scratch, typed[shard]),
        ]
    return calls


def _gather(
    taken: torch.Tensor, given: torch.Tensor, group: ChannelGroup, *, last_first: bool = False
) -> Call:
    """Every rank's bytes in rank order; `given` may be this rank's place in `taken`."""
    if last_first:
        shards = list(taken.chunk(group.size))[::-1]
        return lambda: dist.all_gather(shards, given, group=group.process_group) and None
    gather = _named("all_gather_single", "all_gather_into_tensor")
    return lambda: gather(taken, given, group=group.process_group) and None


def _swap(taken: torch.Tensor, given: torch.Tensor, group: ChannelGroup) -> Call:
    """Piece i goes to rank i, and piece j comes from rank j."""
    return lambda: dist.all_to_all_single(taken, given, group=group.process_group) and None


def _pass_on(taken: torch.Tensor, given: torch.Tensor, group: ChannelGroup) -> Call:
    """To the next rank, and from the one before; nothing to and from the others."""
    sent, heard = ([0] * group.size for _ in range(2))
    sent[(group.place + 1) % group.size] = heard[group.place - 1] = given.numel()
    return lambda: (
        dist.all_to_all_single(taken, given, heard, sent, group=group.process_group) and None
    )


def _swap_rows(
    taken: torch.Tensor, given: torch.Tensor, counts: torch.Tensor, group: ChannelGroup
) -> Call:
    """Rows of experts to the ranks that have these, or back; the host reads how many there are."""
    counts_NNE = counts.view(torch.int32).view(group.size, group.size, -1)

    def swap() -> None:
        rows_NN = counts_NNE.sum(2).tolist()  # of each rank, those of each rank's experts
        own = rows_NN[group.place]
        row_bytes = min(given.numel(), taken.numel()) // sum(own)
        sent = [rows * row_bytes for rows in own]
        heard = [rows[group.place] * row_bytes for rows in rows_NN]
        if taken.numel() < given.numel():
            sent, heard = heard, sent
        dist.all_to_all_single(
            taken[: sum(heard)], given[: sum(sent)], heard, sent, group=group.process_group
        )

    return swap


def _copy(taken: torch.Tensor, given: torch.Tensor) -> None:
    taken.copy_(given)


def _named(name: str, before: str) -> Any:
    """A function of torch.distributed that had another name before 2.13."""
    return getattr(dist, name, None) or getattr(dist, before)
