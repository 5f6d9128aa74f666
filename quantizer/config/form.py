"""Tells a file of the other form (global_quant_config, layer_quant_config, …) from a layered one. Reads neither."""

from __future__ import annotations

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.document import Document, pointer_to
from quantizer.config.wording import listed

OTHER_FORM = frozenset(
    {
        "global_quant_config",
        "layer_type_quant_config",
        "layer_quant_config",
        "exclude",
        "algo_config",
        "pre_quant_opt_config",
    }
)
"""Keys of the other form. Source: AMD Quark for PyTorch, documentation of `Config`."""


def other_form(document: Document) -> Diagnostic | None:
    """One finding, at the first of its keys, if the file has keys of the other form and no overall block."""
    keys = [key for key in document.value if key in OTHER_FORM]
    if not keys or "overall_quantize_config" in document.value:
        return None
    return Diagnostic(
        "QZ114",
        f"this file is of the other form ({listed(keys)}), which this version does not read yet",
        document.place(pointer_to(keys[0]), key=True),
        help="`quantizer init` writes a file of the form that is read: overall_quantize_config, "
        "tensor_quantize_config, layer_quantize_config",
    )
