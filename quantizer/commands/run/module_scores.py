"""Tests a model that was quantized in place: compares its outputs with those of the float
model, and measures the user's metrics of both.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.calibration.events import Events, RunStage
from quantizer.comparison.output_comparison import require_same_shape
from quantizer.comparison.output_figures import OutputFigures, PartFigures, leaves
from quantizer.comparison.samples import SampleFinder
from quantizer.errors import ModelError
from quantizer.evaluation.compare import over_batches
from quantizer.evaluation.network_comparison import NetworkComparison
from quantizer.evaluation.output_warnings import sample_warnings
from quantizer.evaluation.paired_run import record_predictions
from quantizer.evaluation.scores import Scores, in_pairs, log_warnings, measure
from quantizer.graph.output_names import leaf_names, plain_output
from quantizer.sources.batches import Batch, prefix_batch_errors
from quantizer.sources.data import Batches
from quantizer.sources.directions import BY_NAME
from quantizer.sources.models import Evaluate
from quantizer.sources.user_code import user_errors


@dataclass(frozen=True)
class ModulePair:
    """A float model and the same model with quantized modules, on one device."""

    reference: nn.Module
    quantized: nn.Module
    device: torch.device

    def scores(
        self,
        batches: Batches,
        events: Events,
        *,
        function: Evaluate | None,
        check: Callable[[Collection[str]], None],
    ) -> Scores:
        """Run both models on all batches. Nothing is known of their layers.

        Args:
            batches: of evaluation data.
            events: progress is reported there.
            function: the user's `evaluate(model, data)`; None for the metrics of targets.
            check: called with the names of the user's metrics before the models are compared.

        Raises:
            DataError: no batch, or an output of the float model is not finite.
            ModelError: the outputs have other shapes.
        """
        measured = partial(
            measure, batches=batches, device=self.device, events=events, function=function
        )
        before: Mapping[str, float] = {}
        if function is not None:
            before = measured(self.reference, label="evaluate float")
            check(before.keys())
        comparison = NetworkComparison([])
        samples = SampleFinder(lambda batch: list(outputs_of(self.reference, batch).values()))
        names = batches.arguments.names
        marked = (batch.with_included(names) for batch in batches)
        with RunStage(events, "test", batches.total) as stage:
            over_batches(
                stage.counted(self.moved(marked)),
                lambda number, batch: self._add(comparison, number, batch, samples),
            )
        warnings = tuple(sample_warnings(leaves(comparison.outputs)))
        log_warnings(warnings)
        if function is None:
            return Scores(comparison, comparison.pairs(), BY_NAME, warnings=warnings)
        pairs = in_pairs(before, measured(self.quantized, label="evaluate quantized"))
        return Scores(comparison, pairs, function.directions, warnings=warnings)

    def moved(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Return batches on the device of the models."""
        return (batch.to(self.device) for batch in batches)

    def _add(
        self, comparison: NetworkComparison, number: int, batch: Batch, samples: SampleFinder
    ) -> None:
        """Run both models on a batch, and add what it shows to the comparison."""
        with prefix_batch_errors(number, batch):
            reference = outputs_of(self.reference, batch)
            quantized = outputs_of(self.quantized, batch)
            names = list(reference)
            known = names
            if comparison.batches:
                known = [figures.whole.name for figures in comparison.outputs]
            if list(quantized) != names or known != names:
                raise ModelError(
                    "the model returns other outputs for other values: nothing can be compared",
                    help="return the same outputs from forward() for all batches",
                )
            result = NetworkComparison([], outputs=_empty(names))
            for index, (figures, x) in enumerate(
                zip(result.outputs, reference.values(), strict=True)
            ):
                y = quantized[figures.whole.name]
                require_same_shape(figures.whole.name, x, y)
                rows = samples.rows(index, x, 0, batch)
                mask = batch.included
                # The second of two axes may be one of features
                has_positions = x.dim() > 2
                if has_positions and mask is not None and x.shape[:2] == mask.shape:
                    tokens = mask.to(x.device)
                    x = x[tokens].unsqueeze(0)
                    y = y[tokens].unsqueeze(0)
                    rows = None if rows is None else rows.of_tokens(mask)
                figures.whole.add(x, y, rows=rows)
            record_predictions(
                result, batch, list(reference.values()), list(quantized.values())
            )
            if not comparison.batches:
                comparison.outputs = _empty(names)
            comparison.merge(result)


def _empty(names: Sequence[str]) -> list[OutputFigures]:
    """Return the figures of outputs without a batch."""
    return [OutputFigures(PartFigures(name)) for name in names]


@torch.no_grad()
def outputs_of(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the tensors that a model gives for a batch, by name.

    Raises:
        ModelError: the model fails.
    """
    with user_errors("running the model", ModelError):
        output = plain_output(model(*batch.args, **batch.kwargs))
    leaves = pytree.tree_leaves(output)
    tensors = {}
    for name, leaf in zip(leaf_names(output), leaves, strict=True):
        if isinstance(leaf, Tensor):
            tensors[name] = leaf
    return tensors
