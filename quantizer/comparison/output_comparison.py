"""Compares the outputs of two networks for one batch: part by part, and rows by what they are,
not by their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantizer.comparison.extents import ChannelExtents
from quantizer.comparison.output_figures import OutputFigures, PartFigures, RowCounts
from quantizer.comparison.samples import SampleFinder, SampleRows, together
from quantizer.errors import ModelError
from quantizer.graph.channels.output_parts import Output, output_parts, parts_named_as
from quantizer.graph.channels.provenance import OutputPart, Seen, SeenOutput
from quantizer.graph.ir import Graph
from quantizer.nn.network import Execution, Network, Watchers
from quantizer.sources.batches import Batch

if TYPE_CHECKING:
    from quantizer.comparison.row_matching import MatchedRows, PartPlaces

_MAX_SHAPES = 8
"""Shapes of outputs for which the places of parts are cached."""


class Recorder:
    """Records, while a network runs, the shapes and values that the places of parts depend on.

    Attributes:
        watched: the nodes that have to be shown to it.
        shapes: of their tensors.
        values: copies of the tensors on whose values places depend, and all objects except
            tensors that watched nodes return.
    """

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.shapes: dict[str, torch.Size] = {}
        self.values: dict[str, Any] = {}
        self._recorded: set[str] = set()
        self.watched: set[str] = set()
        for output in outputs:
            self.watched |= output.watched
            if output.labels is not None:
                self._recorded |= output.labels.replay.steering
            if output.order is not None:
                self._recorded |= output.order.kept

    def see(self, name: str, value: Any) -> None:
        """Record the value of a node, if it is watched."""
        if name not in self.watched:
            return
        if isinstance(value, (list, tuple)):
            # Sorting operators return the values, and then the indices
            value = value[-1]
        if not isinstance(value, Tensor):
            self.values[name] = value
            return
        self.shapes[name] = value.shape
        if name in self._recorded:
            # A copy, as later operators may write into its memory
            self.values[name] = value.detach().cpu().clone()

    @property
    def watchers(self) -> Watchers:
        """Return the functions that a network calls with the values of nodes."""
        return {name: partial(self.see, name) for name in self.watched}

    @property
    def seen(self) -> Seen:
        """Return what was recorded."""
        return Seen(self.shapes, self.values)


class OutputComparison:
    """Compares outputs batch by batch; finds the places of parts once for each shape.

    Args:
        outputs: of the networks.
        graph: of the network that has them, to know which of them have positions; None if
            padding counts, too.
    """

    def __init__(self, outputs: Sequence[Output], graph: Graph | None = None) -> None:
        self.outputs = outputs
        self._graph = graph
        self._splits: dict[tuple[Any, ...], PartPlaces] = {}

    def empty(self) -> list[OutputFigures]:
        """Return figures without a batch."""
        return [_empty(output) for output in self.outputs]

    def figures(
        self,
        reference: Sequence[Tensor],
        quantized: Sequence[Tensor],
        left: Recorder,
        right: Recorder,
        *,
        included: Tensor | None = None,
        rows: Sequence[SampleRows | None] = (),
    ) -> list[OutputFigures]:
        """Return the figures of one batch.

        Args:
            reference: the outputs of the float network.
            quantized: the outputs of the quantized network.
            left: has watched the float network.
            right: has watched the quantized network.
            included: as `Batch` has it.
            rows: where the samples of each output are, if their figures are wanted.

        Raises:
            DataError: an output of the float network is not finite.
            ModelError: the sizes of the outputs differ.
        """
        figures = []
        for number, output in enumerate(self.outputs):
            x = SeenOutput(reference[number], left.seen)
            y = SeenOutput(quantized[number], right.seen)
            samples = rows[number] if rows else None
            axis = output.channel_axis
            if included is not None and self._has_positions(output, x.value, included):
                require_same_shape("the output", x.value, y.value)
                x = x.of_tokens(included)
                y = y.of_tokens(included)
                samples = None if samples is None else samples.of_tokens(included)
                if axis is not None and axis < included.dim():
                    # It was one of samples or positions
                    axis = None
            of_output = self._of_output(output, x, y, rows=samples, channel_axis=axis)
            figures.append(of_output)
        return figures

    def _has_positions(self, output: Output, x: Tensor, included: Tensor) -> bool:
        """Return whether an output has samples and positions as its first axes."""
        graph = self._graph
        if graph is None or output.labels is not None or output.order is not None:
            return False
        if x.shape[:2] != included.shape:
            return False
        if graph.lengths:
            return 1 in graph.by_name[output.node].open_axes
        # Otherwise the second axis may be one of features
        return x.dim() > included.dim()

    def pieces(
        self, output: Output, x: Tensor, recorder: Recorder
    ) -> list[tuple[OutputPart, Tensor]]:
        """Return the values of each part of an output.

        Args:
            output: the output.
            x: its value.
            recorder: has watched the run that computed it.
        """
        run = SeenOutput(x, recorder.seen)
        split = self._split(output, run)
        if split is not None:
            return list(zip(output.parts, split.of(x), strict=True))
        part = output.parts[0]
        if output.labels is not None:
            # It has several parts, but their places cannot be found in this run
            part = OutputPart(output.name, None, output.node)
        return [(part, x)]

    def _of_output(
        self,
        output: Output,
        reference: SeenOutput,
        quantized: SeenOutput,
        *,
        rows: SampleRows | None,
        channel_axis: int | None,
    ) -> OutputFigures:
        """Return the figures of one output for one batch."""
        x = reference.value
        y = quantized.value
        figures = _empty(output)
        if channel_axis is not None and x.is_floating_point():
            figures.whole.channels = ChannelExtents.of(x, y, channel_axis)
        split = self._split(output, reference)
        matched = None
        if output.order is not None:
            # Only networks that sort need them
            from quantizer.comparison.row_matching import count_unmatched, match_rows

            matched = match_rows(output.order, reference, quantized)
            if matched is not None:
                figures.order = matched.counts
            else:
                figures.order = count_unmatched(output.order, reference.seen)
        if matched is None:
            require_same_shape("the output", x, y)
        if split is not None and split.is_unwritten:
            figures.whole.channels = None
        if split is None:
            self._add_whole(figures, x, y, matched=matched, rows=rows)
            for part in figures.parts:
                part.samples.is_known = False
            return figures
        rows_of_parts: Sequence[SampleRows | None] = [None] * len(figures.parts)
        if rows is not None:
            rows_of_parts = split.rows(rows, x.shape, matched)
        if matched is None:
            pieces = zip(split.of(x), split.of(y), strict=True)
        else:
            pieces = zip(*split.matched(x, y, matched), strict=True)
        for number, (x_piece, y_piece) in enumerate(pieces):
            part = figures.parts[number]
            part.add(x_piece, y_piece, rows=rows_of_parts[number])
            figures.whole.merge(part)
        figures.whole.samples = together(part.samples for part in figures.parts)
        return figures

    def _add_whole(
        self,
        figures: OutputFigures,
        x: Tensor,
        y: Tensor,
        *,
        matched: MatchedRows | None,
        rows: SampleRows | None,
    ) -> None:
        """Add the values of an output that has one part."""
        ranges = None
        if matched is not None:
            if rows is not None:
                places = matched.is_there.nonzero().flatten()
                rows = rows.of_places(places, x.shape)
            x, y = matched.select(x, y)
        elif figures.whole.channels is not None:
            ranges = figures.whole.channels.whole
        figures.whole.add(x, y, ranges, rows)

    def _split(self, output: Output, run: SeenOutput) -> PartPlaces | None:
        """Return the places of the parts of an output; None if it has one part."""
        if output.labels is None:
            return None
        seen = run.seen
        replay = output.labels.replay
        steering = [seen.values.get(name) for name in sorted(replay.steering)]
        shapes = [seen.shapes.get(name) for name in sorted(replay.shaped)]
        shape = run.value.shape
        key = None
        # Places that depend on tensors may be others in each batch
        if not any(isinstance(value, Tensor) for value in steering):
            key = (output.name, shape, *shapes, *steering)
            if key in self._splits:
                return self._splits[key]
        try:
            labels = output.labels.of(seen, shape)
        except ValueError:
            return None
        # Only outputs of several parts need it
        from quantizer.comparison.row_matching import PartPlaces

        split = PartPlaces(labels, len(output.parts))
        if key is not None:
            if len(self._splits) >= _MAX_SHAPES:
                self._splits.clear()
            self._splits[key] = split
        return split


class ComparedNetworks:
    """Compares the outputs of a quantized network with those of the float network, and with
    those of the user's model if the float network computes another function.

    Args:
        reference: the float network that was quantized.
        user: the user's model, if `reference` computes another function.
        outputs: of the user's model, or else of `reference`; None for those of its graph.
    """

    def __init__(
        self, reference: Network, user: Network | None, outputs: Sequence[Output] | None
    ) -> None:
        self._user = user
        expected = reference if user is None else user
        if outputs is None:
            outputs = output_parts(expected.graph)
        self._comparison = OutputComparison(outputs, expected.graph)
        self._samples = SampleFinder(partial(_outputs_of, expected))
        self._passed: OutputComparison | None = None
        if user is not None:
            passed = parts_named_as(reference.graph, user.graph)
            self._passed = OutputComparison(passed, reference.graph)

    def empty(self) -> tuple[list[OutputFigures], list[OutputFigures]]:
        """Return figures without a batch.

        Returns:
            The figures against the user's model or, without one, against the float network; and
            in the first case also those against the float network.
        """
        passed = [] if self._passed is None else self._passed.empty()
        return self._comparison.empty(), passed

    def recorders(self) -> tuple[Recorder, Recorder]:
        """Return recorders that have to watch the float network and the quantized one."""
        outputs = self._comparison.outputs
        passed = (self._passed or self._comparison).outputs
        return Recorder(passed), Recorder([*passed, *outputs])

    @torch.no_grad()
    def figures(
        self,
        executions: tuple[Execution, Execution],
        recorders: tuple[Recorder, Recorder],
        batch: Batch,
    ) -> tuple[list[Tensor], list[OutputFigures], list[OutputFigures]]:
        """Return the figures of a batch that both networks have run.

        Args:
            executions: of the float network and the quantized one.
            recorders: have watched them.
            batch: runs the user's model.

        Returns:
            The outputs that the quantized ones were compared with, and the figures as in
            `empty`.
        """
        reference = executions[0].outputs()
        quantized = executions[1].outputs()
        if self._user is None or self._passed is None:
            rows = self._sample_rows(reference, batch)
            figures = self._comparison.figures(
                reference, quantized, *recorders, included=batch.included, rows=rows
            )
            return reference, figures, []
        passed = self._passed.figures(reference, quantized, *recorders, included=batch.included)
        recorder = Recorder(self._comparison.outputs)
        execution = self._user.start(batch.args, batch.kwargs)
        expected = execution.advance(watch=recorder.watchers).outputs()
        rows = self._sample_rows(expected, batch)
        figures = self._comparison.figures(
            expected, quantized, recorder, recorders[1], included=batch.included, rows=rows
        )
        return expected, figures, passed

    def _sample_rows(self, outputs: Sequence[Tensor], batch: Batch) -> list[SampleRows | None]:
        """Return where the samples of each output are."""
        return [
            self._samples.rows(number, outputs[number], output.sample_axis, batch)
            for number, output in enumerate(self._comparison.outputs)
        ]


@torch.no_grad()
def _outputs_of(network: Network, batch: Batch) -> list[Tensor]:
    """Return the outputs of a network for a batch."""
    return network.start(batch.args, batch.kwargs).advance().outputs()


def _empty(output: Output) -> OutputFigures:
    """Return the figures of an output without a batch."""
    order = None
    if output.order is not None and not output.order.is_reduced:
        order = RowCounts()
    if output.labels is None:
        return OutputFigures(_part(output.parts[0]), order=order)
    is_fixed = all(part.is_constant for part in output.parts)
    whole = PartFigures(output.name, None, output.node, is_fixed)
    parts = [_part(part) for part in output.parts]
    return OutputFigures(whole, parts, order=order)


def _part(part: OutputPart) -> PartFigures:
    return PartFigures(part.name, part.index, part.layer, part.is_constant, part.pooled)


def require_same_shape(name: str, x: Tensor, y: Tensor) -> None:
    """Raise `ModelError` if quantization changes how many values there are, as after
    `nonzero`.

    Args:
        name: of the value in messages.
        x: the value in the float network.
        y: the value in the quantized one.
    """
    if x.shape == y.shape:
        return
    raise ModelError(
        f"{name}: its shape is {list(x.shape)} in the float network and {list(y.shape)} in "
        "the quantized one; sizes that depend on values cannot be compared",
        help="quantize the model up to the layer that selects, and select outside of it",
    )
