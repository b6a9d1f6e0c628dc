"""Small jobs, and random layouts of small models that can be."""

from random import Random
from typing import Any, get_args

from twinstream.clusters.assembling import assembled
from twinstream.clusters.refusals import refusals_of
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, Recompute
from twinstream.models.options import Experts, LatentAttention, SlidingWindow
from twinstream.models.recipes.recipe import megatron_recipe
from twinstream.schedule.document import Schedule
from twinstream.schedule.workload import MachineRef

GPUS_PER_NODE = 8
DENSE = ModelSpec(
    name="toy", num_layers=8, d_model=256, num_heads=8, num_kv_heads=4, head_dim=32, d_ff=512,
    vocab_size=1024,
)  # fmt: skip
MIXTURE = DENSE.model_copy(update={"experts": Experts(count=8, per_token=2, d_ff=256)})
GPT = ModelSpec(
    name="gpt", num_layers=5, d_model=256, num_heads=8, num_kv_heads=8, head_dim=32, d_ff=1024,
    vocab_size=1000, mlp="gelu", norm="layer", positions="learned", max_positions=4096, biases=True,
    dropout=True, tied_embeddings=True,
)  # fmt: skip
LATENT = ModelSpec(  # as DeepSeek-V3 is built
    name="latent", num_layers=6, d_model=256, num_heads=8, num_kv_heads=8, head_dim=48, d_ff=512,
    vocab_size=1024,
    latent=LatentAttention(kv_rank=64, rope_dim=16, v_dim=32, q_rank=96),
    experts=Experts(count=8, per_token=2, d_ff=128, shared_d_ff=128, dense_layers=(0, 1)),
)  # fmt: skip
WINDOWED = MIXTURE.model_copy(  # as gpt-oss is
    update={
        "biases": True,
        "sinks": True,
        "window": SlidingWindow(tokens=24, full_layers=(1, 3, 5, 7)),
    }
)
SHARED = Experts(count=8, per_token=2, d_ff=256, shared_d_ff=128)
SHAPES = (
    DENSE,
    DENSE.model_copy(update={"tied_embeddings": True, "num_layers": 6}),
    MIXTURE,
    DENSE.model_copy(update={"experts": SHARED, "tied_embeddings": True}),
    GPT,
    LATENT,
    WINDOWED,
)


def job_of(
    num_microbatches: int = 1, shape: ModelSpec = DENSE, seq_len: int = 192, **fields: Any
) -> Job:
    """A job of a layout with these fields, and so many microbatches in each replica."""
    layout = Layout(**fields)
    batch = num_microbatches * layout.dp * layout.micro_batch
    return Job(
        shape=shape, layout=layout, seq_len=seq_len, global_batch=batch, recipe=megatron_recipe()
    )


def lowered(job: Job, gpus_per_node: int = GPUS_PER_NODE) -> Schedule:
    assert not refusals_of(job)
    return assembled(job, gpus_per_node, MachineRef(name="toy", content_hash=""))


def random_job(seed: int) -> Job:
    """Of any degrees, order, ZeRO stage, recomputation; stages may be without layers."""
    rng = Random(seed)
    while True:
        job = _any_job(rng)
        if not refusals_of(job):
            return job


def _any_job(rng: Random) -> Job:
    shape = rng.choice(SHAPES)
    pipeline = rng.choice(["gpipe", "1f1b", "interleaved", "ring", "zero_bubble"])
    pp = rng.choice([1, 2, 3, 4])
    virtual = rng.choice([1, 2]) if pipeline in ("interleaved", "ring") and pp > 1 else 1
    cp, dp = rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 2, 4, 6])
    layout = Layout(
        tp=rng.choice([1, 2, 4]), cp=cp, pp=pp, dp=dp,
        ep=rng.choice([1, 2, 4]) if shape.experts else 1,
        virtual_stages=virtual,
        micro_batch=rng.choice([1, 2]),
        pipeline=pipeline,
        zero=rng.choice([0, 1, 2, 3]),
        shard=rng.choice([None, *(s for s in range(1, dp * cp + 1) if dp * cp % s == 0)]),
        recompute=_of_megatron(rng.choice(get_args(Recompute))),
        sequence_parallel=rng.random() < 0.7,
        dp_overlap=rng.random() < 0.7,
        stage_layers=_cut(rng, shape.num_layers, pp * virtual) if rng.random() < 0.3 else None,
    )  # fmt: skip
    gradients = rng.choice(["float32", "model"])
    microbatches = pp * rng.choice([1, 2]) if pipeline == "interleaved" else rng.choice([1, 2, 5])
    return Job(
        shape=shape, layout=layout, seq_len=96 * rng.choice([1, 2]),
        global_batch=microbatches * dp * layout.micro_batch,
        recipe=megatron_recipe(
            rng.choice(["flash", "unfused"]), rng.choice(["bf16", "bf16", "fp8"]), gradients
        ),
    )  # fmt: skip


def _of_megatron(recompute: Recompute) -> Recompute:
    """Its kernels have no level of twinstream's own."""
    return "selective" if recompute in ("attention", "experts") else recompute


def _cut(rng: Random, num_layers: int, num_stages: int) -> tuple[int, ...]:
    cuts = sorted(rng.randint(0, num_layers) for _ in range(num_stages - 1))
    return tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, num_layers], strict=True))
