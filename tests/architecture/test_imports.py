"""Imports run one way: a room may import the rooms in the layers before it, and no sibling."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.ledger import MODULES, PACKAGE, source

ROOT = PACKAGE.parent
LAYERS = (
    ("printable", "option_words", "installation"),
    ("errors", "torch_state"),
    ("rows",),
    ("declarations",),
    ("plugins",),
    ("tables",),
    ("storage",),
    ("config", "numerics", "distributed"),
    ("observers", "graph"),
    ("nn", "plan"),
    ("sources",),
    ("layerwise",),
    ("comparison",),
    ("calibration",),
    ("algorithms",),
    ("results",),
    ("evaluation",),
    ("export", "report"),
    ("cli", "api"),
    ("commands",),
)
DEPTH = {room: depth for depth, layer in enumerate(LAYERS) for room in layer}
ROOT_FILES = {"__init__", "__main__"}
MOST_FILES, MOST_TOKENS = 230, 230_000
"""What a calibration and a test of a small network may import of the package, together."""
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
TWO_MODES = """
import sys
from quantizer.cli.main import run_command

config, model = sys.argv[1:]
for mode in ("calib", "test"):
    options = ["--config_file", config, "--model", model, "-q"]
    assert run_command(["--quant_mode", mode, *options]) == 0
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "quantizer":
        print("imported", module.__file__)
"""


def modules() -> list[Path]:
    return sorted(
        path
        for path in MODULES
        if path.relative_to(PACKAGE).parts[0].removesuffix(".py") not in ROOT_FILES
    )


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Every module that a file imports."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    """Also inside functions, also by `importlib.import_module("…")`."""
    for node in source(path).nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import(node.func):
            yield from (
                arg.value
                for arg in node.args
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def _is_import(function: ast.expr) -> bool:
    name = getattr(function, "attr", getattr(function, "id", ""))
    return name.endswith("import_module")


def rooms_imported(path: Path) -> set[str]:
    names = [name.split(".") for name in imported(path)]
    return {
        parts[1]
        for parts in names
        if parts[0] == "quantizer" and len(parts) > 1 and parts[1] in DEPTH
    }


def test_every_room_has_its_layer() -> None:
    assert {room_of(path) for path in modules()} <= set(DEPTH)


def test_no_upward_or_sideways_import() -> None:
    faults: list[str] = []
    for path in modules():
        here = room_of(path)
        for room in sorted(rooms_imported(path)):
            if room != here and DEPTH[room] >= DEPTH[here]:
                faults.append(f"{path.relative_to(PACKAGE)} imports {room}")
    assert not faults


def test_the_command_line_parses_renders_and_exits() -> None:
    """The pipeline runs algorithms, for the shell and Python alike."""
    for path in modules():
        if room_of(path) == "cli":
            assert not {"algorithms", "layerwise"} & rooms_imported(path), path.name


def test_no_module_imports_itself_by_way_of_others() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules()}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    edges = {
        name: {
            target
            for found in imported(path)
            for target in (found, found.rpartition(".")[0])
            if target in names
        }
        for name, path in names.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for target in sorted(edges[name] - {name}):
                visit(target, (*trail, name))
            done.add(name)

    for name in sorted(names):
        visit(name, ())


@pytest.mark.parametrize(
    ("room", "allowed"), [("config", {"jsonschema"}), ("numerics", {"torch"})]
)
def test_third_parties_of_the_lowest_rooms(room: str, allowed: set[str]) -> None:
    import sys

    found = {
        name.split(".")[0]
        for path in modules()
        if room_of(path) == room
        for name in imported(path)
    }
    assert found - sys.stdlib_module_names - {"quantizer"} <= allowed


def tokens_of(path: Path) -> int:
    """Return how many tokens a file has, without comments and layout."""
    with path.open("rb") as file:
        return sum(token.type not in LAYOUT for token in tokenize.tokenize(file.readline))


def test_a_run_imports_only_what_it_uses(tmp_path: Path) -> None:
    """A feature that a run does not use is imported by the function that uses it."""
    command = [sys.executable, "-c", TWO_MODES]
    command += [str(ROOT / "configs/cpu_int8.json"), str(ROOT / "examples/digits.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    lines = ended.stdout.splitlines()
    files = [Path(line.split(" ", 1)[1]) for line in lines if line.startswith("imported ")]
    assert len(files) <= MOST_FILES
    assert sum(map(tokens_of, files)) <= MOST_TOKENS
