"""What one rank computes for one microbatch where weights are frozen, with adapters or without."""

from dataclasses import dataclass, field

from twinstream.models.layout import EXPERTS
from twinstream.models.layouts.work import PartWork, ShapeWork, joined
from twinstream.models.providers.trained import trained_groups
from twinstream.models.recipes.adapter_layout import expert_sites, low_widths
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cost import Work


@dataclass(frozen=True, kw_only=True)
class FrozenWork(ShapeWork):
    """Work of Megatron's kernels on a recipe that freezes weights or trains adapters beside them.

    Weights that are frozen have no gradient. An adapter of rank r adds x A^T and its product with B
    to a projection, in the model's dtype: of a column-parallel one B is split over tp, of a
    row-parallel one A.

    >>> from twinstream.models.presets import load_preset
    >>> from twinstream.models.recipes.lora import Lora
    >>> LORA = Recipe(lora=Lora(rank=16, alpha=32.0))
    >>> work = FrozenWork(shape=load_preset("8b"), seq_len=8192, recipe=LORA)
    >>> sum(one.flops for one in work.mlp().backward_weight) < 1e12
    True
    """

    recipe: Recipe = field(default_factory=Recipe)

    def latents(self) -> PartWork:
        """Norm and projections to few columns, of latent attention."""
        return self._kept(super().latents(), "0")

    def attention_before_core(self) -> PartWork:
        """Norm, QKV and RoPE; adapters of Q, K and V."""
        part = self._kept(super().attention_before_core(), "0")
        return self._with_adapter(part, "qkv", self.shape.d_model, self.d_qkv)

    def attention_after_core(self) -> PartWork:
        """Output projection, dropout and residual; its adapter."""
        part = self._kept(super().attention_after_core(), "0")
        return self._with_adapter(part, "o", self.d_q, self.shape.d_model)

    def mlp(self) -> PartWork:
        """Norm, dense FFN, dropout and residual; adapters of its projections."""
        part = self._kept(super().mlp(), "0")
        if self.shape.experts is not None:
            return part
        d, up = self.shape.d_model, (2 if self.shape.gated else 1) * self.d_ff
        return self._with_adapter(self._with_adapter(part, "gate_up", d, up), "down", self.d_ff, d)

    def router(self) -> PartWork:
        """Norm, router and the sorting of tokens by expert."""
        return self._kept(super().router(), "0")

    def experts(self) -> PartWork:
        """The rank's experts; their adapters, each expert's on its rows."""
        part = self._kept(super().experts(), f"0{EXPERTS}")
        lora = self.recipe.lora
        if lora is None or self.shape.experts is None:
            return part
        each = -(-self.expert_tokens // self.num_experts)
        for site in expert_sites(self.shape, lora):
            sizes = (site.in_width, site.out_width)
            part = joined(part, self._adapter(each, site.rank, sizes, self.num_experts))
        return part

    def embedding(self) -> PartWork:
        """Rows of all tokens."""
        return self._kept(super().embedding(), "embedding")

    def head(self) -> PartWork:
        """Final norm, logits and their loss."""
        return self._kept(super().head(), "head")

    def _kept(self, part: PartWork, group: str) -> PartWork:
        """A part whose weights have gradients only where their group is trained."""
        trained = group in trained_groups(self.shape, self.recipe)
        return part if trained else part._replace(backward_weight=())

    def _with_adapter(self, part: PartWork, site: str, width: int, out: int) -> PartWork:
        lora = self.recipe.lora
        low = None if lora is None else low_widths(lora, self.shape.d_ff).get(site)
        if not low:
            return part
        return joined(part, self._adapter(self.tokens, low, (width, out)))

    def _adapter(self, rows: int, low: int, sizes: tuple[int, int], groups: int = 1) -> PartWork:
        kernels, dtype = self._kernels, self.dtype
        width, out = sizes

        def product(n: int, k: int) -> Work:
            return kernels.matmul(rows, n, k, groups=groups)

        def gradient(m: int, n: int) -> Work:
            return kernels.weight_gradient(m, n, rows, dtype, groups)

        def added(columns: int) -> Work:
            return self._vector("accumulate", 3 * groups * rows * columns)

        return PartWork(
            (product(low, width), product(out, low), added(out)),
            (product(low, out), product(width, low), added(width)),
            (gradient(out, low), gradient(low, width)),
        )
