"""Finds where a line of text breaks between words."""

import re


def starts_of_lines(text: str, width: int) -> list[int]:
    """Return the positions of words that begin another line, where lines have this width."""
    starts = []
    line_start = 0
    for word in re.finditer(r"\S+", text):
        if word.end() - line_start > width and word.start() > line_start:
            line_start = word.start()
            starts.append(line_start)
    return starts
