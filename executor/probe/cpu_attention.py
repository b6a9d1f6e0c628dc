"""Time eager attention on the CPU: packed and sliced, by head dimension.

What softmax costs goes with the heads and not with the FLOPs, so that each head dimension has
curves of its own. The widest's serve those that are not measured, too.
"""

from collections.abc import Iterator

import torch

from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.executor.kernels.attention.trial import AttentionTrial
from twinstream.executor.probe.tasks.attention import attention_cases
from twinstream.executor.probe.tasks.task_samples import TaskSample
from twinstream.executor.probe.timing.timing import median_ns
from twinstream.models.decoders.spec import ModelSpec
from twinstream.schedule.workload import Workload

PROBED_ATTENTION = "eager"
_HEAD_DIMS = (32, 64)
# (d_model, sequence length, tokens of a chunk): of slices the first and the last are timed
_SHAPES = ((128, 128, 128), (256, 256, 128), (256, 256, 512), (512, 512, 512), (512, 1024, 256))


def attention_samples(dtype: str) -> Iterator[TaskSample]:
    """Forward and backward of every shape and head dimension."""
    for head_dim in _HEAD_DIMS:
        for width, seq_len, chunk_tokens in _SHAPES:
            heads = max(2, width // head_dim)
            spec = ModelSpec(
                name="probe", num_layers=1, d_model=width, num_heads=heads,
                num_kv_heads=heads // 2, head_dim=head_dim, d_ff=width, vocab_size=256,
                dtype="bfloat16" if dtype == "bfloat16" else "float32",
            )  # fmt: skip
            workload = Workload(
                seq_len=seq_len,
                chunk_tokens=chunk_tokens,
                chunks_per_round=max(1, seq_len // chunk_tokens),
                rounds_per_step=1,
            )
            for case in attention_cases(spec, workload):
                trial = AttentionTrial(
                    attention_implementation(PROBED_ATTENTION), case.shape, torch.device("cpu")
                )
                with torch.no_grad():
                    for work, call in (
                        (case.forward, trial.forward),
                        (case.backward, trial.backward),
                    ):
                        name = f"{work.unit} {'x'.join(map(str, work.shape))}"
                        own = work.model_copy(update={"implementation": PROBED_ATTENTION})
                        yield TaskSample(name, (own,), median_ns(call))
