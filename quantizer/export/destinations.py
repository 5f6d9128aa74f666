"""Lists the destinations of `quantizer run --to`: for each the preset to start from and the
file to write. Imports no torch.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantizer.errors import UsageError
from quantizer.export.choices import CHOICES

_logger = logging.getLogger(__name__)
_TRANSPOSED_LINEAR = "Conv1D"
"""The linear layers of GPT-2, whose weights are transposed."""


@dataclass(frozen=True)
class Destination:
    """What one value of `--to` stands for.

    Attributes:
        made: what is written, for sentences.
        preset: the config to start from.
        without_data: the preset if there is no calibration data; None if data is needed.
        target: of `--deploy`, for a network.
        transformers_target: the same for a model of transformers; None if it is `target` too.
        gain: the advice after a run without data; empty if data would change nothing.
        choices: values of the target's options, by name.
    """

    made: str
    preset: str
    target: str
    without_data: str | None = None
    transformers_target: str | None = None
    gain: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)

    def target_of(self, model: Any) -> str:
        """Return the target of `--deploy` for a model."""
        is_of_transformers = callable(getattr(model, "save_pretrained", None))
        if not is_of_transformers or self.transformers_target is None:
            return self.target
        classes = {type(module).__name__ for module in model.modules()}
        if _TRANSPOSED_LINEAR in classes:
            _logger.warning(
                "%s has layers of the class %s, for which %s has no place: the target %s "
                "is written instead",
                type(model).__name__,
                _TRANSPOSED_LINEAR,
                self.transformers_target,
                self.target,
            )
            return self.target
        return self.transformers_target

    def improvement(self, *, has_data: bool) -> str:
        """Return what would lose less than this run; empty if that is not known."""
        return "" if has_data else self.gain


CHECKPOINT = "compressed-tensors"
"""Models of transformers become checkpoints that transformers, vLLM and SGLang load."""

DESTINATIONS: dict[str, Destination] = {
    "onnx": Destination("int8 ONNX", preset="cpu_int8", target="onnx"),
    "openvino": Destination("int8 OpenVINO IR", preset="cpu_int8", target="openvino"),
    "qnn": Destination("encodings for AIMET and QNN", preset="cpu_int8", target="encodings"),
    "pt2": Destination("int8 program of torch.export", preset="cpu_int8", target="pt2"),
    "executorch": Destination(
        "int8 program of ExecuTorch, for phones", preset="mobile_int8", target="executorch"
    ),
    "litert": Destination(
        "int8 file of LiteRT, for phones", preset="mobile_int8", target="litert"
    ),
    "tensorrt": Destination(
        "int8 ONNX for TensorRT",
        preset="tensorrt_int8",
        target="onnx",
        choices={"onnx_profile": "tensorrt"},
    ),
    "npu": Destination(
        "int8 ONNX for NPUs", preset="npu_int8", target="onnx", choices={"onnx_profile": "npu"}
    ),
    "w8": Destination(
        "int8 weights (vLLM: on GPUs only)",
        preset="weight_int8",
        without_data="weight_int8",
        target="safetensors",
        transformers_target=CHECKPOINT,
    ),
    "w4": Destination(
        "int4 weights",
        preset="gptq_int4_group",
        without_data="weight_int4_group",
        target="safetensors",
        transformers_target=CHECKPOINT,
        gain="give calibration data: GPTQ then recovers most of what round-to-nearest loses.",
    ),
    "w8a8": Destination(
        "int8 weights and activations",
        preset="smoothquant_int8",
        without_data="dynamic_int8",
        target="safetensors",
        transformers_target=CHECKPOINT,
        gain="give calibration data: activations then have static scales, which are faster.",
    ),
    "fp8": Destination(
        "fp8 weights and activations (vLLM: on GPUs only)",
        preset="static_fp8",
        target="safetensors",
        transformers_target=CHECKPOINT,
    ),
    "gguf": Destination(
        "Q8_0 GGUF", preset="gguf_q8_0", without_data="gguf_q8_0", target="gguf"
    ),
}
"""By the values of `--to`."""


_LANGUAGE_MODEL = "w4"
_NETWORK = "onnx"
"""The destinations that are chosen if the user names none."""


def default_destination(model: Any) -> str:
    """Return the destination of a model if the user names none."""
    can_generate = getattr(model, "can_generate", None)
    if callable(can_generate) and can_generate():
        return _LANGUAGE_MODEL
    return _NETWORK


def choices_for(name: str, choices: Mapping[str, str]) -> dict[str, str]:
    """Return the values of options, by name, with those that a destination stands for.

    Raises:
        UsageError: another value is given for an option that the destination sets.
    """
    values = dict(choices)
    for option, value in DESTINATIONS[name].choices.items():
        chosen = values.get(option, CHOICES[option].default)
        if chosen not in (value, CHOICES[option].default):
            raise UsageError(
                f"<--to {name}> writes <--{option} {value}>, and <--{option} {chosen}> is "
                "given",
                help=f"leave out <--{option}>, or give <--to {DESTINATIONS[name].target}>",
            )
        values[option] = value
    return values


def preset_for(name: str, *, has_data: bool) -> str:
    """Return the preset to start from.

    Args:
        name: of the destination.
        has_data: whether there is calibration data.

    Raises:
        UsageError: the destination needs data, and there is none.
    """
    destination = DESTINATIONS[name]
    if has_data:
        return destination.preset
    if destination.without_data is not None:
        return destination.without_data
    others = [
        f"<--to {other}>"
        for other, place in DESTINATIONS.items()
        if place.without_data is not None
    ]
    raise UsageError(
        f"<--to {name}> needs calibration data, and there is none",
        help="give <--data><shell:, or add calibration_data() to the model's file>; "
        "<--data synthetic> makes data from the model itself; these need no data: "
        f"{', '.join(others)}",
    )
