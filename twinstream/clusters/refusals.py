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
    return [*found, *_batch(job), *_replicas(layout), *_pipeline(job)]


def require_possible(job: Job, num_gpus: int | None = None) -> None:
    """Refuse a layout that cannot be.

    Raises:
        LayoutError: says all that is wrong.
    """
    if found := refusals_of(job, num_gpus):
        raise LayoutError("; ".join(found))


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
    if layout.dp % layout.ep:
        found.append(
            f"dp {layout.dp} is not divisible by ep {layout.ep}: experts are shared by replicas"
        )
        return found
    shards, replicas = layout.shards, layout.dp * layout.cp
    if replicas % shards or shards % (layout.ep * layout.cp):
        found.append(
            f"shard {shards} must divide dp x cp = {replicas} and be a multiple of ep x cp = "
            f"{layout.ep * layout.cp}"
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
