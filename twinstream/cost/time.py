"""How long a run takes on given GPUs: matmuls, the pipeline's bubble, exchanges, gradients.

The arithmetic is that of davidsj/ml_par_sim, simple_transformer.py.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from twinstream.cost.bill import CostError
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.flops import model_flops_per_sequence
from twinstream.models.spec import ModelSpec
from twinstream.schedule.node import Node, quantity, size

_TOKENS_PER_PARAM = 20  # Hoffmann et al., Training Compute-Optimal LLMs, arXiv:2203.15556
_PASSES = 3  # forward once, backward twice: gradients of the input and of the weights
_MATRICES = 2  # into the inner width, and out of it
_NO_EXCHANGE = 1e30


class TimedRun(Node):
    """A model as its large matrices alone, the tokens that it is trained on, a layout, and rates.

    A model is the matrices into the inner width of a layer, and out of it; one by name has all its
    weights and FLOPs (`timed_sizes`). Tokens of the run are by default 20 a parameter; what is
    trained is whole batches of them. There are as many groups of GPUs for experts as experts.

    Fields:
        d_internal_ratio: inner width, feed-forward and heads together, over d_model.
        num_routed: experts that a token passes.
        microbatch_size: sequences in a stage at a time, over all replicas.
        interleaving: runs of layers of a stage.
        tp, tp2: parts of the inner width, and of the width between layers.
        flop_per_s: peak of dense matmuls in as many bits as values have.
        utilization: share of the peak that one matmul on one GPU reaches; 0.6 is optimistic.
        network_bytes_per_s: of sending and receiving together.
    """

    num_layers: Annotated[int, size("Layers.")]
    d_model: Annotated[int, size("Width between layers.")]
    d_internal_ratio: Annotated[float, quantity("Inner width.", "RATIO", gt=0, le=2**40)] = 5
    num_experts: Annotated[int, size("Experts of a layer.")] = 1
    num_routed: Annotated[int, size("Experts that a token passes.")] = 1
    model_params: int | None = None
    flop_per_sequence: int | None = None
    dataset_tokens: Annotated[float | None, quantity("Tokens of the run.", "TOKENS")] = None
    batch_size: Annotated[int, size("Sequences of an optimizer step.")] = 2048
    microbatch_size: Annotated[int, size("Sequences in a stage at a time.")] = 1
    seq_len: Annotated[int, size("Tokens of a sequence.")] = 2048
    pp: Annotated[int, size("Pipeline stages.")] = 1
    interleaving: Annotated[int, size("Runs of layers of a stage.")] = 1
    dp: Annotated[int, size("Replicas.")] = 1
    tp: Annotated[int, size("Parts of the inner width.")] = 1
    tp2: Annotated[int, size("Parts of the width between layers.")] = 1
    flop_per_s: Annotated[float, quantity("Peak of a GPU.", "FLOP/S", gt=0)]
    memory_bytes_per_s: Annotated[float, quantity("Of device memory.", "BYTES/S", gt=0)]
    network_bytes_per_s: Annotated[float, quantity("Both ways together.", "BYTES/S", gt=0)]
    value_bytes: Annotated[float, quantity("Of a value that is sent.", "BYTES", gt=0)] = 2
    utilization: Annotated[float, quantity("Of the peak, in a matmul.", "SHARE", gt=0, le=1)] = 0.6

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
    def flop_per_batch(self) -> int:
        """6 a weight that a token meets and token, or the model's."""
        if self.flop_per_sequence is not None:
            return self.batch_size * self.flop_per_sequence
        met = self.model_params or self.num_routed * self.expert_params
        return 2 * _PASSES * met * self.batch_size * self.seq_len

    @property
    def tokens(self) -> float:
        """Of the dataset; 20 a parameter where it is not given."""
        if self.dataset_tokens is None:
            return _TOKENS_PER_PARAM * self.num_params
        return self.dataset_tokens

    @property
    def num_batches(self) -> int:
        """Whole batches of the dataset; what is left over is not trained."""
        return int(self.tokens // (self.batch_size * self.seq_len))

    @property
    def num_gpus(self) -> int:
        """GPUs of all axes."""
        return self.pp * self.dp * self.tp * self.tp2 * self.num_experts


def timed_sizes(spec: ModelSpec, seq_len: int) -> dict[str, Any]:
    """Return the sizes of a model as `TimedRun` has them."""
    columns = 2 * (spec.d_q + spec.d_kv) + (3 if spec.gated else 2) * spec.d_ff
    return {
        "num_layers": spec.num_layers,
        "d_model": spec.d_model,
        "d_internal_ratio": columns // _MATRICES / spec.d_model,
        "model_params": spec.num_parameters,
        "flop_per_sequence": model_flops_per_sequence(spec, seq_len),
    }


def rates_of(place: Machine | Cluster) -> dict[str, float]:
    """Return the rates of a machine, or of a cluster's GPUs and the links inside its nodes.

    Raises:
        TwinstreamError: a number is not in the profile.
    """
    machine = place if isinstance(place, Machine) else machine_of(place)
    peak = machine.peak_bf16_flop_per_s or machine.peak_fp32_flop_per_s
    rates = {"flop_per_s": peak, "memory_bytes_per_s": machine.hbm_bytes_per_s}
    found = {name: rate.value for name, rate in rates.items() if rate and rate.value}
    if missing := rates.keys() - found.keys():
        raise CostError(f"the profile of {machine.name} does not say {' and '.join(missing)}")
    # Both ways together; a GPU by itself exchanges nothing.
    alone = isinstance(place, Machine)
    network = _NO_EXCHANGE if alone else 2 * place.number("node_bytes_per_s")
    return found | {"network_bytes_per_s": network}


@dataclass(frozen=True)
class AxisExchange:
    """What one GPU sends along one axis, and as much that it receives; the network adds up.

    `when` is after each "layer" of a micro-batch, at the "boundary" of a run of layers, at a "hop"
    to other experts between layers of a run, or once a "batch".
    """

    axis: str
    when: str
    sent_bytes: float
    seconds: float


@dataclass(frozen=True)
class RunTime:
    """The time of a run, batch after batch.

    A batch takes its bubble, the longer of the pipeline's matmuls (compute_s) and exchanges
    (network_s), and the sum of gradients. A matmul's shape is inner width, outer width, tokens.
    `utilization` is of the peak of all GPUs.
    """

    num_params: int
    num_gpus: int
    num_batches: int
    num_tokens: int
    flop_total: int
    run_s: float
    matmul_shape: tuple[int, int, int]
    matmul_s: float
    layers_per_run: int
    bubble_s: float
    compute_s: float
    network_s: float
    gradient_s: float
    batch_s: float
    utilization: float
    exchanges: tuple[AxisExchange, ...]


def time_of(run: TimedRun) -> RunTime:
    """Estimate the time of a run.

    In the bubble, nothing hides what is exchanged. At the end of a run of layers only what is sent
    is waited for; in between, a token hops with the share of experts that are elsewhere. In a full
    pipeline the longer of matmuls and exchanges hides the other; tokens hop after every layer, or
    else the boundary has its share of each layer of the run, even where there is but one stage.

    Raises:
        CostError: something does not come apart evenly.
    """
    _check_fit(run)
    if not run.num_batches:
        raise CostError(
            f"{run.tokens:,.0f} tokens are less than a batch of "
            f"{run.batch_size * run.seq_len:,}: train on more, or lower batch_size"
        )
    tokens = run.microbatch_size * run.seq_len * run.num_routed // (run.dp * run.num_experts)
    inner, outer = run.d_internal // run.tp, run.d_model // run.tp2
    compute_s = 2 * inner * outer * tokens / (run.flop_per_s * run.utilization)
    # A value counts as one byte of memory whatever the precision, as in davidsj/ml_par_sim.
    memory_s = (inner * outer + outer * tokens + inner * tokens) / run.memory_bytes_per_s
    # Attention and head of a model, which are no part of the two matrices, take as long per FLOP.
    in_matrices = 2 * _PASSES * run.num_routed * run.expert_params * run.batch_size * run.seq_len
    layer_s = _PASSES * _MATRICES * max(compute_s * run.flop_per_batch / in_matrices, memory_s)
    layers_per_run = run.num_layers // (run.pp * run.interleaving)
    exchanges = _exchanges(run)
    within_s, boundary_s, hop_s, gradient_s = (
        sum(passes * one.seconds for one in exchanges if one.when == when)
        for when, passes in (("layer", 2), ("boundary", 2), ("hop", 2), ("batch", 1))
    )
    elsewhere = (run.num_experts - 1) / run.num_experts
    of_run_s = layers_per_run * (layer_s + within_s) + boundary_s / 2
    bubble_s = (run.pp - 1) * (of_run_s + (layers_per_run - 1) * elsewhere * hop_s)
    layer_steps = run.num_layers // run.pp * (run.batch_size // run.microbatch_size)
    compute_all_s = layer_steps * layer_s
    network_all_s = layer_steps * (within_s + (hop_s or boundary_s / layers_per_run))
    batch_s = bubble_s + max(compute_all_s, network_all_s) + gradient_s
    return RunTime(
        num_params=run.num_params,
        num_gpus=run.num_gpus,
        num_batches=run.num_batches,
        num_tokens=run.num_batches * run.batch_size * run.seq_len,
        flop_total=run.num_batches * run.flop_per_batch,
        run_s=run.num_batches * batch_s,
        matmul_shape=(inner, outer, tokens),
        matmul_s=max(compute_s, memory_s),
        layers_per_run=layers_per_run,
        bubble_s=bubble_s,
        compute_s=compute_all_s,
        network_s=network_all_s,
        gradient_s=gradient_s,
        batch_s=batch_s,
        utilization=run.flop_per_batch / (run.flop_per_s * run.num_gpus * batch_s),
        exchanges=exchanges,
    )


def _exchanges(run: TimedRun) -> tuple[AxisExchange, ...]:
    """Of all but gradients there is as much backward as forward.

    The sum over experts and over parts of the inner width carries tokens to their next experts as
    well: only where there is no such sum is there a hop.
    """
    dp, tp, tp2, experts, routed = run.dp, run.tp, run.tp2, run.num_experts, run.num_routed
    hidden = run.microbatch_size * run.seq_len * run.d_model
    inner = run.microbatch_size * run.seq_len * run.d_internal * routed
    everywhere, summed = dp * tp * tp2 * experts, routed * tp > 1
    rows = (
        ("tp2", "layer", inner, dp * tp * experts, tp2 > 1),
        ("tp", "layer", hidden, dp * tp2 * experts // routed, summed),
        ("pp", "boundary", hidden, everywhere, True),
        ("ep", "hop", hidden, everywhere, experts > 1 and not summed),
        ("dp", "batch", run.num_params, run.num_gpus // dp, dp > 1),
    )
    return tuple(
        AxisExchange(
            axis, when, values / gpus * run.value_bytes,
            2 * values / gpus * run.value_bytes / run.network_bytes_per_s,
        )
        for axis, when, values, gpus, is_there in rows
        if is_there
    )  # fmt: skip


def _check_fit(run: TimedRun) -> None:
    if run.d_internal < 1:
        raise CostError(
            f"d_internal_ratio {run.d_internal_ratio:g} leaves no channel of {run.d_model:,}"
        )
    if run.pp == 1 and run.interleaving > 1:
        raise CostError(
            f"a single stage cannot be interleaved {run.interleaving:,} times: raise pp, or leave "
            "out interleaving"
        )
    for name, parts, whole, what in (
        ("num_routed", run.num_routed, run.num_experts, "experts"),
        ("microbatch_size", run.microbatch_size, run.batch_size, "sequences of a batch"),
        ("dp x num_experts", run.dp * run.num_experts,
         run.microbatch_size * run.seq_len * run.num_routed,
         "tokens of a micro-batch, once for each expert that they pass"),
        ("pp x interleaving", run.pp * run.interleaving, run.num_layers, "layers"),
        ("tp", run.tp, run.d_internal, "channels of the inner width"),
        ("tp2", run.tp2, run.d_model, "channels of d_model"),
    ):  # fmt: skip
        if whole % parts:
            raise CostError(
                f"{name}: {parts:,} does not divide the {whole:,} {what}: choose a divisor"
            )
