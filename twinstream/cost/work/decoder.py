"""The decoder whose work is counted: its widths, its experts, its matrices."""

from typing import Annotated

from pydantic import Field

from twinstream.cost.refusal import CostError, parts_of
from twinstream.schedule.node import Node

Size = Annotated[int, Field(gt=0, le=2**40)]


class Decoder(Node):
    """A decoder in which each expert is a whole layer: attention and feed-forward network.

    Every token is at one expert at a time (routing to one), and attends to all tokens of its
    sequence, at whatever expert they are. Embedding, head and router are not counted.

    Fields:
        num_layers, d_model: layers, and width of what passes between them.
        d_ffn: inner width of one expert's feed-forward network.
        num_heads, d_head: query heads, and the width of each.
        num_experts: experts of every layer; 1 is a dense model.
        gated: two input projections and their product (SwiGLU and its like) instead of one.
        multi_query: one key and value head for all query heads.
        attention_first: the feed-forward network takes the output of attention, which has then to
            be complete; otherwise both take the same input, and their outputs are added up as one.
    """

    num_layers: Size
    d_model: Size
    d_ffn: Size
    num_heads: Size
    d_head: Size
    num_experts: Size = 1
    gated: bool = False
    multi_query: bool = True
    attention_first: bool = False

    @property
    def num_params(self) -> int:
        """Weights of all matrices of all experts.

        >>> Decoder(num_layers=12, d_model=1024, d_ffn=4096, num_heads=16, d_head=64).num_params
        127401984
        """
        key_value_heads = 1 if self.multi_query else self.num_heads
        attention = 2 * (self.num_heads + key_value_heads) * self.d_head
        feed_forward = (3 if self.gated else 2) * self.d_ffn
        width = attention + feed_forward
        return self.num_layers * self.num_experts * self.d_model * width

    @property
    def num_params_per_token(self) -> float:
        """Weights that one token meets: those of one expert a layer."""
        return self.num_params / self.num_experts


def feed_forward_width(d_model: int, d_ffn: int | None, d_ffn_ratio: int | None) -> int:
    """The inner width: as given, by its ratio to the outer width, or four times that.

    Raises:
        CostError: both are given.
    """
    if d_ffn is not None and d_ffn_ratio is not None:
        raise CostError(
            f"--d-ffn {d_ffn:,} and --d-ffn-ratio {d_ffn_ratio:,} both say how wide the "
            "feed-forward network is: give one"
        )
    return (4 if d_ffn_ratio is None else d_ffn_ratio) * d_model if d_ffn is None else d_ffn


def heads_of(
    d_model: int, d_head: int, num_heads: int | None, total_width_ratio: float | None
) -> int:
    """Query heads: as given, or those that are together as wide as d_model, or a ratio of it.

    Raises:
        CostError: both are given, or the width is no whole number of heads.
    """
    if num_heads is not None and total_width_ratio is not None:
        raise CostError(
            f"--num-heads {num_heads:,} and --total-attn-width-ratio {total_width_ratio:g} both "
            "say how wide attention is: give one"
        )
    if num_heads is not None:
        return num_heads
    if total_width_ratio is None:
        return parts_of(d_model, d_head, what="channels of --d-model", by="--d-head")
    width = d_model * total_width_ratio
    if width % d_head or not width >= d_head:
        raise CostError(
            f"attention would be {width:g} channels wide, which is no whole number of heads of "
            f"{d_head:,}: change --total-attn-width-ratio or --d-head, or give --num-heads"
        )
    return int(width // d_head)


class Batches(Node):
    """What a run trains on.

    Fields:
        batch_size: sequences of an optimizer step.
        seq_len: tokens of a sequence.
        dataset_tokens: tokens of the run; what is trained is the nearest whole number of batches.
    """

    batch_size: Size
    seq_len: Size
    dataset_tokens: Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]

    @property
    def num_batches(self) -> int:
        """Optimizer steps of the run, rounded to even at a half."""
        return round(self.dataset_tokens / (self.batch_size * self.seq_len))

    @property
    def num_tokens(self) -> int:
        """Tokens of all batches."""
        return self.num_batches * self.batch_size * self.seq_len
