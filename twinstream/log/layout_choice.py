"""Why a run on ranks has its layout, as a file beside its log."""

from twinstream.schedule.node import Node


class LayoutChoice(Node):
    """The layout chosen, the others that were looked at, and what their predictions assume.

    Layouts are sentences, each with its predicted tokens/s or why it is none.
    """

    chosen: str
    others: tuple[str, ...] = ()
    assumed: str

    @property
    def why(self) -> str:
        """Return in words why this layout was chosen."""
        if not self.others:
            return "as asked"
        return f"the fastest of {1 + len(self.others)} that were looked at"
