"""Leaves out plug-ins of other packages where a command must run no code of others.

It is called before the commands are imported, which have the options of plug-ins.
"""

import sys

from quantizer import plugins

_WITHOUT = "validate"
_WITH_VALUE = "--color"
"""The option with a value that may stand before a command."""


def leave_out_if_validating() -> None:
    """Find no plug-ins of other packages if the command line is one of `quantizer validate`."""
    before = ""
    for word in sys.argv[1:]:
        is_option = word.startswith("-") or before == _WITH_VALUE
        if not is_option:
            if word == _WITHOUT:
                plugins.leave_out_foreign()
            return
        before = word
