"""Errors a user can cause, and how a command reports them: one line, no traceback."""

from __future__ import annotations

import functools
import os
import sys
import warnings
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
    """Wrap a command's ``main``: errors end in one line on stderr and an exit code."""

    @functools.wraps(main)
    def run() -> None:
        warnings.showwarning = _one_line  # type: ignore[assignment]
        try:
            open_standard_streams()
            main()
            sys.stdout.flush()
        except SpecStreamError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            sys.exit(130)
        except OSError as error:
            # Of what the system refuses only the output is left here. If its reader has gone
            # (`… | head`) there is nothing more to say, to anyone.
            if not isinstance(error, BrokenPipeError):
                print(f"error: {error.strerror or error}", file=sys.stderr)
            # What could not be written must not be tried again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)

    return run


def open_standard_streams() -> None:
    """Replace streams that the caller closed (``<&-``) by nothing to read and nowhere to write.

    Else the next file that is opened gets descriptor 0, and MLX cannot read weights through that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _one_line(message: Warning | str, *where: object) -> None:
    """A warning as a command shows it: without the source line."""
    print(f"warning: {message}", file=sys.stderr)
