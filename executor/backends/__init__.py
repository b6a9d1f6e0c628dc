"""What enqueues ops and says when they ran: CUDA streams, or threads of the CPU."""
