"""What writing checkpoints of compressed-tensors adds. transformers, vLLM and SGLang load them.

Other models than those of transformers become a .safetensors file.
"""

from quantizer.declarations import Destination, ExportTarget, Plugin

_TARGET = ExportTarget(
    "quantizer.export.compressed_tensors.exporter:CompressedTensorsExporter",
    "-compressed-tensors",
    "transformers with compressed-tensors",
    ("transformers", "compressed_tensors"),
    "llm",
    for_transformers=True,
    by_tensor=True,
    holds_negative_scales=True,
    holds_whole_model=True,
    holds_modules=True,
    modules_exporter="quantizer.export.compressed_tensors.exporter:export_modules",
)
_NAME = "compressed-tensors"
_GAIN_OF_GPTQ = "give calibration data: GPTQ then recovers most of what round-to-nearest loses."
_GAIN_OF_STATIC_SCALES = (
    "give calibration data: activations then have static scales, which are faster."
)

PLUGIN = Plugin(
    "compressed_tensors",
    rank=7,
    needs=("safetensors", "hugging_face"),
    targets={_NAME: _TARGET},
    about_destinations="w8 and w4 are weights in 8 or 4 bits, w8a8 and fp8 weights and "
    "activations.",
    destinations={
        "w8": Destination(
            "int8 weights (vLLM: on GPUs only)",
            preset="weight_int8",
            without_data="weight_int8",
            target="safetensors",
            transformers_target=_NAME,
            also={"w8a16": ""},
        ),
        "w4": Destination(
            "int4 weights",
            preset="gptq_int4_group",
            without_data="weight_int4_group",
            target="safetensors",
            transformers_target=_NAME,
            gain=_GAIN_OF_GPTQ,
            wider="w8",
            stands_for="language model",
            also={"w4a16": "", "int4": "", "vllm": ""},
        ),
        "w8a8": Destination(
            "int8 weights and activations",
            preset="smoothquant_int8",
            without_data="dynamic_int8",
            target="safetensors",
            transformers_target=_NAME,
            gain=_GAIN_OF_STATIC_SCALES,
        ),
        "fp8": Destination(
            "fp8 weights and activations (vLLM: on GPUs only)",
            preset="static_fp8",
            target="safetensors",
            transformers_target=_NAME,
        ),
        _NAME: Destination(
            "int4 weights of a model of transformers",
            preset="gptq_int4_group",
            without_data="weight_int4_group",
            target=_NAME,
        ),
    },
)
