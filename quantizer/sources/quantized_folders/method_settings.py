"""Read the field `quantization_config` of a folder's config.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizer.config.json_types import JsonMapping
from quantizer.config.wording import listed, quoted
from quantizer.errors import ModelError
from quantizer.sources.files.json_files import FLOAT_FOLDER_HELP


@dataclass(frozen=True)
class MethodSettings:
    """The settings of a method.

    Attributes:
        file: that they come from, for messages.
        fields: the settings by name.
    """

    file: Path
    fields: JsonMapping

    @property
    def method(self) -> str:
        """Return the name of the method."""
        return str(self.fields.get("quant_method") or "an unknown method")

    def one_of(self, name: str, known: Sequence[Any], default: Any = None) -> Any:
        """Return a setting that must be one of some values.

        Raises:
            ModelError: it is another one.
        """
        value = self.fields.get(name)
        if value is None:
            value = default
        if value not in known:
            raise self.refusal(name, value, listed(known))
        return value

    def group_size(self) -> int | None:
        """Return the number of values of a group, or None if a row has one scale.

        Raises:
            ModelError: it is not an integer above zero, -1 or null.
        """
        size = self.fields.get("group_size")
        if size in (None, -1):
            return None
        if type(size) is not int or size < 1:
            raise self.refusal("group_size", size, "an integer above zero")
        return size

    def refusal(self, name: str, value: Any, expected: str) -> ModelError:
        """Return the error for a setting with a value that cannot be read.

        Args:
            name: of the setting.
            value: its value.
            expected: what can be read.
        """
        return ModelError(
            f"{self.file}: {name} of the quantization is {quoted(value)}, and quantizer reads "
            f"{expected}",
            help=FLOAT_FOLDER_HELP,
        )
