"""A config in whichever way Python gives it: a path, a dict or dataclasses, of either file form. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from quantizer.api.config import Config
from quantizer.config.document import Document
from quantizer.config.load import LoadResult, check_document, default_config, load_config
from quantizer.config.wording import a_kind
from quantizer.errors import UsageError

AnyConfig = str | os.PathLike[str] | Mapping[str, Any] | Config


def check_kind(config: Any) -> None:
    """Refuse what is no config at all.

    Raises:
        UsageError: saying what it is.
    """
    if not isinstance(config, (str, os.PathLike, Mapping, Config)):
        raise UsageError(
            f"config is {a_kind(config)}, not a config", help="give the path of a file, a dict or a quantizer.Config"
        )


def read_config(config: AnyConfig | None) -> LoadResult:
    """The checked config; the built-in default for None.

    Raises:
        UsageError: it is none.
    """
    if config is None:
        return LoadResult(default_config(), (), {})
    check_kind(config)
    if isinstance(config, (str, os.PathLike)):
        return load_config(config)
    if isinstance(config, Config):
        return check_document(Document.of(config.to_dict(), "Config"))
    return check_document(Document.of(config, "config"))
