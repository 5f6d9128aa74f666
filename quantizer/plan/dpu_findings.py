"""Say before calibration if the DPU cannot run most of a network that is planned for it."""

from dataclasses import replace

from quantizer.config.diagnostics import Diagnostic
from quantizer.plan.dpu_support import verdicts
from quantizer.plan.model import Plan

_ATTENTION = frozenset({"softmax", "scaled_dot_product_attention"})
_LOSES = (
    "; with one power-of-two scale for each tensor, a transformer encoder loses most of its "
    "accuracy"
)


def with_dpu_findings(plan: Plan) -> Plan:
    """Return a plan for the DPU with a warning if the DPU runs less than half of its
    convolutions and linear layers. Other plans are returned as they are.
    """
    settings = plan.settings
    if settings.target_device != "DPU":
        return plan
    verdict_of = verdicts(plan)
    layers = []
    for node in plan.graph.nodes:
        if node.row.is_linear_or_convolution:
            layers.append(node.name)
    refused = [name for name in layers if verdict_of[name].device == "CPU"]
    if 2 * len(refused) <= len(layers):
        return plan
    operators = {node.op for node in plan.graph.nodes}
    is_encoder = "layer_norm" in operators and not operators.isdisjoint(_ATTENTION)
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
