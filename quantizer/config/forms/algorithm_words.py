"""Read entries of `algo_config`, `pre_quant_opt_config` and `algorithms`."""

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from quantizer.config.algorithms import ALGORITHMS, AlgoConfig, Algorithm, settings_of
from quantizer.config.diagnostics import Place, Sourced
from quantizer.config.document.document import Document
from quantizer.config.forms.form import ALGORITHM_BLOCKS, Form
from quantizer.config.json_types import JsonObject, JsonPath

_GROUP_KEYS = ("prev_op", "layers", "inp")
"""The members of a group of layers that something reads."""


def read_algorithms(file: Document, form: Form) -> tuple[Algorithm, ...]:
    """Return the algorithms of a file in a form; unknown ones are left out."""
    algorithms: list[Algorithm] = []
    for path in file.entries(*ALGORITHM_BLOCKS[form]):
        name = file.get(*path, "name")
        if isinstance(name, str) and name in ALGORITHMS:
            algorithms.append(_read_entry(file, path, ALGORITHMS[name]))
    return tuple(algorithms)


def _read_entry(document: Document, path: JsonPath, kind: type[AlgoConfig]) -> Algorithm:
    """Return the algorithm of an entry of the file, with the places of its settings."""
    hints = get_type_hints(kind)
    stated: dict[str, Sourced] = {}
    for key in settings_of(kind):
        value = _valid_part(document, *path, key)
        # An empty name or list, as older files have it, states nothing
        is_empty = value in ("", []) and getattr(kind, key) is None
        if value is not None and not is_empty:
            stated[key] = Sourced(_typed(hints[key], value), document.place(*path, key))
    groups = document.items(*path, "scaling_layers")
    return Algorithm(
        kind=kind,
        path=path,
        stated=stated,
        place=document.place(*path, "name"),
        groups=tuple(document.place(*group) for group in groups),
        unread=dict(_unread(document, path, kind)),
    )


def _unread(
    document: Document, path: JsonPath, kind: type[AlgoConfig]
) -> Iterator[tuple[str, tuple[str, Place | None]]]:
    """Yield the stated keys that nothing reads, each with the reason and its first place."""
    for key, setting in settings_of(kind).items():
        if setting.unread and document.get(*path, key) not in (None, getattr(kind, key)):
            yield key, (setting.unread, document.place(*path, key))
    for group in document.items(*path, "scaling_layers"):
        key_path = (*group, "module2inspect")
        if document.get(*key_path) is not None:
            reason = "the outputs of the layers themselves are compared"
            yield "module2inspect", (reason, document.place(*key_path))
            return


def _valid_part(document: Document, *path: str | int) -> Any:
    """Return a value without the invalid items of a list, and of a group of layers the members
    that something reads.
    """
    value = document.get(*path)
    if isinstance(value, list):
        return [_valid_part(document, *item) for item in document.items(*path)]
    if isinstance(value, dict):
        members: JsonObject = {}
        for key in _GROUP_KEYS:
            member = _valid_part(document, *path, key)
            if member:
                members[key] = member
        return members
    return value


def _typed(hint: Any, value: Any) -> Any:
    """Return a value with its numbers as int or float: JSON has one kind of numbers."""
    if isinstance(value, list):
        return [_typed(hint, item) for item in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    members = (hint, *get_args(hint))
    kind = next((kind for kind in (float, int) if kind in members), None)
    return kind(value) if kind else value
