"""What can run code of others is called in one place each, with the argument that forbids it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from support.ledger import MODULES, PACKAGE, shown, source

PRETRAINED = PACKAGE / "sources" / "json_files.py"
TRUSTED = {"sources/models.py", "export/programs/program.py"}
"""Where a `.pt2` is loaded: with --trust, and what was just written."""


def calls(name: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the file and the constant keyword arguments of each call of a method."""
    for path in MODULES:
        for node in source(path).nodes:
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(name):
                continue
            constants: dict[str, object] = {}
            for argument in node.keywords:
                if argument.arg and isinstance(argument.value, ast.Constant):
                    constants[argument.arg] = argument.value.value
            yield shown(path), constants


def test_one_function_calls_from_pretrained() -> None:
    words = ("from_pretrained", "from_config", "dynamic_module_utils", "trust_remote_code")
    for path in MODULES:
        names: set[str] = set()
        for node in source(path).nodes:
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                names.add(node.arg)
        named = names.intersection(words) - {"_from_config"}
        assert not named or path == PRETRAINED, shown(path)


def test_pickles_do_not_run() -> None:
    loads = [*calls("torch.load")]
    assert loads
    assert all(keywords.get("weights_only") is True for _, keywords in loads)
    assert {path for path, _ in calls("export.load")} == TRUSTED
    for _, keywords in [*calls("np.load"), *calls("numpy.load")]:
        assert not keywords.get("allow_pickle")
