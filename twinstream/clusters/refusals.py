"""Why a layout cannot be: degrees that do not divide, or do not make up the GPUs."""

from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, LayoutError, stages_of
from twinstream.models.layouts.rank_sizes import shape_refusals


def refusals_of(job: Job, num_gpus: int | None = None) -> list[str]:
    """One sentence for each reason, with its numbers; none if the layout can be."""
    layout = job.layout
    found = shape_refusals(job.work)  # `stages_of` sees to layers
    if num_gpus is not None and layout.num_gpus != num_gpus:
        found.append(
            f"tp {layout.tp} x cp {layout.cp} x pp {layout.pp} x dp {layout.dp} are "
            f"{layout.num_gpus} GPUs, not {num_gpus}"
        )
    return [*found, *_overlap(job), *_batch(job), *_replicas(layout), *_pipeline(job)]


def require_possible(job: Job, num_gpus: int | None = None) -> None:
    """Refuse a layout that cannot be.

    Raises:
        LayoutError: says all that is wrong.
    """
    if found := refusals_of(job, num_gpus):
        raise LayoutError("; ".join(found))


def _overlap(job: Job) -> list[str]:
    """Megatron's kernels are priced with parameters that are gathered layer by layer."""
    layout, kernels = job.layout, job.recipe.kernels
    is_priced = layout.tp * layout.cp * layout.ep > 1 or (kernels and kernels.vector == "megatron")
    if layout.zero < 3 or layout.dp_overlap or not is_priced:
        return []
    return [
        "dp_overlap false needs zero 2 or less: with zero 3 the kernel set megatron gathers "
        "parameters layer by layer beside compute, and not all before the step"
    ]


def _batch(job: Job) -> list[str]:
    layout = job.layout
    each = layout.dp * layout.micro_batch
    if job.global_batch % each:
        return [
            f"global batch {job.global_batch} is not divisible by dp {layout.dp} x micro batch "
            f"{layout.micro_batch}"
        ]
    return []


def _replicas(layout: Layout) -> list[str]:
    found = []
    if layout.etp not in (None, 1, layout.tp):
        return [f"etp {layout.etp} is neither 1 nor tp {layout.tp}"]
    among = layout.expert_replicas
    if among != layout.ep and (layout.ep % layout.tp or not layout.sequence_parallel):
        return [
            f"etp 1 needs ep {layout.ep} to be a multiple of tp {layout.tp}, and sequence "
            "parallelism: each rank of tp has experts, and tokens, of its own"
        ]
    if layout.expert_nodes is not None and layout.ep % layout.expert_nodes:
        found.append(f"expert_nodes {layout.expert_nodes} do not divide ep {layout.ep}")
    if layout.dp % among:
        more = "" if among != layout.ep or layout.tp == 1 else " (with etp 1 by tp x dp)"
        found.append(
            f"dp {layout.dp} is not divisible by ep {among}: experts are shared by replicas{more}"
        )
        return found
    shards, replicas = layout.shards, layout.dp * layout.cp
    if replicas % shards or shards % (among * layout.cp):
        found.append(
            f"shard {shards} must divide dp x cp = {replicas} and be a multiple of ep x cp = "
            f"{among * layout.cp}"
        )
    return found


def order_refusals(pipeline: str, virtual_stages: int) -> list[str]:
    """Why an order of a pipeline cannot have so many virtual stages on a rank; none if it can."""
    if virtual_stages == 1 or pipeline in ("interleaved", "ring"):
        return []
    return [
        f"the pipeline '{pipeline}' has no virtual stages: {virtual_stages} a rank need "
        "'interleaved' or 'ring'"
    ]


def _pipeline(job: Job) -> list[str]:
    layout, found = job.layout, list[str]()
    many = layout.virtual_stages > 1
    found += order_refusals(layout.pipeline, layout.virtual_stages)
    if many and layout.pp == 1:
        found.append(f"{layout.virtual_stages} virtual stages need pp of 2 or more")
    if layout.pipeline == "interleaved" and layout.pp > 1 and job.num_microbatches % layout.pp:
        found.append(
            f"{job.num_microbatches} microbatches (global batch {job.global_batch} / dp "
            f"{layout.dp} / micro batch {layout.micro_batch}) are not a multiple of pp "
            f"{layout.pp}, as the interleaved order needs"
        )
    try:
        stages_of(layout, job.shape.num_layers)
    except LayoutError as error:
        found.append(str(error))
    return found
