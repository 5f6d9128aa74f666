"""What the commands that only look at a model know of it: its trace, from this run or an
earlier one.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizer.calibration.memory_prediction import Base
from quantizer.cli import session, trace_cache
from quantizer.cli.options import MODEL, Options
from quantizer.errors import DataError
from quantizer.graph.ir import Graph
from quantizer.graph.module_names import path_names
from quantizer.graph.stored import graph_from_json, graph_to_json
from quantizer.sources.data import Batches, find_files
from quantizer.sources.models import LoadedModel
from quantizer.sources.reads import recorded
from quantizer.sources.user_code import split_spec


@dataclass(frozen=True)
class TracedModel:
    """The graph, how many samples the first batch had, how many `batches` there are, what a
    batch of test mode has, and what batches fill; `base` is the memory of the process that
    traced. From the cache, tensors have shapes and no values.
    """

    graph: Graph
    size: int
    batches: int | None
    tested: int | None
    base: Base
    filled: Mapping[str, Any]


def traced_model(
    options: Options, *, values: bool = False, tested: bool = False
) -> TracedModel:
    """The model of `--model`, traced on the first batch; unless its `values` are needed,
    perhaps not anew.

    `tested` asks for the size of test mode's batches, too, which may read other data.

    Raises:
        UsageError, ModelError, DataError: as `open_model`, `open_data` and `trace_model`.
    """
    if options.model is None or options.no_cache:
        return _traced(options, tested)
    asked = tuple(getattr(options, name) for name in MODEL)
    entry = None if values else trace_cache.stored(asked)
    if entry is not None and (found := _from_entry(entry, tested)):
        trace_cache.say_again(entry["notes"])
        return found
    around = trace_cache.environment()  # libraries set variables of their own
    with recorded(_unseen(options)) as reads, trace_cache.kept_notes() as notes:
        found = _traced(options, tested)
    try:
        graph = graph_to_json(found.graph)
    except TypeError:
        return found
    layers = sorted({*path_names(found.graph).values()})
    facts = {
        "size": found.size,
        "batches": found.batches,
        "tested": found.tested,
        "base": list(found.base),
    }
    read = {
        "environment": around,
        "cwd": os.getcwd(),
        "reads": reads.stamps(),
        "notes": notes,
        "filled": found.filled,
    }
    trace_cache.keep(asked, {**read, **facts, "layers": layers, "graph": graph})
    return found


def _traced(options: Options, tested: bool) -> TracedModel:
    loaded = session.open_model(options)
    return traced_from(options, loaded, session.open_data(options, loaded), tested=tested)


def traced_from(
    options: Options, loaded: LoadedModel, batches: Batches, *, tested: bool
) -> TracedModel:
    """The same of a model and data that are open."""
    graph = session.trace_model(options, loaded, batches)
    size = session.batch_size(options, batches)
    other = _test_size(options, loaded, size) if tested else None
    filled = batches.filled.to_json() if batches.filled else {}
    return TracedModel(graph, size, batches.total, other, Base.now(), filled)


def _from_entry(entry: Mapping[str, Any], tested: bool) -> TracedModel | None:
    """What is in a file of the cache; None if that is not what was asked for."""
    if tested and entry.get("tested") is None:
        return None
    try:
        graph = graph_from_json(entry["graph"])
        size, batches, other = (entry[name] for name in ("size", "batches", "tested"))
        return TracedModel(
            graph, size, batches, other, Base(*entry["base"]), dict(entry["filled"])
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _test_size(options: Options, loaded: LoadedModel, size: int) -> int:
    """How many samples a batch of test mode has: that of calibration, unless the model's file
    offers other data.
    """
    if options.data or loaded.evaluation_data in (None, loaded.calibration_data):
        return size
    batches = session.open_data(options, loaded, evaluation=True)
    batches.first()
    return session.batch_size(options, batches)


def _unseen(options: Options) -> Iterator[Path]:
    """Files that libraries in C open, which Python does not see."""
    try:
        for place in filter(None, (options.model, options.weights, options.tokenizer)):
            path = Path(split_spec(place)[0])
            yield from path.iterdir() if path.is_dir() else [path]
        yield from find_files(options.data)[1] if options.data else ()
    except (DataError, OSError):  # who reads them says so
        return
