"""Lower one stage of a priced job to the task chain of a step."""

from twinstream.models.flops import model_flops_per_sequence
from twinstream.models.lowering.priced.groups import mesh_of
from twinstream.models.lowering.priced.stage import StageOps
from twinstream.models.parallel.job import Job
from twinstream.models.recipe import KernelChoice
from twinstream.schedule.chain import Chain
from twinstream.schedule.workload import ModelRef, Workload


def lower_priced(job: Job, stage: int, *, folded: bool = False) -> Chain:
    """What the ranks of a stage do in a step."""
    everyone = tuple(axis.name for axis in mesh_of(job, 1).axes if axis.size > 1)
    built = StageOps(job, stage, everyone, folded=folded).lower()
    tokens = job.layout.micro_batch * job.seq_len
    return Chain.model_construct(
        tensors=tuple(built.tensors), calls=built.calls, tasks=tuple(built.tasks), recomputes=(),
        inputs=(), outputs=(), persistent=tuple(built.persistent), round_starts=(0,),
        workload=Workload(seq_len=job.seq_len, chunk_tokens=tokens, chunks_per_round=1,
                          rounds_per_step=job.num_microbatches),
        model=ModelRef(name=job.shape.name, content_hash="", spec={}),
        recipe=job.recipe.model_dump(mode="json"),
        model_flops=job.global_batch
        * model_flops_per_sequence(job.shape, job.seq_len, job.recipe),
        pools=built.pools,
    )  # fmt: skip


def with_some_kernels(job: Job) -> Job:
    """The job with the kernel set `megatron`, where its recipe leaves that open."""
    if job.recipe.kernels is not None:
        return job
    priced = KernelChoice(vector="megatron", attention="flash", deterministic=False)
    return job.model_copy(update={"recipe": job.recipe.model_copy(update={"kernels": priced})})
