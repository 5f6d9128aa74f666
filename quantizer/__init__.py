"""Post-training quantization of PyTorch models, configured by a JSON file or by dataclasses.

Importing this package does not import torch. Public names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quantizer.errors import TORCH, pip_line

if TYPE_CHECKING:
    from quantizer import nn as nn
    from quantizer.api.calibrate import calibrate, load
    from quantizer.api.config import (
        Config,
        ObserverBase,
        PerBlock2DMinMaxObserver,
        PerBlockBFPObserver,
        PerBlockMXObserver,
        PerChannelMinMaxObserver,
        PerGroupMinMaxObserver,
        PerGroupMSEObserver,
        PerTensorMinMaxObserver,
        PerTensorMSEObserver,
        PerTensorPercentileObserver,
        PlaceholderObserver,
        QuantizationConfig,
        QuantizationSpec,
    )
    from quantizer.api.model_quantizer import ModelQuantizer
    from quantizer.api.quantize import quantize
    from quantizer.api.result import Quantized
    from quantizer.config.algorithms import (
        AlgoConfig,
        AWQConfig,
        CLEConfig,
        GPTAQConfig,
        GPTQConfig,
        IMatrixConfig,
        PreQuantOptConfig,
        QronosConfig,
        RotationConfig,
        SmoothQuantConfig,
    )
    from quantizer.config.forms.types import (
        DeviceType,
        Dtype,
        QSchemeType,
        RoundType,
        ScaleType,
    )

__version__ = "0.20.0"
__all__ = [
    "AWQConfig",
    "AlgoConfig",
    "CLEConfig",
    "Config",
    "DeviceType",
    "Dtype",
    "GPTAQConfig",
    "GPTQConfig",
    "IMatrixConfig",
    "ModelQuantizer",
    "ObserverBase",
    "PerBlock2DMinMaxObserver",
    "PerBlockBFPObserver",
    "PerBlockMXObserver",
    "PerChannelMinMaxObserver",
    "PerGroupMSEObserver",
    "PerGroupMinMaxObserver",
    "PerTensorMSEObserver",
    "PerTensorMinMaxObserver",
    "PerTensorPercentileObserver",
    "PlaceholderObserver",
    "PreQuantOptConfig",
    "QSchemeType",
    "QronosConfig",
    "QuantizationConfig",
    "QuantizationSpec",
    "Quantized",
    "RotationConfig",
    "RoundType",
    "ScaleType",
    "SmoothQuantConfig",
    "calibrate",
    "load",
    "quantize",
]
# `nn` is missing above: a star import must not hide torch.nn
_HOMES = (
    "quantizer.config.forms.types",
    "quantizer.config.algorithms",
    "quantizer.api.config",
    "quantizer.api.model_quantizer",
)
"""The modules that have the public names, fastest to import first. None imports torch."""
_HEAVY = {
    "calibrate": "quantizer.api.calibrate",
    "load": "quantizer.api.calibrate",
    "quantize": "quantizer.api.quantize",
    "Quantized": "quantizer.api.result",
}
"""The modules of the names that need torch."""


def __getattr__(name: str) -> Any:
    """Return a public name or `quantizer.nn`, loaded on first use.

    Raises:
        AttributeError: there is no such name.
        ModuleNotFoundError: it needs torch, which is missing.
    """
    if name == "nn":
        return importlib.import_module("quantizer.nn")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (_HEAVY[name],) if name in _HEAVY else _HOMES
    for home in homes:
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if error.name not in TORCH:
                raise
            message = f"quantizer.{name} needs {error.name}: {pip_line('torch')}"
            raise ModuleNotFoundError(message, name=error.name) from None
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            break
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "nn"})
