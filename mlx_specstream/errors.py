"""Errors a user can cause, and how a command reports them: one line, no traceback."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable


class SpecStreamError(Exception):
    """Something the user can mend; the message says what is wrong and what to do.

    Args:
        message: One line, without a trailing newline.
        exit_code: 1 for a failure, 2 for a usage error (what ``argparse`` uses).
    """

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


class UsageError(SpecStreamError):
    """A value or combination of options that cannot work (exit code 2)."""

    def __init__(self, message: str):
        super().__init__(message, exit_code=2)


def command(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap a command's ``main``: known errors end in one line on stderr and an exit code."""

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
            sys.stdout.flush()
        except SpecStreamError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:
            # The reader of our output has gone (`… | head`): nothing more to say, to anyone.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)

    return run
