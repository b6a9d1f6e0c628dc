"""All layouts of a model on so many GPUs that are worth a look."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, product
from typing import Any, NamedTuple

from twinstream.clusters.kernel_sets import (
    cluster_refusal,
    run_refusal,
    slices_refusal,
    with_kernels,
)
from twinstream.clusters.refusals import order_refusals, refusals_of
from twinstream.clusters.search.chains import Pricing
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, LayoutError
from twinstream.models.providers.model import AnyModel
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.choices import OPEN, Choices

_MOST_MICRO_BATCH = 16
_LEAST_TOKENS_OF_CP = 4096  # of a sequence on a rank: below, other splits do better
_MOST_VIRTUAL_STAGES = 8
_NEVER_OPEN = ("sequence_parallel", "stage_layers", "expert_imbalance", "dp_overlap", "shard",
               "reduction", "etp", "tp_overlap", "capacity_factor", "expert_nodes")  # fmt: skip
_MOST_REFUSED, _REASONS_TOLD = 2000, 4


class Open(NamedTuple):
    """What is tried where it is not fixed: ZeRO of replicas, orders of several virtual stages,
    whether replicas share experts; and why kernels of ours do not compute a layout."""

    zero: Sequence[int] = (1, 3)
    orders: Sequence[str] = ("interleaved",)
    shares_experts: bool = True
    refusal: Callable[[AnyModel, Recipe, Layout], str | None] = cluster_refusal


_PRICED = Open()
# The less is sent the earlier. Experts are shared where it is asked for: plans take long.
_HERE = Open((0, 1, 2, 3), ("interleaved", "ring"), shares_experts=False, refusal=run_refusal)


def layouts(
    job: Job,
    num_gpus: int,
    gpus_per_node: int,
    fixed: Mapping[str, Any],
    is_open: Open = _PRICED,
    *,
    refused: bool = False,
) -> Iterator[Layout]:
    """Layouts whose degrees divide what they split; `fixed` has what is not left open.

    With `refused` also those in which what is fixed stands in the way, for `refusals_of` to say so.

    Left open, tp stays within a node, cp keeps 4,096 tokens of a sequence on a rank at least,
    pipelines are 1f1b, zero-bubble and, of several virtual stages, as `is_open` has it, as has ZeRO
    of replicas; recomputation is none or full, or the planner's where twinstream's own kernels run
    the layout. What has no room on the device may be on the host.
    """
    shape = job.shape
    for tp, cp, pp in product(
        _choices(fixed, "tp", _divisors_of(num_gpus, min(gpus_per_node, shape.num_heads))),
        _choices(fixed, "cp", _powers(max(1, job.seq_len // _LEAST_TOKENS_OF_CP))),
        _choices(fixed, "pp", _divisors_of(num_gpus, shape.num_layers)),
    ):
        each = tp * cp * pp
        dp = fixed.get("dp") or num_gpus // each
        if dp * each != num_gpus and not (refused and "dp" in fixed):
            continue
        experts = shape.experts.count if shape.experts and is_open.shares_experts else 1
        among = dp * tp if fixed.get("etp") == 1 else dp
        for ep in _choices(fixed, "ep", [n for n in _powers(experts) if among % n == 0]):
            degrees = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep}
            yield from _with_the_rest(job, degrees, fixed, is_open, refused)


class NoLayoutError(LayoutError):
    """No layout fits, or none is possible."""


@dataclass(frozen=True)
class RunsHere:
    """The constraint that twinstream's own kernels run a layout; each is planned whole.

    Args:
        machine: the profile of a rank's device.
        other_cuts: the job's step cut otherwise, which the fastest layout tries, too.
        choices: what is fixed of the plans of all stages.
    """

    machine: Machine
    other_cuts: Sequence[Job] = ()
    choices: Choices = OPEN


@dataclass(frozen=True)
class SearchSpace:
    """A search: model and batch, GPUs, and what is fixed.

    Of the job's layout only the micro-batch is looked at, and that where layouts have to run here.
    """

    job: Job
    num_gpus: int
    cluster: Cluster
    pricing: Pricing
    fixed: Mapping[str, Any]
    here: RunsHere | None = None

    @property
    def devices(self) -> str:
        """The word for what layouts are over."""
        return "GPUs" if self.here is None else "ranks"

    def possible(self) -> list[Layout]:
        """Layouts that can be.

        Raises:
            NoLayoutError: none can; says why.
        """
        found = [layout for layout in self._layouts() if not self._refusals(layout)]
        if not found:
            raise NoLayoutError(
                f"no layout of {self.job.shape.name} on {self.num_gpus} {self.devices} can be: "
                f"{self._why_none()}"
            )
        return found

    def _layouts(self, *, refused: bool = False) -> Iterator[Layout]:
        gpus_per_node, fixed = self.cluster.count("gpus_per_node"), self.fixed
        is_open = _PRICED if self.here is None else _HERE
        if self.here is not None:
            fixed = {**fixed, "micro_batch": self.job.layout.micro_batch}
        found = layouts(self.job, self.num_gpus, gpus_per_node, fixed, is_open, refused=refused)
        if self.here is None:
            return found
        parts = {name: fixed.get(name) for name in ("parts", "cp_parts")}
        return (
            one.model_copy(update={**parts, "cp_exchange": exchange}).with_sequence_parallel(
                fixed.get("sequence_parallel") is True
            )
            for one in found
            for exchange in _exchanges(fixed, one)
        )

    def _refusals(self, layout: Layout) -> list[str]:
        one = self.job.laid_out(layout)
        found = refusals_of(one, self.num_gpus)
        if self.here is not None:
            reasons = run_refusal(one.shape, one.recipe, layout), slices_refusal(one)
            if self.fixed.get("sequence_parallel") is True and layout.token_slices == 1:
                found.append("sequence parallelism of one part (give --tp N or --parts N)")
            return [*found, *(why_not for why_not in reasons if why_not is not None)]
        try:
            with_kernels(one, self.pricing.machine)
        except LayoutError as error:
            found.append(str(error))
        return found

    def _why_none(self) -> str:
        """The reasons of the layouts that are refused for fewest of them, each once."""
        every = [self._refusals(one) for one in islice(self._layouts(refused=True), _MOST_REFUSED)]
        fewest = min(map(len, every), default=0)
        reasons = dict.fromkeys(chain.from_iterable(why for why in every if len(why) == fewest))
        more = len(reasons) - _REASONS_TOLD
        told = [*list(reasons)[:_REASONS_TOLD], *([f"and {more} more"] if more > 0 else [])]
        return "; ".join(told) or (
            f"no degrees that divide {self.num_gpus} {self.devices}, the model and a global batch "
            f"of {self.job.global_batch} fit together"
        )


def _exchanges(fixed: Mapping[str, Any], layout: Layout) -> tuple[str, ...]:
    """How ranks of cp exchange keys: with `auto` both are planned, but where sums have an order
    whatever cp is, which a ring has not."""
    asked, has_order = fixed.get("cp_exchange"), fixed.get("cp_parts") is not None
    if asked is None or (layout.cp == 1 and not has_order):
        return ("all_gather",)
    if asked != "auto":
        return (asked,)
    return ("all_gather",) if has_order else ("all_gather", "ring")


def require_axes(fixed: Mapping[str, Any], num_gpus: int, devices: str = "GPUs") -> None:
    """Refuse fixed degrees that cannot make up the GPUs, or the ranks, and fixed orders without the
    fixed virtual stages.

    Raises:
        LayoutError: says the product.
    """
    for wrong in order_refusals(fixed.get("pipeline", "ring"), fixed.get("virtual_stages", 1)):
        raise LayoutError(wrong)
    degrees = {name: fixed[name] for name in ("tp", "cp", "pp", "dp") if fixed.get(name)}
    size = 1
    for degree in degrees.values():
        size *= degree
    told = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
    if size > num_gpus or (len(degrees) == 4 and size != num_gpus):
        raise LayoutError(f"{told} are {size} {devices}, and there are {num_gpus}")
    if num_gpus % size:
        raise LayoutError(
            f"{num_gpus} {devices} are not a multiple of {told}"
            + (f" = {size}" if len(degrees) > 1 else "")
        )


def _with_the_rest(
    job: Job, degrees: Mapping[str, Any], fixed: Mapping[str, Any], is_open: Open,
    refused: bool,
) -> Iterator[Layout]:  # fmt: skip
    shape, global_batch = job.shape, job.global_batch
    pp, dp = degrees["pp"], degrees["dp"]
    if global_batch % dp and not refused:
        return
    sizes = [n for n in _powers(_MOST_MICRO_BATCH) if global_batch % (dp * n) == 0] or [1]
    for micro_batch, zero, recompute in product(
        _choices(fixed, "micro_batch", sizes),
        _choices(fixed, "zero", is_open.zero if dp * degrees["cp"] > 1 else [0]),
        _choices(fixed, "recompute", ["none", "full"]),
    ):
        for pipeline, stages in _pipelines(shape, pp, fixed, is_open, refused):
            uneven = pipeline == "interleaved" and global_batch // (dp * micro_batch) % pp
            if uneven and not refused:
                continue
            other = {key: value for key, value in fixed.items() if key in _NEVER_OPEN}
            found = Layout(
                **degrees, micro_batch=micro_batch, zero=zero, recompute=recompute,
                pipeline=pipeline, virtual_stages=stages, offload=fixed.get("offload") is not False,
                **other,
            )  # fmt: skip
            refusal = is_open.refusal(job.shape, job.recipe, found)
            is_own = refusal is None and found.tp == 1  # of tp both are planned
            if fixed.get("recompute") is None and is_own:
                if recompute == "none":  # once: the planner decides block by block
                    yield found.model_copy(update={"recompute": "auto"})
                continue
            yield found


def _pipelines(
    shape: ModelSpec, pp: int, fixed: Mapping[str, Any], is_open: Open, refused: bool
) -> Iterator[tuple[Any, int]]:
    alone = fixed.get("pp") == 1 and (fixed.get("virtual_stages") or 1) > 1
    if pp == 1 and not refused and not alone:
        pipeline = fixed.get("pipeline", "1f1b")
        yield (pipeline if fixed.get("virtual_stages", 1) == 1 else "1f1b"), 1
        return
    per_rank = shape.num_layers // pp
    stages = [
        n
        for n in range(1, max(1, min(per_rank, _MOST_VIRTUAL_STAGES)) + 1)
        if n == 1 or shape.num_layers % (pp * n) == 0 or (shape.num_layers + 2) % (pp * n) == 0
    ]
    for n in _choices(fixed, "virtual_stages", stages):
        kinds = ["1f1b", "zero_bubble"] if n == 1 else is_open.orders
        for kind in _choices(fixed, "pipeline", kinds):
            if refused or (n > 1) == (kind in ("interleaved", "ring")):
                yield kind, n


def _choices(fixed: Mapping[str, Any], name: str, choices: Sequence[Any]) -> Sequence[Any]:
    return [fixed[name]] if fixed.get(name) is not None else choices


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def _divisors_of(number: int, most: int) -> list[int]:
    return [n for n in range(1, most + 1) if number % n == 0]
