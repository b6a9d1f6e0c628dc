"""What chips exchange: bytes of one chip, and the time they take on its network."""

from typing import Literal

from twinstream.cost.time.chips import Chip, rate_of
from twinstream.cost.time.plan import Cut, Layout, Stack
from twinstream.schedule.node import Node

Axis = Literal["tp", "tp2", "pp", "ep", "dp"]
When = Literal["layer", "boundary", "hop", "batch"]


class Exchange(Node):
    """What one chip sends, and as much that it receives, along one axis.

    Fields:
        when: after each "layer" of a micro-batch; at the "boundary" of a run of layers; at a "hop"
            to other experts between layers of a run; or once a "batch".
        sent_bytes, received_bytes: of one pass; a batch has one of it, else there is as much
            backward as forward.
        seconds: of one pass: bytes both ways over the network's rate. The network itself adds up.
    """

    axis: Axis
    when: When
    sent_bytes: float
    received_bytes: float
    seconds: float

    @property
    def both_passes_s(self) -> float:
        """Seconds, forward and backward."""
        return 2 * self.seconds


def exchanged(
    axis: Axis, when: When, values: int, chips: int, precision_bits: int, chip: Chip
) -> Exchange:
    """So many values in parts on so many chips: each sends and receives its part."""
    of_a_chip = values / chips * precision_bits / 8
    return Exchange(
        axis=axis,
        when=when,
        sent_bytes=of_a_chip,
        received_bytes=of_a_chip,
        seconds=2 * of_a_chip / rate_of(chip, "network_bytes_per_s"),
    )


def layer_exchanges(
    stack: Stack, cut: Cut, layout: Layout, precision_bits: int, chip: Chip
) -> tuple[Exchange, ...]:
    """Those of one layer of one micro-batch, one pass.

    The sum over experts and over parts of the inner width carries tokens to their next experts as
    well. Only where there is no such sum is there a hop.
    """
    experts, routed = stack.num_experts, stack.num_routed
    hidden = cut.microbatch_tokens * stack.d_model
    inner = cut.microbatch_tokens * stack.d_internal * routed
    everywhere = layout.dp * layout.tp * layout.tp2 * experts
    found = []
    if layout.tp2 > 1:
        parts = layout.dp * layout.tp * experts
        found.append(exchanged("tp2", "layer", inner, parts, precision_bits, chip))
    if routed * layout.tp > 1:
        parts = layout.dp * layout.tp2 * experts // routed
        found.append(exchanged("tp", "layer", hidden, parts, precision_bits, chip))
    found.append(exchanged("pp", "boundary", hidden, everywhere, precision_bits, chip))
    if routed * layout.tp == 1 and experts > 1:
        found.append(exchanged("ep", "hop", hidden, everywhere, precision_bits, chip))
    return tuple(found)
