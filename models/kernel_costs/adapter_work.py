"""Cost descriptors of LoRA's matmuls in a block: thin, and so bound by HBM.

Forward makes x A^T, then the outputs that the base's product is added to; backward likewise the
gradient of the input, so that the base's matmuls only read what they add to as well. Legend: T
tokens of the chunk, r rank.
"""

from dataclasses import dataclass, replace
from typing import Self

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.products import gradient_work, matmul_work
from twinstream.models.recipes.adapter_layout import AdapterSite, adapter_sites
from twinstream.models.recipes.lora import Target
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cost import Work


@dataclass(frozen=True)
class AdapterWork:
    """The work that the adapters of one block do for one chunk; empty where there are none."""

    spec: ModelSpec
    recipe: Recipe
    tokens: int
    names: tuple[str, ...] | None = None

    def covers(self, site: str) -> bool:
        """Whether a projection of the site has adapters."""
        return any(site == each.name for each in self._sites)

    def of_sites(self, *names: str) -> Self:
        """Of some sites alone, as a part of a block has them."""
        return replace(self, names=names)

    def made_again(self) -> tuple[Work, ...]:
        """x A^T where it is not kept."""
        return tuple(
            matmul_work(self.spec, self.tokens, s.low_width, s.in_width) for s in self._sites
        )

    def forward(self) -> tuple[Work, ...]:
        """x A^T of every site, and what the base's product is added to."""
        return (*self.made_again(), *self._outputs(self._sites))

    def keys(self) -> tuple[Work, ...]:
        """K and V of their site, from x A^T."""
        return self._outputs(self._sites, without=("q",))

    def recompute(self) -> tuple[Work, ...]:
        """Outputs again, from the x A^T that is kept; Q of its site, and not K and V."""
        again = [site for site in self._sites if site.name != "down"]
        return self._outputs(again, without=("k", "v"))

    def backward(self) -> tuple[Work, ...]:
        """The gradients of x A^T, of the input's share, and of both matrices."""
        t, found = self.tokens, []
        for site in self._sites:
            widths = [site.out_widths[target] for target in site.adapted]
            found += [matmul_work(self.spec, t, site.rank, width) for width in widths]
            found.append(matmul_work(self.spec, t, site.in_width, site.low_width))
            found.append(self._gradient(site.low_width, site.in_width))
            found += [self._gradient(width, site.rank) for width in widths]
        if self.spec.qk_norm:  # K is made again
            qkv = [site for site in self._sites if site.name == "qkv"]
            found += self._outputs(qkv, without=("q", "v"))
        return tuple(found)

    @property
    def _sites(self) -> tuple[AdapterSite, ...]:
        found = adapter_sites(self.spec, self.recipe.lora) if self.recipe.lora else ()
        return tuple(site for site in found if self.names is None or site.name in self.names)

    def _outputs(
        self, sites: "tuple[AdapterSite, ...] | list[AdapterSite]", without: tuple[Target, ...] = ()
    ) -> tuple[Work, ...]:
        """Those of targets by a matmul; the others' of the same site are zeroed."""
        found = []
        for site in sites:
            for target, width in site.out_widths.items():
                if target in without:
                    continue
                if target in site.adapted:  # of `down` added to the residual stream's copy
                    is_added = site.name == "down"
                    found.append(
                        matmul_work(self.spec, self.tokens, width, site.rank, accumulate=is_added)
                    )
                else:
                    found.append(self._zeroed(width))
        return tuple(found)

    def _gradient(self, m: int, n: int) -> Work:
        """[m, T] x [T, n], added to a weight gradient in place."""
        return gradient_work(self.spec, self.recipe, m, n, self.tokens)

    def _zeroed(self, width: int) -> Work:
        elements = self.tokens * width
        return Work(
            unit="copy", shape=(elements,), flops=elements, hbm_bytes=elements * self.spec.itemsize,
            launches=1, dtype=self.spec.dtype,
        )  # fmt: skip
