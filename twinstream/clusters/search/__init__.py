"""Which layout is fastest: a bound on all of them, the best looking ones simulated, best first."""
