"""Run the command line, for `python -m quantizer` and the console script. Ctrl-C ends it also
during imports.
"""

from typing import NoReturn

from quantizer.cli import interrupts, streams


def main() -> NoReturn:
    """Run the command line."""
    streams.open_closed()
    with interrupts.at_once():
        from quantizer.cli import main as command_line
    command_line.main()


if __name__ == "__main__":
    main()
