"""Declares GPTQ, GPTAQ and Qronos."""

from quantizer.declarations import ConfigChange, ConfigStep, ListedAlgorithm, Plugin

_SETTINGS = "quantizer.algorithms.gptq.settings"
_SEARCH = ConfigStep(
    "rounding",
    "a Hessian for each layer, column after column",
    (
        ConfigChange("gptq", algorithm={"name": "gptq"}),
        ConfigChange("qronos", algorithm={"name": "qronos"}),
        ConfigChange(
            "qronos with searched scales",
            algorithm={"name": "qronos", "scale_search": True, "sweeps": 4},
            most_bits=4,
        ),
    ),
    place=5,
)
PLUGIN = Plugin(
    "gptq",
    rank=23,
    search=(_SEARCH,),
    algorithms={
        "gptq": ListedAlgorithm(f"{_SETTINGS}:GPTQConfig"),
        "gptaq": ListedAlgorithm(f"{_SETTINGS}:GPTAQConfig"),
        "qronos": ListedAlgorithm(f"{_SETTINGS}:QronosConfig"),
    },
)
