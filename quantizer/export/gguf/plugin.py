"""What writing files of llama.cpp adds."""

from quantizer.declarations import Destination, ExportTarget, Plugin, TargetOption

_TEMPLATE = TargetOption(
    "gguf_template",
    "gguf",
    "A .gguf of the same model, whose keys and tokenizer the file keeps.",
    ("",),
    is_file=True,
)
_TARGET = ExportTarget(
    "quantizer.export.gguf.exporter:GgufExporter",
    ".gguf",
    "transformers",
    ("transformers", "accelerate", "gguf"),
    "llm",
    for_transformers=True,
    by_tensor=True,
    holds_negative_scales=True,
    options=(_TEMPLATE,),
)
_PRESETS = (
    "gguf_q4_0",
    "gguf_q4_1",
    "gguf_q5_0",
    "gguf_q5_1",
    "gguf_q8_0",
    "gguf_q4_k",
    "gguf_q4_k_m",
    "gguf_q5_k",
    "gguf_q5_k_m",
    "gguf_q6_k",
    "gguf_iq4_nl",
)

PLUGIN = Plugin(
    "gguf",
    rank=9,
    needs=("hugging_face", "texts"),
    targets={"gguf": _TARGET},
    destinations={
        "gguf": Destination(
            "Q8_0 GGUF",
            preset="gguf_q8_0",
            without_data="gguf_q8_0",
            target="gguf",
            smaller=("gguf_q6_k", "gguf_q5_k_m", "gguf_q4_k_m"),
            also={"llama.cpp": "", "ollama": ""}
            | {preset.removeprefix("gguf_"): preset for preset in _PRESETS},
        )
    },
)
