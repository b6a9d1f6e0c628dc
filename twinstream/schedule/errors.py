"""The base of every error that a user can act on."""


class TwinstreamError(Exception):
    """A user error: one message says what is wrong, with numbers, where, and what to do.

    The command line prints the message and exits with code 2; anything else is our bug. It goes
    from process to process as it is, whatever arguments it was made with.
    """

    def __reduce__(self) -> tuple[object, ...]:
        return _made_again, (type(self), self.args, self.__dict__)


def _made_again(
    kind: type[TwinstreamError], args: tuple[object, ...], state: dict[str, object]
) -> TwinstreamError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
