"""What writing ONNX adds: the target, its profiles for other engines, and the destinations."""

from quantizer.declarations import (
    CheckedTarget,
    Destination,
    ExportTarget,
    Plugin,
    TargetOption,
    int8_share_metrics,
)

_PROFILE = TargetOption(
    "onnx_profile",
    "onnx",
    "An .onnx rounds as the config says, or as ONNX Runtime's fastest kernels do. "
    "tuned and mixed leave in float what integers make slower on this machine; mixed keeps "
    "integers elsewhere. tensorrt and npu are for these engines.",
    ("exact", "fast", "tuned", "mixed", "tensorrt", "npu"),
    alone=("tuned", "mixed"),
)
_WEIGHTS = TargetOption(
    "onnx_weights",
    "onnx",
    "8-bit weights in an .onnx: auto is right on every CPU, int8 on those with "
    "VNNI, where it is faster.",
    ("auto", "uint8", "int8"),
    goes_with=("onnx_profile", ("exact", "fast", "tuned", "mixed")),
)
_DEPLOY_FILE = TargetOption(
    "deploy_file",
    "onnx",
    "A deploy.json of --onnx_profile tuned or mixed, whose choice is repeated.  [default: "
    "the one in the folder of the file, if there is one]",
    ("",),
    is_file=True,
    goes_with=("onnx_profile", ("tuned", "mixed")),
)
_INPUT_NAMES = TargetOption(
    "input_names",
    "onnx",
    "Names of the inputs of an .onnx, separated by commas.  [default: the "
    "parameters of forward()]",
    ("",),
    is_text=True,
)
_OUTPUT_NAMES = TargetOption(
    "output_names",
    "onnx",
    "Names of the outputs of an .onnx, separated by commas.  [default: keys and "
    "fields of the output, otherwise output_0, output_1, ...]",
    ("",),
    is_text=True,
)
_TARGET = ExportTarget(
    "quantizer.export.onnx.exporter:OnnxExporter",
    ".onnx",
    "ONNX Runtime",
    ("onnx", "onnxruntime", "onnxscript"),
    "onnx",
    int8_share="onnx_int8_share",
    is_timed=True,
    offered_for="network",
    options=(_PROFILE, _WEIGHTS, _DEPLOY_FILE, _INPUT_NAMES, _OUTPUT_NAMES),
)
_COUNTED = (
    "; in files for TensorRT and NPUs, of those whose operands are quantized. All "
    "convolutions, matrix products (those of Einsum and attention, too) and recurrent layers "
    "that the engine executes count. A file without any has no such metric, and a gate on it "
    "is refused"
)

PLUGIN = Plugin(
    "onnx",
    rank=1,
    targets={"onnx": _TARGET},
    profiles={
        "tuned": CheckedTarget("onnx", {"onnx_profile": "tuned"}),
        "mixed": CheckedTarget("onnx", {"onnx_profile": "mixed"}),
        "tensorrt": CheckedTarget("onnx", {"onnx_profile": "tensorrt"}),
        "npu": CheckedTarget("onnx", {"onnx_profile": "npu"}),
    },
    destinations={
        "onnx": Destination(
            "int8 ONNX",
            preset="onnx_int8",
            target="onnx",
            if_slower={"onnx_profile": "mixed"},
            stands_for="network",
            also={"int8": ""},
        ),
        "tensorrt": Destination(
            "int8 ONNX for TensorRT",
            preset="tensorrt_int8",
            target="onnx",
            choices={"onnx_profile": "tensorrt"},
            also={"trt": ""},
        ),
        "npu": Destination(
            "int8 ONNX for NPUs",
            preset="npu_int8",
            target="onnx",
            choices={"onnx_profile": "npu"},
        ),
    },
    metrics=int8_share_metrics("onnx", "ONNX Runtime", _COUNTED),
)
