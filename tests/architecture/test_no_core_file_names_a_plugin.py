"""No file of the core names a plug-in, or a word that one adds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from support.ledger import MODULES, PACKAGE, source

from quantizer.plugins import plugins

FOLDERS = [path.parent for path in sorted(PACKAGE.glob("*/*/plugin.py"))]
PLUGINS = plugins(with_commands=True)
COMMON = {
    *("images", "texts", "page", "report", "run", "start", "diff", "convert", "synthetic"),
    *("mobile", "encodings", "inspection", "recalibration", "tuning"),
    # What the core reads and writes itself
    *("safetensors", "transformers", "accelerate"),
}
"""Words that mean something else in sentences, too."""
EXCEPTIONS = {
    # The position of a cached value, before or after the embedding of positions rotates it
    ("config/rules/check_hierarchical.py", "rotation"),
    # The operator of a calibrated network: nn has its layer, and results hold it
    ("graph/ops.py", "rotation"),
    # A key of quant_info.json, whose schema has it
    ("plan/model.py", "bias_correction"),
    # The verb
    ("results/checkpoint.py", "finetuning"),
    # The options of names, which all exporters of programs serve
    ("export/value_names.py", "input_names"),
    ("export/value_names.py", "output_names"),
    # What exporters of models of transformers share
    ("export/hugging_face_folder.py", "a Hugging Face folder"),
}
ALWAYS_SAID = {
    # Comments that say what has written a config
    "config/run_config.py",
    "commands/searching/tune.py",
}


def core_files() -> list[Path]:
    return [path for path in MODULES if not any(map(path.is_relative_to, FOLDERS))]


def sentences(path: Path) -> list[str]:
    """Return the texts in a file that are no docstrings."""
    nodes = source(path).nodes
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts: list[str] = []
    for node in nodes:
        if id(node) not in docstrings and isinstance(node, ast.Constant):
            texts += [node.value] if isinstance(node.value, str) else []
    return texts


def declared_words() -> set[str]:
    """Return the words by which sentences name what a plug-in adds."""
    words: set[str] = set()
    for plugin in PLUGINS:
        words |= {plugin.name, *plugin.targets, *plugin.algorithms}
        words |= {kind.form for kind in plugin.models}
        for row in plugin.algorithms.values():
            words |= {*row.aliases}
        for target in plugin.targets.values():
            words |= {*target.needs, *(option.name for option in target.options)}
        for packages in plugin.packages.values():
            words |= {*packages}
    return words - COMMON


def test_sentences_of_the_core_name_no_plugin() -> None:
    words = sorted(map(re.escape, declared_words()), reverse=True)
    # Suffixes of files are no names
    pattern = re.compile(rf"(?<![\w.-])(?:{'|'.join(words)})(?![\w-])")
    found: set[tuple[str, str]] = set()
    for path in core_files():
        for text in sentences(path):
            found |= {
                (path.relative_to(PACKAGE).as_posix(), word) for word in pattern.findall(text)
            }
    assert found == EXCEPTIONS


def test_the_core_offers_a_command_only_if_it_is_there() -> None:
    names = [name for plugin in PLUGINS for name in plugin.commands]
    pattern = re.compile(rf"\bquantizer (?:{'|'.join(names)})\b")
    faults: list[str] = []
    for path in core_files():
        place = path.relative_to(PACKAGE).as_posix()
        asks = {node.id for node in source(path).nodes if isinstance(node, ast.Name)}
        if asks & {"if_command", "commands"} or place in ALWAYS_SAID:
            continue
        faults += [f"{place} {text!r}" for text in sentences(path) if pattern.search(text)]
    assert not faults


def test_functions_and_classes_of_the_core_name_no_algorithm() -> None:
    algorithms = {name for plugin in PLUGINS for name in plugin.algorithms}
    found: set[str] = set()
    for path in core_files():
        for node in source(path).nodes:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                named = algorithms & set(node.name.lower().split("_"))
                found |= {node.name} if named else set()
    # The embedding of positions
    assert found == {"_heads_before_rotation"}
