"""A compiled program enqueued pass after pass, op by op or as CUDA graphs."""
