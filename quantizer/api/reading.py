"""From the hierarchical form, checked, to the API's dataclasses. The words of other versions end in `config`."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from quantizer.api.config import AlgoConfig, AWQConfig, Config, GPTQConfig, PreQuantOptConfig, SmoothQuantConfig
from quantizer.api.observers import OBSERVERS
from quantizer.config.document import Document
from quantizer.config.load import LoadResult, check_document, load_config
from quantizer.config.spellings import canonical
from quantizer.errors import UsageError

ALGORITHMS = {cls().name: cls for cls in (SmoothQuantConfig, AWQConfig, GPTQConfig)}


def config_of(value: Mapping[str, Any], name: str) -> Config:
    """The config that a document says; its findings call it `name`.

    Raises:
        ConfigError: with all findings, if it cannot be used.
    """
    return _built(check_document(Document.of(value, name)))


def config_of_file(path: str | os.PathLike[str]) -> Config:
    """The config of a file.

    Raises:
        ConfigError: with all findings and their places, if it cannot be used.
        UsageError: it is of the layered form.
    """
    return _built(load_config(path))


def _built(result: LoadResult) -> Config:
    config = result.require()
    assert result.document is not None  # a config came of it
    if config.form != "hierarchical":
        raise UsageError(
            f"{config.source} is of the layered form, which the dataclasses cannot say",
            help="`quantizer convert --to hierarchical` turns it into the form they can",
        )
    built: Config = _value(Config, canonical(result.document)[0].value)
    return built


def _value(hint: Any, value: Any) -> Any:
    """A JSON value as what an annotation asks for; keys that no field has say nothing, or they would be errors."""
    if value is None:
        return None
    if get_origin(hint) in (Union, types.UnionType):
        wanted = [member for member in get_args(hint) if (get_origin(member) is list) == isinstance(value, list)]
        return _value(wanted[0], value)
    if get_origin(hint) is type:
        return OBSERVERS.get(value)
    if get_origin(hint) is list:
        return [_value(get_args(hint)[0], item) for item in value]
    if get_origin(hint) is dict:
        return {key: _value(get_args(hint)[1], item) for key, item in value.items() if not key.startswith("//")}
    if hint in (AlgoConfig, PreQuantOptConfig):
        hint = ALGORITHMS[value["name"]]
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        known = {f.name: _value(hints[f.name], value[f.name]) for f in fields(hint) if value.get(f.name) is not None}
        return hint(**known)  # type: ignore[operator]  # a dataclass, not an instance of one
    return hint[value] if isinstance(hint, type) and issubclass(hint, Enum) else value
