"""The time of one batch: the pipeline once it is full, its bubble, the sum of the gradients."""

from typing import Annotated, Literal

from pydantic import Field

from twinstream.cost.time.chips import Chip, rate_of
from twinstream.cost.time.exchanges import Exchange, exchanged, layer_exchanges
from twinstream.cost.time.plan import Cut, Layout, Stack
from twinstream.schedule.node import Node

_PASSES = 3  # forward once, backward twice: gradients of the input and of the weights
_MATRICES = 2  # into the inner width, and out of it


class Setting(Node):
    """All that the time of a batch depends on.

    Fields:
        precision_bits: of everything that is multiplied or sent.
        base_utilization: share of the chip's peak that one matmul on one chip reaches.
    """

    stack: Stack
    cut: Cut
    layout: Layout
    chip: Chip
    precision_bits: Annotated[int, Field(gt=0, le=1024)] = 8
    base_utilization: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 0.6

    @property
    def flop_per_s(self) -> float:
        """What a chip reaches in one matmul that memory does not slow."""
        peak = rate_of(self.chip, "flop_per_s_8bit")
        return peak * self.base_utilization * 8 / self.precision_bits


class BatchTime(Node):
    """Times of one batch, in seconds.

    Fields:
        matmul_shape: channels of the inner width and of d_model, and tokens, on one chip.
        matmul_s, matmul_limit: one such matmul, and what it is limited by.
        layers_per_run: consecutive layers of a stage, from boundary to boundary.
        bubble_layers: layers that a stage waits for at the beginning and end of a batch together.
        num_microbatches: micro-batches of a batch.
        exchanges: what chips exchange, per axis and pass.
        bubble_s: the wait, with its exchanges, which nothing hides there.
        steady_compute_s, steady_network_s: of all micro-batches; the longer hides the other.
        gradient_s: the sum of gradients over replicas, which nothing hides.
        flop_per_batch: 6 a weight that a token meets and token.
        utilization: share of the peak of all chips.
    """

    matmul_shape: tuple[int, int, int]
    matmul_s: float
    matmul_limit: Literal["compute", "memory"]
    layers_per_run: int
    bubble_layers: int
    num_microbatches: int
    exchanges: tuple[Exchange, ...]
    bubble_s: float
    steady_compute_s: float
    steady_network_s: float
    gradient_s: float
    flop_per_batch: int
    utilization: float

    @property
    def steady_s(self) -> float:
        """All micro-batches through a full pipeline."""
        return max(self.steady_compute_s, self.steady_network_s)

    @property
    def batch_s(self) -> float:
        """An optimizer step."""
        return self.bubble_s + self.steady_s + self.gradient_s


def batch_time(setting: Setting) -> BatchTime:
    """The time of a batch whose sizes come apart evenly (`check_fit`)."""
    stack, cut, layout = setting.stack, setting.cut, setting.layout
    shape = _matmul_shape(setting)
    compute_s, memory_s = _matmul_times(setting, shape)
    layer_s = _PASSES * _MATRICES * max(compute_s, memory_s)
    layers_per_run = stack.num_layers // (layout.pp * layout.interleaving)
    num_microbatches = cut.batch_size // cut.microbatch_size
    layer_steps = stack.num_layers // layout.pp * num_microbatches
    exchanges = layer_exchanges(stack, cut, layout, setting.precision_bits, setting.chip)
    gradients = exchanged(
        "dp", "batch", stack.num_params, layout.num_chips(stack) // layout.dp,
        setting.precision_bits, setting.chip,
    )  # fmt: skip
    gradient_s = gradients.seconds if layout.dp > 1 else 0.0
    waited_s = _run_s(layer_s, layers_per_run, exchanges, stack.num_experts)
    bubble_s = (layout.pp - 1) * waited_s
    steady_compute_s = layer_steps * layer_s
    steady_network_s = layer_steps * _steady_exchange_s(layers_per_run, exchanges)
    batch_s = bubble_s + max(steady_compute_s, steady_network_s) + gradient_s
    flop = 6 * stack.num_params_per_token * cut.batch_tokens
    peak = setting.flop_per_s * layout.num_chips(stack)
    return BatchTime(
        matmul_shape=shape,
        matmul_s=max(compute_s, memory_s),
        matmul_limit="compute" if compute_s >= memory_s else "memory",
        layers_per_run=layers_per_run,
        bubble_layers=(layout.pp - 1) * layers_per_run,
        num_microbatches=num_microbatches,
        exchanges=(*exchanges, gradients) if layout.dp > 1 else exchanges,
        bubble_s=bubble_s,
        steady_compute_s=steady_compute_s,
        steady_network_s=steady_network_s,
        gradient_s=gradient_s,
        flop_per_batch=flop,
        utilization=setting.base_utilization * flop / (peak * batch_s),
    )


def _matmul_shape(setting: Setting) -> tuple[int, int, int]:
    stack, cut, layout = setting.stack, setting.cut, setting.layout
    tokens = cut.microbatch_tokens * stack.num_routed // (layout.dp * stack.num_experts)
    return stack.d_internal // layout.tp, stack.d_model // layout.tp2, tokens


def _matmul_times(setting: Setting, shape: tuple[int, int, int]) -> tuple[float, float]:
    """Seconds of computing, and of reading both factors and writing the product.

    A value counts as one byte of memory whatever the precision, as in davidsj/ml_par_sim.
    """
    inner, outer, tokens = shape
    flop = 2 * inner * outer * tokens
    moved_bytes = inner * outer + outer * tokens + inner * tokens
    memory_rate = rate_of(setting.chip, "memory_bytes_per_s")
    return flop / setting.flop_per_s, moved_bytes / memory_rate


def _run_s(
    layer_s: float, layers_per_run: int, exchanges: tuple[Exchange, ...], num_experts: int
) -> float:
    """A run of layers in the bubble, where nothing hides what is exchanged.

    At its end only what is sent is waited for. In between, a token hops with the share of experts
    that are elsewhere.
    """
    within_s, boundary_s, hop_s = (
        _both_s(exchanges, when) for when in ("layer", "boundary", "hop")
    )
    elsewhere = (num_experts - 1) / num_experts
    between_s = (layers_per_run - 1) * elsewhere * hop_s
    return layers_per_run * (layer_s + within_s) + boundary_s / 2 + between_s


def _steady_exchange_s(layers_per_run: int, exchanges: tuple[Exchange, ...]) -> float:
    """What is exchanged a layer in a full pipeline: after every layer where tokens hop.

    Else the boundary has its share of each layer of the run, even where there is but one stage.
    """
    within_s, boundary_s, hop_s = (
        _both_s(exchanges, when) for when in ("layer", "boundary", "hop")
    )
    return within_s + (hop_s or boundary_s / layers_per_run)


def _both_s(exchanges: tuple[Exchange, ...], when: str) -> float:
    return sum(one.both_passes_s for one in exchanges if one.when == when)
