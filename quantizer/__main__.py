"""Run the command line, for `python -m quantizer` and the console script. Ctrl-C ends it also
during imports.
"""

from typing import NoReturn

from quantizer.cli import foreign_plugins, interrupts, streams


def main() -> NoReturn:
    """Run the command line."""
    streams.open_closed()
    foreign_plugins.leave_out_if_validating()
    with interrupts.at_once():
        from quantizer.cli import main as command_line
    command_line.main()


if __name__ == "__main__":
    main()
