"""Backends enqueue ops and say when they ran: CUDA streams, or threads of the CPU."""
