"""What writing the IR of OpenVINO adds. It is converted from the .onnx."""

from quantizer.declarations import Destination, ExportTarget, Plugin, int8_share_metrics

_TARGET = ExportTarget(
    "quantizer.export.openvino_ir.exporter:OpenVinoIrExporter",
    ".xml",
    "OpenVINO",
    ("onnx", "onnxruntime", "onnxscript", "openvino"),
    "openvino",
    plainly="in float32",
    int8_share="openvino_int8_share",
    is_timed=True,
)

PLUGIN = Plugin(
    "openvino_ir",
    rank=2,
    needs=("onnx",),
    targets={"openvino": _TARGET},
    destinations={
        "openvino": Destination("int8 OpenVINO IR", preset="cpu_int8", target="openvino")
    },
    metrics=int8_share_metrics("openvino", "OpenVINO"),
)
