"""What a command says when the system fails it: one line, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAY = """
import sys
from mlx_specstream.errors import command
command(lambda: print("said", sys.stdin.read()))()
"""


def shell(redirections: str) -> tuple[int, str, str]:
    """Runs a command with the shell's redirections; returns exit code, stdout, stderr."""
    process = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {redirections}', sys.executable, SAY],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return process.returncode, process.stdout, process.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_output_to_a_full_disk_is_one_line():
    assert shell("</dev/null >/dev/full") == (1, "", "error: No space left on device\n")


@pytest.mark.parametrize("closed", ["<&-", "</dev/null >&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_streams_do_no_harm(closed):
    assert shell(closed) == (0, "" if ">&-" in closed else "said \n", "")
