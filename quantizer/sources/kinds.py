"""Finds the kind of data that `--data` names, of those that the plug-ins declare."""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from quantizer.config.wording import closest_word, joined
from quantizer.declarations import DataKind
from quantizer.errors import DataError, UsageError
from quantizer.plugins import plugins, remedy_for_absent
from quantizer.sources.batches import Batch
from quantizer.sources.tensor_kinds import WEIGHT_SUFFIXES
from quantizer.sources.user_code import split_spec

_TENSORS = DataKind(
    "tensor files",
    "tensor file",
    "quantizer.sources.tensor_batches:open_tensors",
    (*WEIGHT_SUFFIXES, ".npy", ".npz"),
)
_TENSOR_FORM = "a file, folder or glob of .npy, .npz, .safetensors or .pt tensors"


@dataclass(frozen=True)
class NamedData:
    """Data that `--data` names, for the opener of its kind.

    Attributes:
        spec: the value of `--data`.
        paths: its files, or one folder; none for a word.
        module: the model that reads the data; None if it is not known.
        batch_size: samples of a batch; None for as many as is usual.
        samples: how many to use; None for all.
        seed: of all random numbers.
        options: those that were given, by name.
        defaults: what takes the place of options that were not given.
        example: returns a batch with the shapes of the data, or None if they are not known.
            Synthetic data need it.
    """

    spec: str
    paths: Sequence[Path]
    module: nn.Module | None
    batch_size: int | None
    samples: int | None
    seed: int
    options: Mapping[str, Any]
    defaults: Mapping[str, Any]
    example: Callable[[], Batch | None] | None


def data_kinds() -> dict[str, DataKind]:
    """Return the kinds of data by name, with the suffixes that all plug-ins add."""
    kinds = {_TENSORS.name: _TENSORS}
    for plugin in plugins():
        for kind in plugin.data:
            known = kinds.get(kind.name)
            if known is not None:
                kind = replace(known, suffixes=known.suffixes + kind.suffixes)
            kinds[kind.name] = kind
    return kinds


def advice_without_data() -> str:
    """Return what errors about missing data add to their help."""
    return "".join(f"; {kind.advice}" for kind in data_kinds().values() if kind.advice)


def no_files_of_any_kind() -> str:
    """Return what files lack that have no data, such as "no tensor file and no text"."""
    return joined([f"no {kind.one}" for kind in data_kinds().values() if not kind.word], "and")


def find_files(spec: str) -> tuple[DataKind | None, list[Path]]:
    """Return the kind of data, and its files sorted by name.

    For a folder whose files may be in class folders, the folder itself is returned. There are
    no files if a word names the data. If the data are of the user's code, return (None, []).

    Raises:
        DataError: there are no such files, or files of no kind or of several.
    """
    path = Path(spec)
    kind = kind_of_word(spec)
    if kind is not None or path.suffix == ".py" or spec.startswith("random:"):
        return kind, []
    if path.is_dir():
        files = sorted(path.iterdir())
    elif path.is_file():
        files = [path]
    elif glob.has_magic(spec):
        files = sorted(map(Path, glob.glob(spec, recursive=True)))
    elif split_spec(spec)[1]:
        return None, []
    else:
        raise DataError(f"there is no file or folder {spec}", help=_help_for_missing(path))
    by_kind: dict[str, list[Path]] = {}
    kinds = data_kinds()
    for kind in kinds.values():
        matching = [file for file in files if file.suffix.lower() in kind.suffixes]
        if matching:
            by_kind[kind.name] = matching
    if path.is_dir():
        for kind in kinds.values():
            if kind.has_class_folders and by_kind.keys() <= {kind.name}:
                return kind, [path]
    if not by_kind:
        raise DataError(f"{spec} gives {no_files_of_any_kind()}", help=_help(path.suffix))
    name, matching = next(iter(by_kind.items()))
    if len(by_kind) > 1:
        pattern = path / f"*{matching[0].suffix}"
        raise DataError(
            f"{spec} holds {' and '.join(by_kind)}",
            help=f"name one kind, for example {pattern}",
        )
    return kinds[name], matching


def shape_of_spec(spec: str) -> tuple[int, list[int]]:
    """Return the number of samples of `random:NxCxHxW` or `synthetic:NxCxHxW`, and the shape of
    one.

    Raises:
        UsageError: the text is not of this form, or a sample is too large.
    """
    kind, _, size = spec.partition(":")
    if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8})+", size):
        raise UsageError(
            f"{spec!r} is not {kind}:NxCxHxW", help=f"for example {kind}:32x3x224x224"
        )
    samples, *shape = map(int, size.split("x"))
    values = math.prod(shape)
    if values > 2**31:
        raise UsageError(f"one sample of {spec} has {values} values, more than 2^31")
    return samples, shape


def check_options(kind: DataKind | None, options: Iterable[str]) -> None:
    """Check that a kind of data reads the options that were given.

    Raises:
        UsageError: naming an option that other data read.
    """
    for name in options:
        if kind is not None and name in kind.options:
            continue
        for other in data_kinds().values():
            if name in other.options:
                refusal, remedy = other.refusal
                raise UsageError(f"<--{name}> is for {other.name}, but {refusal}", help=remedy)
        raise UsageError(f"no plug-in is there that reads <--{name}>", help="leave it out")


def kind_of_word(spec: str) -> DataKind | None:
    """Return the kind of data that a word asks for; None if the value begins with no such word.

    >>> [kind is not None for kind in map(kind_of_word, ("synthetic:8x512", "./synthetic"))]
    [True, False]
    """
    word = spec.partition(":")[0]
    return next((kind for kind in data_kinds().values() if word and kind.word == word), None)


def _help_for_missing(path: Path) -> list[str]:
    """Return what may be meant by a path that is not there."""
    try:
        near = closest_word(path.name, os.listdir(path.parent))
    except OSError:
        near = None
    return _help(str(path)) if near is None else [f"did you mean {path.with_name(near)}?"]


def _help(word: str) -> list[str]:
    """Return what `--data` may be, and how to add a word or a suffix."""
    files, others, words = [_TENSOR_FORM], [], []
    for kind in data_kinds().values():
        if kind.word:
            words.append(kind.word)
        elif kind.form:
            others.append(kind.form)
        elif kind.name != _TENSORS.name:
            files.append(f"of {joined(kind.suffixes, 'or')} {kind.name}")
    python = ("FILE.py:factory", "package.module:factory")
    forms = (*python, " or ".join(files), *others, "random:NxCxHxW", *words)
    remedy = f"give {joined(forms, 'or')}"
    name = word.partition(":")[0]
    return [remedy, f"or {remedy_for_absent(name)}"] if name else [remedy]
