"""The traced model for commands that look at a model and run nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantizer.calibration.memory_prediction import ProcessMemory
from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.config.algorithms import StructureNames
from quantizer.config.diagnostics import pointing_into
from quantizer.graph.ir import Graph
from quantizer.graph.structure.definitions import Structure
from quantizer.graph.structure.find import find_structure
from quantizer.sources.data import Batches
from quantizer.sources.models import LoadedModel


@dataclass(frozen=True)
class TracedModel:
    """A traced model and the size of its data.

    Attributes:
        graph: the trace on the first batch.
        size: samples in a batch of calibration.
        batches: the number of batches, None if that is unknown.
        tested: samples in a batch of test mode, None if it was not asked for.
        base: memory of the process that traced.
        filled: the arguments of `forward` that batches fill, as JSON.
        way: how calibration would make synthetic data; empty for other data.
    """

    graph: Graph
    size: int
    batches: int | None
    tested: int | None
    base: ProcessMemory
    filled: Mapping[str, Any]
    way: str = ""


def traced_model(options: Options, *, tested: bool = False) -> TracedModel:
    """Return the model of `--model`, traced on the first batch.

    `tested` asks for the size of test mode's batches, too, which may read other data.

    Raises:
        UsageError, ModelError, DataError: as `open_model`, `open_data` and `trace_model`.
    """
    loaded = session.open_model(options)
    batches = session.open_data(options, loaded).for_shapes()
    return traced_from(options, loaded, batches, tested=tested)


def traced_from(
    options: Options, loaded: LoadedModel, batches: Batches, *, tested: bool
) -> TracedModel:
    """Return the same of a model and data that are open."""
    graph = session.trace_model(options, loaded, batches)
    size = session.batch_size(options, batches)
    tested_size = None
    if tested:
        tested_size = _tested_size(options, loaded, size)
    filled: Mapping[str, Any] = {}
    if batches.filled:
        filled = batches.filled.to_json()
    return TracedModel(
        graph,
        size,
        batches=batches.total,
        tested=tested_size,
        base=ProcessMemory.now(),
        filled=filled,
        way=batches.way,
    )


def _tested_size(options: Options, loaded: LoadedModel, size: int) -> int:
    """Return how many samples a batch of test mode has.

    That is `size`, the one of calibration, unless the model's file offers other data.
    """
    if options.data or loaded.evaluation_data in (None, loaded.calibration_data):
        return size
    batches = session.open_data(options, loaded, evaluation=True).for_shapes()
    batches.first()
    return session.batch_size(options, batches)


def named_structures(read: session.ReadConfig, graph: Graph) -> dict[str, Structure]:
    """Return the structure that each algorithm finds which names parts of the model.

    Raises:
        ConfigError: the model lacks a name, or it does not fit.
    """
    structures = {}
    with pointing_into(read.sources):
        for algorithm in read.config.algorithms:
            if algorithm.names != StructureNames():
                title = f"{algorithm.name} ({algorithm.label})"
                structures[title] = find_structure(graph, algorithm.names)
    return structures
