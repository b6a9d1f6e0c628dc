"""What is laid out: a model, its batch, in which precision."""

from typing import Literal

from twinstream.clusters.layout import Layout
from twinstream.models.shapes.work import ShapeWork
from twinstream.models.spec import ModelSpec
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount

Precision = Literal["bf16", "fp16", "fp8", "fp4"]
Attention = Literal["flash", "unfused", "sdpa_flash", "sdpa_cudnn", "flash2", "flash3", "flash4"]
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16", "fp4": "bfloat16"}
_MATMUL_DTYPES = {"fp8": "fp8", "fp4": "fp4"}
MASTER_BYTES = 12  # AdamW: float32 master, first and second moment


class Job(Node):
    """A training step of a model under a layout.

    `global_batch` and the layout's `micro_batch` count sequences of `seq_len` tokens. With fp8 and
    fp4 the linear layers' products are in it, all else is bfloat16. `attention` is the library
    whose rate the machine's profile has, "flash" the profile's own choice. `network_reduction`:
    switches may reduce (NVLS, SHARP) where the cluster's profile has it.
    """

    shape: ModelSpec
    layout: Layout
    seq_len: PositiveCount
    global_batch: PositiveCount
    precision: Precision = "bf16"
    attention: Attention = "flash"
    network_reduction: bool = True

    @property
    def dtype(self) -> str:
        """Of activations and parameters."""
        return _DTYPES[self.precision]

    @property
    def num_microbatches(self) -> int:
        """Of one replica, in a step."""
        return self.global_batch // (self.layout.dp * self.layout.micro_batch)

    @property
    def tokens_per_step(self) -> int:
        """Of all replicas."""
        return self.seq_len * self.global_batch

    @property
    def work(self) -> ShapeWork:
        """What one rank does of a layer for one microbatch."""
        layout = self.layout
        return ShapeWork(
            shape=self.shape,
            seq_len=self.seq_len,
            micro_batch=layout.micro_batch,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            sequence_parallel=layout.sequence_parallel and layout.tp > 1,
            dtype=self.dtype,
            matmul_dtype=_MATMUL_DTYPES.get(self.precision),
            gradient_dtype=layout.gradient_dtype,
            attention_implementation=None if self.attention == "flash" else self.attention,
            expert_imbalance=layout.expert_imbalance,
        )
