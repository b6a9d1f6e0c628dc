"""Cost descriptors of a block's routed experts: grouped matmuls, and what routes and moves rows.

Rows are those of tokens times experts for each, whatever the choice; that of a grouped matmul's
shape is what an expert has on average. Eager kernels multiply expert by expert, Triton's all in
one launch. Legend: T tokens of the chunk, S rows, d model width, f an expert's width, E experts.
"""

from dataclasses import dataclass

from twinstream.models.decoders.sizes import ITEMSIZE_BYTES
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.products import gradient_work, matmul_work
from twinstream.models.kernel_costs.scratch_sizes import BLOCK_ELEMENTS, router_block_width
from twinstream.models.layout import EXPERTS
from twinstream.models.options import Experts
from twinstream.models.recipes.adapter_layout import ExpertSite, expert_sites
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cost import Work

# Launches of torch's operations on a GPU: a sort has some eight of them, a top-k two.
_CHOICE_OPS, _GRADIENT_OPS, _ORDER_OPS = 12, 20, 14
_INT64_BYTES = 8
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class ExpertWork:
    """The work that the experts of one block do for one chunk.

    Where `ep` ranks share them, products are counted by `products` alone: of rows that come from
    all ranks, as many as a chunk has where experts are equally busy.
    """

    spec: ModelSpec
    recipe: Recipe
    tokens: int
    ep: int = 1

    @property
    def experts(self) -> Experts:
        """How tokens go to them."""
        assert self.spec.experts is not None
        return self.spec.experts

    def choice(self) -> tuple[Work, ...]:
        """Logits, scores and the best of them; what forward alone does."""
        return (self._logits(), self._scores(_CHOICE_OPS))

    def projections(self) -> tuple[Work, ...]:
        """The order of rows, rows in it, gate and up of them."""
        d, f = self.spec.d_model, self.experts.d_ff
        found = (*self.order(), self._gather())
        if self.ep > 1:
            return found
        return (*found, self._grouped(2 * f, d), *self._shares("experts_gate_up"))

    def order(self) -> tuple[Work, ...]:
        """Where rows go, and what the expert of all tokens counts."""
        gate = matmul_work(self.spec, self.tokens, 1, self.spec.d_model)
        return (self._order(), *([gate] if self.experts.shared_gate else []))

    def dispatch(self) -> tuple[Work, ...]:
        """What is sent for backward: rows and their gradients."""
        return (*self.order(), self._gather(), self._gather())

    def products(self) -> tuple[Work, ...]:
        """Gate, up and down of every row."""
        d, f = self.spec.d_model, self.experts.d_ff
        swiglu = self._moved("swiglu", 3 * self._rows * f)
        return (
            self._grouped(2 * f, d), *self._shares("experts_gate_up"), swiglu,
            self._grouped(d, f), *self._shares("experts_down"),
        )  # fmt: skip

    def products_backward(self, *, frozen_experts: bool) -> tuple[Work, ...]:
        """Gate and up again; the products of backward; the gradients of both matrices."""
        d, f = self.spec.d_model, self.experts.d_ff
        weights = () if frozen_experts else (self._gradient(d, f), self._gradient(2 * f, d))
        again = (self._grouped(2 * f, d), *self._shares("experts_gate_up"))
        return (*again, *self._back_through_products(), *weights, *self._adapters_backward())

    def _back_through_products(self) -> tuple[Work, ...]:
        rows, d, f = self._rows, self.spec.d_model, self.experts.d_ff
        return (
            self._grouped(f, d),
            self._moved("swiglu", 3 * rows * f),
            self._moved("weigh", 4 * rows * f),
            self._moved("swiglu_backward", 5 * rows * f),
            self._grouped(d, 2 * f),
        )

    def outputs(self) -> tuple[Work, ...]:
        """Down of every row, and the sum of a token's, weighted, with the residual stream."""
        d, f = self.spec.d_model, self.experts.d_ff
        gated = [self._moved("weigh", 2 * self.tokens * self.experts.shared_d_ff)]
        return (
            *(gated if self.experts.shared_gate else []),
            *([] if self.ep > 1 else [self._moved("swiglu", 3 * self._rows * f)]),
            *([] if self.ep > 1 else [self._grouped(d, f), *self._shares("experts_down")]),
            self._moved("permute", (self._rows + 2 * self.tokens) * d),
        )

    def backward(self, *, frozen: bool, frozen_experts: bool) -> tuple[Work, ...]:
        """Through down, SwiGLU, gate and up, and the router; with what weights have of it."""
        t, rows, d = self.tokens, self._rows, self.spec.d_model
        needs_input = not frozen_experts or bool(self._sites)
        *before, last = self._back_through_products()
        products = (
            self._gather(), *before, *([self._gather()] if needs_input else []), last
        )  # fmt: skip
        return (
            self._order(),
            *(products if self.ep == 1 else ()),
            self._moved("permute", (rows + t) * d),
            self._logits(),
            self._scores(_GRADIENT_OPS),
            matmul_work(self.spec, t, d, self.experts.count, accumulate=True),
            *self._shared_backward(frozen=frozen),
            *(self._adapters_backward() if self.ep == 1 else ()),
            *self.weight_gradients(frozen=frozen, frozen_experts=frozen_experts),
        )

    def part_backward(self) -> tuple[Work, ...]:
        """The same of a part of every expert, without the router and a gate, which take sums over
        parts (`router_backward`)."""
        frozen = self.recipe.freezes(f"0{EXPERTS}")
        *before, last = self._back_through_products()
        t, d, shared = self.tokens, self.spec.d_model, self.experts.shared_d_ff
        again = [] if frozen and not self._sites else [self._gather()]
        products = (self._gather(), *before, *again, last)
        return (
            *self.order(),
            *(products if self.ep == 1 else ()),
            self._moved("permute", (self._rows + t) * d),
            *([self._moved("residual", 3 * t * d)] if shared else []),
            *([self._moved("weigh", 4 * t * shared)] if self.experts.shared_gate else []),
            *(self._adapters_backward() if self.ep == 1 else ()),
            *self.weight_gradients(frozen=True, frozen_experts=frozen),
        )  # fmt: skip

    def router_backward(self, *, frozen: bool) -> tuple[Work, ...]:
        """From what tokens' experts count to normed rows, through the router and a gate."""
        t, d, rows = self.tokens, self.spec.d_model, [self.experts.count]
        rows += [1] if self.experts.shared_gate else []
        gradients = [] if frozen else [gradient_work(self.spec, self.recipe, n, d, t) for n in rows]
        through = [matmul_work(self.spec, t, d, n, accumulate=True) for n in rows]
        return (self._logits(), self._scores(_GRADIENT_OPS), *through, *gradients)

    def weight_gradients(self, *, frozen: bool, frozen_experts: bool) -> tuple[Work, ...]:
        """Of both matrices of every expert, and of the router."""
        t, d, f = self.tokens, self.spec.d_model, self.experts.d_ff
        router = [] if frozen else [gradient_work(self.spec, self.recipe, self.experts.count, d, t)]
        if frozen_experts or self.ep > 1:
            return tuple(router)
        return (self._gradient(d, f), self._gradient(2 * f, d), *router)

    @property
    def _rows(self) -> int:
        return self.tokens * self.experts.per_token

    @property
    def _sites(self) -> tuple[ExpertSite, ...]:
        return expert_sites(self.spec, self.recipe.lora) if self.recipe.lora else ()

    def _shares(self, name: str) -> tuple[Work, ...]:
        """What adapters add to an output."""
        return tuple(
            work
            for site in self._sites
            if site.name == name
            for work in (
                self._grouped(site.rank, site.in_width),
                self._grouped(site.out_width, site.rank, accumulate=True),
            )
        )  # fmt: skip

    def _shared_backward(self, *, frozen: bool) -> tuple[Work, ...]:
        """Of an expert that all tokens go to what other blocks have not: the gradient of its input
        is added to that of routed ones'; and its gate's."""
        t, d, experts = self.tokens, self.spec.d_model, self.experts
        found = [self._moved("residual", 3 * t * d)] if experts.shared_d_ff else []
        if experts.shared_gate:
            found += [matmul_work(self.spec, t, 1, d)]
            found += [self._moved("weigh", 4 * t * experts.shared_d_ff)]
            found += [matmul_work(self.spec, t, d, 1, accumulate=True)]
        if experts.shared_gate and not frozen:
            found.append(gradient_work(self.spec, self.recipe, 1, d, t))
        return tuple(found)

    def _adapters_backward(self) -> tuple[Work, ...]:
        """The gradient of x A^T twice, the input's share, x A^T again, and both matrices'."""
        found: list[Work] = []
        for site in self._sites:
            low = self._grouped(site.rank, site.out_width)
            found += [low, self._grouped(site.in_width, site.rank, accumulate=True)]
            found += [self._grouped(site.rank, site.in_width), low]
            found += [self._gradient(site.out_width, site.rank)]
            found += [self._gradient(site.rank, site.in_width)]
        return tuple(found)

    def _gather(self) -> Work:
        return self._moved("permute", 2 * self._rows * self.spec.d_model)

    def _logits(self) -> Work:
        """A product for each block of rows."""
        found = matmul_work(self.spec, self.tokens, self.experts.count, self.spec.d_model)
        return found.model_copy(update={"launches": self._router_blocks})

    def _scores(self, num_ops: int) -> Work:
        """So many operations of torch on the scores of all experts, block of rows by block."""
        moved = num_ops * self.tokens * self.experts.count * _FLOAT32_BYTES
        return self._vector("router", moved, launches=num_ops * self._router_blocks)

    @property
    def _router_blocks(self) -> int:
        width = router_block_width(self.spec.d_model, self.experts)
        return -(-self.tokens // max(1, BLOCK_ELEMENTS // width))

    def _order(self) -> Work:
        """Sorts what rows go to which expert, and where each row is then."""
        return self._vector("router", 6 * self._rows * _INT64_BYTES, launches=_ORDER_OPS)

    def _grouped(self, n: int, k: int, *, accumulate: bool = False) -> Work:
        """[rows, k] x [k, n] of every expert; with `accumulate` the result is read, too."""
        rows, count = self._rows, self.experts.count
        moved = rows * (k + (2 if accumulate else 1) * n) + count * n * k
        return self._product("grouped_matmul", (self._each, n, k, count), rows, moved)

    def _gradient(self, m: int, n: int) -> Work:
        """[m, rows] x [rows, n] of every expert, added to its gradient."""
        gradient = ITEMSIZE_BYTES[self.recipe.gradient_dtype(self.spec.dtype)]
        count, item = self.experts.count, self.spec.itemsize
        moved = self._rows * (m + n) + 2 * count * m * n * gradient // item
        shape = (m, n, self._each, count)
        return self._product("grouped_matmul_gradient", shape, self._rows, moved)

    def _product(self, unit: str, shape: tuple[int, ...], rows: int, moved: int) -> Work:
        flops = 2 * rows * shape[1] * (shape[2] if unit == "grouped_matmul" else shape[0])
        is_one = self.recipe.implementations.vector == "triton"
        return Work(
            unit=unit, shape=shape, flops=flops, hbm_bytes=moved * self.spec.itemsize,
            launches=1 if is_one else min(self.experts.count, rows), dtype=self.spec.dtype,
        )  # fmt: skip

    @property
    def _each(self) -> int:
        """Rows of an expert on average."""
        return max(1, self._rows // self.experts.count)

    def _moved(self, unit: str, elements: int) -> Work:
        return self._vector(unit, elements * self.spec.itemsize, elements=elements)

    def _vector(
        self, unit: str, hbm_bytes: int, *, launches: int = 1, elements: int | None = None
    ) -> Work:
        count = hbm_bytes // _FLOAT32_BYTES if elements is None else elements
        return Work(
            unit=unit, shape=(count,), flops=count, hbm_bytes=hbm_bytes, launches=launches,
            dtype=self.spec.dtype,
        )  # fmt: skip
