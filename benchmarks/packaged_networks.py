"""Networks of other packages with random weights, each with what has been hard to quantize
faithfully.

    pip install --no-deps pytorch-tabnet==4.1.0 timm==1.0.31 diffusers==0.42.1

Batch norms have drawn statistics, and data are drawn too; calibration and scoring share no
sample.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from module_alone import module_alone
from torch import Tensor, nn

Make = Callable[[], tuple[nn.Module, tuple[int, ...]]]
"""A network, and the shape of a sample."""


STATISTICS = (
    *("IMAGENET_DEFAULT_MEAN", "IMAGENET_DEFAULT_STD"),
    *("IMAGENET_INCEPTION_MEAN", "IMAGENET_INCEPTION_STD"),
    *("OPENAI_CLIP_MEAN", "OPENAI_CLIP_STD"),
)
"""Of pictures, which timm's files name and only their presets use."""


class Part(nn.Module):
    """A network of which one output is looked at."""

    def __init__(self, network: nn.Module, part: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.network, self.part = network, part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.network(x))


def convnextv2() -> tuple[nn.Module, tuple[int, ...]]:
    """Divides by a norm over space (global response normalization)."""
    transformers = importlib.import_module("transformers")
    return Part(
        transformers.ConvNextV2ForImageClassification(
            transformers.ConvNextV2Config(num_labels=100)
        ),
        lambda y: y.logits,
    ), (3, 64, 64)


def cvt() -> tuple[nn.Module, tuple[int, ...]]:
    """Attention on convolutions' outputs."""
    transformers = importlib.import_module("transformers")
    return Part(
        transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=100)),
        lambda y: y.logits,
    ), (3, 64, 64)


def patchtst() -> tuple[nn.Module, tuple[int, ...]]:
    """Scales a series by its own mean and deviation, and the forecast back."""
    transformers = importlib.import_module("transformers")
    config = transformers.PatchTSTConfig(
        num_input_channels=4, context_length=128, prediction_length=24
    )
    return Part(transformers.PatchTSTForPrediction(config), lambda y: y.prediction_outputs), (
        128,
        4,
    )


def tabnet() -> tuple[nn.Module, tuple[int, ...]]:
    """Picks features by a sparsemax: a sum of comparisons is an index."""
    code = packaged("pytorch_tabnet", "tab_network")
    return Part(code.TabNet(20, 5, group_attention_matrix=torch.eye(20)), lambda y: y[0]), (20,)


def efficientvit_b0() -> tuple[nn.Module, tuple[int, ...]]:
    """Linear attention, which divides by a sum of products."""
    unused = ("timm", "timm.data", "torchvision", "torchvision.ops", "torchvision.ops.misc")
    network: nn.Module = packaged("timm", "models.efficientvit_mit", unused).efficientvit_b0(
        num_classes=100
    )
    return network, (3, 64, 64)


def diffusion_autoencoder() -> tuple[nn.Module, tuple[int, ...]]:
    """The deep compression autoencoder of diffusion models, whose attention is linear."""
    widths, layers = (32, 32, 64), (1, 1, 1)
    blocks, scales = ("ResBlock", "ResBlock", "EfficientViTBlock"), ((), (), (5,))
    network = importlib.import_module("diffusers").AutoencoderDC(
        latent_channels=8,
        attention_head_dim=8,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        encoder_layers_per_block=layers,
        decoder_layers_per_block=layers,
        encoder_qkv_multiscales=scales,
        decoder_qkv_multiscales=scales,
        downsample_block_type="pixel_unshuffle",
        upsample_block_type="pixel_shuffle",
    )
    return Part(network, lambda y: y.sample), (3, 64, 64)


def packaged(package: str, name: str, unused: Sequence[str] = ()) -> Any:
    """A module of a package whose own `__init__` is not run, nor those of `unused`, as they ask
    for other packages.
    """
    example: Any = importlib.import_module("efficientnet_lite")
    folder = example.package_folder(package)
    for other in unused:
        stub: Any = sys.modules.setdefault(other, ModuleType(other))
        stub.FrozenBatchNorm2d, stub.__version__, stub.__spec__ = (
            nn.BatchNorm2d,
            "",
            ModuleSpec(other, None),
        )
        for statistic in STATISTICS:
            setattr(stub, statistic, (0.5, 0.5, 0.5))
    found = module_alone(f"{package}.{name}", folder)
    for other in unused:
        del sys.modules[other]  # others ask whether it is there
    return found


PACKAGED = (convnextv2, cvt, patchtst, tabnet, efficientvit_b0, diffusion_autoencoder)


def made(make: Make) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """The network in evaluation mode, four batches to calibrate on and four others."""
    torch.manual_seed(0)
    network, shape = make()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, *shape, generator=generator) for _ in range(8)]
    return network.eval(), batches[:4], batches[4:]
