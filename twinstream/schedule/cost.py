"""The work of an operation: counts of FLOPs and bytes, never seconds."""

from twinstream.schedule.node import Node
from twinstream.schedule.numbers import Count, Flops, Size

GROUPED_TILE_ROWS = 128  # of a tile of a grouped matmul in one launch: an expert's last is not full


class Work(Node):
    """Demand of one group of like kernels inside a task.

    `unit` selects the efficiency curve of the machine's profile (`matmul`, `attention_forward`,
    `attention_backward`, `rms_norm`, `swiglu`, `adamw`, ...; unknown units use `vector`). `shape`
    is what that curve may depend on: (M, N, K) for a matmul, (query tokens, context tokens,
    heads, head_dim, sequences) for attention, (rows of an expert, N, K, experts) for a grouped
    matmul, (elements,) for the rest. A multiply-add is 2 FLOPs.
    `implementation` is that of attention, whose rates differ; None is any.
    Work on the device moves `hbm_bytes`, work on the host CPU `host_dram_bytes`.
    """

    unit: str
    shape: tuple[Size, ...]
    flops: Flops
    hbm_bytes: Size
    launches: Count
    dtype: str = "bfloat16"
    host_dram_bytes: Size = 0
    implementation: str | None = None
