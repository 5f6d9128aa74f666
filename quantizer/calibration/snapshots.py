"""Snapshots of stopped stages: makes them of values, shares them between ranks, and checks them
when they are read. Observes the batches of a rank, and combines what all ranks have observed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.calibration.events import Snapshot
from quantizer.calibration.observing import Calibration, Observable, Watching
from quantizer.calibration.statistics import ChannelMean
from quantizer.config.json_types import fits
from quantizer.distributed import Ranks, merge_in_batch_order
from quantizer.errors import DAMAGE_ERRORS, CheckpointError
from quantizer.sources.batches import Batch, prefix_batch_errors
from quantizer.storage.files import damaged

_AGAIN = "run without <--resume>"
_T = TypeVar("_T")

_BATCHES_APART = 8
"""Batches of a rank between two exchanges. A stopped run loses what it has observed since the
last one.
"""


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


def observe_share(
    calibration: Calibration, network: Observable, batches: Iterable[Batch], ranks: Ranks
) -> None:
    """Observe each batch on its rank, and merge the statistics of all ranks.

    Raises:
        DataError: NaN or Inf in a tensor (layer and batch are named).
        RankError: the ranks do not have the same batches.
    """
    shard = _Shard(calibration)
    first = calibration.batches
    # Ranks that do not fit each other are found at the first exchange
    batches_per_rank = 1
    since = 0
    for number, batch in enumerate(batches):
        if ranks.owns(number):
            with prefix_batch_errors(first + number, batch):
                shard.observe(network, batch)
        since += 1
        if since == batches_per_rank * ranks.world_size:
            shard.exchange(ranks, since)
            batches_per_rank = _BATCHES_APART
            since = 0
    shard.exchange(ranks, since)


class _Shard:
    """What a rank has observed since the last exchange, and the calibration that it is merged
    into.
    """

    def __init__(self, whole: Calibration) -> None:
        self._whole = whole
        self._clear()

    def observe(self, network: Observable, batch: Batch) -> None:
        """Observe one batch of this rank's share."""
        self._watching.observe(partial(network.observe, batch.args, batch.kwargs))
        self._means.append(self._part.means)
        self._start_batch()

    def exchange(self, ranks: Ranks, batches: int) -> None:
        """Merge what all ranks have observed of so many batches."""
        whole = self._whole
        place = f"calibration after {whole.batches + batches} batches"
        shards = ranks.gather((self._part.calibrated, self._means), place)
        for key, observer in whole.calibrated.items():
            observer.merge(*(observers[key] for observers, _ in shards))
        for means in merge_in_batch_order(means for _, means in shards):
            for layer, mean in means.items():
                whole.means[layer].merge(mean)
        whole.batches += batches
        self._clear()

    def _clear(self) -> None:
        self._part = self._whole.fresh()
        # Means of each batch are merged one by one, in the order of the batches
        self._means: list[dict[str, ChannelMean]] = []
        self._start_batch()

    def _start_batch(self) -> None:
        self._part.means = self._whole.fresh().means
        self._watching = Watching(self._part)
