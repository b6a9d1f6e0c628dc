"""What one rank holds and handles of a microbatch, and which splits of a shape cannot be."""

from dataclasses import dataclass
from math import inf

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import padded_vocab, rank_heads
from twinstream.models.recipes.recipe import USUALLY_NARROW, NarrowUnit, OptimizerState
from twinstream.schedule.errors import TwinstreamError

UNFUSED = "unfused"
BITS_OF_DTYPE = {"bfloat16": 16, "float16": 16, "float32": 32, "fp8": 8, "fp4": 4}


class UnknownWidthError(TwinstreamError):
    """The bits of an element of this dtype are not known."""

    def __init__(self, dtype: str) -> None:
        super().__init__(f"unknown dtype '{dtype}'. Known dtypes: {', '.join(BITS_OF_DTYPE)}.")


@dataclass(frozen=True, kw_only=True)
class RankSizes:
    """One rank's share of one microbatch: `micro_batch` sequences of `seq_len` tokens.

    Of each sequence a rank has seq_len / cp tokens, in two slices whose causal work is the same on
    each rank (zigzag). Heads, FFN width and vocabulary are split over `tp`, experts over `ep`, each
    expert's width over `etp`, which is `tp` unless given. With `sequence_parallel` what lies
    between the matrix products is split by tokens over `tp`.

    `dtype` is that of activations and parameters; the matrix products of linear layers run in
    `matmul_dtype`, by default the same, but for those of router and head. Weight gradients are
    summed in `gradient_dtype`. `attention_implementation` None is any that keeps its scores on
    chip; "unfused" writes scores and softmax to HBM, as Megatron-LM did before FlashAttention.
    With `expert_nodes` a token is sent once to each of as many nodes that has one of its experts.
    `expert_imbalance` is how many times the mean the tokens of the busiest rank's experts are, of
    which they take at most `capacity_factor` times the mean. `narrow` are the units that compute in
    `matmul_dtype`.

    What does not divide is rounded up; `shape_refusals` has what cannot be.

    Raises:
        UnknownWidthError: a dtype is not known.
    """

    shape: ModelSpec
    seq_len: int
    micro_batch: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = False
    dtype: str = "bfloat16"
    matmul_dtype: str | None = None
    gradient_dtype: str = "float32"
    optimizer_state: OptimizerState = "float32_master"
    attention_implementation: str | None = None
    expert_imbalance: float = 1.0
    capacity_factor: float | None = None
    expert_nodes: int | None = None
    narrow: tuple[NarrowUnit, ...] = USUALLY_NARROW

    def __post_init__(self) -> None:
        for dtype in (self.dtype, self.matmul_dtype or self.dtype, self.gradient_dtype):
            if dtype not in BITS_OF_DTYPE:
                raise UnknownWidthError(dtype)

    @property
    def slice_tokens(self) -> int:
        """Tokens of one sequence on this rank."""
        return -(-self.seq_len // self.cp)

    @property
    def tokens(self) -> int:
        """Tokens that matrix products see."""
        return self.micro_batch * self.slice_tokens

    @property
    def local_tokens(self) -> int:
        """Tokens of norms, residuals and dropout."""
        return -(-self.tokens // self.tp) if self.sequence_parallel else self.tokens

    @property
    def heads(self) -> int:
        """Query heads."""
        return rank_heads(self.shape.num_heads, self.tp)

    @property
    def d_q(self) -> int:
        """Width of the rank's query heads."""
        return self.heads * self.shape.head_dim

    @property
    def d_kv(self) -> int:
        """Width of the rank's key heads."""
        return rank_heads(self.shape.num_kv_heads, self.tp) * self.shape.head_dim

    @property
    def d_v(self) -> int:
        """Width of the rank's heads of values."""
        return rank_heads(self.shape.num_kv_heads, self.tp) * self.shape.v_dim

    @property
    def d_o(self) -> int:
        """Columns that the output projection reads."""
        return self.heads * self.shape.v_dim

    @property
    def d_qkv(self) -> int:
        """Columns of Q, K and V."""
        return self.d_q + self.d_kv + self.d_v

    @property
    def d_columns(self) -> int:
        """Columns of the input of the projections to heads: the model's, or few of latents."""
        latent, d = self.shape.latent, self.shape.d_model
        return d if latent is None else (latent.q_rank or d) + latent.kv_rank + latent.rope_dim

    @property
    def vocab(self) -> int:
        """Rows of the padded vocabulary."""
        return padded_vocab(self.shape.vocab_size, self.tp) // self.tp

    @property
    def num_experts(self) -> int:
        """Routed experts."""
        return -(-self.shape.experts.count // self.ep) if self.shape.experts else 0

    @property
    def routed_tokens(self) -> int:
        """Copies of the rank's own tokens that go to experts, of `local_tokens`; no more than all
        ranks' experts take."""
        if self.shape.experts is None:
            return 0
        return _times(self.local_tokens * self.shape.experts.per_token, min(1.0, self._capacity))

    @property
    def sent_rows(self) -> int:
        """Of them those that are sent: one to a node where that hands it on to its ranks.

        Of m nodes that a token may reach it reaches m (1 - (1 - 1/m)^k) in the mean, with k experts
        drawn evenly; those of as many groups as its router may choose from.
        """
        experts, nodes = self.shape.experts, self.expert_nodes
        if experts is None or nodes is None:
            return self.routed_tokens
        reached = max(1.0, nodes * experts.groups_per_token / experts.num_groups)
        met = reached * (1 - (1 - 1 / reached) ** experts.per_token)
        return _times(self.routed_tokens, min(1.0, met / experts.per_token))

    @property
    def expert_tokens(self) -> int:
        """Tokens that come to the rank's experts, all together: those of etp ranks of a tp group
        for each of the ranks that experts are split over."""
        if self.shape.experts is None:
            return 0
        shared = self.tokens * self.shape.experts.per_token * self.expert_tp
        return _times(shared, min(self.expert_imbalance, self._capacity), self.tp)

    @property
    def _capacity(self) -> float:
        return inf if self.capacity_factor is None else self.capacity_factor

    @property
    def expert_tp(self) -> int:
        """Ranks that split an expert's width."""
        return self.tp if self.etp is None else self.etp

    @property
    def itemsize(self) -> int:
        """Bytes of an element of activations and parameters."""
        return BITS_OF_DTYPE[self.dtype] // 8

    @property
    def unfused(self) -> bool:
        """Whether attention writes its scores to HBM."""
        return self.attention_implementation == UNFUSED

    @property
    def casts(self) -> bool:
        """Whether linear layers keep their input in another dtype than the activations'."""
        return self.dtype_of("gradients") != self.dtype

    @property
    def matmul_bits(self) -> int:
        """Of an element of a linear layer's input as its weights' gradient reads it."""
        return BITS_OF_DTYPE[self.dtype_of("gradients")]

    def dtype_of(self, unit: NarrowUnit) -> str:
        """What a unit multiplies in."""
        return (unit in self.narrow and self.matmul_dtype) or self.dtype

    @property
    def d_ff(self) -> int:
        """Width of the dense FFN."""
        return -(-self.shape.d_ff // self.tp)

    @property
    def expert_d_ff(self) -> int:
        """Width of each routed expert."""
        return -(-self.shape.experts.d_ff // self.expert_tp) if self.shape.experts else 0

    @property
    def shared_d_ff(self) -> int:
        """Width of the shared expert."""
        return -(-self.shape.experts.shared_d_ff // self.tp) if self.shape.experts else 0


def _times(count: int, factor: float, ranks: int = 1) -> int:
    """In whole millionths, so that 1.1 x 10 is 11 and not 11.000000000000002 rounded up."""
    return -(-count * round(factor * 10**6) // (ranks * 10**6))


def shape_refusals(sizes: RankSizes, pp: int = 1) -> list[str]:
    """Why a shape cannot be split so, one sentence each; none if it can."""
    shape, tp = sizes.shape, sizes.tp
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    found = []
    if heads % tp:
        found.append(f"{heads} heads are not divisible by tp {tp}")
    if kv_heads % tp and tp % kv_heads:
        found.append(f"{kv_heads} KV heads are neither divisible by tp {tp} nor divide it")
    found += _width_refusals(sizes)
    if sizes.ep > 1 and shape.experts is None:
        found.append(f"ep is {sizes.ep}, but {shape.name} has no experts")
    elif shape.experts and shape.experts.count % sizes.ep:
        found.append(f"{shape.experts.count} experts are not divisible by ep {sizes.ep}")
    if shape.num_layers < pp:
        found.append(f"{shape.num_layers} layers are fewer than pp {pp}")
    return found + _sequence_refusals(sizes)


def _width_refusals(sizes: RankSizes) -> list[str]:
    shape, tp, etp = sizes.shape, sizes.tp, sizes.expert_tp
    if shape.experts is None:
        splits = [("d_ff", shape.d_ff, "tp", tp)]
    else:
        splits = [("d_ff of an expert", shape.experts.d_ff, "etp" if sizes.etp else "tp", etp),
                  ("d_ff of the shared expert", shape.experts.shared_d_ff, "tp", tp)]  # fmt: skip
    return [
        f"{what} {width} is not divisible by {axis} {ranks}"
        for what, width, axis, ranks in splits
        if width % ranks
    ]


def _sequence_refusals(sizes: RankSizes) -> list[str]:
    shape, seq_len, tp, cp = sizes.shape, sizes.seq_len, sizes.tp, sizes.cp
    found = []
    if cp > 1 and seq_len % (2 * cp):
        found.append(f"seq_len {seq_len} is not divisible by 2 x cp {cp}, two slices a rank")
    elif sizes.sequence_parallel and seq_len // cp % tp:
        found.append(
            f"{seq_len // cp} tokens of a sequence on a rank are not divisible by tp {tp}, as "
            "sequence parallelism needs"
        )
    if shape.max_positions and seq_len > shape.max_positions:
        found.append(f"seq_len {seq_len} is more than the {shape.max_positions} learned positions")
    return found
