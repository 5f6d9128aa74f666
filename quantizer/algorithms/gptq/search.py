"""What a search for gates tries with GPTQ and Qronos. Imports no torch."""

from quantizer.config.search_steps import ConfigChange, ConfigStep

STEP = ConfigStep(
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
