"""What writing codes, scales and floats into one .safetensors file adds."""

from quantizer.declarations import Destination, ExportTarget, Plugin

_TARGET = ExportTarget(
    "quantizer.export.safetensors.exporter:SafetensorsExporter",
    ".safetensors",
    "quantizer",
    by_tensor=True,
    holds_negative_scales=True,
    offered_for="weights",
    holds_modules=True,
)

PLUGIN = Plugin(
    "safetensors",
    rank=6,
    targets={"safetensors": _TARGET},
    destinations={
        "safetensors": Destination(
            "codes and scales of int8 weights, for your own loader",
            preset="weight_int8",
            without_data="weight_int8",
            target="safetensors",
        )
    },
)
