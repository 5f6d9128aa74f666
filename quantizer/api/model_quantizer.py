"""The door of the Python API. What it calls is imported at the first call, so that importing
the API is cheap.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from quantizer.api.config import AnyConfig, check_kind

if TYPE_CHECKING:
    from torch import nn

    from quantizer.export.agreement import Verification

Model = TypeVar("Model", bound="nn.Module")


class ModelQuantizer:
    """`ModelQuantizer(config).quantize_model(model, dataloader)`: weight-only, static or
    dynamic, as the config says.

    Linear, convolutions, transposed convolutions, embeddings, recurrent layers, their
    subclasses and the experts of transformers' mixtures are quantized; what else has weights
    stays float and is logged. The command line does the same to a traced copy of the model.
    """

    def __init__(self, config: AnyConfig) -> None:
        check_kind(config)
        self.config = config

    def quantize_model(self, model: Model, dataloader: Iterable[Any] | None = None) -> Model:
        """Quantize `model` in place and return it; it keeps its class's methods, its dtype and
        its training mode.

        Batches are tensors, tuples or lists (positional arguments, a target may follow) or
        dicts (keyword arguments). They are read only if a tensor other than a weight or bias
        has a static scale. A call that fails leaves the model as it was.

        Raises:
            ConfigError: all findings on the config, alone and with this model.
            ModelError: NaN or Inf in weights; weights without values; a model that is quantized
                already.
            DataError: a static config without batches, or with batches that the model cannot
                take or that give NaN.
        """
        from quantizer.api.in_place import quantize

        quantize(model, self.config, dataloader)
        return model

    @staticmethod
    def freeze(model: Model) -> Model:
        """Make a quantized model final: no gradients any more. Its outputs are the same, bit
        for bit.
        """
        return model.requires_grad_(False)

    @staticmethod
    def export(
        model: nn.Module,
        folder: str | os.PathLike[str],
        dataloader: Iterable[Any] | None = None,
    ) -> Verification:
        """Write a quantized model of transformers as a checkpoint in compressed-tensors, which
        transformers, vLLM and SGLang load, and compare what transformers makes of it with the
        model.

        Args:
            folder: a new one, or an earlier export.
            dataloader: batches to compare on, as `quantize_model` takes them; None for a
                made-up input.

        Raises:
            ModelError: no layer is quantized.
            UsageError: the format cannot say how one is quantized, or this is no model of
                transformers.
            VerificationError: transformers does not give the model's outputs; nothing is
                written then.
        """
        from quantizer.api.in_place import export

        return export(model, folder, dataloader)

    @staticmethod
    def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
        """Write a quantized model's state; see `storage.save`."""
        from quantizer.api import storage

        storage.save(model, folder)

    @staticmethod
    def load(model: Model, folder: str | os.PathLike[str]) -> Model:
        """Make a float model of the same architecture the quantized one that was saved; see
        `storage.load`.
        """
        from quantizer.api import storage

        storage.load(model, folder)
        return model
