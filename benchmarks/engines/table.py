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
class Engine:
    """An engine with one target of `--deploy` and its options.

    Attributes:
        name: of the file of results.
        title: what tables call it.
        target: a target of `--deploy`.
        consumer: the program in `consumers/` that runs the file in the engine.
        package: the package whose version is that of the engine.
        options: of the target.
        packages: what pip installs into the engine's environment. Without any, the consumer
            runs in the project's own environment.
        removed: packages that pip removes from it again.
        environment: the name of that environment, if it is not that of the engine. Engines that
            share it have the same packages.
        float_program: the float network that the engine is timed with: "onnx", "pt2",
            "transformers" or "gguf"; "" if it is not timed.
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
    packages: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    environment: str = ""
    float_program: str = ""
    is_next_token: bool = False
    configs: Mapping[str, str] = field(default_factory=dict)
    cannot_hold: Mapping[str, str] = field(default_factory=dict)


def all_but_llama(reason: str) -> dict[str, str]:
    """Return the reason for each network that is not a language model of transformers."""
    return {name: reason for name in NETWORKS if name != "llama"}


ONLY_TRANSFORMERS = all_but_llama("The format holds models of transformers only.")

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
        "openvino",
        "OpenVINO",
        "onnx",
        "in_openvino.py",
        "openvino",
        float_program="onnx",
    ),
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
        packages=("tract==0.23.9", "numpy==2.4.6"),
        float_program="onnx",
    ),
    Engine(
        "aimet",
        "AIMET",
        "onnx",
        "in_aimet.py",
        "aimet-onnx",
        packages=("aimet-onnx==2.42.0", "torch==2.13.0"),
        cannot_hold={"llama": "AIMET reads no scales that are found at run time."},
    ),
    Engine(
        "aimet_encodings",
        "AIMET",
        "encodings",
        "in_aimet_encodings.py",
        "aimet-onnx",
        packages=("aimet-onnx==2.42.0", "torch==2.13.0"),
        environment="aimet",
        cannot_hold={
            "llama": "Encodings have no scales that are found at run time.",
            "tagger": "Encodings have no weights of an LSTM.",
        },
    ),
    Engine(
        "torch",
        "torch",
        "pt2",
        "in_torch.py",
        "torch",
        float_program="pt2",
    ),
    Engine(
        "inductor",
        "torch.compile",
        "pt2",
        "in_inductor.py",
        "torch",
        float_program="pt2",
    ),
    Engine(
        "executorch",
        "ExecuTorch (XNNPACK)",
        "executorch",
        "in_executorch.py",
        "executorch",
        configs={name: "mobile_int8" for name in NETWORKS if name != "llama"},
        cannot_hold={"llama": "XNNPACK's static kernels read no scales found at run time."},
    ),
    Engine(
        "litert",
        "LiteRT (XNNPACK)",
        "litert",
        "in_litert.py",
        "ai-edge-litert",
        configs={name: "mobile_int8" for name in NETWORKS if name != "llama"},
        cannot_hold={"llama": "LiteRT's static kernels read no scales found at run time."},
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
