"""Memory and speed on this machine: ``python -m mlx_specstream.benchmark``.

    python -m mlx_specstream.benchmark --prompts prompts.jsonl --bits 4,8,16,32 \
        --against plain,mlx-lm --markdown --json out.json --csv out.csv --plot memory_speed.png

Each method decodes each prompt once untimed and then ``-n`` times, taking turns. A row has figures
only if every one of its texts is plain decoding's, token for token. ``docs/benchmark.md`` says
what the figures are.

Other words in front ask for other measurements:

    simulate, fits, record     what proposals are worth, weighed without running a model's passes
    calibrate                  what passes cost on this machine, for the planner
    draw                       the picture, from a file that --json wrote
"""

from __future__ import annotations

import sys

from . import options
from .errors import command

WEIGHED = ("simulate", "fits", "record")


@command
def main() -> None:
    """Lead to what the first word asks for, or measure memory and speed."""
    options.printable_anywhere()
    word, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if word in WEIGHED:
        from .benchmarking import simulate_command

        simulate_command.main(word, rest)
    elif word == "calibrate":
        from .benchmarking import calibrate_command

        calibrate_command.main(rest)
    elif word == "draw":
        from .benchmarking import draw_command

        draw_command.main(rest)
    else:
        from .benchmarking import measure_command

        measure_command.main(sys.argv[1:])


if __name__ == "__main__":
    main()
