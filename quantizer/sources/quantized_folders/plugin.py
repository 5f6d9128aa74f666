"""What reading folders of transformers with quantized weights adds."""

from quantizer.declarations import Plugin

PLUGIN = Plugin(
    "quantized_folders",
    needs=("hugging_face",),
    parts={
        "dequantize Hugging Face folders": (
            "quantizer.sources.quantized_folders.dequantized_folder:dequantizer_of"
        )
    },
)
