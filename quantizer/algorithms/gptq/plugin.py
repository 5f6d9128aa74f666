"""Declares GPTQ, GPTAQ and Qronos."""

from quantizer.declarations import ListedAlgorithm, Plugin

_SETTINGS = "quantizer.algorithms.gptq.settings"
PLUGIN = Plugin(
    "gptq",
    rank=23,
    algorithms={
        "gptq": ListedAlgorithm(f"{_SETTINGS}:GPTQConfig"),
        "gptaq": ListedAlgorithm(f"{_SETTINGS}:GPTAQConfig"),
        "qronos": ListedAlgorithm(f"{_SETTINGS}:QronosConfig"),
    },
)
