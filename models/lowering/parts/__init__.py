"""Lowers blocks to parts with collectives over tp, cp and ep between them, run here or priced."""
