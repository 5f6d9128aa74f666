"""What writing files for phones adds: programs of ExecuTorch, and files of LiteRT."""

from quantizer.declarations import (
    Destination,
    ExportTarget,
    Plugin,
    TargetOption,
    int8_share_metrics,
)

_BATCH = TargetOption(
    "executorch_batch",
    "executorch",
    "The largest batch of a .pte, for which memory is planned.  [default: the first one of "
    "the data]",
    ("",),
    is_text=True,
    metavar="N",
)
_EXECUTORCH = ExportTarget(
    "quantizer.export.mobile.executorch:ExecutorchExporter",
    ".pte",
    "ExecuTorch",
    ("executorch",),
    "executorch",
    plans_alone=True,
    int8_share="executorch_int8_share",
    options=(_BATCH,),
)
_IO = TargetOption(
    "litert_io",
    "litert",
    "Type of the inputs and outputs of a .tflite: float, or int8 where they are quantized.",
    ("float", "int8"),
)
_LITERT = ExportTarget(
    "quantizer.export.mobile.litert:LitertExporter",
    ".tflite",
    "LiteRT",
    ("litert_torch", "ai_edge_litert"),
    "litert",
    plans_alone=True,
    int8_share="litert_int8_share",
    options=(_IO,),
)

PLUGIN = Plugin(
    "mobile",
    rank=5,
    targets={"executorch": _EXECUTORCH, "litert": _LITERT},
    destinations={
        "executorch": Destination(
            "int8 program of ExecuTorch, for phones",
            preset="mobile_int8",
            target="executorch",
            also={"pte": ""},
        ),
        "litert": Destination(
            "int8 file of LiteRT, for phones",
            preset="mobile_int8",
            target="litert",
            also={"tflite": ""},
        ),
    },
    metrics={
        **int8_share_metrics("executorch", "XNNPACK"),
        **int8_share_metrics("litert", "LiteRT"),
    },
)
