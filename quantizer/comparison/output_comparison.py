"""Compares what two networks return for one batch: part by part, and rows by what they are,
wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantizer.comparison.output_figures import (
    ChannelExtents,
    OutputFigures,
    PartFigures,
    RowCounts,
)
from quantizer.errors import ModelError
from quantizer.graph.label_replay import Seen
from quantizer.graph.output_parts import Output, Part, output_parts, parts_named_as
from quantizer.graph.row_order import RowOrder, matched_rows, places_of_rows
from quantizer.nn.execution import Execution, Watchers
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch

MOST_SHAPES = 8
"""Shapes of outputs of which it is remembered where their parts are."""


class Recorder:
    """Keeps what tells the parts of outputs apart while a network runs."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.shapes: dict[str, torch.Size] = {}
        self.values: dict[str, Any] = {}
        self._kept: set[str] = set()
        self.watched: set[str] = set()
        for output in outputs:
            self.watched |= output.watched
            if output.labels is not None:
                self._kept |= output.labels.replay.steering
            if output.order is not None:
                self._kept |= output.order.kept

    def see(self, name: str, value: Any) -> None:
        """Take in the value of a node, if it is watched; of several results the last."""
        if name not in self.watched:
            return
        last = value[-1] if isinstance(value, (list, tuple)) else value
        if not isinstance(last, Tensor):
            self.values[name] = last
            return
        self.shapes[name] = last.shape
        if name in self._kept:
            self.values[name] = last.detach().cpu().clone()  # its memory may be written to

    @property
    def watchers(self) -> Watchers:
        """What a network calls with the values of nodes."""

        def watch(name: str) -> Any:
            return lambda value: self.see(name, value)

        return {name: watch(name) for name in self.watched}

    @property
    def seen(self) -> Seen:
        """What was kept."""
        return Seen(self.shapes, self.values)


class OutputComparison:
    """Compares outputs batch by batch; what tells parts apart is found once for each shape."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.outputs = outputs
        self._splits: dict[tuple[Any, ...], _Split] = {}

    def empty(self) -> list[OutputFigures]:
        """Return figures without a batch."""
        return [_empty(output) for output in self.outputs]

    def figures(
        self,
        reference: Sequence[Tensor],
        quantized: Sequence[Tensor],
        left: Recorder,
        right: Recorder,
    ) -> list[OutputFigures]:
        """Return the figures of one batch.

        Args:
            reference: what the float network returns; `left` has watched it.
            quantized: what the quantized one returns, watched by `right`.

        Raises:
            DataError: an output of the float network is not finite.
            ModelError: the networks return other sizes.
        """
        figures: list[OutputFigures] = []
        for number, output in enumerate(self.outputs):
            pair = reference[number], quantized[number]
            figures.append(self._of_output(output, pair, (left, right)))
        return figures

    def pieces(
        self,
        output: Output,
        x: Tensor,
        recorder: Recorder,
    ) -> list[tuple[Part, Tensor]]:
        """Return the values of each part of an output, which a run has made that `recorder`
        watched."""
        split = self._split(output, x, recorder)
        if split is None:
            is_one = output.labels is None
            return [(output.parts[0] if is_one else Part(output.name, None, output.node), x)]
        values = torch.split(x.reshape(-1)[split.order.to(x.device)], split.counts)
        return list(zip(output.parts, values, strict=True))

    def _of_output(
        self,
        output: Output,
        values: tuple[Tensor, Tensor],
        recorders: tuple[Recorder, Recorder],
    ) -> OutputFigures:
        x, y = values
        figures = _empty(output)
        if output.channel_axis is not None and x.is_floating_point():
            figures.channels = ChannelExtents.of(x, y, output.channel_axis)
        split = self._split(output, x, recorders[0])
        matched = None if output.order is None else _matched(output.order, values, recorders)
        if matched is not None:
            figures.order = matched.counts
        elif x.shape != y.shape:
            raise _other_sizes(x, y)
        elif output.order is not None:
            figures.order = _unmatched(output.order, recorders[0])
        if split is not None and split.is_unwritten:
            figures.channels = None
        if split is None:
            ranges = None if figures.channels is None else figures.channels.whole
            if matched is not None:
                x, y = matched.pair(x, y)
                ranges = None  # of fewer rows
            figures.whole.add(x, y, ranges)
            return figures
        pieces = split.pieces(x, y) if matched is None else split.matched_pieces(x, y, matched)
        for part, (mine, its) in zip(figures.parts, pieces, strict=True):
            part.add(mine, its)
            figures.whole.merge(part)
        return figures

    def _split(self, output: Output, x: Tensor, recorder: Recorder) -> _Split | None:
        """Return where each part of an output is, None if it has one."""
        if output.labels is None:
            return None
        replay = output.labels.replay
        steering = [recorder.values.get(name) for name in sorted(replay.steering)]
        has_masks = any(isinstance(value, Tensor) for value in steering)
        shapes = tuple(recorder.shapes.get(name) for name in sorted(replay.shaped))
        key = (output.name, x.shape, shapes, () if has_masks else tuple(steering))
        if not has_masks and key in self._splits:
            return self._splits[key]
        try:
            labels = output.labels.of(recorder.seen, x.shape)
        except ValueError:
            return None  # the output is one part then
        split = _Split(labels, len(output.parts))
        if not has_masks:
            if len(self._splits) >= MOST_SHAPES:
                self._splits.clear()
            self._splits[key] = split
        return split


class ComparedNetworks:
    """The outputs of a float network and a quantized one, and where those of the quantized one
    are compared with the user's model, also of that.

    Args:
        reference: the float network that was quantized.
        user: the user's model, where `reference` computes another function.
        outputs: of the network that outputs are compared with; as its graph names them, if
            None.
    """

    def __init__(
        self,
        reference: Network,
        user: Network | None,
        outputs: Sequence[Output] | None,
    ) -> None:
        self._user = user
        if outputs is None:
            outputs = output_parts((reference if user is None else user).graph)
        self._comparison = OutputComparison(outputs)
        self._passed: OutputComparison | None = None
        if user is not None:
            self._passed = OutputComparison(parts_named_as(reference.graph, user.graph))

    def empty(self) -> tuple[list[OutputFigures], list[OutputFigures]]:
        """Return figures without a batch: of the outputs, and of those of the float network."""
        passed = [] if self._passed is None else self._passed.empty()
        return self._comparison.empty(), passed

    def recorders(self) -> tuple[Recorder, Recorder]:
        """Return what has to watch the float network and the quantized one."""
        passed = self._passed or self._comparison
        return Recorder(passed.outputs), Recorder([*passed.outputs, *self._comparison.outputs])

    @torch.no_grad()
    def figures(
        self,
        executions: tuple[Execution, Execution],
        recorders: tuple[Recorder, Recorder],
        batch: Batch,
    ) -> tuple[list[Tensor], list[OutputFigures], list[OutputFigures]]:
        """Return what outputs were compared with, and the figures as in `empty`, of a batch
        that both networks have run, watched by `recorders`.
        """
        reference, quantized = executions[0].outputs(), executions[1].outputs()
        if self._user is None or self._passed is None:
            return reference, self._comparison.figures(reference, quantized, *recorders), []
        passed = self._passed.figures(reference, quantized, *recorders)
        recorder = Recorder(self._comparison.outputs)
        execution = self._user.start(batch.args, batch.kwargs)
        expected = execution.advance(watch=recorder.watchers).outputs()
        figures = self._comparison.figures(expected, quantized, recorder, recorders[1])
        return expected, figures, passed


class _Split:
    """The places of all parts of an output, one after the other."""

    def __init__(self, labels: Tensor, parts: int) -> None:
        flat = labels.reshape(-1)
        self.order = flat.argsort(stable=True)
        counts = torch.bincount(flat + 1, minlength=parts + 1).tolist()
        self.is_unwritten = counts[0] > 0
        self.order = self.order[counts[0] :]  # what nothing has written comes first
        self.counts: list[int] = counts[1:]

    def pieces(self, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the values of each part, of both networks."""
        order = self.order.to(x.device)
        mine = torch.split(x.reshape(-1)[order], self.counts)
        its = torch.split(y.reshape(-1)[order], self.counts)
        return list(zip(mine, its, strict=True))

    def matched_pieces(
        self,
        x: Tensor,
        y: Tensor,
        matched: _MatchedRows,
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the values of each part that both networks have, of both."""
        pieces: list[tuple[Tensor, Tensor]] = []
        mine, its = x.reshape(-1), y.reshape(-1)
        for places in torch.split(self.order, self.counts):
            shared = places[matched.is_there[places]]
            pieces.append((mine[shared.to(x.device)], its[matched.places[shared].to(y.device)]))
        return pieces


class _MatchedRows:
    """For each value of the float network's output the place of its counterpart in the
    quantized one's."""

    def __init__(self, places: Tensor, is_there: Tensor, counts: RowCounts) -> None:
        self.places, self.is_there, self.counts = places, is_there, counts

    def pair(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of rows that both networks have, side by side."""
        mine = x.reshape(-1)[self.is_there.to(x.device)]
        its = y.reshape(-1)[self.places[self.is_there].to(y.device)]
        return mine, its


def _matched(
    order: RowOrder,
    values: tuple[Tensor, Tensor],
    recorders: tuple[Recorder, Recorder],
) -> _MatchedRows | None:
    """Return which values belong together; None if the rows of a network cannot be followed
    from where they were at first to its output."""
    tables: list[tuple[Tensor, Tensor]] = []
    before: list[Tensor] = []
    for value, recorder in zip(values, recorders, strict=True):
        if order.node not in recorder.values:
            return None
        try:
            rows = order.rows(recorder.seen, value.shape)
            before.append(order.places(recorder.seen))
        except ValueError:
            return None
        table = places_of_rows(rows.reshape(-1), recorder.values[order.node].numel())
        if table is None:
            return None
        tables.append(table)
    (mine, unordered), (its, others) = tables
    if mine.shape[1] != its.shape[1] or unordered.shape != others.shape:
        return None
    matches = matched_rows(before[0], before[1], order.axis).reshape(-1)
    is_kept = matches >= 0
    places = torch.zeros(values[0].numel(), dtype=torch.int64)
    is_there = torch.zeros(values[0].numel(), dtype=torch.bool)
    places[unordered] = others
    is_there[unordered] = True
    places[mine[is_kept].reshape(-1)] = its[matches[is_kept]].reshape(-1)
    is_there[mine[is_kept].reshape(-1)] = True
    numbers = torch.arange(len(matches))
    moved = int((is_kept & (matches != numbers)).sum())
    return _MatchedRows(places, is_there, RowCounts(len(matches), moved, int((~is_kept).sum())))


def _unmatched(order: RowOrder, recorder: Recorder) -> RowCounts | None:
    """Return the counts of rows that were compared by place; None if what was reduced may have
    been rows, whose order makes no difference then.
    """
    if order.is_reduced:
        return None
    positions = recorder.values.get(order.node)
    return RowCounts(unmatched=positions.numel() if isinstance(positions, Tensor) else 1)


def _empty(output: Output) -> OutputFigures:
    """Return the figures of an output without a batch."""
    order = None if output.order is None or output.order.is_reduced else RowCounts()
    if output.labels is None:
        return OutputFigures(_part(output.parts[0]), order=order)
    is_fixed = all(part.is_constant for part in output.parts)
    whole = PartFigures(output.name, None, output.node, is_fixed)
    return OutputFigures(whole, [_part(part) for part in output.parts], order=order)


def _part(part: Part) -> PartFigures:
    return PartFigures(part.name, part.index, part.layer, part.is_constant, part.pooled)


def _other_sizes(x: Tensor, y: Tensor) -> ModelError:
    """Say that quantization changes how many values there are, as it does behind `nonzero`."""
    sizes = f"the float network makes {list(x.shape)}, the quantized one {list(y.shape)}"
    return ModelError(
        f"the output: {sizes}: sizes that depend on values leave nothing to compare",
        help="quantize the model up to the layer that selects, and select outside of it",
    )
