"""Makes the networks that the engines run, with their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from decoders import hifi_gan, spectrograms, tagger, unet
from detectors import SIDE, ssd, yolo
from networks import Case, digits, digits_mobile, efficientnet_lite0
from torch import nn
from vision import mobile, vit
from workloads import images, resnet18, tokens

DEFAULT_CONFIG = "cpu_int8"


@dataclass(frozen=True)
class Subject:
    """A network in evaluation mode.

    Attributes:
        calibration: the batches to calibrate on, tensors or dicts of tensors.
        batch: another one, which engines run.
        config: the preset that quantizes the network.
    """

    model: nn.Module
    calibration: list[Any]
    batch: Any
    config: str = DEFAULT_CONFIG


def of_case(case: Case, samples: int) -> Subject:
    """Return a network of `networks.py`, which engines run on so many samples."""
    calibration = [_images(item) for item in case.calibration]
    return Subject(case.model, calibration, _images(case.held_out[0])[:samples])


def _images(item: Any) -> Any:
    """Return an item without its labels."""
    return item[0] if isinstance(item, (tuple, list)) else item


def of_batches(model: nn.Module, batches: list[Any], config: str = DEFAULT_CONFIG) -> Subject:
    """Return a network that engines run on the last batch and that the others calibrate."""
    *calibration, batch = batches
    return Subject(model, calibration, batch, config)


def words() -> list[Any]:
    """Return five batches of sentences."""
    batches: list[Any] = []
    for seed in range(5):
        batches.append(torch.cat(tokens(8, 24, 500, seed)))
    return batches


def llama() -> Subject:
    """Return the language model, whose inputs have a scale for each token."""
    from transformers_llama import prompts, transformers_llama

    return of_batches(transformers_llama(), prompts(12), "dynamic_int8")


MAKE: dict[str, Callable[[], Subject]] = {
    "digits": lambda: of_case(digits(), 20),
    "mobilenet": lambda: of_case(digits_mobile(), 20),
    "mobilenet_v3": lambda: of_batches(mobile(), images(20, 4)),
    "efficientnet_lite0": lambda: of_case(efficientnet_lite0(), 4),
    "resnet18": lambda: of_batches(resnet18(), images(20, 4)),
    "vit": lambda: of_batches(vit(), images(20, 4)),
    "yolo": lambda: of_batches(yolo(), images(20, 4, SIDE)),
    "unet": lambda: of_batches(unet(), images(20, 4, 64)),
    "ssd": lambda: of_batches(ssd(), images(20, 4, SIDE)),
    "tagger": lambda: of_batches(tagger(), words()),
    "hifi_gan": lambda: of_batches(hifi_gan(), spectrograms()),
    "llama": llama,
}
"""By the names of `table.NETWORKS`."""
