"""Lowers blocks to parts with collectives over tp, cp and ep between them: of our own kernels, which
run here, or of Megatron's, which are priced."""
