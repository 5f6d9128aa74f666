"""From the hierarchical form, checked, to the API's dataclasses. The words of other versions end in `config`."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from quantizer.api.observers import OBSERVERS
from quantizer.config.algorithms import ALGORITHMS, AlgoConfig
from quantizer.config.load import LoadResult
from quantizer.config.spellings import canonical
from quantizer.errors import UsageError

T = TypeVar("T")


def read_config(whole: type[T], result: LoadResult) -> T:
    """The config that was loaded, as an instance of the dataclass `whole`.

    Raises:
        ConfigError: with all findings, if it cannot be used.
        UsageError: it is of the layered form.
    """
    config = result.require()
    assert result.document is not None  # a config came of it
    if config.form != "hierarchical":
        raise UsageError(
            f"{config.source} is of the layered form, which the dataclasses cannot say",
            help="`quantizer convert --to hierarchical` turns it into the form they can",
        )
    read: T = _value(whole, canonical(result.document)[0].value)
    return read


def _value(hint: Any, value: Any) -> Any:
    """A JSON value as what an annotation asks for."""
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
        named = {key: item for key, item in value.items() if not key.startswith("//")}
        return {key: _value(get_args(hint)[1], item) for key, item in named.items()}
    if isinstance(hint, type) and issubclass(hint, AlgoConfig):
        return _instance(ALGORITHMS[value["name"]], value)
    if is_dataclass(hint):
        return _instance(hint, value)
    return hint[value] if isinstance(hint, type) and issubclass(hint, Enum) else value


def _instance(cls: Any, value: Mapping[str, Any]) -> Any:
    """Keys without a field say nothing, or the check would have refused them."""
    hints = get_type_hints(cls)
    stated = [field.name for field in fields(cls) if value.get(field.name) is not None]
    return cls(**{name: _value(hints[name], value[name]) for name in stated})
