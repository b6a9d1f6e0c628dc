"""What is trained, how it is cut, and how it lies on the chips."""

from typing import Annotated

from pydantic import Field

from twinstream.cost.refusal import CostError
from twinstream.cost.work.decoder import Size
from twinstream.schedule.node import Node

_TOKENS_PER_PARAM = 20  # Hoffmann et al., Training Compute-Optimal LLMs, arXiv:2203.15556


class Stack(Node):
    """A model as its large matrices alone: into the inner width of a layer, and out of it.

    Fields:
        num_layers, d_model: layers, and the width between them.
        d_internal_ratio: inner width, of feed-forward and heads together, over d_model.
        num_experts: experts of a layer, each on its own group of chips.
        num_routed: experts that each token passes.
    """

    num_layers: Size
    d_model: Size
    d_internal_ratio: Size = 5
    num_experts: Size = 1
    num_routed: Size = 1

    @property
    def d_internal(self) -> int:
        """Inner width of one expert."""
        return self.d_internal_ratio * self.d_model

    @property
    def num_params(self) -> int:
        """Weights of all experts."""
        return self.num_experts * self._params_of_an_expert

    @property
    def num_params_per_token(self) -> int:
        """Weights that a token meets."""
        return self.num_routed * self._params_of_an_expert

    @property
    def _params_of_an_expert(self) -> int:
        return 2 * self.num_layers * self.d_model * self.d_internal


class Cut(Node):
    """How the tokens of a run are cut.

    Fields:
        batch_size: sequences of an optimizer step.
        microbatch_size: sequences that are in a stage at a time, over all replicas.
        seq_len: tokens of a sequence.
        dataset_tokens: None for 20 a parameter; what is trained is whole batches of it.
    """

    batch_size: Size = 2048
    microbatch_size: Size = 1
    seq_len: Size = 2048
    dataset_tokens: Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)] | None = None

    @property
    def batch_tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.batch_size * self.seq_len

    @property
    def microbatch_tokens(self) -> int:
        """Tokens in a stage at a time."""
        return self.microbatch_size * self.seq_len

    def num_batches(self, stack: Stack) -> int:
        """Whole batches of the dataset; what is left over is not trained."""
        tokens = self.dataset_tokens
        if tokens is None:
            return _TOKENS_PER_PARAM * stack.num_params // self.batch_tokens
        return int(tokens // self.batch_tokens)


class Layout(Node):
    """Chips along each axis; those for experts are as many as there are experts.

    Fields:
        pp: pipeline stages.
        interleaving: runs of layers that each stage has.
        dp: replicas.
        tp: parts of the inner width.
        tp2: parts of the width between layers.
    """

    pp: Size = 1
    interleaving: Size = 1
    dp: Size = 1
    tp: Size = 1
    tp2: Size = 1

    def num_chips(self, stack: Stack) -> int:
        """All chips."""
        return self.pp * self.dp * self.tp * self.tp2 * stack.num_experts


def check_fit(stack: Stack, cut: Cut, layout: Layout) -> None:
    """
    Raises:
        CostError: the first thing that does not come apart evenly.
    """
    routed = cut.microbatch_tokens * stack.num_routed
    _divides(stack.num_routed, "--n-routed-experts", stack.num_experts, "experts")
    _divides(cut.microbatch_size, "--microbatch-size", cut.batch_size, "sequences of a batch")
    _divides(
        layout.dp * stack.num_experts,
        "--dp x --n-experts",
        routed,
        "tokens of a micro-batch, once for each expert that they pass",
    )
    _divides(
        layout.pp * layout.interleaving,
        "--pp x --pipeline-interleaving",
        stack.num_layers,
        "layers",
    )
    if layout.pp == 1 and layout.interleaving > 1:
        raise CostError(
            f"a single stage cannot be interleaved {layout.interleaving:,} times: raise --pp, or "
            "leave out --pipeline-interleaving"
        )
    _divides(layout.tp, "--tp", stack.d_internal, "channels of the inner width")
    _divides(layout.tp2, "--tp2", stack.d_model, "channels of --d-model")


def _divides(parts: int, flag: str, whole: int, what: str) -> None:
    if whole % parts:
        raise CostError(f"{flag}: {parts:,} does not divide the {whole:,} {what}: choose a divisor")
