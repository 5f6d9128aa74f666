"""Find image files and their labels, and read them as batches with the preprocessing of
`--preprocess`. Needs pillow.
"""

import importlib
import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor

from quantizer.config.json_types import fits
from quantizer.config.wording import did_you_mean, listed
from quantizer.errors import DataError, UsageError
from quantizer.sources.batches import Batch, prefix_errors
from quantizer.sources.data import DEFAULT_BATCH_SIZE, Batches
from quantizer.sources.images.plugin import SUFFIXES
from quantizer.sources.json_files import parse_object
from quantizer.sources.kinds import NamedData, no_files_of_any_kind
from quantizer.sources.tensor_batches import prefetched
from quantizer.storage.system_calls import read_start, require_file_or_folder

_logger = logging.getLogger(__name__)

# Pillow would start Ghostscript for an EPS file, whatever its suffix
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF")
_Converted = TypeVar("_Converted")
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
_MAX_PIXELS = 200_000_000
_MAX_ROW_PIXELS = 64_000_000
"""Of an image in a row, which a processor copies several times as float numbers."""
_MAX_SETTINGS_BYTES = 1_000_000
_MAX_NUMBER = 1e30
"""The largest mean or std. In float32, numbers that are a little larger become infinite."""
PREPROCESS_EXAMPLE = (
    '{"resize": 256, "crop": 224, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}'
)
MAX_BYTE = 255
_FLOAT_MODE = "F"
_INTEGER_MODE = "I"
_SIXTEEN_BITS = "I;16"
"""The beginning of the modes of 16-bit grey images."""
_SCALED_FORMATS = ("PNG", "PPM")
"""The formats whose pixels in `_INTEGER_MODE` are from 0 to 65535."""
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262
"""Tags of TIFF."""
_WHITE_IS_ZERO = 0
_REMEDY = "save it with 8 or 16 bits a channel, or give batches of your own"


@dataclass(frozen=True)
class Preprocess:
    """The steps from an image to a tensor: resize, crop, then (pixel/255 - mean) / std.

    Args:
        mean: of each channel: three for RGB, one for grey.
        std: of each channel.
        resize: pixels of the shorter side.
        crop: pixels of a square in the centre.
        interpolation: of resizing.
        max_pixels: of an image, before and after resizing. A file of a few bytes can claim any
            number.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | None = None
    crop: int | None = None
    interpolation: str = "bilinear"
    max_pixels: int = _MAX_PIXELS

    def __call__(self, image: Any) -> Tensor:
        """Return a pillow image as float32 [channels, height, width].

        Raises:
            DataError: it is smaller than the crop, or too large.
        """
        self._check_pixels(image.size)
        mode = "RGB" if len(self.mean) == 3 else "L"
        image = converted(image, mode)
        if self.resize:
            shorter = min(image.size)
            size = tuple(self.resize * side // shorter for side in image.size)
            self._check_pixels(size)
            image = image.resize(size, _pillow().Resampling[self.interpolation.upper()])
        if self.crop:
            width, height = image.size
            if min(width, height) < self.crop:
                raise DataError(f"is {width}x{height}, smaller than the crop of {self.crop}")
            left = round((width - self.crop) / 2)
            top = round((height - self.crop) / 2)
            image = image.crop((left, top, left + self.crop, top + self.crop))
        width, height = image.size
        dtype = torch.float32 if image.mode == "F" else torch.uint8
        content = torch.frombuffer(bytearray(image.tobytes()), dtype=dtype)
        pixels = content.reshape(height, width, -1).permute(2, 0, 1).float()
        mean = torch.tensor(self.mean)[:, None, None]
        std = torch.tensor(self.std)[:, None, None]
        # Resizing in float may leave the range, and grey pixels are those of all channels
        return (pixels.clamp(0, MAX_BYTE) / MAX_BYTE - mean) / std

    def _check_pixels(self, size: Sequence[int]) -> None:
        remedy = 'a larger "max_pixels" in <--preprocess> allows it'
        _require_pixels(size, self.max_pixels, remedy)


def _require_pixels(size: Sequence[int], limit: int, remedy: str) -> None:
    """Raise `DataError` for an image of more pixels than a limit."""
    if math.prod(size) > limit:
        width, height = size
        raise DataError(f"would have {width} x {height} pixels, more than {limit}", help=remedy)


def open_images(data: NamedData) -> Batches:
    """Return the batches of images.

    Raises:
        DataError: there is no image.
        UsageError: `--preprocess` is missing or cannot be used.
    """
    images = find_images(data.paths)
    preprocess = data.options.get("preprocess")
    if preprocess is None:
        raise UsageError(
            f"{data.spec} holds images, and <--preprocess> is missing",
            help=f"give <--preprocess> '{PREPROCESS_EXAMPLE}', or batches of tensors",
        )
    settings = parse_preprocess(preprocess)
    size = data.batch_size or DEFAULT_BATCH_SIZE
    read = partial(image_batches, images, settings, size, data.seed)
    length = math.ceil(len(images) / size)
    return Batches(partial(prefetched, read), data.spec, length=length)


def parse_preprocess(text: str) -> Preprocess:
    """Return the preprocessing of `--preprocess`: a JSON object, or the name of a file with
    one.

    Raises:
        UsageError: the file or its content cannot be used.
    """
    place = "<--preprocess>"
    if not text.lstrip().startswith("{"):
        place = text
        try:
            text = read_start(text, _MAX_SETTINGS_BYTES).decode()
        except (OSError, UnicodeDecodeError) as cause:
            raise UsageError(
                f"<--preprocess {place}> cannot be read: {_reason(cause)}",
                help=f"give a file or: {PREPROCESS_EXAMPLE}",
            ) from cause
    remedy = f"for example: {PREPROCESS_EXAMPLE}"
    fields = parse_object(text, Path(place), UsageError, remedy=remedy)
    _check_fields(fields, place)
    for name in ("mean", "std"):
        fields[name] = tuple(map(float, fields[name]))
    if max(fields["mean"]) > 1:
        _logger.warning(
            "%s: a mean of %g is for pixels from 0 to 255, and they are from 0 to 1 here: "
            "divide mean and std by 255",
            place,
            max(fields["mean"]),
        )
    return Preprocess(**fields)


def find_images(paths: Sequence[Path]) -> list[tuple[Path, int | None]]:
    """Return the image files with their labels: None, or the index of the class folder in
    sorted order.

    Args:
        paths: files, or one folder of images or of class folders.

    Raises:
        DataError: there is no image.
    """
    if len(paths) != 1 or not paths[0].is_dir():
        return [(path, None) for path in paths]
    folder = paths[0]
    flat = _images_in(folder)
    classes: list[list[Path]] = []
    for path in sorted(folder.iterdir()):
        images = _images_in(path) if path.is_dir() else []
        if images:
            classes.append(images)
    if flat and classes:
        raise DataError(
            f"{folder} holds images and folders of images",
            help="keep either class folders or a flat folder",
        )
    if not flat and not classes:
        raise DataError(
            f"{folder} holds {no_files_of_any_kind()}", help=f"images end in {listed(SUFFIXES)}"
        )
    labelled: list[tuple[Path, int | None]] = [(path, None) for path in flat]
    for label, images in enumerate(classes):
        labelled += [(path, label) for path in images]
    return labelled


def image_batches(
    images: Sequence[tuple[Path, int | None]], preprocess: Preprocess, size: int, seed: int
) -> Iterator[Batch]:
    """Yield batches of `size` images. The order is drawn from `seed`, so that a subset is not
    of one class.
    """
    order = list(images)
    random.Random(seed).shuffle(order)
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        tensors = [_opened(path, str(path), preprocess) for path, _ in chosen]
        _require_same_shape(tensors, chosen)
        labels = [label for _, label in chosen if label is not None]
        target = torch.tensor(labels) if labels else None
        yield Batch.of(torch.stack(tensors), target)


def _require_same_shape(
    tensors: Sequence[Tensor], images: Sequence[tuple[Path, int | None]]
) -> None:
    """Raise `DataError` if the tensors of some images cannot be one batch."""
    first = tensors[0].shape
    for tensor, (path, _) in zip(tensors, images, strict=True):
        if tensor.shape != first:
            raise DataError(
                f"the images differ in size: {path} gives {list(tensor.shape)}, {images[0][0]} "
                f"gives {list(first)}",
                help='set "resize" and "crop" in <--preprocess>',
            )


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as cause:
        # Only a missing extra needs it
        from quantizer.installation import pip_line

        raise DataError("reading images needs pillow", help=pip_line("images")) from cause


def read_image(source: Path | IO[bytes], name: str) -> Any:
    """Return an image of pillow in RGB.

    Args:
        source: a file.
        name: of the file, for messages.

    Raises:
        DataError: the file cannot be read as an image or is too large, or pillow is missing.
    """
    return _opened(source, name, _small_rgb)


def _small_rgb(image: Any) -> Any:
    _require_pixels(
        image.size, _MAX_ROW_PIXELS, "make it smaller: models take far fewer pixels"
    )
    return as_rgb(image)


def _opened(
    source: Path | IO[bytes], name: str, convert: Callable[[Any], _Converted]
) -> _Converted:
    """Return what `convert` makes of the image in a file.

    Raises:
        DataError: it cannot be read as an image, or `convert` raises it.
    """
    pillow = _pillow()
    limit = pillow.MAX_IMAGE_PIXELS
    # `Preprocess.max_pixels` limits the pixels instead
    pillow.MAX_IMAGE_PIXELS = None
    try:
        if isinstance(source, Path):
            require_file_or_folder(source)
        with prefix_errors(f"{name} "), pillow.open(source, formats=_FORMATS) as image:
            return convert(image)
    except (OSError, ValueError, SyntaxError) as cause:
        raise DataError(f"{name} cannot be read as an image: {_reason(cause)}") from cause
    finally:
        pillow.MAX_IMAGE_PIXELS = limit


def _reason(cause: Exception) -> object:
    """Return the system's text of an error, without the path that it repeats."""
    # Pillow names an object in memory by its address
    if "BytesIO" in str(cause):
        return "its format is not known"
    return getattr(cause, "strerror", None) or cause


def _is_size(value: Any) -> bool:
    return fits(value, int) and value > 0


def _is_mean(value: Any) -> bool:
    if not fits(value, list[float]) or len(value) not in (1, 3):
        return False
    # JSON has whole numbers of any size. NaN is not in this range, either
    return all(-_MAX_NUMBER <= number <= _MAX_NUMBER for number in value)


def _is_std(value: Any) -> bool:
    return _is_mean(value) and min(value) > 0


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "resize": (_is_size, "a number of pixels"),
    "crop": (_is_size, "a number of pixels"),
    "mean": (_is_mean, "a list of one or three numbers"),
    "std": (_is_std, "a list of one or three positive numbers"),
    "max_pixels": (_is_size, "a number of pixels"),
    "interpolation": (_INTERPOLATIONS.__contains__, f"one of {listed(_INTERPOLATIONS)}"),
}


def _check_fields(fields: Mapping[str, Any], place: str) -> None:
    """Raise `UsageError` for a key or a value that `Preprocess` does not take; `place` is where
    they are written.
    """
    for name, value in fields.items():
        if name not in _FIELDS:
            remedy = did_you_mean(name, _FIELDS, f"known are {listed(_FIELDS)}")
            raise UsageError(f"{place}: unknown key {name!r}", help=remedy)
        is_valid, expected = _FIELDS[name]
        if not is_valid(value):
            raise UsageError(f"{place}: {name!r} must be {expected}, not {json.dumps(value)}")
    for name in ("mean", "std"):
        if name not in fields:
            raise UsageError(
                f"{place}: {name!r} is missing", help=f"for example: {PREPROCESS_EXAMPLE}"
            )
    if len(fields["mean"]) != len(fields["std"]):
        raise UsageError(f"{place}: 'mean' and 'std' must have the same length")


def converted(image: Any, mode: str) -> Any:
    """Return an image in a mode of 8 bits, or, if it is grey and has more bits, in the float
    mode F with pixels from 0 to 255.

    Transparent pixels have the colour that is stored for them.

    Args:
        image: of pillow, opened and not yet changed.
        mode: RGB or L.

    Raises:
        DataError: the file does not say which value is white.
    """
    white = _white(image)
    if white is not None:
        return _scaled(image, white)
    if "transparency" in image.info:
        # Pillow warns about what other modes do with it
        image = image.convert("RGBA")
    return image.convert(mode)


def as_rgb(image: Any) -> Any:
    """Return an image in RGB with 8 bits.

    Raises:
        DataError: the file does not say which value is white.
    """
    image = converted(image, "RGB")
    if image.mode == _FLOAT_MODE:
        # Pillow cuts off decimals
        image = image.point(lambda value: value * 1 + 0.5).convert("L")
    return image.convert("RGB")


def _white(image: Any) -> float | None:
    """Return the value of a white pixel in a grey image with more than 8 bits; None for other
    images.

    Raises:
        DataError: it is not known.
    """
    if image.mode.startswith(_SIXTEEN_BITS):
        bits = 16
        if image.format == "TIFF":
            (bits,) = image.tag_v2.get(_BITS_PER_SAMPLE, (bits,))
        return float(2**bits - 1)
    if image.mode == _INTEGER_MODE and image.format in _SCALED_FORMATS:
        return float(2**16 - 1)
    if image.mode == _INTEGER_MODE:
        text = "has signed or 32-bit integers as pixels, and it is not known which one is white"
        raise DataError(text, help=_REMEDY)
    if image.mode != _FLOAT_MODE:
        return None
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.float32)
    smallest, largest = pixels.aminmax()
    # NaN is in no range
    if not 0 <= smallest <= largest <= 1:
        raise DataError(
            f"has float pixels from {smallest:.4g} to {largest:.4g}, and only those from 0 "
            "to 1 have a known white",
            help=f"scale it to 0 to 1, {_REMEDY}",
        )
    return 1.0


def _scaled(image: Any, white: float) -> Any:
    """Return an image in the mode F with pixels from 0 to 255."""
    factor = MAX_BYTE / white
    offset = 0.0
    tags = getattr(image, "tag_v2", {})
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        factor = -factor
        offset = MAX_BYTE
    return image.convert(_FLOAT_MODE).point(lambda value: value * factor + offset)
