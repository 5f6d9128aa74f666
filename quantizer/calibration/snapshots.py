"""Snapshots of interrupted stages: made of values, shared by ranks, and checked when they are
read back.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.calibration.events import Snapshot
from quantizer.config.typed_fields import fits
from quantizer.distributed import Ranks
from quantizer.errors import ResultError
from quantizer.storage.files import damaged

AGAIN = "run without --resume"
T = TypeVar("T")


class CheckpointStore(Protocol):
    """Where interrupted stages leave their snapshots."""

    def restore(self, name: str, key: Mapping[str, Any]) -> Snapshot | None:
        """Return what a stopped run has left of a stage, if this run is to go on from it."""


def checked_statistics(tensors: Mapping[str, Tensor], path: Path | str) -> Mapping[str, Tensor]:
    """Statistics as they were read, if calibration can have written them.

    Raises:
        ResultError: naming the tensor.
    """
    for name, tensor in tensors.items():
        if name.count("|") < 2:
            raise damaged(path, name, "it says of no tensor")
        if name.endswith(("|counts", "|count")):
            if tensor.dtype != torch.int64 or bool((tensor < 0).any()):
                raise damaged(path, name, "it counts nothing")
        elif bool(tensor.isnan().any()):
            raise damaged(path, name, "it holds NaN")
    return tensors


def snapshot_of(value: Any, data: Mapping[str, Any] | None = None) -> Snapshot:
    """Of nested dicts, tuples and registered dataclasses; `data` is the fingerprint of what it
    was found on.
    """
    leaves, structure = pytree.tree_flatten(value)
    tensors = {str(at): leaf for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    state = {
        "structure": pytree.treespec_dumps(structure),
        "values": others,
        "tensors": sorted(tensors),
        "data": data,
    }
    return Snapshot(tensors, state)


def shared(snapshot: Snapshot, ranks: Ranks, place: str) -> Snapshot:
    """Rank 0's on all ranks, tensor by tensor, so that none has more of them in memory than it
    keeps there.
    """
    names, state = ranks.broadcast((list(snapshot.tensors), snapshot.state), place)
    own = snapshot.tensors if ranks.is_first else dict.fromkeys(names, torch.empty(0))
    return Snapshot(
        {name: ranks.broadcast(own[name], f"{place}, {name}") for name in names}, state
    )


def value_of(snapshot: Snapshot, kind: type[T]) -> T:
    """The inverse of `snapshot_of`, for a value that is annotated as a `kind`.

    Raises:
        ResultError: it is of something else.
    """
    with telling_damage("the checkpoint"):
        leaves = [
            snapshot.tensors.get(str(at), value)
            for at, value in enumerate(snapshot.state["values"])
        ]
        structure = snapshot.state["structure"]
        if sorted(snapshot.tensors) != snapshot.state["tensors"]:
            raise ValueError("it lacks tensors, or has others")
        if strange := sorted(
            {*filter(None, _types(json.loads(structure)[1]))} - {*_CONTAINERS, *_registered}
        ):
            # Torch imports the module that some types name
            raise ValueError(f"it holds a {strange[0]}")
        value = pytree.tree_unflatten(leaves, pytree.treespec_loads(structure))
        if not fits(value, kind, within=True):
            raise ValueError("its values are of other kinds")
        return cast("T", value)


@contextmanager
def telling_damage(what: str) -> Iterator[None]:
    """What no checkpoint that was written here leads to is an error about the checkpoint."""
    try:
        yield
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
        AssertionError,
    ) as error:
        raise ResultError(
            f"{what} is damaged: {type(error).__name__}: {error}", help=AGAIN
        ) from error


def _types(structure: Mapping[str, Any]) -> Iterator[str | None]:
    """The types in a nested value, as torch names them in JSON; None stands for a leaf."""
    yield structure["type"]
    for child in structure["children_spec"]:
        yield from _types(child)


_CONTAINERS = ("builtins.dict", "builtins.list", "builtins.tuple")


_registered: set[str] = set()


def register(*classes: type) -> None:
    """Dataclasses that snapshots may hold."""
    for cls in classes:
        torch.export.register_dataclass(cls, serialized_type_name=f"quantizer.{cls.__name__}")
        _registered.add(f"quantizer.{cls.__name__}")


def other_run(why: str) -> ResultError:
    """The error about a checkpoint that this run cannot go on from."""
    return ResultError(f"the checkpoint belongs to another run: {why}", help=AGAIN)
