"""`python -m quantizer` and the console script: the command line, imported so that Ctrl-C ends
it at any moment.
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
