"""What writing programs of torch.export adds."""

from quantizer.declarations import Destination, ExportTarget, Plugin, TargetOption

_ACTIVATIONS = TargetOption(
    "pt2_activations",
    "pt2",
    "Integers of activations in a .pt2: uint8 for torch's compiler, int8 for ExecuTorch.",
    ("uint8", "int8"),
)
_INTEGERS = ExportTarget(
    "quantizer.export.torch_export.exporter:Pt2Exporter",
    ".pt2",
    "torch.export.load",
    offered_for="program",
    options=(_ACTIVATIONS,),
)
_FLOATS = ExportTarget(
    "quantizer.export.torch_export.exporter:Pt2FloatExporter",
    ".float.pt2",
    "torch.export.load",
    holds_negative_scales=True,
)

PLUGIN = Plugin(
    "torch_export",
    rank=4,
    targets={"pt2": _INTEGERS, "pt2_float": _FLOATS},
    destinations={
        "pt2": Destination("int8 program of torch.export", preset="cpu_int8", target="pt2"),
        "pt2_float": Destination(
            "program of torch.export that computes in float with rounded values",
            preset="cpu_int8",
            target="pt2_float",
        ),
    },
)
