"""Defines the hierarchical form of a config as dataclasses, with the names of calibration
methods as classes. Imports no torch.

Source of names, order and defaults: AMD Quark for PyTorch, documentation of
`quark.torch.quantization.config.config`.
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quantizer.api.display import called_from_python
from quantizer.config.algorithms import AlgoConfig, PreQuantOptConfig, entry_kinds
from quantizer.config.document.document import Document
from quantizer.config.forms.aliases import canonical
from quantizer.config.forms.types import DeviceType, Dtype, QSchemeType, RoundType, ScaleType
from quantizer.config.load import LoadResult, check_document, default_config, load_config
from quantizer.config.typed_fields import check_field_types, type_checked
from quantizer.config.wording import a_kind
from quantizer.errors import UsageError
from quantizer.plugins import if_command
from quantizer.storage.permission import replacing
from quantizer.storage.replacing import replace_file
from quantizer.tables import RANGE_METHODS


class ObserverBase:
    """Names how a range is found. A spec takes the class itself, never an instance."""

    def __init__(self) -> None:
        name = type(self).__name__
        raise UsageError(
            f"{name} has to be a class, not an instance",
            help=f"write {name}, without parentheses",
        )


class PlaceholderObserver(ObserverBase):
    """Selects no range, for formats without a scale."""


OBSERVERS: dict[str, type[ObserverBase]] = {"PlaceholderObserver": PlaceholderObserver}
"""The classes by their names in config files."""
for _row in RANGE_METHODS.values():
    for _name, _observer in _row.observers.items():
        _members = {"__doc__": f"Selects {_observer.selects}.", "__module__": __name__}
        OBSERVERS[_name] = type(_name, (ObserverBase,), _members)
globals().update(OBSERVERS)


@type_checked
@dataclass
class QuantizationSpec:
    """Describes how one tensor is quantized. None takes the value of a wider level, or the
    default.

    `is_dynamic="local"` is for inputs in NVFP4: the ranges of groups are found at run time, and
    the float that they share is calibrated.

    With `QSchemeType.per_block`, `block_size` has the rows and columns of a block, [128, 128]
    if it is None. The fields from `percentage` on, except `block_size`, are not in Quark:

    - `percentage`: for `PerTensorPercentileObserver`.
    - `mx_element_dtype`: the elements of `Dtype.mx`.
    - `scale_format`: of groups; "e8m0" is a shared exponent, "e4m3" a scale of 8 bits (with
      `Dtype.fp4` this is NVFP4).
    - `scale_calculation_mode`: how a shared exponent is rounded, "floor", "even" or "ceil".
    - `symmetric_scale`: the divisor of the largest magnitude of symmetric integers,
      "quant_max" or "half_range", or "quant_min" for scales that may be negative.
    """

    dtype: Dtype
    is_dynamic: bool | Literal["local"] | None = None
    observer_cls: type[ObserverBase] | None = None
    qscheme: QSchemeType | None = None
    ch_axis: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    round_method: RoundType | None = None
    scale_type: ScaleType | None = None
    percentage: float | None = None
    mx_element_dtype: Dtype | None = None
    scale_calculation_mode: str | None = None
    scale_format: str | None = None
    symmetric_scale: str | None = None
    block_size: list[int] | None = None


@type_checked
@dataclass
class QuantizationConfig:
    """Holds the specs of a layer's tensors. None inherits: a layer from its layer type, a layer
    type from global. None in global means float.
    """

    input_tensors: QuantizationSpec | None = None
    output_tensors: QuantizationSpec | None = None
    weight: QuantizationSpec | None = None
    bias: QuantizationSpec | None = None
    target_device: DeviceType | None = None


@type_checked
@dataclass
class Config:
    """Holds a whole config. Later levels override earlier ones, field by field: global, layer
    type, layer name, exclude.

    `kv_cache_quant_config` quantizes the keys and values of attentions, by the layers that
    compute them: after the rotary embedding, unless `kv_cache_post_rope` is false.

    `save` writes a file for `--config_file`.

    >>> weight = QuantizationSpec(Dtype.int4, qscheme=QSchemeType.per_group, group_size=32)
    >>> Config(QuantizationConfig(weight=weight), exclude=["kind:head"]).to_dict()["exclude"]
    ['kind:head']
    """

    global_quant_config: QuantizationConfig
    layer_type_quant_config: dict[str, QuantizationConfig] = field(default_factory=dict)
    layer_quant_config: dict[str, QuantizationConfig] = field(default_factory=dict)
    exclude: list[str] = field(default_factory=list)
    algo_config: AlgoConfig | list[AlgoConfig] | None = None
    pre_quant_opt_config: PreQuantOptConfig | list[PreQuantOptConfig] | None = None
    kv_cache_quant_config: dict[str, QuantizationConfig] | None = None
    kv_cache_group: list[str] | None = None
    kv_cache_post_rope: bool | None = None

    @called_from_python()
    def to_dict(self) -> dict[str, Any]:
        """Return the config in the hierarchical form, without fields that are None.

        Raises:
            UsageError: a field has a value of another type.
        """
        document: dict[str, Any] = _to_json(self)
        return document

    @classmethod
    @called_from_python()
    def from_dict(cls, document: Mapping[str, Any]) -> Config:
        """Return the config of a document in the hierarchical form.

        Args:
            document: the content of a config file.

        Raises:
            ConfigError: it cannot be used. The error has all findings.
            UsageError: it is not a dict, or has no `global_quant_config`.
        """
        if not isinstance(document, Mapping):
            raise UsageError(
                f"Config.from_dict got {a_kind(document)}, not a dict",
                help="Config.load(path) reads a file",
            )
        if not document:
            raise UsageError(
                "the document has no global_quant_config, the config of all layers",
                help='add it, as in {"global_quant_config": {"weight": {"dtype": "int8"}}}',
            )
        return cls._of(check_document(Document.of(document, cls.__name__)))

    @called_from_python()
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a config file.

        Args:
            path: the file to write.
            overwrite: whether a file that exists is replaced.

        Raises:
            UsageError: the file exists or cannot be written, or `path` is not a path.
        """
        place = path_of(path)
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        try:
            with replacing(overwrite=overwrite):
                replace_file(place, text.encode())
        except OSError as error:
            message = f"cannot write {os.fspath(path)}: {error.strerror or error}"
            raise UsageError(message) from error

    @classmethod
    @called_from_python()
    def load(cls, path: str | os.PathLike[str]) -> Config:
        """Return the config of a file in the hierarchical form.

        Args:
            path: the file to read.

        Raises:
            ConfigError: it cannot be used. The error has all findings with their lines.
            UsageError: it has the layered form, or `path` is not a path.
        """
        path_of(path)
        return cls._of(load_config(path))

    @classmethod
    def _of(cls, result: LoadResult) -> Config:
        """Return the config of a checked document, also with other names that Quark has."""
        config = result.require()
        assert result.document is not None
        if config.form != "hierarchical":
            raise UsageError(
                f"{config.source} has the layered form, which the dataclasses cannot express",
                help=if_command(
                    "convert", "`quantizer convert --form hierarchical` converts it"
                ),
            )
        document, _ = canonical(result.document)
        converted: Config = _from_json(cls, document.value)
        return converted


AnyConfig = str | os.PathLike[str] | Mapping[str, Any] | Config
"""A config as Python gives it: a path, a dict or dataclasses."""


def check_kind(config: Any) -> None:
    """Raise `UsageError` if a value cannot be a config."""
    if not isinstance(config, (str, os.PathLike, Mapping, Config)):
        raise UsageError(
            f"config is {a_kind(config)}, not a config",
            help="give the path of a file, a dict or a quantizer.Config",
        )


def read_config(config: AnyConfig | None) -> LoadResult:
    """Return the checked config; the built-in default for None.

    Raises:
        UsageError: the value cannot be a config.
    """
    if config is None:
        return LoadResult(default_config(), (), {})
    check_kind(config)
    if isinstance(config, (str, os.PathLike)):
        return load_config(config)
    if isinstance(config, Config):
        return check_document(Document.of(config.to_dict(), "Config"))
    return check_document(Document.of(config, "config"))


def path_of(path: Any, name: str = "path") -> Path:
    """Return the path of a text or path object; `name` is the argument's name in errors.

    Raises:
        UsageError: it is neither, or is empty.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(
            f"{name} is {a_kind(path)}, not a path", help="give it as text or pathlib.Path"
        )
    if not os.fspath(path):
        raise UsageError(f"{name} is an empty path", help='"." is the working directory')
    return Path(path)


def _to_json(value: Any) -> Any:
    """Return a value as JSON: enumeration members and classes by name, without None and without
    defaults of algorithms.
    """
    if is_dataclass(value):
        return _fields_to_json(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    return value


def _fields_to_json(value: Any) -> dict[str, Any]:
    check_field_types(value)
    defaults: dict[str, Any] = {}
    if isinstance(value, AlgoConfig):
        defaults = vars(type(value)())
    content = {}
    for attribute in fields(value):
        name = attribute.name
        item = getattr(value, name)
        # The name says which algorithm it is, and is written although it is a default
        is_default = name != "name" and name in defaults and item == defaults[name]
        if item is not None and not is_default:
            content[name] = _to_json(item)
    return content


def _from_json(hint: Any, value: Any) -> Any:
    """Return a JSON value as an object of the annotated type; keys without a field are ignored.

    Args:
        hint: an annotation of a field, such as `dict[str, QuantizationConfig]`.
        value: the content of a config file there.
    """
    origin = get_origin(hint)
    if value is None:
        return None
    if origin in (Union, types.UnionType):
        # In a union of a class and its list, the value shows which of them it is
        is_list = isinstance(value, list)
        members = [
            member for member in get_args(hint) if (get_origin(member) is list) == is_list
        ]
        return _from_json(members[0], value)
    if origin is type:
        return OBSERVERS.get(value)
    if origin is list:
        return [_from_json(get_args(hint)[0], item) for item in value]
    if origin is dict:
        content = {}
        for key, item in value.items():
            if not key.startswith("//"):
                content[key] = _from_json(get_args(hint)[1], item)
        return content
    if is_dataclass(hint):
        return _dataclass_from_json(hint, value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint[value]
    return value


def _dataclass_from_json(cls: Any, value: Mapping[str, Any]) -> Any:
    if issubclass(cls, AlgoConfig):
        cls = entry_kinds("hierarchical")[value["name"]]
    hints = get_type_hints(cls)
    arguments = {}
    for attribute in fields(cls):
        name = attribute.name
        if value.get(name) is not None:
            arguments[name] = _from_json(hints[name], value[name])
    return cls(**arguments)
