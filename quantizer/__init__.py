"""Post-training quantization of PyTorch models, configured by a JSON file or by dataclasses.

Three functions do most of it:

    made = quantizer.quantize(model, batches, "onnx")  # calibrate, test and write a file
    print(made)  # the file, what it lost, how fast it is, and what to do next
    result = quantizer.calibrate(model, config, batches)  # a result to test, save and export
    result.test().require("sqnr_db>=20")
    result.export("onnx", "model.onnx")
    result = quantizer.load("quantize_result", model)  # one that was saved

`Config`, `QuantizationConfig` and `QuantizationSpec` make a config in Python, with classes such
as `AWQConfig` for algorithms and `PerTensorMinMaxObserver` for ranges. `ModelQuantizer`
quantizes a model in place. `quantizer.errors.QuantizerError` is the class of all errors.

`help(quantizer.quantize)` explains one name, and `dir(quantizer)` lists all. `quantizer help`
shows the commands of the shell. Importing this package does not import torch.
"""

import importlib
import sys
from typing import Any

from quantizer.errors import TORCH

__version__ = "0.20.0"
_CONFIG = "quantizer.api.config"
_NAMES = {
    "quantizer.api.calibrate": ("calibrate", "load"),
    "quantizer.api.quantize": ("quantize",),
    "quantizer.api.result": ("Quantized",),
    "quantizer.api.model_quantizer": ("ModelQuantizer",),
    _CONFIG: (
        *("Config", "QuantizationConfig", "QuantizationSpec"),
        *("ObserverBase", "PlaceholderObserver"),
    ),
    "quantizer.config.algorithms": ("AlgoConfig", "PreQuantOptConfig"),
    "quantizer.config.forms.types": (
        *("DeviceType", "Dtype", "QSchemeType", "RoundType", "ScaleType"),
    ),
}
"""The public names of each module. Rows of range methods name the observers, and plug-ins the
settings of their algorithms.
"""


def __getattr__(name: str) -> Any:
    """Return a public name or `quantizer.nn`, loaded on first use.

    Raises:
        AttributeError: there is no such name.
        ModuleNotFoundError: it needs torch, which is missing.
    """
    if name == "nn":
        return importlib.import_module("quantizer.nn")
    # With these names, help() prints each of them in full, which takes 2,000 lines
    if name == "__all__" and sys._getframe(1).f_globals.get("__name__") != "pydoc":
        return _public_names()
    # An import of a module asks here, too, before plug-ins may be imported
    known = homes_of_names() if name.endswith("Config") else _NAMES
    homes = [home for home, names in known.items() if name in names]
    if not homes and name.endswith("Observer"):
        homes = [_CONFIG]
    for home in homes:
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if error.name not in TORCH:
                raise
            # Only a plain install needs it
            from quantizer.installation import pip_line

            raise ModuleNotFoundError(
                f"quantizer.{name} needs {error.name}: {pip_line('torch')}", name=error.name
            ) from None
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            return globals()[name]
    remedy = ""
    if name.endswith(("Observer", "ObserverPro")):
        # Only wrong names need it
        from quantizer.config.forms.aliases import instead_of_observer

        remedy = instead_of_observer(name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(f"{message}: {remedy}" if remedy else message)


def homes_of_names() -> dict[str, tuple[str, ...]]:
    """Return the public names of each module, without the observers."""
    from quantizer.plugins import plugins

    homes = dict(_NAMES)
    for plugin in plugins():
        for row in plugin.algorithms.values():
            home, _, name = row.settings.partition(":")
            homes[home] = (*homes.get(home, ()), name)
    return homes


def _public_names() -> list[str]:
    """Return all public names but `nn`: a star import must not hide torch.nn."""
    observers = importlib.import_module(_CONFIG).OBSERVERS
    names = {*observers}
    for of_module in homes_of_names().values():
        names.update(of_module)
    return sorted(names)


def __dir__() -> list[str]:
    return [*_public_names(), "nn", "__version__"]
