"""The jobs one after the other, as far as the time goes."""
