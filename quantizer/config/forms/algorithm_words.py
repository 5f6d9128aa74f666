"""Reads entries of `algo_config`, `pre_quant_opt_config` and `algorithms`, and writes them.
Checks nothing.
"""

import itertools
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from quantizer.config.algorithm_settings import AlgoConfig, read_keys, settings_of
from quantizer.config.algorithms import ALGORITHMS
from quantizer.config.diagnostics import Place
from quantizer.config.document.document import ValidDocument
from quantizer.config.model import Algorithm, Sourced

Path = tuple[str | int, ...]


def read_algorithms(view: ValidDocument, *blocks: str) -> tuple[Algorithm, ...]:
    """The entries of the blocks in order; one algorithm may stand without a list. Unknown ones
    are left out.
    """
    paths = (_entries(view, block) for block in blocks)
    return tuple(entry for path in itertools.chain(*paths) if (entry := _entry(view, path)))


def read_names(view: ValidDocument, *blocks: str) -> tuple[tuple[str, Place | None], ...]:
    """The name of every entry of the blocks, in order, and where it stands."""
    paths = (_entries(view, block) for block in blocks)
    named = [
        (view.get(*path, "name"), view.place(*path, "name")) for path in itertools.chain(*paths)
    ]
    return tuple((name, place) for name, place in named if isinstance(name, str))


def written(settings: AlgoConfig) -> dict[str, Any]:
    """The entry of a file that says the same as settings, with every default that something
    reads.

    >>> written(ALGORITHMS["rotation"](seed=3))
    {'name': 'rotation', 'residual': True, 'values': True, 'online': True, 'seed': 3}
    """
    values = {key: getattr(settings, key) for key in read_keys(type(settings))}
    return {
        "name": settings.name,
        **{key: value for key, value in values.items() if value is not None},
    }


def _entries(view: ValidDocument, block: str) -> list[Path]:
    return [(block,)] if isinstance(view.get(block), dict) else _items(view, block)


def _items(view: ValidDocument, *path: str | int) -> list[Path]:
    return [(*path, at) for at in view.items(*path)]


def _entry(view: ValidDocument, path: Path) -> Algorithm | None:
    """An empty name or list, as older files have it, states nothing."""
    name = view.get(*path, "name")
    if not isinstance(name, str) or name not in ALGORITHMS:
        return None
    kind = ALGORITHMS[name]
    hints = get_type_hints(kind)
    found = {key: _sound(view, *path, key) for key in settings_of(kind)}
    stated = {
        key: Sourced(_typed(hints[key], value), view.place(*path, key))
        for key, value in found.items()
        if value is not None and not (value in ("", []) and getattr(kind, key) is None)
    }
    groups = tuple(view.place(*group) for group in _items(view, *path, "scaling_layers"))
    return Algorithm(
        kind, path, stated, view.place(*path, "name"), groups, dict(_unread(view, path, kind))
    )


def _unread(
    view: ValidDocument, path: Path, kind: type[AlgoConfig]
) -> Iterator[tuple[str, tuple[str, Place | None]]]:
    for key, meant in settings_of(kind).items():
        if meant.unread and view.get(*path, key) not in (None, getattr(kind, key)):
            yield key, (meant.unread, view.place(*path, key))
    key = "module2inspect"
    groups = [(*group, key) for group in _items(view, *path, "scaling_layers")]
    for group in [group for group in groups if view.get(*group) is not None][:1]:
        yield key, ("the outputs of the layers themselves are compared", view.place(*group))


def _sound(view: ValidDocument, *path: str | int) -> Any:
    """A value; of a list the items that are not wrong, of a group of layers the members that
    something reads.
    """
    value = view.get(*path)
    if isinstance(value, list):
        return [_sound(view, *item) for item in _items(view, *path)]
    if isinstance(value, dict):
        return {
            key: item
            for key in ("prev_op", "layers", "inp")
            if (item := _sound(view, *path, key))
        }
    return value


def _typed(hint: Any, value: Any) -> Any:
    """JSON has one kind of numbers."""
    if isinstance(value, list):
        return [_typed(hint, item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        members = (hint, *get_args(hint))
        return float(value) if float in members else int(value) if int in members else value
    return value
