"""Snapshots of stopped stages: makes them of values, shares them between ranks, and checks them
when they are read.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.calibration.events import Snapshot
from quantizer.config.json_types import fits
from quantizer.distributed import Ranks
from quantizer.errors import DAMAGE_ERRORS, CheckpointError
from quantizer.storage.files import damaged

_AGAIN = "run without <--resume>"
_T = TypeVar("_T")


def checked_statistics(tensors: Mapping[str, Tensor], path: Path | str) -> Mapping[str, Tensor]:
    """Return statistics as they were read from `path`, if calibration can have written them.

    Raises:
        ResultError: naming the tensor.
    """
    for name, tensor in tensors.items():
        if name.count("|") < 2:
            raise damaged(path, name, "its name has no layer and role")
        if name.endswith(("|counts", "|count")):
            is_negative = tensor < 0
            if tensor.dtype != torch.int64 or bool(is_negative.any()):
                raise damaged(path, name, "it does not hold counts")
        elif bool(tensor.isnan().any()):
            raise damaged(path, name, "it holds NaN")
    return tensors


def snapshot_of(value: Any, data: Mapping[str, Any] | None = None) -> Snapshot:
    """Return a snapshot of nested dicts, tuples and registered dataclasses.

    Args:
        value: the nested value.
        data: the fingerprint of the data that it was found on.
    """
    leaves, structure = pytree.tree_flatten(value)
    tensors = {}
    others: list[Any] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            tensors[str(index)] = leaf
            others.append(None)
        else:
            others.append(leaf)
    state = {
        "structure": pytree.treespec_dumps(structure),
        "values": others,
        "tensors": sorted(tensors),
        "data": data,
    }
    return Snapshot(tensors, state)


def share_snapshot(snapshot: Snapshot, ranks: Ranks, place: str) -> Snapshot:
    """Return the first rank's snapshot on all ranks.

    Its tensors are sent one by one, so that no rank has copies of all of them in memory.
    """
    names = list(snapshot.tensors)
    names, state = ranks.broadcast((names, snapshot.state), place)
    tensors = {}
    for name in names:
        tensor = snapshot.tensors[name] if ranks.is_first else torch.empty(0)
        tensors[name] = ranks.broadcast(tensor, f"{place}, {name}")
    return Snapshot(tensors, state)


def value_of(snapshot: Snapshot, kind: type[_T]) -> _T:
    """Return the value that `snapshot_of` was called with.

    Raises:
        ResultError: the value does not fit the annotation `kind`.
    """
    with reporting_damage("the checkpoint"):
        leaves = []
        for index, other in enumerate(snapshot.state["values"]):
            leaf = snapshot.tensors.get(str(index), other)
            leaves.append(leaf)
        structure = snapshot.state["structure"]
        if sorted(snapshot.tensors) != snapshot.state["tensors"]:
            raise ValueError("it lacks tensors, or has others")
        # Checked before torch loads them, which imports the modules that some types name
        types = set(_types(json.loads(structure)[1]))
        unknown = sorted(types - {*_CONTAINERS, *_registered})
        if unknown:
            raise ValueError(f"it holds a {unknown[0]}")
        value = pytree.tree_unflatten(leaves, pytree.treespec_loads(structure))
        if not fits(value, kind, within=True):
            raise ValueError("its values are of other kinds")
        return cast("_T", value)


@contextmanager
def reporting_damage(what: str) -> Iterator[None]:
    """Raise `CheckpointError` for errors that only a damaged checkpoint `what` leads to."""
    try:
        yield
    except DAMAGE_ERRORS as error:
        raise CheckpointError(
            f"{what} is damaged: {type(error).__name__}: {error}", help=_AGAIN
        ) from error


def _types(structure: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types in a nested value, as torch names them in JSON."""
    # A leaf has no type
    if structure["type"]:
        yield structure["type"]
    for child in structure["children_spec"]:
        yield from _types(child)


_CONTAINERS = ("builtins.dict", "builtins.list", "builtins.tuple")


_registered: set[str] = set()


def register_dataclasses(*classes: type) -> None:
    """Register dataclasses that snapshots may hold."""
    for cls in classes:
        name = f"quantizer.{cls.__name__}"
        if name in _registered:
            continue
        torch.export.register_dataclass(cls, serialized_type_name=name)
        _registered.add(name)


def other_run(why: str) -> CheckpointError:
    """Return the error about a checkpoint that this run cannot resume from."""
    return CheckpointError(f"the checkpoint belongs to another run: {why}", help=_AGAIN)
