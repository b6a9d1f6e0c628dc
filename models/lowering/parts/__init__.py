"""Lowers blocks to parts with collectives over tp, cp and ep between them; priced, not run here."""
