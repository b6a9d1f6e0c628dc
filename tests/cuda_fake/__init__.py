"""The CUDA path of the executor on a CUDA build of torch, above a device that is host memory."""
