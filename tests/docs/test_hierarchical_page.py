"""The pages on the hierarchical form: each file in them is read, and each command prints the
lines that they show.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from support.printed import is_printed

import quantizer
from quantizer.cli.main import run_command
from quantizer.config.forms.aliases import (
    KEY_ALIASES,
    REPLACED_OBSERVERS,
    TYPE_ALIASES,
    VALUE_ALIASES,
    instead_of_observer,
)
from quantizer.config.load import load_config
from quantizer.config.resources import load_resource

ROOT = Path(__file__).parents[2]
PAGES = ("hierarchical.md", "number_formats.md", "convert.md")
PAGE = "\n".join((ROOT / "docs" / page).read_text("utf-8") for page in PAGES)
FILES = re.findall(r"As `(\w+\.json)`:\n\n```json\n(.*?)```", PAGE, flags=re.DOTALL)
BLOCKS = re.findall(r"\n```\n(\$ quantizer .*?)\n```", PAGE, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES:
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


@pytest.mark.real
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.partition("\n")[0][2:40])
def test_commands_print_what_the_page_shows(
    block: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "digits" in block:
        pytest.importorskip(
            "sklearn",
            reason="the digits come from scikit-learn; needs quantizer-torch[examples]",
        )
    if "net.json" in block and "init" not in block:
        run_command(["init", "--strategy", "dynamic", "-o", "net.json"])
    for part in block.split("$ quantizer ")[1:]:
        command, *expected = part.replace("\\\n", " ").strip().splitlines()
        capsys.readouterr()
        run_command(shlex.split(command))
        printed = _plain("".join(capsys.readouterr()))
        missing = [line for line in expected if _plain(line).strip() not in printed]
        assert [
            line
            for line in missing
            if not any(is_printed(line, found) for found in printed.splitlines())
        ] == []


def _plain(text: str) -> str:
    """Columns one space apart."""
    return re.sub(r" +", " ", text)


def test_files_are_valid_but_for_the_misspelt_one(folder: Path) -> None:
    assert [name for name, _ in FILES if load_config(name).config is None] == ["typo.json"]


def test_every_spelling_and_every_silent_key_is_named() -> None:
    words = {
        *KEY_ALIASES,
        *TYPE_ALIASES,
        *(word for table in VALUE_ALIASES.values() for word in table if "_e" not in word),
    }
    classes = {
        word
        for word in VALUE_ALIASES["observer_cls"]
        if word.startswith("Per") or word == "Placeholder"
    }
    schema = load_resource("schemas", "hierarchical.schema.json")
    properties = {**schema["properties"], **schema["definitions"]["spec"]["properties"]}
    silent = {key for key, entry in properties.items() if entry.get("code") == "QZ118"}
    assert {word for word in (words - classes) | silent if f"`{word}`" not in PAGE} == set()


@pytest.mark.parametrize("name", REPLACED_OBSERVERS)
def test_an_observer_that_is_not_here_has_one_replacement_everywhere(
    name: str, tmp_path: Path
) -> None:
    """In the message, in Python and on the page of names."""
    remedy = instead_of_observer(name)
    spec = {"dtype": "int8", "observer_cls": name}
    (tmp_path / "net.json").write_text(json.dumps({"global_quant_config": {"weight": spec}}))
    [finding] = load_config(tmp_path / "net.json").diagnostics
    assert finding.help == remedy
    with pytest.raises(AttributeError, match=re.escape(remedy)):
        getattr(quantizer, name)
    rows = (ROOT / "docs" / "quark_names.md").read_text("utf-8").splitlines()
    [row] = [row for row in rows if f"`{name}`" in row]
    observer, scale_type = REPLACED_OBSERVERS[name]
    told = f"`{observer}`" + (f' with `"scale_type": "{scale_type}"`' if scale_type else "")
    assert row.endswith(f"| {told} |")
