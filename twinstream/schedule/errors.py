"""The base of every error that a user can act on, and what several of them say."""

import difflib
from collections.abc import Iterable


class TwinstreamError(Exception):
    """A user error: one message says what is wrong, with numbers, where, and what to do.

    The command line prints the message and exits with code 2; anything else is our bug. It goes
    from process to process as it is, whatever arguments it was made with.
    """

    def __reduce__(self) -> tuple[object, ...]:
        return _made_again, (type(self), self.args, self.__dict__)


class ArgumentError(TwinstreamError):
    """A function was given something else than it takes."""


class SeveralRanksError(TwinstreamError):
    """A schedule of one rank among several was run, or simulated, by itself."""

    def __init__(self, op_id: str) -> None:
        super().__init__(
            f"op '{op_id}' communicates with other ranks: this schedule is one rank's part of a "
            "cluster's, and takes part in that only"
        )


def require(name: str, value: object, *kinds: type) -> None:
    """Refuse an argument that is of none of these types.

    Raises:
        ArgumentError: says what is needed and what was given.
    """
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        needed = " or ".join(kind.__name__ for kind in kinds)
        shown = f"{value!r:.60}"
        raise ArgumentError(f"{name} needs {needed}, got {type(value).__name__} {shown}")


def require_whole(name: str, value: object, least: int, most: int) -> None:
    """Refuse an argument that is no whole number from `least` to `most`.

    Raises:
        ArgumentError: says the range and what was given.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ArgumentError(
            f"{name} needs a whole number from {least} to {most}, got {value!r:.60}"
        )


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """A hint at the known name that was probably meant; None if none is near.

    Of near ones the shortest that begins with the name, else the nearest.

    >>> did_you_mean("H1000", ["h100", "cpu"]), did_you_mean("H100", ["h100_dgx", "a100"])
    ("did you mean 'h100'?", "did you mean 'h100_dgx'?")
    """
    name = name.lower()
    close = difflib.get_close_matches(name, list(known), n=50, cutoff=0.5)
    longer = sorted((one for one in close if one.startswith(name)), key=lambda one: (len(one), one))
    return f"did you mean '{(longer or close)[0]}'?" if close else None


def _made_again(
    kind: type[TwinstreamError], args: tuple[object, ...], state: dict[str, object]
) -> TwinstreamError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
