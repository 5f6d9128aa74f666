"""What options make of their text where click has no type for it."""

import click

from quantizer.storage.process_memory import parsed


def rows_shown(text: str) -> int | str:
    """The value of `--top`: a whole number, or "all".

    Raises:
        BadParameter: it is neither.
    """
    if text != "all" and not (text.isdecimal() and int(text)):
        raise click.BadParameter(f"{text!r} is neither a number of rows nor 'all'.")
    return text if text == "all" else int(text)


def memory_size(text: str) -> int:
    """The value of `--memory` and `--max_unpacked` in bytes.

    Raises:
        BadParameter: it is no size.
    """
    try:
        return parsed(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no size of memory; write 8GB or 512MB, for example."
        ) from None
