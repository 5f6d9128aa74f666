"""Run the command line, for `python -m quantizer` and the console script. Ctrl-C ends it also
during imports.
"""

import sys
from typing import NoReturn

from quantizer import plugins
from quantizer.cli.terminal import process

_WITHOUT = "validate"
_WITH_VALUE = "--color"
"""The option with a value that may stand before a command."""


def main() -> NoReturn:
    """Run the command line."""
    process.open_closed()
    process.wait_briefly()
    _leave_out_foreign_plugins()
    with process.at_once():
        from quantizer.cli import main as command_line
    command_line.main()


def _leave_out_foreign_plugins() -> None:
    """Find no plug-ins of other packages for `quantizer validate`, which must run no code of
    others. This comes before imports of commands, which have the options of plug-ins.
    """
    before = ""
    for word in sys.argv[1:]:
        is_option = word.startswith("-") or before == _WITH_VALUE
        if not is_option:
            if word == _WITHOUT:
                plugins.leave_out_foreign()
            return
        before = word


if __name__ == "__main__":
    main()
