"""Say before calibration if the DPU cannot run most of a network that is planned for it."""

from dataclasses import replace

from quantizer.config.diagnostics import Diagnostic
from quantizer.graph.attention import cached_values
from quantizer.plan.dpu_support import verdicts
from quantizer.plan.model import Plan

_LOSES = (
    "; with one power-of-two scale for each tensor, a transformer encoder loses most of its "
    "accuracy"
)


def with_dpu_findings(plan: Plan) -> Plan:
    """Return a plan for the DPU with a warning if the DPU runs less than half of the
    convolutions and linear layers with quantized weights. Other plans are returned as they are.
    """
    settings = plan.settings
    if settings.target_device != "DPU":
        return plan
    verdict_of = verdicts(plan)
    layers = []
    for node in plan.graph.nodes:
        is_planned = (node.name, "weights") in plan.tensors
        if node.row.is_linear_or_convolution and is_planned:
            layers.append(node.name)
    refused = [name for name in layers if verdict_of[name].device == "CPU"]
    if 2 * len(refused) <= len(layers):
        return plan
    has_norms = any(node.row.normalizes for node in plan.graph.nodes)
    is_encoder = has_norms and bool(cached_values(plan.graph))
    first = refused[0]
    warning = Diagnostic(
        "QZ357",
        f"the DPU runs {len(layers) - len(refused)} of {len(layers)} convolutions and linear "
        f"layers; {first} runs on the CPU: {verdict_of[first].why}"
        f"{_LOSES * is_encoder}",
        settings.places.get("target_device"),
        "warning",
        help="`quantizer inspect --target DPU` says why for each layer; `quantizer init "
        "--device CPU` writes a config for a CPU",
    )
    return replace(plan, diagnostics=(*plan.diagnostics, warning))
