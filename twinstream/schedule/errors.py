"""The base of every error that a user can act on."""


class TwinstreamError(Exception):
    """A user error: one message says what is wrong, with numbers, where, and what to do.

    The command line prints the message and exits with code 2; anything else is our bug.
    """
