"""Translate `exclude`, which both forms have: the layers that stay in float."""

from collections.abc import Iterator

from quantizer.config.document.document import Document
from quantizer.config.model import ConfigRule, Selector


def excludes(file: Document) -> Iterator[ConfigRule]:
    """Yield a rule for each entry of `exclude`."""
    for number, path in enumerate(file.items("exclude")):
        place = file.place(*path)
        selector = Selector("exclude", file.get(*path), place)
        yield ConfigRule(selector, f"exclude[{number}]", frozenset(), place)
