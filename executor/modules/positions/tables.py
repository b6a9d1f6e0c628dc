"""How many positions a module has: rows of its tables, and what its rotary embeddings hold."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from twinstream.executor.modules.batches import documents
from twinstream.executor.modules.blocks import ModuleRefusal, blocks_of, told_of
from twinstream.executor.modules.building import (
    buffer_slots,
    build_module,
    parameter_slots,
    placed,
)
from twinstream.executor.modules.calling import (
    POSITIONS,
    grows_with_documents,
    module_inputs,
    run_module,
)
from twinstream.models.options import PositionLimit
from twinstream.models.providers.traced import ModuleSource
from twinstream.schedule.errors import TwinstreamError

_LENGTHS = 16, 32  # of a sequence, to see which numbers grow with it


def position_limit(module: nn.Module) -> PositionLimit | None:
    """The longest sequence that a module's positions reach to; None where they have no end.

    Raises:
        ModuleRefusal: it fails with a short sequence.
    """
    limits = [getattr(module, POSITIONS), *_of_tables(module), *_in_blocks(module)]
    found = [limit for limit in limits if limit is not None]
    return min(found, key=lambda one: one.tokens, default=None)


def built_for(
    source: ModuleSource, dtype: torch.dtype, attention: str | None, longest: int | None
) -> tuple[ModuleSource, nn.Module]:
    """The module, whose rotary frequencies follow from each document's length where documents are
    longer than the first ones are for; and its source, which says so.

    Args:
        longest: tokens of the longest packed document, where that is known.

    Raises:
        ModuleRefusal: as `build_module`.
    """
    module = build_module(source, dtype, attention)
    limit: PositionLimit | None = getattr(module, POSITIONS)
    if limit is None or longest is None or longest <= limit.tokens:
        return source, module
    if grows_with_documents(module):
        source = source.model_copy(update={"rotary": "by_document"})
        module = build_module(source, dtype, attention)
    return source, module


def _of_tables(module: nn.Module) -> list[PositionLimit]:
    """The longest sequence for which each table that is read before the blocks has positions.

    What comes before its blocks is run on two short sequences, with parameters that are zero and
    have no memory: rows of a table that are asked for and grow with the sequence are positions."""
    found: dict[str, _Lookup] = {}
    slots = parameter_slots(module)
    zeros = {
        name: torch.zeros((), dtype=place[key].dtype).expand(place[key].shape)
        for place, key, name in slots
    }
    names = {id(tensor): name for name, tensor in zeros.items()}
    names |= {id(place[key]): name for place, key, name in buffer_slots(module)}
    for seq_len in _LENGTHS:
        with placed(slots, zeros), _until_blocks(module), documents(None), torch.no_grad():
            _run(module, _Lookups(names, seq_len, found), seq_len)
    return [
        PositionLimit(tokens=one.tokens, why=_rows_told(name, one))
        for name, one in found.items()
        if one.tokens is not None
    ]


def _rows_told(name: str, table: "_Lookup") -> str:
    unused = table.rows - (table.tokens or 0)
    before = f", and positions begin at row {unused}" if unused else ""
    return f"its table '{name}' has {table.rows:,} rows{before}"


def _in_blocks(module: nn.Module) -> list[PositionLimit]:
    """Tables in blocks, of which only the size is seen: that of the config's longest sequence."""
    longest = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    if not isinstance(longest, int):
        return []
    tables = (
        (name, buffer)
        for name, buffer in blocks_of(module)[1].named_buffers()
        if buffer.dim() > 1 and longest in buffer.shape
    )
    return [
        PositionLimit(tokens=longest, why=f"table '{name}' of its blocks has {longest:,} rows")
        for name, _ in tables
    ][:1]


class _Reached(Exception):
    """The first block is called, or a table ends."""


def _run(module: nn.Module, lookups: "_Lookups", seq_len: int) -> None:
    batch = {"input_ids": torch.zeros(1, seq_len, dtype=torch.int64)}
    try:
        with lookups:
            run_module(module, module_inputs(module, batch))
    except _Reached:
        return
    except TwinstreamError:
        raise
    except Exception as error:
        raise ModuleRefusal(
            f"{type(module).__name__} fails before its blocks with a sequence of {seq_len} tokens: "
            f"{told_of(error)}"
        ) from error


@contextmanager
def _until_blocks(module: nn.Module) -> Iterator[None]:
    def reached(*_: Any, **__: Any) -> None:
        raise _Reached

    blocks = blocks_of(module)[1]
    try:
        for block in blocks:
            block.forward = reached
        yield
    finally:
        for block in blocks:
            del block.forward


@dataclass
class _Lookup:
    """Rows of a table, and the last one that was asked for, by the length of the sequence."""

    rows: int
    last: dict[int, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int | None:
        """Of the longest sequence; None where rows do not follow from positions."""
        short, long = _LENGTHS
        if {short, long} - self.last.keys() or self.last[long] - self.last[short] != long - short:
            return None
        return self.rows - (self.last[short] + 1 - short)


class _Lookups(TorchDispatchMode):
    """Notes which rows of parameters and buffers are asked for; ends where there are none."""

    def __init__(self, names: dict[int, str], seq_len: int, found: dict[str, _Lookup]) -> None:
        super().__init__()
        self.names, self.seq_len, self.found = names, seq_len, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.names.get(id(args[0])) if args and func in _ASKED else None
        asked = None if name is None else _ASKED[func](*args)
        if name is not None and asked is not None:
            rows, last = asked
            self.found.setdefault(name, _Lookup(rows)).last[self.seq_len] = last
            if last >= rows:
                raise _Reached
        return func(*args, **(kwargs or {}))


def _of_embedding(table: torch.Tensor, index: torch.Tensor, *_: Any) -> tuple[int, int]:
    return table.shape[0], int(index.max())


def _of_selection(table: torch.Tensor, axis: int, index: torch.Tensor) -> tuple[int, int]:
    return table.shape[axis], int(index.max())


def _of_index(table: torch.Tensor, indices: Any, *_: Any) -> tuple[int, int] | None:
    axis = next(at for at, index in enumerate(indices) if index is not None)
    if indices[axis].dtype is torch.bool:
        return None
    return table.shape[axis], int(indices[axis].max())


def _of_slice(
    table: torch.Tensor, axis: int = 0, start: int | None = None, end: int | None = None, *_: Any
) -> tuple[int, int] | None:
    return None if end is None or end > _WHOLE or end < 1 else (table.shape[axis], end - 1)


_WHOLE = 2**62  # the end of a slice that has all
_ASKED: dict[Any, Callable[..., tuple[int, int] | None]] = {
    torch.ops.aten.embedding.default: _of_embedding,
    torch.ops.aten.index_select.default: _of_selection,
    torch.ops.aten.index.Tensor: _of_index,
    torch.ops.aten.slice.Tensor: _of_slice,
}
