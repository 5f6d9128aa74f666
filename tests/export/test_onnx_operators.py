"""Operators that torch.onnx has no form for: written by others, or refused before calibration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantizer
from quantizer.errors import UsageError

pytestmark = pytest.mark.slow

pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")


class Ranks(nn.Module):
    """Returns what torch.onnx lacks, of the values of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("bounds", torch.tensor([-0.5, 0.0, 0.5]))
        self.register_buffer("unsorted", torch.tensor([0.5, -0.5, 0.0]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        return (
            torch.cdist(y, y.flip(1)),
            torch.cdist(y, y.flip(1), p=1),
            torch.hypot(y, y.flip(2)),
            y.kthvalue(3, 1, keepdim=True).values,
            y.median(-1).values,
            torch.searchsorted(self.bounds, y, right=True),
            torch.searchsorted(self.unsorted, y, sorter=self.unsorted.argsort()),
            torch.searchsorted(self.bounds, y.mean()),
            torch.searchsorted(y[:, :, :3].sort().values, y[:, :, 3:]),
            torch.isin(y.round(), self.bounds),
            torch.diagonal_scatter(y, y[:, 0, :5], 1, 1, 2),
            torch.diagonal_scatter(y, y[:, :, 0], -1, 2, 1),
            # Resize takes another value at one place of each
            F.interpolate(y.flatten(1)[:, None, :20], 24),
            F.interpolate(y.flatten(1)[:, None, None, :26], (2, 44)),
            F.interpolate(y.flatten(1)[:, None, :20], scale_factor=1.2),
        )


class Regions(nn.Module):
    """Pools maps to sizes that do not divide theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.volume, self.image = nn.Conv3d(1, 4, 3), nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        volume, image = self.volume(x), self.image(x[:, :, 0])
        return (
            F.adaptive_avg_pool3d(volume, (None, 1, 1)),
            F.adaptive_avg_pool3d(volume, (2, 3, 4)),
            F.adaptive_max_pool3d(volume, 2),
            F.adaptive_max_pool2d(image, (3, 2)),
            F.adaptive_max_pool1d(image.flatten(2), 7),
        )


class Places(nn.Module):
    """Pools maps to a size that divides theirs, with the places, and to another, without them."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        image = self.image(x)
        values, places = F.adaptive_max_pool2d(image, 2, return_indices=True)
        return F.adaptive_max_pool2d(image, 3), values, places


class Filters(nn.Module):
    """Computes filters for each sample, and puts the samples of a batch into groups."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.image = nn.Linear(4, 54), nn.Conv2d(1, 3, 3)

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        image = self.image(x)
        samples, channels, height, width = image.shape
        grouped = image.reshape(1, -1, height, width)
        filters = self.linear(z)
        bias = filters[:, :2].reshape(-1)
        by_channel = filters[:, :27].reshape(-1, 1, 3, 3)
        by_sample = filters.reshape(-1, 3, 3, 3)
        upwards = filters.reshape(-1, 2, 3, 3)
        rows = filters[:, :9].reshape(-1, 1, 3)
        compared = F.conv2d(grouped, by_channel, groups=samples * channels)
        seen = F.conv2d(grouped, by_sample, bias, 2, 1, 2, groups=samples)
        wider = F.conv_transpose2d(grouped, upwards, None, 2, 1, 1, groups=samples)
        lines = F.conv1d(grouped[:, :, 0], rows, padding="same", groups=samples * channels)
        outputs = (compared, seen, wider, lines)
        return tuple(output.reshape(samples, -1) for output in outputs)


class Inverse(nn.Module):
    """Multiplies by the inverse of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(self.linear(x))


class Number(nn.Module):
    """Ranks a single number, which has no axis to sort."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + y.mean().kthvalue(1).values


class Median(nn.Module):
    """Shifts by the median of all values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y - y.median()


@pytest.mark.parametrize(
    ("model", "shape"),
    [(Ranks(), (2, 5, 8)), (Regions(), (2, 1, 7, 7, 7)), (Places(), (2, 1, 8, 8))],
    ids=["ranks", "regions", "places"],
)
def test_operators_without_a_form_are_written_by_others(
    model: nn.Module, shape: tuple[int, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    data = [torch.randn(shape) for _ in range(3)]
    result = quantizer.quantize(model, data, to="onnx", folder=tmp_path)
    # Without optimizations, ONNX Runtime computes what test mode does
    assert result.verification.sqnr_db is not None
    assert result.verification.sqnr_db > 100


def test_filters_of_samples_are_products_of_matrices(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data: list[tuple[Tensor, ...]] = []
    for samples in (3, 3, 2):
        data.append((torch.randn(samples, 1, 8, 9), torch.randn(samples, 4)))
    result = quantizer.quantize(Filters(), data, to="onnx", folder=tmp_path)
    assert result.verification.sqnr_db is not None
    assert result.verification.sqnr_db > 100


class Volumes(nn.Module):
    """Filters volumes by the filters of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 27)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        filters = self.linear(z).reshape(-1, 1, 3, 3, 3)
        return F.conv3d(x[None], filters, groups=x.shape[0])[0]


def test_filters_of_samples_for_volumes_are_refused(tmp_path: Path) -> None:
    data = [(torch.randn(2, 5, 5, 5), torch.randn(2, 4))]
    with pytest.raises(
        UsageError, match="conv3d has a number of groups that follows the batch"
    ):
        quantizer.quantize(Volumes(), data, to="onnx", folder=tmp_path)


class Extremes(nn.Module):
    """Shifts by the largest of all values, which torch.onnx asks an axis of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y - torch.aminmax(y).max


_MISSING = "No ONNX function found for <OpOverload"


@pytest.mark.parametrize(
    ("model", "operator", "reason"),
    [
        (Inverse(), "linalg_inv", _MISSING),
        (Number(), "kthvalue", _MISSING),
        (Median(), "median", _MISSING),
        (Extremes(), "aminmax", "Required parameter 'dim' is not provided"),
    ],
)
def test_an_operator_without_a_form_is_refused_before_calibration(
    model: nn.Module, operator: str, reason: str, tmp_path: Path
) -> None:
    def batches() -> Iterator[Tensor]:
        yield torch.randn(4, 8, 8)
        raise AssertionError("a second batch was read")

    sentence = rf"/{operator} computes {operator}, for which torch.onnx has no form: {reason}"
    with pytest.raises(UsageError, match=sentence):
        quantizer.quantize(model, batches, to="onnx", folder=tmp_path)
