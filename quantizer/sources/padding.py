"""Leave padding out of batches. A batch whose attention mask excludes positions is divided.
Each part has the samples whose tokens span the same positions, and only these positions.

So no statistic sees a position before a sample's first token or after its last one, and no
algorithm has to know of masks. An excluded position between two tokens stays.

A call may have several texts, such as those of an encoder and a decoder, with a mask each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.errors import BatchError
from quantizer.graph.ir import Graph
from quantizer.sources.arguments import MASK, included_positions, text_prefix
from quantizer.sources.batches import Batch

_EMBEDDINGS = ("inputs_embeds", "hidden_states")
"""Floating-point arguments [batch, positions, width] of a text."""
_IMAGE_RANK = 4
"""Floats of at least so many axes are images without positions, as in `graph.lengths`."""
_Path = tuple[Any, ...]
"""The indices and keys that lead to a value in (args, kwargs), as (1, "attention_mask")."""
_Span = tuple[int, int]
"""The position of a sample's first token, and the position after its last token."""


@dataclass(frozen=True)
class _Positions:
    """Where a call has the positions of one text.

    Args:
        axes: the axes of positions, by the path of the value.
        least: the fewest positions that the model accepts.
    """

    axes: Mapping[_Path, tuple[int, ...]]
    least: int = 1


def parts_without_padding(
    batch: Batch, names: Sequence[str], graph: Graph | None, warn: Callable[[Batch, str], None]
) -> Iterator[Batch]:
    """Yield the parts of a batch without padding; the batch itself if it has to stay as it is.
    See `Batches.without_padding`.

    Args:
        batch: with its number.
        names: of the model's positional arguments.
        graph: the trace, if there is one.
        warn: of a batch whose padding stays, for a reason.

    Raises:
        BatchError: a mask excludes all positions.
    """
    call = _PaddedCall(batch, names, graph)
    try:
        yield from call.parts()
    except _UnsureError as error:
        warn(batch, str(error))
        yield batch


class _UnsureError(Exception):
    """It is not sure where the positions of a call are. Its argument is the reason."""


class _PaddedCall:
    """Divides one batch; the arguments are those of `parts_without_padding`."""

    def __init__(self, batch: Batch, names: Sequence[str], graph: Graph | None) -> None:
        self._batch = batch
        self._names = names
        self._graph = graph
        call = (batch.args, dict(batch.kwargs))
        leaves, self._structure = pytree.tree_flatten_with_path(call)
        self._values: dict[_Path, Any] = {}
        for keys, value in leaves:
            path = tuple(_step(key) for key in keys)
            self._values[path] = value

    def parts(self) -> Iterator[Batch]:
        """Yield the parts of the batch; the batch itself if it has no padding.

        Raises:
            _UnsureError: the padding has to stay.
        """
        masks = self._padded_masks()
        if not masks:
            yield self._batch
            return
        positions_by_mask = {}
        for path in masks:
            positions = self._positions(path)
            if positions is None:
                raise _UnsureError(
                    "the number of its positions is fixed, or several axes may have it"
                )
            positions_by_mask[path] = positions
        groups = self._samples_by_spans(masks, positions_by_mask)
        count = max(map(len, masks.values()))
        is_divided = any(len(rows) < count for rows in groups.values())
        if is_divided and not self._has_samples_first(count):
            raise _UnsureError("not all of its values have the samples along axis 0")
        for spans, rows in groups.items():
            values = dict(self._values)
            if is_divided:
                for path, value in values.items():
                    if isinstance(value, Tensor):
                        values[path] = value[rows]
            for mask, span in zip(masks, spans, strict=True):
                _cut_to_span(values, positions_by_mask[mask], span)
            yield self._batch_with(values, rows)

    def _padded_masks(self) -> dict[_Path, Tensor]:
        """Return the masks that exclude a position, bool [batch, positions], by path."""
        masks = {}
        for path, value in self._values.items():
            name = self._name(path)
            # A path of two entries is an argument itself, not a part of one
            if len(path) != 2 or name != text_prefix(name) + MASK:
                continue
            mask = included_positions(value)
            if mask is not None:
                masks[path] = mask
        return masks

    def _name(self, path: _Path) -> str:
        """Return the name of the argument that a path leads to or into; empty for an argument
        after the known ones.
        """
        is_keyword, key = path[:2]
        if is_keyword:
            return str(key)
        return self._names[key] if key < len(self._names) else ""

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
            # If sizes differ, the batch stays as it is, and the network refuses it
            if any(axis >= len(shape) or shape[axis] != size for axis in axes):
                return None
        return positions

    def _positions_in_graph(self, mask: _Path, graph: Graph) -> _Positions | None:
        """Return where the positions of a mask are in a trace; None if their number is fixed,
        or other texts share it.
        """
        text = text_prefix(self._name(mask))
        for length in graph.lengths:
            axes: dict[_Path, tuple[int, ...]] = {}
            for leaf, axis in length.axes:
                path = graph.input_paths[leaf]
                before = axes.get(path, ())
                axes[path] = (*before, axis)
            if axes.get(mask) != (1,):
                continue
            texts = {text_prefix(self._name(path)) for path in axes}
            if texts == {text}:
                return _Positions(axes, length.least)
        return None

    def _positions_by_size(self, mask: _Path) -> _Positions | None:
        """Return where the positions of a mask are in a call without a trace: axis 1 of tokens
        and embeddings of the mask's size. None if another axis has that size, because it may
        be one of positions, too.
        """
        text = text_prefix(self._name(mask))
        shape = self._values[mask].shape
        axes = {}
        for path, value in self._values.items():
            name = self._name(path)
            if not isinstance(value, Tensor) or text_prefix(name) != text:
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

    def _samples_by_spans(
        self, masks: Mapping[_Path, Tensor], positions_by_mask: Mapping[_Path, _Positions]
    ) -> dict[tuple[_Span, ...], list[int]]:
        """Return the numbers of the samples that have the same span in each mask, by these
        spans. A sample that a mask excludes wholly is in none.

        Raises:
            BatchError: no sample is left.
        """
        spans_by_mask = []
        for path, mask in masks.items():
            least = positions_by_mask[path].least
            spans_of_mask = [_span(row, least) for row in mask.tolist()]
            spans_by_mask.append(spans_of_mask)
        groups: dict[tuple[_Span, ...], list[int]] = {}
        for sample, of_sample in enumerate(zip(*spans_by_mask, strict=True)):
            spans = tuple(span for span in of_sample if span is not None)
            if len(spans) < len(masks):
                continue
            groups.setdefault(spans, []).append(sample)
        if not groups:
            names = " and ".join(self._name(path) for path in masks)
            raise BatchError(
                f"batch {self._batch.number}: {names} excludes every position",
                help="1 is for a token, and 0 for padding",
            )
        return groups

    def _has_samples_first(self, count: int) -> bool:
        """Return whether each tensor of the call has the samples along axis 0, and the trace
        accepts any number of them.

        Args:
            count: how many samples the batch has.
        """
        nodes = () if self._graph is None else self._graph.nodes
        for node in nodes:
            # None is a size that follows the batch
            if node.op == "input" and node.shape and node.shape[0] is not None:
                return False
        for value in self._values.values():
            if isinstance(value, Tensor) and value.shape[:1] != (count,):
                return False
        return True

    def _batch_with(self, values: Mapping[_Path, Any], rows: Sequence[int]) -> Batch:
        """Return the batch with other values, those of the samples `rows`. It has no target,
        which may have padding, too.
        """
        leaves = list(values.values())
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return replace(
            self._batch,
            args=args,
            kwargs=kwargs,
            rows=tuple(rows),
            target=None,
            raw=kwargs or args[0],
        )


def _step(key: Any) -> Any:
    """Return the index or key of an entry of a pytree path."""
    return key.idx if hasattr(key, "idx") else getattr(key, "key", None)


def _cut_to_span(values: dict[_Path, Any], positions: _Positions, span: _Span) -> None:
    """Replace all values that have positions by their parts in a span."""
    first, end = span
    for path, axes in positions.axes.items():
        value = values[path]
        # A value without padding stays the tensor that it is
        if value.shape[axes[0]] == end - first:
            continue
        for axis in axes:
            value = value.narrow(axis, first, end - first)
        values[path] = value.contiguous()


def _span(row: list[bool], least: int) -> _Span | None:
    """Return the span from the first to the last included position; None if there is none.

    A span of fewer than `least` positions takes in positions after it, then before it.

    >>> _span([False, True, False, True, False], 1), _span([False, True], 2)
    ((1, 4), (0, 2))
    """
    if True not in row:
        return None
    first = row.index(True)
    end = len(row) - row[::-1].index(True)
    end = min(len(row), max(end, first + least))
    return max(0, min(first, end - least)), end
