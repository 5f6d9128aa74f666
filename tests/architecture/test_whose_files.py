"""Only `storage` replaces or removes files, because it alone knows whose they are."""

from __future__ import annotations

import ast

from support.ledger import MODULES, PACKAGE, shown, source

METHODS = {"unlink", "rmdir", "rename", "touch"}
FUNCTIONS = {
    "os.replace",
    "os.rename",
    "os.remove",
    "os.unlink",
    "shutil.rmtree",
    "shutil.move",
}
OF_TEMPORARY_FOLDERS = {"export/openvino_ir/exporter.py"}
"""It removes files of a folder that it has made for another process."""


def test_only_storage_replaces_or_removes_files() -> None:
    faults: list[str] = []
    for path in MODULES:
        if path.is_relative_to(PACKAGE / "storage") or shown(path) in OF_TEMPORARY_FOLDERS:
            continue
        for node in source(path).nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name = ast.unparse(node.func)
            if node.func.attr in METHODS or name in FUNCTIONS:
                faults.append(f"{shown(path)}:{node.lineno}: {name}")
    assert not faults
