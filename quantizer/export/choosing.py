"""Chooses which layers of a file stay in float, before test mode runs."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import nn

from quantizer.export.deployment import Deployment
from quantizer.export.exporting import exporter_of
from quantizer.export.layer_choice import LayerChoice
from quantizer.export.library_failures import refused_by_libraries
from quantizer.export.targets import EXPORTERS
from quantizer.results.calibrated import Calibrated
from quantizer.sources.batches import Batch


def chosen_layers(
    calibrated: Calibrated,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    targets: Iterable[str],
    choices: Mapping[str, str],
    folder: Path,
) -> LayerChoice | None:
    """Return which layers stay in float because integers are slower there.

    Args:
        calibrated: with all its quantizations.
        model: the float model.
        batches: of the evaluation data. The first one is measured.
        targets: those that are written.
        choices: values of their options, by name, one of which chooses layers.
        folder: of the files.

    Returns:
        None if no target chooses.

    Raises:
        ResultError: a deploy.json does not fit the network.
        UsageError: the machine is too busy to measure.
    """
    deployment = Deployment.of(calibrated, model, batches, {}, choices=choices, metrics={})
    for target in targets:
        exporter = exporter_of(target, choices)
        path = folder / f"{deployment.graph.model}{EXPORTERS[target].suffix}"
        with refused_by_libraries(target, deployment.graph):
            choice = exporter.layer_choice(deployment, path)
        if choice is not None:
            return choice
    return None
