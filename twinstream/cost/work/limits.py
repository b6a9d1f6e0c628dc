"""Rules of thumb that keep a run efficient: gradient noise, bubble, arithmetic intensity."""

from typing import Literal

from twinstream.cost.refusal import CostError
from twinstream.cost.work.decoder import Batches, Decoder
from twinstream.cost.work.mesh import Mesh
from twinstream.schedule.node import Node

MOST_TOKENS_PER_EXPERT = 4096 * 2048
LEAST_MICRO_BATCHES_PER_STAGE = 4
LEAST_MATMUL_SIZE = 1024

_Kind = Literal["gradient noise", "pipeline bubble", "arithmetic intensity"]


class Limit(Node):
    """One rule: `value` is to be at most, or at least, `bound`.

    Fields:
        kind: what it keeps small (noise, bubble) or large (intensity).
        of: what the value is.
        advice: what to change where it does not hold.
    """

    kind: _Kind
    of: str
    value: int
    relation: Literal["at most", "at least"]
    bound: int
    advice: str

    @property
    def holds(self) -> bool:
        """Whether the value is on the right side of the bound."""
        if self.relation == "at most":
            return self.value <= self.bound
        return self.value >= self.bound


class Efficiency(Node):
    """The rules for one run, and the micro-batches that they leave.

    Fields:
        limits: in the order in which they are asked.
        micro_batch_sizes: sequences of a micro-batch over all replicas, ascending.
    """

    limits: tuple[Limit, ...]
    micro_batch_sizes: tuple[int, ...]

    def require(self) -> None:
        """
        Raises:
            CostError: the first rule that does not hold.
        """
        for limit in self.limits:
            if not limit.holds:
                raise CostError(
                    f"{limit.kind}: {limit.of} would be {limit.value:,}, and should be "
                    f"{limit.relation} {limit.bound:,}: {limit.advice}, or count it all the same "
                    "with --skip-efficiency-check"
                )


def efficiency_of(decoder: Decoder, batches: Batches, mesh: Mesh) -> Efficiency:
    """The rules for a run whose sizes come apart evenly on its mesh.

    Source: the bounds are those of davidsj/ml_par_sim, transformer.py.
    """
    batch, tokens = batches.batch_size, batches.seq_len // decoder.num_experts
    smallest = mesh.data * -(-LEAST_MATMUL_SIZE * mesh.seq // tokens)
    largest = batch // (LEAST_MICRO_BATCHES_PER_STAGE * mesh.pipe) if mesh.pipe > 1 else batch
    possible = (mesh.data * divisor for divisor in _divisors(batch // mesh.data))
    sizes = tuple(size for size in possible if smallest <= size <= largest)
    limits = (
        Limit(
            kind="gradient noise",
            of="tokens of a batch at an expert",
            value=batch * tokens,
            relation="at most",
            bound=MOST_TOKENS_PER_EXPERT,
            advice="lower --batch-size",
        ),
        *_pipeline_limits(batch // mesh.data, mesh),
        Limit(
            kind="arithmetic intensity",
            of=f"sequences of the least micro-batch whose matmuls have {LEAST_MATMUL_SIZE:,} "
            "tokens",
            value=smallest,
            relation="at most",
            bound=largest,
            advice="raise --batch-size, or lower --p-data, --p-seq or --p-pipe",
        ),
        Limit(
            kind="arithmetic intensity",
            of=f"sizes from {smallest:,} to {largest:,} that divide a batch of {batch:,} and are "
            f"a multiple of --p-data {mesh.data:,}",
            value=len(sizes),
            relation="at least",
            bound=1,
            advice="choose a --batch-size with more divisors",
        ),
        *_width_limits(decoder, mesh),
    )
    return Efficiency(limits=limits, micro_batch_sizes=sizes)


def _pipeline_limits(most_micro_batches: int, mesh: Mesh) -> tuple[Limit, ...]:
    if mesh.pipe == 1:
        return ()
    return (
        Limit(
            kind="pipeline bubble",
            of="micro-batches that a replica has at most",
            value=most_micro_batches,
            relation="at least",
            bound=LEAST_MICRO_BATCHES_PER_STAGE * mesh.pipe,
            advice="raise --batch-size, or lower --p-pipe or --p-data",
        ),
    )


def _width_limits(decoder: Decoder, mesh: Mesh) -> tuple[Limit, ...]:
    heads = decoder.num_heads * decoder.d_head
    inner, outer = mesh.tensor_int, mesh.tensor_ext
    widths = (
        ("--p-tensor-int", inner, "the feed-forward network", decoder.d_ffn),
        ("--p-tensor-int", inner, "the heads", heads),
        ("--p-tensor-ext", outer, "--d-model", decoder.d_model),
    )
    return tuple(
        Limit(
            kind="arithmetic intensity",
            of=f"{flag} over the {width:,} channels of {of}",
            value=degree,
            relation="at most",
            bound=width // LEAST_MATMUL_SIZE,
            advice=f"lower {flag}, so that each device has {LEAST_MATMUL_SIZE:,} of them",
        )
        for flag, degree, of, width in widths
    )


def _divisors(number: int) -> list[int]:
    """
    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*low, *(number // one for one in low)})
