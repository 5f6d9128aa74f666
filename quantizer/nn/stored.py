"""Safetensors files as their library reads them, wherever they lie."""

import os
from pathlib import Path

from safetensors.torch import load, load_file
from torch import Tensor


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file; the library opens none whose name is not UTF-8, so that of such a one it gets the bytes.

    Raises:
        OSError: it cannot be read.
        SafetensorError: it is none, or damaged.
    """
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError:
        return load(path.read_bytes())
    return load_file(path)
