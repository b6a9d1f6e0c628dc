"""`twinstream` and `python -m twinstream`: Ctrl-C is heeded before anything slow is imported."""

import contextlib
import errno
import os
import signal
import sys

_USER_ERROR = 2
_INTERRUPTED = 130
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main() -> None:
    """Run the command line; ends with one message where standard output cannot be written."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
        from twinstream.cli import main as command_line

        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:  # a shell that starts it in its background has it ignore Ctrl-C
        from twinstream.cli import main as command_line
    if sys.stdout is None:
        print("error: standard output is closed", file=sys.stderr)
        sys.exit(_USER_ERROR)
    try:
        try:
            command_line()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise
        with contextlib.suppress(OSError):
            print(f"error: cannot write to standard output: {error.strerror}", file=sys.stderr)
        os._exit(_USER_ERROR)  # an orderly exit would try to write the rest


if __name__ == "__main__":
    main()
