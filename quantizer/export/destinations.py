"""Lists the destinations of `quantizer run --to`: for each the preset to start from and the
file to write. Imports no torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Destination:
    """What one value of `--to` stands for.

    Attributes:
        made: what is written, for sentences.
        preset: the config to start from.
        without_data: the preset if there is no calibration data; None if data is needed.
        target: of `--deploy`, for a network.
        folder_target: the same for a Hugging Face folder; None if it is `target` too.
    """

    made: str
    preset: str
    target: str
    without_data: str | None = None
    folder_target: str | None = None

    def target_of(self, *, is_folder: bool) -> str:
        """Return the target of `--deploy` for a network, or for a Hugging Face folder."""
        if is_folder and self.folder_target is not None:
            return self.folder_target
        return self.target

    def preset_of(self, *, has_data: bool) -> str | None:
        """Return the preset to start from; None if it needs data and there is none."""
        return self.preset if has_data else self.without_data


_CHECKPOINT = "compressed-tensors"
"""Hugging Face folders become checkpoints that transformers, vLLM and SGLang load."""

DESTINATIONS: dict[str, Destination] = {
    "onnx": Destination("int8 ONNX", preset="cpu_int8", target="onnx"),
    "pt2": Destination("int8 program of torch.export", preset="cpu_int8", target="pt2"),
    "w8": Destination(
        "int8 weights",
        preset="weight_int8",
        without_data="weight_int8",
        target="safetensors",
        folder_target=_CHECKPOINT,
    ),
    "w4": Destination(
        "int4 weights",
        preset="gptq_int4_group",
        without_data="weight_int4_group",
        target="safetensors",
        folder_target=_CHECKPOINT,
    ),
    "w8a8": Destination(
        "int8 weights and activations",
        preset="smoothquant_int8",
        without_data="dynamic_int8",
        target="safetensors",
        folder_target=_CHECKPOINT,
    ),
    "fp8": Destination(
        "fp8 weights and activations",
        preset="static_fp8",
        target="safetensors",
        folder_target=_CHECKPOINT,
    ),
    "gguf": Destination(
        "Q8_0 GGUF", preset="gguf_q8_0", without_data="gguf_q8_0", target="gguf"
    ),
}
"""By the values of `--to`."""


def without_data() -> list[str]:
    """Return the destinations that need no calibration data."""
    return [name for name, place in DESTINATIONS.items() if place.without_data is not None]
