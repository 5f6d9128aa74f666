"""The data that networks are analyzed on: those of the calibration, without padding."""

from collections.abc import Iterator
from functools import partial

from quantizer.cli.follow import progress
from quantizer.cli.options import Options
from quantizer.cli.session import device_of
from quantizer.evaluation.analyze import WatchedData
from quantizer.graph.ir import Graph
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches
from quantizer.sources.padding import without_padding


def on_device(options: Options, batches: Batches, graph: Graph) -> Iterator[Batch]:
    """Yield batches without padding, on the device of `--device`.

    Args:
        options: name the device.
        batches: the data.
        graph: the trace that they will run through.
    """
    device = device_of(options)
    for batch in without_padding(batches, graph):
        yield batch.to(device)


def watched_data(options: Options, batches: Batches, graph: Graph) -> WatchedData:
    """Return the data of an analysis, whose progress is shown."""
    start = partial(on_device, options, batches, graph)
    return WatchedData(start, batches.total, progress(quiet=options.json))
