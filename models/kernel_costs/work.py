"""Cost descriptors of a decoder's tasks: FLOPs and HBM bytes per kernel group.

FLOPs are those executed. They exceed model FLOPs (`models.flops`) only by the recompute tasks,
by the scores that attention's backward computes again (5 matmuls instead of 4), and by the K
projection that a QK-norm backward redoes.

These are the eager implementation's; `triton_work` has what differs with Triton's kernels. Eager
elementwise work is counted as if every operation were one pass, although it is several torch ops
with float32 blocks between them, which stay in a cache.

Legend: T tokens of the chunk, d model width, q width of Q, k width of K (= of V), f FFN width.
"""

from dataclasses import dataclass, field

from twinstream.models.decoders.sizes import ITEMSIZE_BYTES
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.adapter_work import AdapterWork
from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.kernel_costs.attention_shape import (
    ROW_BLOCK,
    room_for_longest,
    room_for_sequences,
)
from twinstream.models.kernel_costs.expert_work import ExpertWork
from twinstream.models.kernel_costs.products import gradient_work, matmul_work
from twinstream.models.kernel_costs.scratch_sizes import state_bytes, sum_shares
from twinstream.models.layout import dense_width
from twinstream.models.recipes.quantized_base import (
    BLOCK_ELEMENTS,
    CODE_BITS,
    SCALE_BYTES,
    BaseFormat,
)
from twinstream.models.recipes.recipe import OptimizerState, Recipe
from twinstream.schedule.cost import Work
from twinstream.schedule.workload import Workload

_FLOAT32_BYTES = 4
_BLOCKS_FOR_ALL_ROOM = ("sdpa_flash", "flash2")  # blocks for as many sequences, all of the longest
# A block that finds no sequence takes some 7 ns of the device, a launch 2 us: assumed.
_EMPTY_BLOCKS_OF_A_LAUNCH = 300


@dataclass(frozen=True)
class ChunkWork:
    """The work of each task for one chunk that starts at `start` in its sequence, or behind so many
    tokens of a cache. Where `ep` ranks share experts, products with these are other tasks. Where it
    has `seen` so many keys every query sees all of them.
    """

    spec: ModelSpec
    workload: Workload
    start: int
    recipe: Recipe = field(default_factory=Recipe)
    ep: int = 1
    seen: int | None = None

    def gradient_matmul(self, m: int, n: int, k: int) -> Work:
        """[m, k] x [k, n], added to weight gradients in place."""
        return gradient_work(self.spec, self.recipe, m, n, k)

    def matmul(self, m: int, n: int, k: int, *, accumulate: bool = False) -> Work:
        """[m, k] x [k, n]; with `accumulate` the result is read as well as written."""
        return matmul_work(self.spec, m, n, k, accumulate=accumulate)

    def vector(self, unit: str, elements_moved: int, *, launches: int = 1) -> Work:
        """An elementwise kernel that reads and writes `elements_moved` elements in all."""
        return self._work(
            unit, (elements_moved,), elements_moved, elements_moved * self.spec.itemsize, launches
        )

    def attention_forward(self) -> Work:
        """Scores and values over the causal half: 4 x q width FLOPs per (query, key) pair."""
        return self._attention("attention_forward", 4, tensors_moved=2)

    def attention_backward(self) -> Work:
        """Five matmuls over the causal half: the scores again, dV, dP, dQ, dK."""
        return self._attention("attention_backward", 10, tensors_moved=4)

    def block_forward(self) -> tuple[Work, ...]:
        t, s = self.tokens, self.spec
        return (
            self.vector("rms_norm", 4 * t * s.d_model, launches=2),
            self.matmul(t, s.d_q + 2 * s.d_kv, s.d_model, accumulate=self.adapters.covers("qkv")),
            self.vector("rope", 2 * t * (s.d_q + s.d_kv)),
            self.attention_forward(),
            self.matmul(t, s.d_model, s.d_q, accumulate=True),
            *(self.of_experts.choice() if s.experts else ()),
            *self.ffn_projections(),
            *(self.ffn_outputs() if self.ep == 1 else ()),
            *self.adapters.forward(),
        )

    def ffn_projections(self) -> tuple[Work, ...]:
        """Gate and up, of experts and of the network that all tokens go through."""
        t, s = self.tokens, self.spec
        routed = self.of_experts.projections() if s.experts else ()
        if not (f := dense_width(s)):
            return routed
        return (
            *routed,
            self.matmul(t, 2 * f, s.d_model, accumulate=self.adapters.covers("gate_up")),
        )

    def ffn_outputs(self) -> tuple[Work, ...]:
        """SwiGLU and down of both, added to the residual stream."""
        t, s = self.tokens, self.spec
        routed = self.of_experts.outputs() if s.experts else ()
        if not (f := dense_width(s)):
            return routed
        swiglu, down = (
            self.vector("swiglu", 3 * t * f),
            self.matmul(t, s.d_model, f, accumulate=True),
        )
        return (*routed, swiglu, *self._before_down(), down)

    def _before_down(self) -> tuple[Work, ...]:
        """What comes between SwiGLU and down beside them."""
        return ()

    @property
    def of_experts(self) -> ExpertWork:
        """Return the work of routed experts, of a block that has some."""
        return ExpertWork(self.spec, self.recipe, self.tokens, self.ep)

    def combine_forward(self) -> tuple[Work, ...]:
        """What follows the experts of other ranks: order of rows, their sums, down of the rest."""
        return (*self.of_experts.order(), *self.ffn_outputs())

    def dispatch_backward(self) -> tuple[Work, ...]:
        """Normed rows, and gradients of outputs, in the order of experts."""
        norm = self.vector("rms_norm", 2 * self.tokens * self.spec.d_model)
        return (norm, *self.of_experts.dispatch())

    def shared_forward(self) -> tuple[Work, ...]:
        """A rank's experts on rows of all ranks, of which a chunk's number are expected."""
        return self.of_experts.products()

    def shared_backward(self, *, frozen_experts: bool = False) -> tuple[Work, ...]:
        return self.of_experts.products_backward(frozen_experts=frozen_experts)

    def recompute_attention(self) -> tuple[Work, ...]:
        """Recompute from level ATTENTION: Q, output, gate and up projections."""
        t, s = self.tokens, self.spec
        return (
            self.vector("rms_norm", 4 * t * s.d_model, launches=2),
            self.matmul(t, s.d_q, s.d_model, accumulate=self.adapters.covers("qkv")),
            self.matmul(t, s.d_model, s.d_q, accumulate=True),
            *self.ffn_projections(),
            *self.adapters.recompute(),
        )

    def recompute_experts(self) -> tuple[Work, ...]:
        """Recompute from level EXPERTS: gate and up of routed experts."""
        norm = self.vector("rms_norm", 2 * self.tokens * self.spec.d_model)
        return (norm, *self.of_experts.projections())

    def recompute_input(self) -> tuple[Work, ...]:
        """Recompute from level INPUT: the same and attention."""
        rope = self.vector("rope", 2 * self.tokens * self.spec.d_q)
        return (*self.recompute_attention(), rope, self.attention_forward())

    def block_backward(
        self, *, frozen: bool = False, frozen_experts: bool = False
    ) -> tuple[Work, ...]:
        """`frozen` weights take no gradient; their input's gradient goes on all the same."""
        t, s = self.tokens, self.spec
        d, q, k = s.d_model, s.d_q, s.d_kv
        covers = self.adapters.covers
        works = (
            *self._experts_backward(frozen=frozen, frozen_experts=frozen_experts),
            *self._ffn_backward(frozen=frozen),
            self.matmul(t, q, d, accumulate=covers("o")),
            self.attention_backward(),
            self.vector("rope_backward", 3 * t * (q + k)),
            self.matmul(t, d, q + 2 * k, accumulate=covers("qkv")),
            self.vector("rms_norm_backward", 4 * t * d, launches=2),
            *([] if frozen else self.dense_gradients()),
            *self.adapters.backward(),
        )
        return (*works, self.matmul(t, k, d, accumulate=covers("qkv"))) if s.qk_norm else works

    def _experts_backward(self, *, frozen: bool, frozen_experts: bool) -> tuple[Work, ...]:
        """Through routed experts, with the gradients of their weights; none of a block without."""
        if not self.spec.experts:
            return ()
        return self.of_experts.backward(frozen=frozen, frozen_experts=frozen_experts)

    def _ffn_backward(self, *, frozen: bool) -> tuple[Work, ...]:
        """Through down, SwiGLU, gate and up of the network of all tokens, and the norm before."""
        t, s, covers = self.tokens, self.spec, self.adapters.covers
        norm = self.vector("rms_norm_backward", 8 * t * s.d_model, launches=2)
        if not (f := dense_width(s)):
            return (norm,)
        return (
            self.matmul(t, f, s.d_model, accumulate=covers("down")),  # of the SwiGLU product
            self.vector("swiglu_backward", 6 * t * f, launches=2),
            self.matmul(t, s.d_model, 2 * f, accumulate=covers("gate_up")),
            norm,
        )

    def weight_gradients(
        self, *, frozen: bool = False, frozen_experts: bool = False
    ) -> tuple[Work, ...]:
        """Return the weight gradients of a block's matrices, those of experts among them."""
        experts: tuple[Work, ...] = ()
        if self.spec.experts:
            experts = self.of_experts.weight_gradients(frozen=frozen, frozen_experts=frozen_experts)
        return (*experts, *([] if frozen else self.dense_gradients()))

    def dense_gradients(self) -> tuple[Work, ...]:
        """Return the weight gradients of the four matrices that all tokens go through."""
        t, s, f = self.tokens, self.spec, dense_width(self.spec)
        ffn = (self.gradient_matmul(s.d_model, f, t), self.gradient_matmul(2 * f, s.d_model, t))
        return (
            *(ffn if f else ()),
            self.gradient_matmul(s.d_model, s.d_q, t),
            self.gradient_matmul(s.d_q + 2 * s.d_kv, s.d_model, t),
        )

    def dequantized(
        self, kernel: str, base: BaseFormat, experts_base: BaseFormat = "model"
    ) -> tuple[Work, ...]:
        """What makes the matrices that a block kernel multiplies with anew from codes: those of the
        block and those of its experts, where either lie in them."""
        if base == experts_base == "model":
            return ()
        s, f = self.spec, dense_width(self.spec)
        into, down = [2 * f * s.d_model] if f else [], [f * s.d_model] if f else []
        routed: dict[str, list[int]] = {}
        matrix = 0
        if s.experts is not None and experts_base != "model":
            matrix = s.experts.count * s.experts.d_ff * s.d_model
            both = ("block_forward", "block_backward", "mlp_part_forward", "mlp_part_backward")
            routed = {name: [2 * matrix, matrix] for name in both}
        if self.ep > 1 and matrix:  # a rank's own, by other tasks
            own = matrix // self.ep
            routed = {name: [2 * own, own] for name in ("experts_forward", "experts_backward")}
            matrix = 0
        whole = [(s.d_q + 2 * s.d_kv) * s.d_model, s.d_q * s.d_model, *into]
        q = [s.d_q * s.d_model, *whole[1:]]  # K and V are kept
        k = s.d_kv * s.d_model
        counts = {
            "block_forward": [q[0], 2 * k, *whole[1:], *down], "block_recompute_attention": q,
            "block_recompute_input": q, "block_recompute_experts": [],
            "block_backward": [*down, *whole[::-1], *([k] if s.qk_norm else [])],
            "attention_part_forward": [q[0], 2 * k, q[0]], "attention_part_recompute": q[:1],
            "attention_part_backward": [q[0], *([k] if s.qk_norm else []), whole[0]],
            "kv_part_forward": [2 * k], "context_part_forward": [q[0], q[0]],
            "context_part_recompute": q[:1], "context_part_backward": q[:1],
            "q_part_recompute": q[:1], "output_part_forward": q[:1], "output_part_backward": q[:1],
            "ring_part_forward": [], "ring_part_backward": [],
            "qkv_part_backward": [*([k] if s.qk_norm else []), whole[0]],
            "mlp_part_forward": [*into, *down], "mlp_part_recompute": into,
            "mlp_part_backward": [*down, *into], "experts_part_recompute": [],
            "mlp_part_dispatch_forward": into, "mlp_part_combine_forward": down,
            "mlp_part_dispatch_backward": [],
            "experts_forward": [], "experts_backward": [], "block_dispatch_backward": [],
            "block_combine_forward": down,
        }[kernel]  # fmt: skip
        again = routed.get(kernel, [2 * matrix] if matrix else [])
        few = experts_base if base == "model" else base
        bits = CODE_BITS[few] + 8 * SCALE_BYTES / BLOCK_ELEMENTS[few]
        return tuple(
            self._work("dequantize", (n,), n, round(n * bits / 8) + n * s.itemsize)
            for n in (*(counts if base != "model" else ()), *again)
        )

    def head_loss(self, row_slice: int) -> tuple[Work, ...]:
        """Final norm, logits in row slices, cross entropy, and the backward of all three."""
        t, d, v = self.tokens, self.spec.d_model, self.spec.vocab_size
        slices = -(-t // row_slice)
        return (
            self.vector("rms_norm", 6 * t * d, launches=3),
            *(self._times(work, slices) for work in self.head_matmuls(row_slice)),
            self.vector("cross_entropy", 4 * t * v, launches=2 * slices),
        )

    def head_evaluate(self, row_slice: int) -> tuple[Work, ...]:
        """Final norm, logits in row slices, and cross entropy, which leaves a gradient unused."""
        t, d, v = self.tokens, self.spec.d_model, self.spec.vocab_size
        slices = -(-t // row_slice)
        return (
            self.vector("rms_norm", 2 * t * d, launches=slices),
            self._times(self.matmul(row_slice, v, d), slices),
            self.vector("cross_entropy", 4 * t * v, launches=2 * slices),
        )

    def row_results(self) -> tuple[Work, ...]:
        """What a head hands out of each row beside the loss: read, and written in float32."""
        if self.workload.result == "loss":
            return ()
        n = self.tokens * (self.spec.vocab_size if self.workload.result == "logits" else 1)
        return (self._work("copy", (n,), n, n * (self.spec.itemsize + _FLOAT32_BYTES)),)

    def head_logits(self) -> tuple[Work, ...]:
        """Final norm and logits of the last token of each sequence."""
        rows, d = self.tokens // self.workload.seq_len, self.spec.d_model
        return (
            self.vector("rms_norm", 2 * rows * d),
            self.matmul(rows, self.spec.vocab_size, d),
        )

    def head(self, row_slice: int, *, evaluates: bool = False) -> tuple[Work, ...]:
        """The passes over the rows that the recipe's loss takes, and what it makes of them."""
        loss = self.recipe.loss
        made = loss.works(self.tokens, self.spec.dtype)
        if evaluates:
            return (*self.head_evaluate(row_slice), *made)
        first = self.head_evaluate(row_slice) if loss.passes > 1 else ()
        return (*first, *made, *self.head_loss(row_slice))

    def head_matmuls(self, row_slice: int) -> tuple[Work, ...]:
        """Logits, their rows' gradient and, unless the LM head is frozen, its own; of a slice."""
        d, v = self.spec.d_model, self.spec.vocab_size
        logits, d_norm = self.matmul(row_slice, v, d), self.matmul(row_slice, d, v)
        if self.recipe.freezes("embedding" if self.spec.tied_embeddings else "head"):
            return (logits, d_norm)
        return (logits, d_norm, self.gradient_matmul(v, d, row_slice))

    def embed_forward(self) -> tuple[Work, ...]:
        return (self.vector("embedding", 2 * self.tokens * self.spec.d_model),)

    def embed_backward(self) -> tuple[Work, ...]:
        return (self.vector("embedding_backward", 4 * self.tokens * self.spec.d_model),)

    @property
    def adapters(self) -> AdapterWork:
        """Return what LoRA adds to a block."""
        return AdapterWork(self.spec, self.recipe, self.tokens)

    @property
    def tokens(self) -> int:
        return self.workload.chunk_tokens

    def _attention(self, unit: str, flops_per_pair: int, tensors_moved: int) -> Work:
        if self.workload.packing is not None:
            return self._attention_of_packed(unit, flops_per_pair, tensors_moved)
        s, seq_len = self.spec, self.workload.seq_len
        sequences = max(1, self.tokens // seq_len)
        queries = min(self.tokens, seq_len)
        keys = self.start + queries if self.seen is None else self.seen
        pairs = 2 * self.start + queries if self.seen is None else 2 * self.seen
        doubled_pairs = sequences * queries * pairs
        rows = sequences * (queries * s.d_q + keys * s.d_kv)
        return self._attention_work(
            unit,
            (queries, keys, s.num_heads, s.head_dim, sequences),
            flops_per_pair * s.d_q * doubled_pairs // 2,
            tensors_moved * rows * s.itemsize,
        )

    def _attention_of_packed(self, unit: str, flops_per_pair: int, tensors_moved: int) -> Work:
        """The sum over the expected sequences. As queries and keys its shape has the length at
        which a token sees as many keys as here on average."""
        assert self.workload.packing is not None
        s, lengths = self.spec, self.workload.packing.expected_lengths
        squares = sum(length * length for length in lengths)
        mean = max(1, round(squares / self.tokens))
        return self._attention_work(
            unit,
            (mean, mean, s.num_heads, s.head_dim, len(lengths)),
            flops_per_pair * s.d_q * squares // 2,
            tensors_moved * self.tokens * (s.d_q + s.d_kv) * s.itemsize,
            launches=self._launches_of_packed(),
        )

    def _launches_of_packed(self) -> int:
        """One, or one for each; FlashAttention-2's blocks that find nothing to do count as some."""
        packing, name = self.workload.packing, self.recipe.implementations.attention
        assert packing is not None
        lengths, heads = packing.expected_lengths, self.spec.num_heads
        if not attention_limits(name).variable_length:
            return len(lengths)
        if name not in _BLOCKS_FOR_ALL_ROOM:
            return 1
        longest = room_for_longest(packing.longest, self.workload.seq_len)
        room = room_for_sequences(len(lengths), packing.most_sequences, heads)
        launched = room * -(-longest // ROW_BLOCK)
        used = sum(-(-length // ROW_BLOCK) for length in lengths)
        return 1 + heads * max(0, launched - used) // _EMPTY_BLOCKS_OF_A_LAUNCH

    def _attention_work(
        self, unit: str, shape: tuple[int, ...], flops: int, hbm_bytes: int, launches: int = 1
    ) -> Work:
        work = self._work(unit, shape, flops, hbm_bytes, launches)
        return work.model_copy(update={"implementation": self.recipe.implementations.attention})

    def _work(
        self, unit: str, shape: tuple[int, ...], flops: int, hbm_bytes: int, launches: int = 1
    ) -> Work:
        return Work(
            unit=unit,
            shape=shape,
            flops=flops,
            hbm_bytes=hbm_bytes,
            launches=launches,
            dtype=self.spec.dtype,
        )

    def _times(self, work: Work, count: int) -> Work:
        return work.model_copy(
            update={
                "flops": work.flops * count,
                "hbm_bytes": work.hbm_bytes * count,
                "launches": work.launches * count,
            }
        )


def adamw_work(
    num_elements: int, dtype: str, gradient_dtype: str | None = None,
    state: OptimizerState = "model",
) -> tuple[Work, ...]:  # fmt: skip
    """One pass: reads parameter, gradient and state; writes parameter and state.

    With a float32 master, which is a part of the state, the parameter is only written; it is
    priced as a float32 model's update, since nothing is rounded by chance.
    """
    itemsize, gradient = ITEMSIZE_BYTES[dtype], ITEMSIZE_BYTES[gradient_dtype or dtype]
    parameter = itemsize if state == "float32_master" else 2 * itemsize
    moved = (parameter + gradient) * num_elements + 2 * state_bytes(state, dtype, num_elements)
    return (
        Work(
            unit="adamw",
            shape=(num_elements,),
            flops=14 * num_elements,
            hbm_bytes=moved,
            launches=1,
            dtype="float32" if state == "float32_master" else dtype,
        ),
    )


def gradient_squares_work(num_elements: int, dtype: str) -> tuple[Work, ...]:
    """Reads a gradient; writes and reads the sums of its stretches."""
    moved = num_elements * ITEMSIZE_BYTES[dtype] + 2 * sum_shares(num_elements) * _FLOAT32_BYTES
    return (_sum_work("gradient_squares", 2 * num_elements, moved, launches=2),)


def gradient_norm_work(num_groups: int) -> tuple[Work, ...]:
    """Reads one number of each group."""
    return (_sum_work("gradient_norm", num_groups, (num_groups + 1) * _FLOAT32_BYTES, launches=1),)


def add_gradients_work(num_elements: int, dtype: str) -> tuple[Work, ...]:
    """Reads two gradients and writes one, at the rate of sums of squares."""
    moved = 3 * num_elements * ITEMSIZE_BYTES[dtype]
    return (_sum_work("gradient_squares", num_elements, moved, launches=1),)


def sum_pieces_work(num_elements: int, num_pieces: int, dtype: str) -> tuple[Work, ...]:
    """Reads all pieces of a gradient and writes their sum, at the same rate."""
    moved = (num_pieces + 1) * num_elements * ITEMSIZE_BYTES[dtype]
    flops = num_pieces * num_elements
    return (_sum_work("gradient_squares", flops, moved, launches=num_pieces),)


def _sum_work(unit: str, flops: int, moved: int, launches: int) -> Work:
    return Work(
        unit=unit, shape=(flops,), flops=flops, hbm_bytes=moved, launches=launches, dtype="float32"
    )
