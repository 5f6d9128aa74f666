"""Files that cannot be read as JSON, beyond what tests/cases holds; and the places of keys and
values.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.config.diagnostics import ConfigError
from quantizer.config.document.document import Document, Text, path_from
from quantizer.config.document.read import parse_document, read_document


def parse(text: str) -> Document:
    return parse_document(Text("net.json", text))


def codes_of(error: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    return [found.code for found in error.value.diagnostics]


def test_places_count_from_one_and_cover_keys_and_values() -> None:
    document = parse('{\n  "a": [1, "two"],\n  "b/c": {"d": true}\n}')
    assert str(document.place("a", key=True)) == "net.json:2:3"
    assert str(document.place("a", 1)) == "net.json:2:12"
    item = document.place("a", 1)
    assert item and item.length == len('"two"')
    assert str(document.place("b/c", "d")) == "net.json:3:16"
    block = document.place("b/c")
    assert block and block.pointer == "/b~1c"
    assert document.place("c") is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing.json", "there is no such file"),
        ("folder", "this is a directory"),
        ("nul\0byte.json", "the file cannot be read: embedded null byte"),
        ("long" * 100, "the file cannot be read: File name too long"),
    ],
)
def test_unreadable_paths(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError) as error:
        read_document(tmp_path / name)
    assert codes_of(error) == ["QZ001"]
    assert error.value.diagnostics[0].message == why


def test_a_nul_byte_is_named_where_it_is(tmp_path: Path) -> None:
    for content, where in ((b"\0{}", 0), (b"{}\0", 2)):
        (tmp_path / "net.json").write_bytes(content)
        with pytest.raises(ConfigError, match=f"at byte {where}: there is a NUL byte"):
            read_document(tmp_path / "net.json")


def test_the_place_of_a_wrong_escape_is_one_character() -> None:
    with pytest.raises(ConfigError) as error:
        parse('{"a": "b\\qc"}')
    place = error.value.diagnostics[0].place
    assert place is not None
    assert (place.line, place.column, place.length) == (1, 9, 1)


def test_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "cpu_int8.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        read_document(tmp_path / "cpu_in8.json")
    assert "cpu_int8.json" in str(error.value.help)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[" + "1," * 600_000 + "1]"]
)
def test_limits_are_told_not_hit(tmp_path: Path, text: str) -> None:
    path = tmp_path / "big.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_document(path)
    assert codes_of(error) == ["QZ003"]


def test_a_number_of_any_length_is_told() -> None:
    """Python refuses to read so many digits."""
    with pytest.raises(ConfigError) as error:
        parse('{"bit_width": ' + "9" * 5000 + "}")
    assert codes_of(error) == ["QZ008"]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@settings(derandomize=True, max_examples=50, deadline=None)
@given(
    st.dictionaries(st.text(), JSON, max_size=4),
    st.sampled_from([None, 1, "\t"]),
    st.booleans(),
)
def test_reads_what_json_reads(
    value: dict[str, object], indent: int | str | None, ascii_only: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    document = parse(text)
    assert document.value == value
    for pointer, (start, end) in document.values.items():
        found = json.loads(text[start:end])
        place = document.place(*path_from(pointer))
        assert place and place.column >= 1
        assert parse(f'{{"v": {text[start:end]}}}').value == {"v": found}


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.text(alphabet='{}[]:,"\\/*# \n\ta1.-eENtrufls\u00df\ud7ff', max_size=40))
def test_any_text_is_read_as_json_does_or_refused(text: str) -> None:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        expected = json.loads(text, parse_constant=refuse)
    except ValueError:
        expected = None
    try:
        assert parse(text).value == expected
    except ConfigError as error:
        assert all(found.place for found in error.diagnostics)
        known_stricter = {"QZ007", "QZ008", "QZ009"}
        assert expected is None or {found.code for found in error.diagnostics} & known_stricter


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_give_diagnostics_only(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "net.json"
    path.write_bytes(data)
    try:
        read_document(path)
    except ConfigError as error:
        assert error.exit_code == 2
