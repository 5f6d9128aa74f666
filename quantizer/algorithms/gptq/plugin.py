"""Declares GPTQ, GPTAQ and Qronos."""

from quantizer.declarations import ListedAlgorithm, Plugin

_SETTINGS = "quantizer.algorithms.gptq.settings"
_SEARCH = "quantizer.algorithms.gptq.settings:STEP"
PLUGIN = Plugin(
    "gptq",
    rank=23,
    search=_SEARCH,
    algorithms={
        "gptq": ListedAlgorithm(f"{_SETTINGS}:GPTQConfig"),
        "gptaq": ListedAlgorithm(f"{_SETTINGS}:GPTAQConfig"),
        "qronos": ListedAlgorithm(f"{_SETTINGS}:QronosConfig"),
    },
)
