"""Holds the last part of the calibration data back for the test, if there are no other data."""

from collections.abc import Sequence

from quantizer.config.model import ConfigRule, ResolvedConfig, Role
from quantizer.config.roles import is_parameter
from quantizer.graph.ir import Graph

MIN_SAMPLES = 16
"""With fewer samples all of them calibrate, and the figures are those of the same samples."""
MOST_WINDOWS = 128
"""Windows of a text that a run uses by default. More take longer and change little. Frantar et
al. 2022, "GPTQ" (arXiv 2210.17323), section 4 calibrates with 128 windows.
"""
_SHARE_HELD_BACK = 4
"""One of so many batches judges, or of so many samples if there is one batch."""


def may_need_data(config: ResolvedConfig) -> bool:
    """Return whether a config may need the values of data; False if it quantizes weights to
    nearest.
    """
    if config.settings.include_bias_corr:
        return True
    if any(algorithm.needs_data for algorithm in config.algorithms):
        return True
    return any(map(_may_calibrate, config.rules))


def _may_calibrate(rule: ConfigRule) -> bool:
    """Return whether a block of a config may quantize activations with stored scales."""
    roles: set[Role] = set()
    roles.update(rule.fields)
    roles.update(rule.adds)
    roles.update(rule.roles or ())
    for role in roles:
        fields = rule.fields.get(role, {})
        is_dynamic = "is_dynamic" in fields and fields["is_dynamic"].value is True
        if not is_parameter(role) and not is_dynamic:
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
        if node.op != "input" or node.shape is None:
            continue
        first_axis = node.shape[:1]
        if first_axis != (None,):
            return False
    return True
