"""From the hierarchical form, checked, to the API's dataclasses. The words of other versions end in `config`."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from quantizer.api.observers import OBSERVERS
from quantizer.config.load import LoadResult
from quantizer.config.spellings import canonical
from quantizer.errors import UsageError


@dataclass(frozen=True)
class Reader:
    """Turns checked documents into instances of `whole`; `algorithms` are the classes of settings with a name."""

    whole: type
    algorithms: Mapping[str, type]

    def read(self, result: LoadResult) -> Any:
        """The config that was loaded.

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
        return self._value(self.whole, canonical(result.document)[0].value)

    def _value(self, hint: Any, value: Any) -> Any:
        """A JSON value as what an annotation asks for."""
        if value is None:
            return None
        if get_origin(hint) in (Union, types.UnionType):
            wanted = [member for member in get_args(hint) if (get_origin(member) is list) == isinstance(value, list)]
            return self._value(wanted[0], value)
        if get_origin(hint) is type:
            return OBSERVERS.get(value)
        if get_origin(hint) is list:
            return [self._value(get_args(hint)[0], item) for item in value]
        if get_origin(hint) is dict:
            named = {key: item for key, item in value.items() if not key.startswith("//")}
            return {key: self._value(get_args(hint)[1], item) for key, item in named.items()}
        if isinstance(value, dict) and "name" in value:
            hint = self.algorithms[value["name"]]
        if is_dataclass(hint):
            return self._instance(hint, value)
        return hint[value] if isinstance(hint, type) and issubclass(hint, Enum) else value

    def _instance(self, cls: Any, value: Mapping[str, Any]) -> Any:
        """Keys without a field say nothing, or the check would have refused them."""
        hints = get_type_hints(cls)
        stated = [field.name for field in fields(cls) if value.get(field.name) is not None]
        return cls(**{name: self._value(hints[name], value[name]) for name in stated})
