"""als244/dataflow on equal terms: its constants as a machine profile, and the steps it states.

github.com/als244/dataflow plans a chain of tasks for one cold step, by greedy residency and then a
search over recompute, on a simulator with these constants: matmul at 0.70 and attention at 0.55 of
989 TFLOP/s, HBM at 0.8 of 3,350 GB/s, PCIe at 55 GB/s in each direction, and no other cost: no
joint limit of the directions, no limit of host DRAM, no latencies, no launch costs. Its steps are
those that issue 3 of this project states, found by running it: 8B, 4,096 tokens a sequence, 4
rounds of 32,768 tokens, host unlimited, 9.50 s of compute in all; and one round of 8,192 tokens.

Of our 10.22 s of compute alone, matmul and attention take 9.43 s and vector kernels 0.79 s: AdamW
0.04 s, the rest norms, RoPE, SwiGLU and cross entropy. So its 9.50 s hold hardly any of the rest,
and there are two terms: `counted`, with our vector kernels at its HBM rate; and `hidden`, with all
HBM traffic free, where what our compute is then short of its 9.50 s is added to every step of ours.
"""

from dataclasses import dataclass
from typing import Literal

from twinstream.hardware_profiles.schema import Efficiency, Machine, Number

GIB = 2**30
Terms = Literal["counted", "hidden"]
SEQ_LEN = 4096
PURE_COMPUTE_S = 9.50
# Device cap in GiB: seconds of its cold step, 131,072 tokens.
COLD_S = {67.3: 9.98, 50.0: 10.76, 35.0: 11.08, 25.0: 11.72, 18.0: 11.61, 12.0: 11.98, 8.8: 12.54}
# One round of 8,192 tokens: the same at any of these caps.
SMALL_COLD_S = 1.21
SMALL_CAPS_GIB = (16.0, 24.0, 40.0, 80.0)
_SOURCE = "als244/dataflow's simulator, as issue 3 states it"


@dataclass(frozen=True)
class Reference:
    """A device cap, tokens per step, and what als244/dataflow takes for its cold step."""

    device_gib: float
    tokens_per_step: int
    cold_s: float


def references() -> list[Reference]:
    """The seven cells of 131,072 tokens, then the four of 8,192."""
    large = [Reference(cap, 131_072, cold_s) for cap, cold_s in COLD_S.items()]
    return large + [Reference(cap, 8192, SMALL_COLD_S) for cap in SMALL_CAPS_GIB]


def dataflow_machine(terms: Terms) -> Machine:
    """A machine of exactly its constants.

    Vector work (norms, RoPE, SwiGLU, AdamW, embedding) is memory traffic at the HBM rate, or free
    where that is `hidden`; its arithmetic is unconstrained. A cap is the arena's: no reserve.
    """
    attention = _curve(0.55, "flops")
    return Machine(
        name=f"dataflow-h100-{terms}",
        description="H100 with the constants of als244/dataflow's simulator",
        device="cuda",
        peak_bf16_flop_per_s=_number(989e12),
        peak_fp32_flop_per_s=_number(None),
        hbm_bytes_per_s=_number(3350e9 if terms == "counted" else None),
        pcie_h2d_bytes_per_s=_number(55e9),
        pcie_d2h_bytes_per_s=_number(55e9),
        pcie_duplex_bytes_per_s=_number(None),
        host_dram_bytes_per_s=_number(None),
        device_memory_bytes=_number(80 * GIB),
        device_reserve_bytes=_number(0),
        launch_latency_ns=_number(0),
        copy_latency_ns=_number(0),
        event_wait_latency_ns=_number(0),
        efficiency={
            "matmul": _curve(0.70, "flops"),
            "attention_forward": attention,
            "attention_backward": attention,
            "vector": _curve(0.8, "bytes"),
            "hbm": _curve(0.8, "bytes"),
            "h2d": _curve(1.0, "bytes"),
            "d2h": _curve(1.0, "bytes"),
        },
    )


def _number(value: float | None) -> Number:
    return Number(value=value, kind="unconstrained" if value is None else "assumed", source=_SOURCE)


def _curve(share: float, of: str) -> Efficiency:
    return Efficiency.model_validate(
        {"max": share, "half": 0.0, "of": of, "kind": "assumed", "source": _SOURCE}
    )
