"""What writing encodings for AIMET and QNN adds. They go with a float .onnx."""

from quantizer.declarations import Destination, ExportTarget, Plugin, TargetOption

_VERSION = TargetOption(
    "encodings_version",
    "encodings",
    "The version of an .encodings file: 2.0.0 also holds axes.",
    ("1.0.0", "2.0.0"),
)
_TARGET = ExportTarget(
    "quantizer.export.encodings.exporter:EncodingsExporter",
    ".encodings",
    "ONNX Runtime, with operators for the encodings",
    ("onnx", "onnxruntime", "onnxscript"),
    "onnx",
    options=(_VERSION,),
)

PLUGIN = Plugin(
    "encodings",
    rank=3,
    needs=("onnx",),
    targets={"encodings": _TARGET},
    destinations={
        "qnn": Destination(
            "encodings for AIMET and QNN",
            preset="cpu_int8",
            target="encodings",
            also={"aimet": "", "qualcomm": "", "encodings": ""},
        )
    },
)
