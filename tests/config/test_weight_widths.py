"""Other widths for single layers, written into a document."""

from __future__ import annotations

from quantizer.config.model import QuantizationSpec
from quantizer.config.weight_widths import patched

GLOBAL = {"weight": {"dtype": "int8"}}


def test_a_null_weight_gets_the_width() -> None:
    document = {"global_quant_config": GLOBAL, "layer_quant_config": {"fc": {"weight": None, "bias": None}}}
    changed = patched(document, {"fc": {"weights": QuantizationSpec(bit_width=4)}})
    assert changed["layer_quant_config"] == {"fc": {"weight": {"dtype": "int4", "symmetric": True}, "bias": None}}


def test_nothing_to_change_changes_nothing() -> None:
    assert patched({"global_quant_config": GLOBAL}, {}) == {"global_quant_config": GLOBAL}
