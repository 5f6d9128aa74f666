"""Which files `--data` stands for, and of which kind they are. Opens none of them."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path

from quantizer.errors import DataError
from quantizer.sources.images import IMAGE_SUFFIXES
from quantizer.sources.tensor_files import READERS
from quantizer.sources.user_code import split_spec

TENSORS, IMAGES, TEXTS = "tensor files", "images", "texts"
KINDS: Mapping[str, Sequence[str]] = {TENSORS: tuple(READERS), TEXTS: (".txt",), IMAGES: IMAGE_SUFFIXES}
FORMS = (
    "give FILE.py:factory, package.module:factory, a file, folder or glob of .npy, .npz, .safetensors or .pt tensors "
    "or of .txt texts, a folder of images, or random:NxCxHxW"
)


def find_files(spec: str) -> tuple[str, list[Path]]:
    """The kind and the files in the order of their names; a folder of images stays a folder; ("", []) for no path.

    Raises:
        DataError: there is nothing of this name, or files of no kind or of several.
    """
    path = Path(spec)
    if path.suffix == ".py" or spec.startswith("random:"):
        return "", []
    if path.is_dir():
        found = sorted(path.iterdir())
        if not any(_kind(file) in (TENSORS, TEXTS) for file in found):
            return IMAGES, [path]
    elif path.is_file():
        found = [path]
    elif glob.has_magic(spec):
        found = sorted(Path(name) for name in glob.glob(spec, recursive=True))
    elif split_spec(spec)[1]:
        return "", []
    else:
        raise DataError(f"there is no file or folder {spec}", help=FORMS)
    return _of_one_kind(spec, found)


def _of_one_kind(spec: str, found: list[Path]) -> tuple[str, list[Path]]:
    kinds = {kind: [path for path in found if _kind(path) == kind] for kind in KINDS}
    present = [kind for kind, paths in kinds.items() if paths]
    if not present:
        raise DataError(f"{spec} gives no tensor file, no text and no image", help=FORMS)
    if len(present) > 1:
        pattern = Path(spec) / f"*{kinds[present[0]][0].suffix}"
        raise DataError(f"{spec} holds {' and '.join(present)}", help=f"name one kind, for example {pattern}")
    return present[0], kinds[present[0]]


def _kind(path: Path) -> str | None:
    return next((kind for kind, suffixes in KINDS.items() if path.suffix.lower() in suffixes), None)
