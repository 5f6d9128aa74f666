"""Check that a model and a config are those of a calibration."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from quantizer.calibration import fingerprint
from quantizer.config.forms.algorithm_words import algorithm_entry
from quantizer.config.model import ResolvedConfig, Settings
from quantizer.errors import ResultError
from quantizer.graph.ir import Graph, references
from quantizer.plan.joining.joins import with_decisions
from quantizer.plan.model import Plan
from quantizer.results.folder import OpenedResults, QuantInfo, stored_joins


def check_model(info: QuantInfo, original: Graph) -> None:
    """Check that a model is the calibrated one.

    Args:
        info: the calibration.
        original: the graph of the model.

    Raises:
        ResultError: naming the first layer or tensor that differs.
    """
    layer = fingerprint.first_difference(
        info.header["layers"], fingerprint.layer_digests(original)
    )
    if layer is not None:
        raise ResultError(
            f"the model is not the calibrated one: layer {layer} differs",
            help="calibrate this model first",
        )
    path = fingerprint.first_difference(
        info.header["weights"], fingerprint.weight_digests(original)
    )
    if path is not None:
        owner = path
        for node in reversed(original.nodes):
            if path in node.params.values():
                owner = node.name
        raise ResultError(
            f"the weights are not those that were calibrated: {path} of layer {owner} differs",
            help="calibrate again, or give the weights that were calibrated",
        )


def check_output(info: OpenedResults, stored: Graph, original: Graph) -> None:
    """Check that a model with the calibrated layers returns the same layers in the same order.

    Args:
        info: the calibration.
        stored: its graph.
        original: the graph of the model.

    Raises:
        ResultError: it returns the values of other layers, or in another order.
    """
    if info.header["layers"] != fingerprint.layer_digests(original):
        # `check_model` names the layer
        return
    before = references(stored.output)
    now = references(original.output)
    for layer, present in zip_longest(before, now, fillvalue="nothing"):
        if layer != present:
            raise ResultError(
                f"the model is not the calibrated one: it returns {present} where it returned "
                f"{layer}",
                help="calibrate this model first",
            )


def check_plan(info: QuantInfo, config: ResolvedConfig, plan: Plan) -> Plan:
    """Return a plan with its joins quantized as in the calibration.

    Args:
        info: the calibration.
        config: of this run.
        plan: made from this config.

    Raises:
        ResultError: the config is not the calibrated one. The first setting or layer that
            differs is named.
    """
    plan = with_decisions(plan, stored_joins(info.header))
    for difference in _differences(info, config, plan.tensors):
        raise ResultError(
            f"the config is not the calibrated one: {difference}",
            help="calibrate with this config first, or leave out <--config_file>",
        )
    return plan


def _differences(
    info: QuantInfo, config: ResolvedConfig, planned: Mapping[tuple[str, str], Any]
) -> Iterator[str]:
    """Yield sentences about settings and tensors that differ from those of the calibration."""
    names = [field.name for field in fields(Settings) if field.name != "places"]
    for name in names:
        present = getattr(config.settings, name)
        stored = getattr(info.settings, name)
        if present != stored:
            yield f"{name} is {present!r}, calibrated with {stored!r}"
    algorithms = [algorithm_entry(algorithm.settings) for algorithm in config.algorithms]
    if algorithms != info.header["algorithms"]:
        yield "its algorithms differ"
    calibrated = info.solution.tensors
    for key in [*planned, *calibrated]:
        is_in_both = key in planned and key in calibrated
        if not is_in_both or planned[key].spec != calibrated[key].spec:
            layer, role = key
            yield f"{role} of layer {layer} differs"
