"""The prose linter finds each kind of fault, at its line, and nothing in what is not prose."""

from __future__ import annotations

import pytest

pytest.importorskip("proselint", reason="the linter comes with quantizer-torch[dev]")

from prose.check import findings, register
from prose.texts import Text, descriptions, markdown, strings


def kinds(text: Text) -> list[tuple[str, int]]:
    """Return the kind and the line of each finding."""
    register()
    return [(kind, line) for kind, line, _ in findings(text)]


@pytest.mark.parametrize(
    ("sentence", "kind"),
    [
        ("The layer is rounded plainly.", "house.terms"),
        ("A message tells the reason.", "house.terms"),
        ("Nobody reads this value.", "house.plain_words"),
        ("The path is no folder.", "house.plain_words"),
        ("The result does not fit, as it is too large.", "house.patterns"),
        ("It recovers .67 of the loss.", "house.patterns"),
        ("It reads the the file.", "house.patterns"),
        ("The ranges are very different.", "weasel_words.very"),
        ("A layer that reads what a pass writes that runs.", "house.chained_sentence"),
        ("one two " * 16, "house.long_sentence"),
    ],
)
def test_each_kind_is_found_at_its_line(sentence: str, kind: str) -> None:
    assert kinds(markdown("page.md", f"# A page\n\nA sentence.\n\n{sentence}\n")) == [(kind, 5)]


def test_code_links_and_comments_are_no_prose() -> None:
    page = "\n".join(
        [
            "Run `tell nobody` first.",
            "",
            "```",
            "nobody tells",
            "```",
            "",
            "    nobody tells",
            "",
            "<!-- nobody tells --> See [a page](nobody.md#tells).",
        ]
    )
    assert kinds(markdown("page.md", page)) == []


def test_items_cells_and_headings_are_sentences_of_their_own() -> None:
    half = "one two " * 10
    page = f"# {half}\n\n- {half}\n- {half}\n\n| {half} | {half} |\n"
    assert kinds(markdown("page.md", page)) == []


def test_of_a_module_docstrings_and_printed_strings_are_read() -> None:
    source = '"""Nobody reads it."""\n\n\ndef f(x):\n    raise ValueError(f"{x} is no file")\n'
    found = [("house.plain_words", 1), ("house.plain_words", 5)]
    assert kinds(strings("module.py", source)) == found


def test_sentences_of_a_schema_are_read() -> None:
    source = '{\n  "description": "The path is no folder."\n}\n'
    assert kinds(descriptions("schema.json", source)) == [("house.plain_words", 2)]
