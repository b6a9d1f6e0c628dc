"""Small machines for tests, with numbers that are easy to compute with."""

from typing import Literal

from twinstream.hardware_profiles.schema import Efficiency, Machine, Number


def number(value: float | None) -> Number:
    return Number(value=value, kind="unconstrained" if value is None else "assumed", source="test")


def curve(max_: float, half: float, of: Literal["flops", "bytes"]) -> Efficiency:
    return Efficiency(max=max_, half=half, of=of, kind="assumed", source="test")


def toy_machine() -> Machine:
    """100 TFLOP/s bf16, 10 TFLOP/s fp32, 1 TB/s HBM, 10 and 20 GB/s link, 3 us launches."""
    return Machine(
        name="toy",
        description="",
        device="cuda",
        peak_bf16_flop_per_s=number(100e12),
        peak_fp32_flop_per_s=number(10e12),
        hbm_bytes_per_s=number(1e12),
        pcie_h2d_bytes_per_s=number(10e9),
        pcie_d2h_bytes_per_s=number(20e9),
        pcie_duplex_bytes_per_s=number(30e9),
        host_dram_bytes_per_s=number(100e9),
        launch_latency_ns=number(3000),
        copy_latency_ns=number(700),
        efficiency={
            "matmul": curve(0.5, 1e9, "flops"),
            "matmul/float32": curve(0.8, 0, "flops"),
            "attention_forward": curve(0.4, 0, "flops"),
            "attention_forward/head_dim_64": curve(0.25, 0, "flops"),
            "attention_forward/float32": curve(0.2, 0, "flops"),
            "vector": curve(0.8, 1e6, "bytes"),
            "rms_norm": curve(0.4, 0, "bytes"),
            "cached": curve(1.2, 0, "bytes"),
            "hbm": curve(0.9, 0, "bytes"),
            "h2d": curve(0.8, 1e6, "bytes"),
            "d2h": curve(0.8, 0, "bytes"),
            "duplex": curve(2 / 3, 0, "bytes"),
            "host_dram": curve(0.5, 0, "bytes"),
        },
    )
