"""Name the types of JSON values."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]
"""A JSON object that is not to be changed."""

JsonPath = tuple[str | int, ...]
"""The keys and indices that lead to a value."""
