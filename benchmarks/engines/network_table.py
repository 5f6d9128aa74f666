"""Makes the networks that the engines run, with their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from networks import Case, digits, digits_mobile
from torch import nn

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


MAKE: dict[str, Callable[[], Subject]] = {
    "digits": lambda: of_case(digits(), 20),
    "mobilenet": lambda: of_case(digits_mobile(), 20),
}
"""By the names of `table.NETWORKS`."""
