"""Python imports this first: with FAKE_CUDA_VALUES the fake device computes values."""

import os

if os.environ.get("FAKE_CUDA_VALUES") and "libcudart" in os.environ.get("LD_PRELOAD", ""):
    os.environ["TRITON_INTERPRET"] = "0"
    import values

    values.install()
