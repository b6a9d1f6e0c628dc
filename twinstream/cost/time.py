"""How long a run takes on given chips: matmuls, the pipeline's bubble, exchanges, gradients.

The arithmetic is that of davidsj/ml_par_sim, simple_transformer.py.
"""

from math import inf
from typing import Annotated, Any

from twinstream.cost.bill import CostError, Prices, bill_of
from twinstream.cost.chip import Chip, chip_names, load_chip
from twinstream.cost.work import ModelOptions
from twinstream.hardware_profiles.schema import Number
from twinstream.models.flops import model_flops_per_sequence
from twinstream.schedule.node import Node, option, quantity, size

_TOKENS_PER_PARAM = 20  # Hoffmann et al., Training Compute-Optimal LLMs, arXiv:2203.15556
_PASSES = 3  # forward once, backward twice: gradients of the input and of the weights
_MATRICES = 2  # into the inner width, and out of it


class Stack(ModelOptions, title="Model", populate_by_name=True):
    """A model as its large matrices alone: into the inner width of a layer, and out of it.

    One by name has all its weights and FLOPs, attention and head included.
    """

    num_layers: Annotated[int, size("Layers.", "n_layers")] = 0
    d_model: Annotated[int, size("Width between layers.")] = 0
    d_internal_ratio: Annotated[
        float,
        quantity("Inner width (feed-forward and heads together) over --d-model.", "RATIO", gt=0,
                 le=2**40),
    ] = 5  # fmt: skip
    num_experts: Annotated[
        int, size("Experts of a layer, and groups of chips for them.", "n_experts")
    ] = 1
    num_routed: Annotated[int, size("Experts that a token passes.", "n_routed_experts")] = 1
    model_params: int | None = None
    flop_per_sequence: int | None = None

    def complete(self, seq_len: int) -> "Stack":
        """The same with the sizes of the model that is named, if one is.

        Raises:
            CostError: the model is not given, or twice, or has experts beside attention.
        """
        spec = self.named(seq_len, "num_layers", "d_model")
        if spec is None:
            return self
        columns = 2 * (spec.d_q + spec.d_kv) + (3 if spec.gated else 2) * spec.d_ff
        sizes = {
            "num_layers": spec.num_layers,
            "d_model": spec.d_model,
            "d_internal_ratio": columns // _MATRICES / spec.d_model,
            "model_params": spec.num_parameters,
            "flop_per_sequence": model_flops_per_sequence(spec, seq_len),
        }
        return self.model_copy(update={"model": spec.name, **sizes})

    @property
    def d_internal(self) -> int:
        """Inner width of one expert."""
        return round(self.d_internal_ratio * self.d_model)

    @property
    def expert_params(self) -> int:
        """Weights of the two matrices of one expert, in all layers."""
        return _MATRICES * self.num_layers * self.d_model * self.d_internal

    @property
    def num_params(self) -> int:
        """Weights of all experts, or of the whole model."""
        return self.model_params or self.num_experts * self.expert_params

    @property
    def num_params_per_token(self) -> int:
        """Weights that a token meets."""
        return self.model_params or self.num_routed * self.expert_params

    def flop_of(self, num_sequences: int, seq_len: int) -> int:
        """To train on sequences: 6 a weight that a token meets and token, or the model's."""
        if self.flop_per_sequence is not None:
            return num_sequences * self.flop_per_sequence
        return 2 * _PASSES * self.num_params_per_token * num_sequences * seq_len


class Cut(Node, title="Run", populate_by_name=True):
    """How the tokens of a run are cut; what is trained is whole batches of the dataset."""

    dataset_tokens: Annotated[
        float | None,
        quantity("Tokens of the run; by default 20 a parameter.", "TOKENS", "dataset_size"),
    ] = None
    batch_size: Annotated[int, size("Sequences of an optimizer step.")] = 2048
    microbatch_size: Annotated[
        int, size("Sequences in a stage at a time, over all replicas.")
    ] = 1  # fmt: skip
    seq_len: Annotated[int, size("Tokens of a sequence.")] = 2048

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
        if self.dataset_tokens is None:
            return _TOKENS_PER_PARAM * stack.num_params // self.batch_tokens
        return int(self.dataset_tokens // self.batch_tokens)


class Layout(Node, title="Layout", populate_by_name=True):
    """Chips along each axis; those for experts are as many as there are experts."""

    pp: Annotated[int, size("Pipeline stages.")] = 1
    interleaving: Annotated[int, size("Runs of layers of a stage.", "pipeline_interleaving")] = 1
    dp: Annotated[int, size("Replicas.")] = 1
    tp: Annotated[int, size("Parts of the inner width.")] = 1
    tp2: Annotated[int, size("Parts of the width between layers.")] = 1

    def num_chips(self, stack: Stack) -> int:
        """All chips."""
        return self.pp * self.dp * self.tp * self.tp2 * stack.num_experts


class Setting(Node):
    """All that the time of a batch depends on."""

    stack: Stack
    cut: Cut
    layout: Layout
    chip: Chip
    precision_bits: int = 8
    base_utilization: float = 0.6


class ChipOptions(Node, title="Chips", populate_by_name=True):
    """The options that say what it runs on, and how well."""

    chip: Annotated[
        str,
        option(f"One of: {', '.join(chip_names())}; or a TOML file.", "chip", "chip_type",
               unit="NAME|FILE"),
    ] = "H100"  # fmt: skip
    network_bandwidth: Annotated[
        float | None,
        option("Both ways together; by default the chip's.", unit="BYTES/S"),
    ] = None
    base_utilization: Annotated[
        float,
        quantity("Share of the peak that one matmul on one chip reaches; 0.6 is optimistic.",
                 "SHARE", gt=0, le=1),
    ] = 0.6  # fmt: skip
    precision_bits: Annotated[
        int | None,
        option("Of what is multiplied and sent; by default 16 with --model and 8 with sizes, as "
               "davidsj/ml_par_sim has it.", unit="BITS", gt=0, le=1024),
    ] = None  # fmt: skip

    def setting(self, stack: Stack, cut: Cut, layout: Layout) -> Setting:
        """
        Raises:
            CostError: the chip is unknown, or its network moves nothing.
        """
        chip, network = load_chip(self.chip), self.network_bandwidth
        if network is not None and not 0 < network < inf:
            raise CostError(f"--network-bandwidth needs to be more than 0 bytes/s, got {network:g}")
        if network is not None:
            rate = Number(value=network, kind="assumed", source="--network-bandwidth")
            chip = chip.model_copy(update={"network_bytes_per_s": rate})
        return Setting(
            stack=stack,
            cut=cut,
            layout=layout,
            chip=chip,
            precision_bits=self.precision_bits or (8 if stack.model is None else 16),
            base_utilization=self.base_utilization,
        )


def time_document(setting: Setting, prices: Prices) -> dict[str, Any]:
    """The time of a run, batch after batch, in full; under the names of davidsj/ml_par_sim, too.

    In the bubble, nothing hides what is exchanged. At the end of a run of layers only what is sent
    is waited for; in between, a token hops with the share of experts that are elsewhere. In a full
    pipeline the longer of matmuls and exchanges hides the other; tokens hop after every layer, or
    else the boundary has its share of each layer of the run, even where there is but one stage.

    Raises:
        CostError: something does not come apart evenly.
    """
    _check_fit(setting)
    stack, cut, layout = setting.stack, setting.cut, setting.layout
    num_chips, num_batches = layout.num_chips(stack), cut.num_batches(stack)
    peak = setting.chip.rate("flop_per_s_8bit") * 8 / setting.precision_bits
    flop = stack.flop_of(cut.batch_size, cut.seq_len)
    tokens = cut.microbatch_tokens * stack.num_routed // (layout.dp * stack.num_experts)
    inner, outer = stack.d_internal // layout.tp, stack.d_model // layout.tp2
    compute_s = 2 * inner * outer * tokens / (peak * setting.base_utilization)
    # A value counts as one byte of memory whatever the precision, as in davidsj/ml_par_sim.
    moved_bytes = inner * outer + outer * tokens + inner * tokens
    memory_s = moved_bytes / setting.chip.rate("memory_bytes_per_s")
    # Attention and head of a model, which are no part of the two matrices, take as long per FLOP.
    in_matrices = 2 * _PASSES * stack.num_routed * stack.expert_params * cut.batch_tokens
    layer_s = _PASSES * _MATRICES * max(compute_s * flop / in_matrices, memory_s)
    layers_per_run = stack.num_layers // (layout.pp * layout.interleaving)
    num_microbatches = cut.batch_size // cut.microbatch_size
    exchanges = _exchanges(setting)
    within_s, boundary_s, hop_s, gradient_s = (
        sum(passes * one["seconds"] for one in exchanges if one["when"] == when)
        for when, passes in (("layer", 2), ("boundary", 2), ("hop", 2), ("batch", 1))
    )
    elsewhere = (stack.num_experts - 1) / stack.num_experts
    run_s = layers_per_run * (layer_s + within_s) + boundary_s / 2
    bubble_s = (layout.pp - 1) * (run_s + (layers_per_run - 1) * elsewhere * hop_s)
    bubble_layers = (layout.pp - 1) * layers_per_run
    layer_steps = stack.num_layers // layout.pp * num_microbatches
    compute_all_s = layer_steps * layer_s
    network_all_s = layer_steps * (within_s + (hop_s or boundary_s / layers_per_run))
    full_s = max(compute_all_s, network_all_s)
    batch_s = bubble_s + full_s + gradient_s
    figures = {
        ("num_params", "P"): stack.num_params,
        ("num_params_per_token", "N"): stack.num_params_per_token,
        ("num_tokens", "D"): num_batches * cut.batch_tokens,
        ("num_batches", "n_batches"): num_batches,
        ("num_chips", "p"): num_chips,
        ("flop_total", "total_flop"): num_batches * flop,
        ("flop_per_expert",): num_batches * flop / stack.num_experts,
        ("flop_per_batch",): flop,
        ("n_microbatches_per_batch",): num_microbatches,
        ("n_pipeline_steps",): layout.pp * layout.interleaving,
        ("pipe_boundary_intvl",): layers_per_run,
        ("pipeline_bubble_layers",): bubble_layers,
        ("pipeline",): [layout.pp, layout.interleaving, layers_per_run, bubble_layers],
        ("d_int_per_matmul",): inner,
        ("d_per_matmul",): outer,
        ("tokens_per_matmul",): tokens,
        ("matmul_shape",): [inner, outer, tokens],
        ("matmul_s", "matmul_time"): max(compute_s, memory_s),
        ("matmul_limit",): "compute" if compute_s >= memory_s else "memory",
        ("pipeline_bubble_s", "pipeline_bubble_time"): bubble_s,
        ("pipeline_full_flop_s", "pipeline_full_flop_time"): compute_all_s,
        ("pipeline_full_net_s", "pipeline_full_net_time"): network_all_s,
        ("pipeline_full_s", "pipeline_full_time"): full_s,
        ("grad_reduction_s", "gradient_reduction_time"): gradient_s,
        ("batch_s", "batch_time"): batch_s,
        ("utilization", "util"): flop / (peak * num_chips * batch_s),
    }
    bill = bill_of(
        batch_s * num_batches, num_chips * setting.chip.num_gpus, prices, setting.chip.names
    )
    return {
        **{name: figure for names, figure in figures.items() for name in names},
        "exchanges": exchanges,
        **bill.model_dump(),
        "asked": setting.model_dump(),
    }


def _exchanges(setting: Setting) -> list[dict[str, Any]]:
    """What one chip sends along one axis, and as much that it receives; the network adds up.

    "when" is after each "layer" of a micro-batch, at the "boundary" of a run of layers, at a "hop"
    to other experts between layers of a run, or once a "batch". Of the others there is as much
    backward as forward. The sum over experts and over parts of the inner width carries tokens to
    their next experts as well: only where there is no such sum is there a hop.
    """
    stack, cut, layout = setting.stack, setting.cut, setting.layout
    dp, tp, tp2, experts, routed = (
        layout.dp, layout.tp, layout.tp2, stack.num_experts, stack.num_routed,
    )  # fmt: skip
    hidden = cut.microbatch_tokens * stack.d_model
    inner = cut.microbatch_tokens * stack.d_internal * routed
    everywhere, summed = dp * tp * tp2 * experts, routed * tp > 1
    rows = (
        ("tp2", "layer", inner, dp * tp * experts, tp2 > 1),
        ("tp", "layer", hidden, dp * tp2 * experts // routed, summed),
        ("pp", "boundary", hidden, everywhere, True),
        ("ep", "hop", hidden, everywhere, experts > 1 and not summed),
        ("dp", "batch", stack.num_params, layout.num_chips(stack) // dp, dp > 1),
    )
    network, value_bytes = setting.chip.rate("network_bytes_per_s"), setting.precision_bits / 8
    return [
        {"axis": axis, "when": when,
         **dict.fromkeys(("sent_bytes", "received_bytes"), values / chips * value_bytes),
         "seconds": 2 * values / chips * value_bytes / network}
        for axis, when, values, chips, is_there in rows
        if is_there
    ]  # fmt: skip


def _check_fit(setting: Setting) -> None:
    stack, cut, layout = setting.stack, setting.cut, setting.layout
    if stack.d_internal < 1:
        raise CostError(
            f"--d-internal-ratio {stack.d_internal_ratio:g} leaves no channel of {stack.d_model:,}"
        )
    if layout.pp == 1 and layout.interleaving > 1:
        raise CostError(
            f"a single stage cannot be interleaved {layout.interleaving:,} times: raise --pp, or "
            "leave out --pipeline-interleaving"
        )
    for flag, parts, whole, what in (
        ("--n-routed-experts", stack.num_routed, stack.num_experts, "experts"),
        ("--microbatch-size", cut.microbatch_size, cut.batch_size, "sequences of a batch"),
        ("--dp x --n-experts", layout.dp * stack.num_experts,
         cut.microbatch_tokens * stack.num_routed,
         "tokens of a micro-batch, once for each expert that they pass"),
        ("--pp x --pipeline-interleaving", layout.pp * layout.interleaving, stack.num_layers,
         "layers"),
        ("--tp", layout.tp, stack.d_internal, "channels of the inner width"),
        ("--tp2", layout.tp2, stack.d_model, "channels of --d-model"),
    ):  # fmt: skip
        if whole % parts:
            raise CostError(
                f"{flag}: {parts:,} does not divide the {whole:,} {what}: choose a divisor"
            )
