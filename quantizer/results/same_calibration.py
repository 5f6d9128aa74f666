"""What a calibration was made of, against what is there now: another model or another config is
refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from quantizer.calibration import fingerprint
from quantizer.config.forms.algorithm_words import written
from quantizer.config.model import Config, Settings
from quantizer.errors import ResultError
from quantizer.graph.ir import Graph
from quantizer.plan.joins import with_decisions
from quantizer.plan.model import Plan
from quantizer.results.folder import QuantInfo, stored_joins


def check_model(info: QuantInfo, original: Graph) -> None:
    """Refuse a model that is not the calibrated one.

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
        owner = next(
            (node.name for node in original.nodes if path in node.params.values()), path
        )
        raise ResultError(
            f"the weights are not those that were calibrated: {path} of layer {owner} differs",
            help="calibrate again, or pass the same --weights",
        )


def check_plan(info: QuantInfo, config: Config, plan: Plan) -> Plan:
    """Return the plan with its joins decided as in the calibration; refuse one of another
    config.

    Raises:
        ResultError: naming the first setting or layer that differs.
    """
    plan = with_decisions(plan, stored_joins(info.header))
    for what in _differences(info, config, plan.tensors):
        raise ResultError(
            f"the config is not the calibrated one: {what}",
            help="calibrate with this config first, or leave out --config_file",
        )
    return plan


def _differences(
    info: QuantInfo, config: Config, planned: Mapping[tuple[str, str], Any]
) -> Iterator[str]:
    """Yield the settings and tensors that differ from those of the calibration."""
    names = [field.name for field in fields(Settings) if field.name != "places"]
    for name in names:
        present = getattr(config.settings, name)
        stored = getattr(info.settings, name)
        if present != stored:
            yield f"{name} is {present!r}, calibrated with {stored!r}"
    algorithms = [written(algorithm.settings) for algorithm in config.algorithms]
    if algorithms != info.header["algorithms"]:
        yield "its algorithms differ"
    known = info.solution.tensors
    for key in [*planned, *known]:
        if key not in planned or key not in known or planned[key].spec != known[key].spec:
            yield f"{key[1]} of layer {key[0]} differs"
