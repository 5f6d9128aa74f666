"""The prose linter finds each kind of fault, at its line, and nothing in what is not prose."""

from __future__ import annotations

import pytest

pytest.importorskip("proselint", reason="the linter comes with quantizer-torch[dev]")

from prose.check import findings, register
from prose.texts import Text, descriptions, html, markdown, notebook, strings


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


def test_a_plain_page_has_no_finding() -> None:
    page = "# A page\n\nThere is no prompt. It is no longer 0.67.\n\n- one\n- two\n"
    assert kinds(markdown("page.md", page)) == []


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


@pytest.mark.parametrize("link", ["[page.md](page.md)", "[`a/b.py`](../a/b.py)"])
def test_a_link_with_a_file_name_as_its_text_is_found(link: str) -> None:
    page = f"# A page\n\nThe details are on another page ({link}).\n"
    assert kinds(markdown("page.md", page)) == [("house.link_text", 3)]
    source = f'TEXT = "The details are in {link}."\n'
    assert kinds(strings("module.py", source)) == [("house.link_text", 1)]


def test_a_link_with_a_title_is_no_finding() -> None:
    page = "See [the page](page.md), [`key`](page.md#key) and `[page.md](page.md)`.\n"
    assert kinds(markdown("page.md", page)) == []


def test_items_cells_and_headings_are_sentences_of_their_own() -> None:
    half = "one two " * 10
    page = f"# {half}\n\n- {half}\n- {half}\n\n| {half} | {half} |\n"
    assert kinds(markdown("page.md", page)) == []


def test_of_a_module_docstrings_and_printed_strings_are_read() -> None:
    source = '"""Nobody reads it."""\n\n\ndef f(x):\n    raise ValueError(f"{x} is no file")\n'
    found = [("house.plain_words", 1), ("house.plain_words", 5)]
    assert kinds(strings("module.py", source)) == found


def test_of_a_docstring_examples_sources_and_names_are_no_prose() -> None:
    docstring = """Return it.

    Args:
        whatever: a value of the file.

    >>> tell("nobody is no file")

    Source: Nobody, "What nobody tells" (2020).
    """
    source = f"def f():\n    {docstring!r}\n"
    assert kinds(strings("module.py", source)) == []
    docstring = docstring.replace("a value", "whatever is a value")
    source = f"def f():\n    {docstring!r}\n"
    assert kinds(strings("module.py", source)) == [("house.plain_words", 2)]


def test_the_help_of_a_command_is_read() -> None:
    source = '@command()\ndef f():\n    """Nobody reads it."""\n'
    assert kinds(strings("module.py", source)) == [("house.plain_words", 3)]


def test_names_and_formats_are_no_sentences() -> None:
    assert strings("module.py", 'NAMES = "nobody lie stand"\nKEY = "nobody"\n').content == ""


def test_sentences_of_a_schema_are_read() -> None:
    source = '{\n  "description": "The path is no folder."\n}\n'
    assert kinds(descriptions("schema.json", source)) == [("house.plain_words", 2)]


def test_elements_of_a_template_separate_sentences() -> None:
    half = "one two " * 10
    page = f"<p>{half}</p>\n<p>{half}{{{{ x | y }}}}</p>\n<p>Nobody reads {{% if x %}}it{{% endif %}}</p>\n"
    assert kinds(html("page.html", page)) == [("house.plain_words", 3)]


def test_of_a_notebook_texts_are_read_and_programs_are_not() -> None:
    source = """{"cells": [
 {"cell_type": "code", "source": ["# nobody tells it what is read"]},
 {"cell_type": "markdown", "source": ["# A page\\n", "\\n", "Nobody reads it."]}
]}
"""
    assert kinds(notebook("book.ipynb", source)) == [("house.plain_words", 3)]
