"""Sentences on what the walk over a schedule finds wrong."""

from twinstream.schedule.ops import Op
from twinstream.schedule.proof.accesses import Access, AccessMap
from twinstream.schedule.proof.clocks import StreamOrder
from twinstream.schedule.proof.memory_cells import GARBAGE, MemoryCell
from twinstream.schedule.proof.violations import (
    CarriedNotValid,
    OperandsOverlap,
    OverwriteTooEarly,
    ReadTooEarly,
    VersionOutOfOrder,
    Violation,
    WrongContent,
)
from twinstream.schedule.tensors import Carried


class WalkReport:
    """Collects violations; the same one of both passes counts once."""

    def __init__(self, ops: tuple[Op, ...], access_map: AccessMap, order: StreamOrder) -> None:
        self.violations: list[Violation] = []
        self._map = access_map
        self._seen: set[tuple[type, str, str, str]] = set()
        self._pass_index = 0
        self._ops = ops
        self._order = order

    def next_pass(self) -> None:
        self._pass_index += 1

    def wrong_content(self, op: Op, access: Access, there: list[MemoryCell]) -> None:
        held = [
            f"version {cell.version} of '{self._map.leaves[cell.leaf]}'"
            + ("" if cell.start == access.start else f" at byte {cell.start}")
            for cell in there
            if cell.leaf != GARBAGE
        ]
        holds = f"it holds {', '.join(held[:2])}" if held else "nothing valid is there"
        self._add(
            WrongContent,
            f"op '{op.op_id}' needs {self._needs(access)} in slot '{access.slot}', but {holds}",
            (op.op_id,),
            access,
        )

    def read_too_early(self, op: Op, access: Access, cell: MemoryCell) -> None:
        maker, name = self._who(cell.writer_stream, cell.writer_index)
        if maker == op.op_id:
            return  # reads what it writes itself: reported where it writes
        self._add(
            ReadTooEarly,
            f"op '{op.op_id}' reads {self._needs(access)} in slot '{access.slot}' without waiting "
            f"for {name}, which makes it",
            (op.op_id, maker),
            access,
        )

    def overwrite(self, op: Op, access: Access, touched: tuple[int, int], does: str) -> None:
        """`touched` is the (stream, index) of the op that reads or writes the bytes."""
        other, name = self._who(*touched)
        tier = self._map.tiers[access.tier]
        where = f"slot '{access.slot}' ({access.start} to {access.end} of {tier})"
        if other == op.op_id:
            text = f"op '{op.op_id}' writes {where} as '{access.tensor}' and {does} it as another"
            self._add(OperandsOverlap, text, (op.op_id, other), access)
        else:
            text = f"op '{op.op_id}' writes '{access.tensor}' over {where} without waiting for "
            self._add(
                OverwriteTooEarly, f"{text}{name}, which {does} there", (op.op_id, other), access
            )

    def version_out_of_order(self, op: Op, access: Access, made: int, newest: int) -> None:
        self._add(
            VersionOutOfOrder,
            f"op '{op.op_id}' makes version {made} of '{self._map.leaves[access.leaf]}' in slot "
            f"'{access.slot}', but the newest version is {newest}",
            (op.op_id,),
            access,
        )

    def carried_not_valid(self, item: Carried, leaf: int, final: int) -> None:
        self.violations.append(
            CarriedNotValid(
                f"slot '{item.slot}' does not hold the final version {final} of "
                f"'{self._map.leaves[leaf]}' when the pass ends, though it is carried",
                (),
                item.tensor,
                item.slot,
            )
        )

    def _add(
        self, kind: type[Violation], message: str, ops: tuple[str, ...], access: Access
    ) -> None:
        key = (kind, ops[0], ops[-1], access.slot)
        if key not in self._seen:
            self._seen.add(key)
            self.violations.append(kind(message, ops, access.tensor, access.slot))

    def _who(self, stream: int, index: int) -> tuple[str, str]:
        """An op's id, and how to call it in a sentence."""
        number, place = divmod(index, self._order.length[stream])
        op_id = self._ops[self._order.positions_on[stream][place]].op_id
        before = " of the pass before" if number < self._pass_index else ""
        return op_id, f"op '{op_id}'{before}"

    def _needs(self, access: Access) -> str:
        return f"version {access.version} of '{self._map.leaves[access.leaf]}'"
