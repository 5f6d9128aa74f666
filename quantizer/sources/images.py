"""Image files as batches: finding them, their labels, and the preprocessing that the user
states. Needs pillow.
"""

import difflib
import importlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.config.typed_fields import fits
from quantizer.errors import DataError, UsageError, pip_line
from quantizer.sources.batches import Batch, naming
from quantizer.storage.plain_files import read_start, require_plain

IMAGE_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".bmp",
    ".webp",
    ".ppm",
    ".pgm",
    ".gif",
    ".tif",
    ".tiff",
)
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF")
"""What is read, whatever a file is called: Pillow would start Ghostscript for an EPS."""
MOST_PIXELS = 200_000_000
LONGEST_SETTINGS = 1_000_000
"""Bytes of a file for `--preprocess`."""
EXAMPLE = (
    '{"resize": 256, "crop": 224, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}'
)


@dataclass(frozen=True)
class Preprocess:
    """From pixels to a tensor: shorter side to `resize`, centre `crop` (pixels), then
    (pixel/255 - mean) / std.

    One mean per channel: three for RGB, one for grey. Images of more than `max_pixels`, as they
    are or resized, are refused: a file of a few bytes can ask for any number.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | None = None
    crop: int | None = None
    interpolation: str = "bilinear"
    max_pixels: int = MOST_PIXELS

    def __call__(self, image: Any) -> Tensor:
        """A pillow image as float32 [channels, height, width].

        Raises:
            DataError: it is smaller than the crop, or too large.
        """
        self._limit(image.size)
        image = image.convert("RGB" if len(self.mean) == 3 else "L")
        if self.resize:
            size = tuple(self.resize * side // min(image.size) for side in image.size)
            self._limit(size)
            image = image.resize(size, _pillow().Resampling[self.interpolation.upper()])
        if self.crop:
            image = image.crop(_centre(image.size, self.crop))
        width, height = image.size
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(
            height, width, -1
        )
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (pixels.permute(2, 0, 1).float() / 255 - mean) / std

    def _limit(self, size: Sequence[int]) -> None:
        if math.prod(size) > self.max_pixels:
            width, height = size
            remedy = 'a larger "max_pixels" in --preprocess allows it'
            raise DataError(
                f"would have {width} x {height} pixels, more than {self.max_pixels}",
                help=remedy,
            )


def parse_preprocess(text: str) -> Preprocess:
    """`--preprocess`: a JSON object, or the name of a file that holds one.

    Raises:
        UsageError: there is something unknown in it.
    """
    place = "--preprocess"
    if not text.lstrip().startswith("{"):
        place = text
        try:
            text = read_start(text, LONGEST_SETTINGS).decode()
        except (OSError, UnicodeDecodeError) as cause:
            remedy = f"give a file or: {EXAMPLE}"
            reason = getattr(cause, "strerror", None) or cause
            raise UsageError(
                f"--preprocess {place} cannot be read: {reason}", help=remedy
            ) from cause
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise UsageError(
            f"{place} is not JSON: {cause}", help=f"for example: {EXAMPLE}"
        ) from cause
    if not isinstance(fields, dict):
        raise UsageError(f"{place} is not a JSON object", help=f"for example: {EXAMPLE}")
    _check_fields(fields, place)
    return Preprocess(**(fields | {name: tuple(fields[name]) for name in ("mean", "std")}))


def find_images(paths: Sequence[Path]) -> list[tuple[Path, int | None]]:
    """The image files, each with its label: None, or the index of its class folder in sorted
    order.

    `paths` are files, or one folder of images or of class folders.

    Raises:
        DataError: there is no image.
    """
    if len(paths) != 1 or not paths[0].is_dir():
        return [(path, None) for path in paths]
    folder = paths[0]
    flat = _images_in(folder)
    classes = [
        images
        for each in sorted(folder.iterdir())
        if each.is_dir() and (images := _images_in(each))
    ]
    if flat and classes:
        raise DataError(
            f"{folder} holds images and folders of images",
            help="keep either class folders or a flat folder",
        )
    if not flat and not classes:
        remedy = f"images end in {', '.join(IMAGE_SUFFIXES)}"
        raise DataError(f"{folder} holds no tensor file, no text and no image", help=remedy)
    if flat:
        return [(path, None) for path in flat]
    return [(path, label) for label, images in enumerate(classes) for path in images]


def image_batches(
    images: Sequence[tuple[Path, int | None]], preprocess: Preprocess, size: int, seed: int
) -> Iterator[Batch]:
    """Batches of `size` images, in an order drawn from `seed`, so that a subset is not all of
    one class.
    """
    order = list(images)
    random.Random(seed).shuffle(order)
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        x = _stack(
            [_decode(path, preprocess) for path, _ in chosen], [path for path, _ in chosen]
        )
        labels = [label for _, label in chosen if label is not None]
        yield Batch.of(x, torch.tensor(labels) if labels else None)


def _centre(size: tuple[int, int], crop: int) -> tuple[int, int, int, int]:
    width, height = size
    if min(width, height) < crop:
        raise DataError(f"is {width}x{height}, smaller than the crop of {crop}")
    left, top = round((width - crop) / 2), round((height - crop) / 2)
    return left, top, left + crop, top + crop


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as cause:
        raise DataError("reading images needs pillow", help=pip_line("images")) from cause


def _decode(path: Path, preprocess: Preprocess) -> Tensor:
    pillow = _pillow()
    before, pillow.MAX_IMAGE_PIXELS = pillow.MAX_IMAGE_PIXELS, None  # `max_pixels` is the limit
    try:
        require_plain(path)
        with naming(f"{path} "), pillow.open(path, formats=FORMATS) as image:
            return preprocess(image)
    except (OSError, ValueError, SyntaxError) as cause:
        reason = getattr(cause, "strerror", None) or cause
        raise DataError(f"{path} cannot be read as an image: {reason}") from cause
    finally:
        pillow.MAX_IMAGE_PIXELS = before


def _stack(images: Sequence[Tensor], paths: Sequence[Path]) -> Tensor:
    for image, path in zip(images, paths, strict=True):
        if image.shape != images[0].shape:
            sizes = (
                f"{path} gives {list(image.shape)}, {paths[0]} gives {list(images[0].shape)}"
            )
            raise DataError(
                f"the images differ in size: {sizes}",
                help='set "resize" and "crop" in --preprocess',
            )
    return torch.stack(list(images))


def _is_size(value: Any) -> bool:
    return fits(value, int) and value > 0


def _are_numbers(value: Any) -> bool:
    return fits(value, list[float]) and len(value) in (1, 3) and all(map(math.isfinite, value))


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "resize": (_is_size, "a number of pixels"),
    "crop": (_is_size, "a number of pixels"),
    "mean": (_are_numbers, "a list of one or three numbers"),
    "std": (
        lambda value: _are_numbers(value) and all(v > 0 for v in value),
        "a list of one or three positive numbers",
    ),
    "max_pixels": (_is_size, "a number of pixels"),
    "interpolation": (
        lambda value: value in INTERPOLATIONS,
        f"one of {', '.join(INTERPOLATIONS)}",
    ),
}


def _check_fields(fields: Mapping[str, Any], place: str) -> None:
    for name, value in fields.items():
        if name not in _FIELDS:
            close = difflib.get_close_matches(name, _FIELDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_FIELDS)}"
            raise UsageError(f"{place}: unknown key {name!r}", help=hint)
        is_valid, expected = _FIELDS[name]
        if not is_valid(value):
            raise UsageError(f"{place}: {name!r} must be {expected}, not {json.dumps(value)}")
    for name in ("mean", "std"):
        if name not in fields:
            raise UsageError(f"{place}: {name!r} is missing", help=f"for example: {EXAMPLE}")
    if len(fields["mean"]) != len(fields["std"]):
        raise UsageError(f"{place}: 'mean' and 'std' must have the same length")
