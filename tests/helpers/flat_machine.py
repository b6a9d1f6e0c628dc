"""A machine without efficiency curves: what the datasheet says is what every op gets."""

from typing import Any

from tests.hardware_profiles.machines import curve, number
from twinstream.hardware_profiles.schema import Machine

FLOP_PER_NS = 100_000
HBM_PER_NS = 1000
H2D_PER_NS = 50
D2H_PER_NS = 40
DUPLEX_PER_NS = 60
DRAM_PER_NS = 200
HOST_FLOP_PER_NS = 1000
LAUNCH_NS = 30
COPY_NS = 7
WAIT_NS = 5


def flat_machine(**changes: Any) -> Machine:
    """Rates are bytes or FLOPs per ns times 1e9; None among the changes is a missing number."""
    known: dict[str, Any] = {
        "name": "flat",
        "description": "",
        "device": "cuda",
        "peak_bf16_flop_per_s": number(FLOP_PER_NS * 1e9),
        "peak_fp32_flop_per_s": number(FLOP_PER_NS * 1e9),
        "hbm_bytes_per_s": number(HBM_PER_NS * 1e9),
        "pcie_h2d_bytes_per_s": number(H2D_PER_NS * 1e9),
        "pcie_d2h_bytes_per_s": number(D2H_PER_NS * 1e9),
        "pcie_duplex_bytes_per_s": number(DUPLEX_PER_NS * 1e9),
        "host_dram_bytes_per_s": number(DRAM_PER_NS * 1e9),
        "host_peak_fp32_flop_per_s": number(HOST_FLOP_PER_NS * 1e9),
        "launch_latency_ns": number(LAUNCH_NS),
        "copy_latency_ns": number(COPY_NS),
        "event_wait_latency_ns": number(WAIT_NS),
        "device_reserve_bytes": number(0),
        "efficiency": {
            **{name: curve(1.0, 0, "bytes") for name in ("hbm", "h2d", "d2h", "duplex", "vector")},
            "host_dram": curve(1.0, 0, "bytes"),
            "host_vector": curve(1.0, 0, "bytes"),
            "matmul": curve(1.0, 0, "flops"),
            "attention_forward": curve(1.0, 0, "flops"),
            "attention_backward": curve(1.0, 0, "flops"),
        },
    }
    return Machine(**known).model_copy(update=changes)  # links of any rates among them
