"""Convert images of pillow to RGB or grey by the values of their pixels, in every mode that a
file may have.
"""

from typing import Any

import torch

from quantizer.errors import DataError

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
