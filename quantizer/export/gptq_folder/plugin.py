"""What writing folders of GPTQ adds."""

from quantizer.declarations import Destination, ExportTarget, Plugin

_TARGET = ExportTarget(
    "quantizer.export.gptq_folder.exporter:GptqExporter",
    "-gptq",
    "transformers with dequantized weights",
    ("transformers",),
    "llm",
    for_transformers=True,
    holds_whole_model=True,
)

PLUGIN = Plugin(
    "gptq_folder",
    rank=8,
    needs=("compressed_tensors", "hugging_face", "quantized_folders"),
    targets={"gptq": _TARGET},
    destinations={
        "gptq": Destination("int4 weights as AutoGPTQ has them", "gptq_int4_group", "gptq")
    },
)
