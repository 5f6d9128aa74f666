"""Holds the last part of the calibration data back for the test, if there are no other data."""

from collections.abc import Sequence

from quantizer.config.model import Config
from quantizer.config.roles import is_parameter
from quantizer.graph.ir import Graph

MIN_SAMPLES = 16
"""With fewer samples all of them calibrate, and the figures are those of the same samples."""
_SHARE_HELD_BACK = 4
"""One of so many batches judges, or of so many samples if there is one batch."""


def may_need_data(config: Config) -> bool:
    """Return whether a config may need the values of data; False if it quantizes weights to
    nearest.
    """
    if config.settings.include_bias_corr:
        return True
    if any(algorithm.needs_data for algorithm in config.algorithms):
        return True
    for rule in config.rules:
        for role in {*rule.fields, *rule.adds, *(rule.roles or ())}:
            is_dynamic = rule.fields.get(role, {}).get("is_dynamic")
            if not is_parameter(role) and (is_dynamic is None or is_dynamic.value is not True):
                return True
    return False


def samples_to_calibrate(sizes: Sequence[int], graph: Graph) -> int | None:
    """Return how many samples calibrate if the others judge; None if all have to calibrate.

    The last quarter of the batches judges, or of the samples if there is one batch. That needs
    `MIN_SAMPLES`, and a network that takes batches of any size.

    Args:
        sizes: the samples of each batch.
        graph: of the network.
    """
    if len(sizes) > 1:
        count = max(1, len(sizes) // _SHARE_HELD_BACK)
        return sum(sizes[:-count])
    if sizes[0] < MIN_SAMPLES or not _takes_any_batch(graph):
        return None
    return sizes[0] - sizes[0] // _SHARE_HELD_BACK


def _takes_any_batch(graph: Graph) -> bool:
    """Return whether the first axis of each input is a batch of any size."""
    for node in graph.nodes:
        if node.op == "input" and node.shape is not None and node.shape[:1] != (None,):
            return False
    return True
