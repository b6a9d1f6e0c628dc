"""How a campaign's commands end."""

import os
import sys
from collections.abc import Callable

from twinstream.schedule.errors import TwinstreamError

_USER_ERROR = 2
_INTERRUPTED = 130


def run_command(command: Callable[[], object]) -> None:
    """A user error is one message on stderr and exit code 2; Ctrl-C ends it quietly."""
    try:
        command()
    except TwinstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_USER_ERROR)
    except KeyboardInterrupt:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_INTERRUPTED)
