"""The error that every fault in training data raises."""

from twinstream.schedule.errors import TwinstreamError


class DataError(TwinstreamError):
    """The data cannot be used: says what is wrong, in which file and row, and what to do."""


def unreadable(path: object, error: OSError) -> DataError:
    return DataError(f"cannot read {path}: {error.strerror or error}")
