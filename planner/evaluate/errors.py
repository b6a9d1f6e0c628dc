"""The error of a training schedule that has no evaluation."""

from twinstream.schedule.errors import TwinstreamError


class NoEvaluation(TwinstreamError):
    """A schedule of training has no forward that could run by itself and leave the state alone."""
