"""Defines `ModelQuantizer`, which imports torch only when it is used."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from quantizer.api.config import AnyConfig, check_kind
from quantizer.api.display import called_from_python
from quantizer.storage.permission import replacing

if TYPE_CHECKING:
    from torch import nn

    from quantizer.export.agreement import Verification

Model = TypeVar("Model", bound="nn.Module")


class ModelQuantizer:
    """Quantizes a model in place: weight-only, static or dynamic, as the config says.

    It quantizes linear layers, convolutions, transposed convolutions, embeddings, recurrent
    layers, their subclasses, and the experts of transformers' mixtures. Other layers with
    weights stay in float and are logged. The command line and `calibrate` instead quantize a
    traced copy of the model.

    Args:
        config: a path, a dict or a `Config`, in the hierarchical form.
    """

    def __init__(self, config: AnyConfig) -> None:
        check_kind(config)
        self.config = config

    @called_from_python()
    def quantize_model(self, model: Model, dataloader: Iterable[Any] | None = None) -> Model:
        """Quantize a model in place and return it. It keeps the methods of its class, its dtype
        and its training mode. If the call fails, the model is unchanged.

        Args:
            model: the model to quantize.
            dataloader: batches; each is a tensor, a tuple or list (positional arguments, and
                optionally a target) or a dict (keyword arguments). They are read only if an
                activation has a static scale.

        Raises:
            ConfigError: the config cannot be used, alone or with this model. It has all
                findings.
            ModelError: weights have NaN, Inf or no values; or the model is already quantized.
            DataError: a static config has no batches, or the model cannot take them, or gives
                NaN.

        >>> import torch
        >>> from quantizer import Config, Dtype, ModelQuantizer
        >>> from quantizer import QuantizationConfig, QuantizationSpec
        >>> config = Config(QuantizationConfig(weight=QuantizationSpec(Dtype.int8)))
        >>> network = torch.nn.Sequential(torch.nn.Linear(8, 4))
        >>> ModelQuantizer(config).quantize_model(network) is network
        True
        """
        from quantizer.api.in_place import quantize

        quantize(model, self.config, dataloader)
        return model

    @staticmethod
    def freeze(model: Model) -> Model:
        """Disable the gradients of a quantized model, and return it. Its outputs stay the
        same.

        Args:
            model: a quantized model.
        """
        return model.requires_grad_(False)

    @staticmethod
    @called_from_python()
    def export(
        model: nn.Module,
        folder: str | os.PathLike[str],
        dataloader: Iterable[Any] | None = None,
        *,
        overwrite: bool = False,
    ) -> Verification:
        """Write a quantized model of transformers as a checkpoint in compressed-tensors, which
        transformers, vLLM and SGLang load, and verify it.

        Args:
            model: a quantized model.
            folder: a new folder, or an earlier export.
            dataloader: the batches to compare on, as `quantize_model` takes them; None for an
                example input.
            overwrite: whether an earlier export is replaced that was changed since.

        Raises:
            ModelError: no layer is quantized.
            UsageError: the folder holds other files, the format cannot express the
                quantization of a layer, or this is not a model of transformers.
            VerificationError: the outputs in transformers differ from the model's; then nothing
                is written.
        """
        from quantizer.api.in_place import export

        with replacing(overwrite=overwrite):
            return export(model, folder, dataloader)

    @staticmethod
    @called_from_python()
    def save(
        model: nn.Module, folder: str | os.PathLike[str], *, overwrite: bool = False
    ) -> None:
        """Write the state of a quantized model to the files `model.safetensors` and
        `quantizer.json` of a folder.

        Args:
            model: a quantized model.
            folder: a new or empty folder, or one that `save` has written. Its files stay until
                both new ones are complete.
            overwrite: whether files of an earlier call are replaced that were changed since.

        Raises:
            ModelError: the model is not quantized, or has state that is not a tensor.
            ResultError: the folder cannot be written.
            UsageError: the folder holds other files, or `folder` is not a path.
        """
        from quantizer.api.config import path_of
        from quantizer.export.saved_modules import save_quantized

        with replacing(overwrite=overwrite):
            save_quantized(model, path_of(folder, "folder"))

    @staticmethod
    @called_from_python()
    def load(model: Model, folder: str | os.PathLike[str]) -> Model:
        """Load a saved quantized model into a float model of the same architecture, and return
        it. If the call fails, the model is unchanged.

        Args:
            model: a float model. Its weights may have any values, or be on the meta device.
            folder: a folder that `save` has written.

        Raises:
            ModelError: the model is quantized already, or has another architecture.
            ResultError: the folder is incomplete or damaged.
            UsageError: `folder` is not a path.
        """
        from quantizer.api.config import path_of
        from quantizer.export.saved_modules import load_quantized

        load_quantized(model, path_of(folder, "folder"))
        return model
