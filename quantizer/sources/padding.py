"""Leave padding out of batches. A batch whose attention mask excludes positions becomes one
batch for each range of positions that its sequences have.

No statistic sees a position before the first or after the last that the mask includes, and no
algorithm has to know of masks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.errors import BatchError
from quantizer.graph.ir import Graph
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches

logger = logging.getLogger(__name__)

_MASK = "attention_mask"
_TEXTS = ("decoder_", "encoder_", "")
"""How the names of the arguments of one text begin; the last one is for all other names."""
_EMBEDDINGS = ("inputs_embeds", "hidden_states")
"""Floating-point arguments [batch, positions, width] of a text."""
_IMAGE_RANK = 4
"""Axes from which on floating-point values have no positions, as `graph.lengths` has it."""
_Path = tuple[Any, ...]
"""Where a value is in (args, kwargs)."""
_Span = tuple[int, int]
"""The first position of a sequence, and the one after its last."""


@dataclass(frozen=True)
class _Positions:
    """Where a call has the positions of one text.

    Args:
        axes: the axis of each value that has them, by the value's path.
        least: the fewest positions that the model accepts.
    """

    axes: Mapping[_Path, tuple[int, ...]]
    least: int = 1


def without_padding(
    batches: Batches,
    graph: Graph | None,
) -> Iterator[Batch]:
    """Yield the batches of a pass, numbered, without padding.

    The attention mask is the argument `attention_mask`, 2-D [batch, positions], of integers 0
    and 1 or booleans. `decoder_attention_mask` and `encoder_attention_mask` are those of other
    texts of the same call. A batch without padding keeps its tensors.

    Args:
        batches: the data, and the names of the model's arguments.
        graph: the trace that the batches will run through. It says where the positions of a
            mask are. None for a model without a trace.

    Raises:
        BatchError: a mask excludes all positions of a batch.
    """
    for number, batch in enumerate(batches):
        numbered = replace(batch, number=number)
        call = _PaddedCall(numbered, batches, graph)
        yield from call.parts()


class _PaddedCall:
    """One batch, whose sequences are taken apart."""

    def __init__(
        self,
        batch: Batch,
        batches: Batches,
        graph: Graph | None,
    ) -> None:
        self._batch = batch
        self._batches = batches
        self._graph = graph
        call = (batch.args, dict(batch.kwargs))
        leaves, self._structure = pytree.tree_flatten_with_path(call)
        self._values: dict[_Path, Any] = {}
        for keys, value in leaves:
            path = tuple(_step(key) for key in keys)
            self._values[path] = value

    def parts(self) -> Iterator[Batch]:
        """Yield the batch, or the batches that it becomes."""
        masks = self._padded_masks
        if not masks:
            yield self._batch
            return
        texts = {}
        for path in masks:
            positions = self._positions(path)
            if positions is None:
                self._stay("the number of its positions is fixed, or several axes may have it")
                yield self._batch
                return
            texts[path] = positions
        groups = self._groups(masks, texts)
        count = max(map(len, masks.values()))
        is_divided = any(len(rows) < count for rows in groups.values())
        if is_divided and not self._is_by_sample(count):
            self._stay("not all of its values have the samples along axis 0")
            yield self._batch
            return
        for spans, rows in groups.items():
            values = dict(self._values)
            if is_divided:
                values = self._of_samples(rows)
            for mask, span in zip(masks, spans, strict=True):
                _cut(values, texts[mask], span)
            yield self._with(values)

    @cached_property
    def _padded_masks(self) -> dict[_Path, Tensor]:
        """Return the masks that exclude something, boolean, by path."""
        masks = {}
        for path, value in self._values.items():
            name = self._name(path)
            if len(path) != 2 or name != _text_of(name) + _MASK:
                continue
            mask = _included(value)
            if mask is not None:
                masks[path] = mask
        return masks

    def _name(self, path: _Path) -> str:
        """Return the name of the argument that has a value."""
        where, key = path[:2]
        if where:
            return str(key)
        names = self._batches.arguments.names
        return names[key] if key < len(names) else ""

    def _positions(self, mask: _Path) -> _Positions | None:
        """Return where the positions of a mask are; None if that is not sure."""
        if self._graph is None:
            positions = self._positions_by_size(mask)
        else:
            positions = self._positions_in_graph(mask, self._graph)
        if positions is None:
            return None
        size = self._values[mask].shape[1]
        for path, axes in positions.axes.items():
            value = self._values.get(path)
            shape = getattr(value, "shape", ())
            # The network refuses the batch if they differ
            if any(axis >= len(shape) or shape[axis] != size for axis in axes):
                return None
        return positions

    def _positions_in_graph(
        self,
        mask: _Path,
        graph: Graph,
    ) -> _Positions | None:
        """Return where the positions of a mask are in a trace, if calls choose their number."""
        text = _text_of(self._name(mask))
        for length in graph.lengths:
            axes: dict[_Path, tuple[int, ...]] = {}
            for leaf, axis in length.axes:
                path = graph.input_paths[leaf]
                before = axes.get(path, ())
                axes[path] = (*before, axis)
            if axes.get(mask) != (1,):
                continue
            texts = {_text_of(self._name(path)) for path in axes}
            if texts == {text}:
                return _Positions(axes, length.least)
        return None

    def _positions_by_size(self, mask: _Path) -> _Positions | None:
        """Return where the positions of a mask are in a call of modules, None if another value
        has an axis of the same size.
        """
        text = _text_of(self._name(mask))
        shape = self._values[mask].shape
        axes = {}
        for path, value in self._values.items():
            name = self._name(path)
            if not isinstance(value, Tensor) or _text_of(name) != text:
                continue
            rank = value.dim()
            is_float = value.is_floating_point()
            if is_float and rank >= _IMAGE_RANK:
                continue
            is_embedded = rank == 3 and name.removeprefix(text) in _EMBEDDINGS
            is_of_tokens = rank == 2 and not is_float
            has_positions = value.shape[:2] == shape
            if has_positions and (is_of_tokens or is_embedded):
                axes[path] = (1,)
            elif shape[1] in value.shape[1:]:
                return None
        return _Positions(axes)

    def _groups(
        self,
        masks: Mapping[_Path, Tensor],
        texts: Mapping[_Path, _Positions],
    ) -> dict[tuple[_Span, ...], list[int]]:
        """Return the samples of each combination of spans, without samples that are all
        padding.

        Raises:
            BatchError: no sample is left.
        """
        by_mask = []
        for path, mask in masks.items():
            least = texts[path].least
            spans_of_mask = [_span(row, least) for row in mask.tolist()]
            by_mask.append(spans_of_mask)
        groups: dict[tuple[_Span, ...], list[int]] = {}
        for sample, of_sample in enumerate(zip(*by_mask, strict=True)):
            spans = tuple(span for span in of_sample if span is not None)
            if len(spans) < len(masks):
                continue
            rows = groups.setdefault(spans, [])
            rows.append(sample)
        if not groups:
            names = " and ".join(self._name(path) for path in masks)
            raise BatchError(
                f"batch {self._batch.number}: {names} excludes every position",
                help="1 is for a token, and 0 for padding",
            )
        return groups

    def _is_by_sample(self, count: int) -> bool:
        """Return whether each tensor of the call has the samples along axis 0, any number of
        them.

        Args:
            count: how many samples there are.
        """
        nodes = () if self._graph is None else self._graph.nodes
        for node in nodes:
            if node.op != "input" or not node.shape:
                continue
            if node.shape[0] is not None:
                return False
        for value in self._values.values():
            if isinstance(value, Tensor) and value.shape[:1] != (count,):
                return False
        return True

    def _of_samples(self, rows: list[int]) -> dict[_Path, Any]:
        """Return the values of some samples, by path."""
        values = {}
        for path, value in self._values.items():
            if isinstance(value, Tensor):
                value = value[rows]
            values[path] = value
        return values

    def _with(self, values: Mapping[_Path, Any]) -> Batch:
        """Return the batch with other values, and without a target."""
        leaves = list(values.values())
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return replace(
            self._batch,
            args=args,
            kwargs=kwargs,
            target=None,
            raw=kwargs or args[0],
        )

    def _stay(self, reason: str) -> None:
        """Warn, once for each reason, that padding stays."""
        if reason in self._batches.warnings:
            return
        self._batches.warnings.add(reason)
        logger.warning(
            "batch %s of %s: its padding counts in the statistics, as %s (give sequences of "
            "one length)",
            self._batch.number,
            self._batches.label,
            reason,
        )


def _step(key: Any) -> Any:
    """Return the index or key that an entry of a pytree path stands for."""
    return key.idx if hasattr(key, "idx") else getattr(key, "key", None)


def _cut(
    values: dict[_Path, Any],
    positions: _Positions,
    span: _Span,
) -> None:
    """Leave the positions of a span alone in all values that have positions."""
    first, end = span
    for path, axes in positions.axes.items():
        value = values[path]
        if value.shape[axes[0]] == end - first:
            continue
        for axis in axes:
            value = value.narrow(
                axis,
                first,
                end - first,
            )
        values[path] = value.contiguous()


def _text_of(name: str) -> str:
    """Return how the names of the arguments of the same text begin."""
    return next(text for text in _TEXTS if name.startswith(text))


def _included(mask: Any) -> Tensor | None:
    """Return the positions that a mask includes, boolean [batch, positions].

    None means that it excludes none, or is no mask of zeros and ones.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype.is_floating_point:
        return None
    if bool(mask.all()):
        return None
    is_binary = (mask == 0) | (mask == 1)
    return mask.bool() if bool(is_binary.all()) else None


def _span(row: list[bool], least: int) -> _Span | None:
    """Return the span from the first to the last included position, at least as long as the
    model needs; None if the row includes none.

    >>> _span([False, True, False, True, False], 1), _span([False, True], 2)
    ((1, 4), (0, 2))
    """
    if True not in row:
        return None
    first = row.index(True)
    end = len(row) - row[::-1].index(True)
    end = min(len(row), max(end, first + least))
    return max(0, min(first, end - least)), end
