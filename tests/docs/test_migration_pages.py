"""The pages for those who come from another tool: what they say to write here runs, and every
word of ours exists.

A block ```py is code of the other tool, which does not run. Blocks ```python run one after the
other, as in a notebook; those below "As `file`:" are files first, like ```json. Blocks that
begin with `$ quantizer` print the lines below each command. In tables, what stands as code in a
column "here" or "for the same as there" is an option, a key, a value, a name or a file of ours.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import quantizer
from quantizer.api.config import OBSERVERS
from quantizer.api.result import Result
from quantizer.cli.main import cli, run_command, subcommands
from quantizer.config.algorithms import ALGORITHMS
from quantizer.config.document.document import Document
from quantizer.config.load import check_document, load_config
from quantizer.config.resources import load_resource

ROOT = Path(__file__).parents[2]
PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    for name in (
        "from_vai_q_pytorch",
        "vai_q_pytorch_differences",
        "from_quark",
        "quark_names",
        "quark_differences",
    )
}
FENCE = re.compile(
    r"^(?:As `(?P<file>[\w.]+)`:\n\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FREE = {"layer1.0.conv1", "re:", "model()", "evaluate(model, data)"}
"""Words that a user chooses."""


def blocks(page: str) -> list[re.Match[str]]:
    return list(FENCE.finditer(PAGES[page]))


@pytest.fixture
def folder(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's files, as the working directory."""
    for found in blocks(page):
        if found["file"]:
            (tmp_path / found["file"]).write_text(found["text"], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    yield tmp_path
    sys.modules.pop("my_model", None)


@pytest.mark.real
@pytest.mark.parametrize("page", PAGES)
def test_what_stands_under_here_runs(page: str, folder: Path) -> None:
    names: dict[str, Any] = {}
    for found in blocks(page):
        if found["kind"] == "python" and not found["file"]:
            exec(compile(found["text"], page, "exec"), names)
        elif found["kind"] == "json":
            (folder / "read.json").write_text(found["text"], encoding="utf-8")
            assert [
                str(each)
                for each in load_config("read.json").diagnostics
                if each.severity == "error"
            ] == []
        elif found["text"].startswith("$ quantizer "):
            for part in found["text"].split("$ quantizer ")[1:]:
                command, *expected = part.replace("\\\n", " ").strip().splitlines()
                printed = _printed(command)
                assert [line for line in expected if _spaced(line) not in printed] == [], (
                    printed
                )
        else:
            assert found["file"] or found["kind"] == "py"


@pytest.mark.parametrize("page", PAGES)
def test_words_of_ours_exist(page: str) -> None:
    unknown = [
        word
        for cell in _cells(PAGES[page])
        for word in re.findall(r"`([^`]+)`", cell)
        if not _exists(word)
    ]
    assert unknown == []


IMPORTS = re.findall(
    r"^\| (`quark\.[^|]+) \| `(from quantizer import (\w+))` \|$",
    PAGES["quark_names"],
    re.MULTILINE,
)
OURS_ALONE = {"IMatrixConfig", *OBSERVERS}
DOCUMENTED = {
    "quark.torch": "ModelQuantizer",
    "quark.torch.quantization.config.config": "Config QuantizationConfig QuantizationSpec SmoothQuantConfig AWQConfig GPTQConfig",
    "quark.torch.quantization.config.type": "Dtype QSchemeType ScaleType RoundType DeviceType",
    "quark.torch.quantization.observer.observer": (
        "PerTensorMinMaxObserver PerChannelMinMaxObserver PerTensorPercentileObserver "
        "PerTensorMSEObserver"
    ),
}
"""The classes that Quark's public pages import, by module."""


@pytest.mark.parametrize(
    ("theirs", "line", "name"), IMPORTS, ids=[name for *_, name in IMPORTS]
)
def test_the_one_import_that_replaces_each_of_theirs_works(
    theirs: str, line: str, name: str
) -> None:
    names: dict[str, Any] = {}
    exec(line, names)
    assert inspect.isclass(names[name])
    assert theirs.count("`") % 2 == 0 and f".{name}`" in theirs


def test_every_class_of_the_public_paths_and_of_ours_has_an_import() -> None:
    listed = [path for theirs, *_ in IMPORTS for path in re.findall(r"`([^`]+)`", theirs)]
    assert len(set(listed)) == len(listed)
    assert {
        f"{module}.{name}" for module, names in DOCUMENTED.items() for name in names.split()
    } <= set(listed)
    assert {name for *_, name in IMPORTS} - OURS_ALONE == {*_public()} - OURS_ALONE


def _printed(command: str) -> str:
    """What a command prints on both streams; it ends with exit code 0."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = run_command(shlex.split(command))
    assert code == 0, output.getvalue()
    return _spaced(output.getvalue())


def _spaced(text: str) -> str:
    """Columns one space apart."""
    return re.sub(r" +", " ", text)


def _cells(page: str) -> Iterator[str]:
    """The cells of the columns about what to write here."""
    for table in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|\n").split(" | ")]
            for line in table.splitlines()
        )
        for row in rows:
            assert len(row) == len(head), row
            yield from (
                cell
                for name, cell in zip(head, row, strict=True)
                if name.startswith(("here", "for"))
            )


def _exists(word: str) -> bool:
    """Whether a word of ours is one."""
    if word.startswith(("quantizer ", "--")):
        return _is_command(word)
    if word.startswith("from quantizer import "):
        return word.removeprefix("from quantizer import ") in quantizer.__all__
    if word.startswith("{"):
        return _is_part_of_a_config(json.loads(word))
    if '"' in word and "(" not in word:
        return set(re.findall(r'"([^"]+)"', word)) <= _words() | FREE
    return word in FREE | _words() | _files() or _is_name(word)


def _is_part_of_a_config(part: dict[str, Any]) -> bool:
    """Whether an algorithm, or the spec of a weight or of an input, is read without an
    error.
    """
    weight = {"dtype": "int8"}
    levels: list[dict[str, Any]] = [{"weight": part}, {"weight": weight, "input_tensors": part}]
    documents = [{"global_quant_config": level} for level in levels]
    if "name" in part:
        documents = [{"global_quant_config": {"weight": weight}, "algo_config": part}]
    return any(
        check_document(Document.of(each, "part")).config is not None for each in documents
    )


def _is_command(word: str) -> bool:
    """Options of some command, after `quantizer` those of its subcommand."""
    words = shlex.split(word.removeprefix("quantizer "))
    if word.startswith("quantizer ") and not word.startswith("quantizer --"):
        command = cli.get_command(click.Context(cli), words[0])
        return command is not None and {
            each for each in words if each.startswith("--")
        } <= _options(command)
    every = {
        option
        for name in subcommands()
        for option in _options(cli.get_command(click.Context(cli), name))
    }
    return {each for each in words if each.startswith("--")} <= every | _options(cli)


def _options(command: click.Command | None) -> set[str]:
    return {spelling for each in command.params for spelling in each.opts} if command else set()


@cache
def _words() -> set[str]:
    """Keys and values of both file forms, fields and names of Python, operators by their torch
    names.
    """

    def inside(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from value.get("properties", {})
            yield from (each for each in value.get("enum", ()) if isinstance(each, str))
            yield from (each for item in value.values() for each in inside(item))
        elif isinstance(value, list):
            yield from (each for item in value for each in inside(item))

    schemas = [
        load_resource("schemas", f"{form}.schema.json") for form in ("layered", "hierarchical")
    ]
    calls = inspect.signature(quantizer.calibrate).parameters
    literals = {
        "true",
        "false",
        "null",
        "kind:embedding",
        "kind:head",
        "auto",
        "Linear",
        "Conv2d",
        "ReLU",
        "add",
    }
    return {*inside(schemas), *ALGORITHMS, *calls, *quantizer.__all__, *literals}


@cache
def _files() -> set[str]:
    """Result files and presets: those that docs/result_folder.md lists, what deploys, and what a model in
    place is saved as.
    """
    listed = set(
        re.findall(
            r"`([\w<>]+\.\w[\w.]*)`", (ROOT / "docs" / "result_folder.md").read_text("utf-8")
        )
    )
    presets = {f"configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    exported = {
        "<Model>.onnx",
        "<Model>.pt2",
        "<Model>.safetensors",
        "export",
        "model.safetensors",
        "quantizer.json",
    }
    # The last are keys of quant_info.json
    return {*listed, *presets, *exported, "scale", "zero_point", "position"}


def _is_name(word: str) -> bool:
    """A dotted name that is there, such as `quantizer.calibrate(model, config, data)` or
    `result.save(folder)`.
    """
    path, _, arguments = word.partition("(")
    root, *rest = path.split(".")
    roots = {
        "quantizer": quantizer,
        "torch": torch,
        "result": Result,
        **{n: getattr(quantizer, n) for n in _public()},
    }
    found: Any = roots.get(root)
    for part in rest:
        if not hasattr(found, part) and inspect.ismodule(found):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{found.__name__}.{part}")
        if not hasattr(found, part) and part not in getattr(found, "__annotations__", {}):
            return (root, path) == ("result", "result.plan")  # an attribute of each result
        found = getattr(found, part, None)
    keywords = set(re.findall(r"(\w+)=", arguments))
    return root in roots and (
        not keywords or keywords <= set(inspect.signature(found).parameters)
    )


def _public() -> list[str]:
    return [
        name
        for name in quantizer.__all__
        if name not in ("Quantized", "calibrate", "load", "quantize")
    ]
