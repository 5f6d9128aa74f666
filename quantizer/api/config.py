"""What to quantize and how, as dataclasses with the fields of the hierarchical file form.
Imports no torch.

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
from typing import Any, Union, get_args, get_origin, get_type_hints

from quantizer.api.observers import OBSERVERS, ObserverBase
from quantizer.config.algorithm_settings import AlgoConfig, PreQuantOptConfig
from quantizer.config.algorithms import entry_kinds
from quantizer.config.document.document import Document
from quantizer.config.forms.aliases import canonical
from quantizer.config.forms.types import DeviceType, Dtype, QSchemeType, RoundType, ScaleType
from quantizer.config.load import LoadResult, check_document, default_config, load_config
from quantizer.config.typed_fields import check, checked
from quantizer.config.wording import a_kind
from quantizer.errors import UsageError
from quantizer.storage.atomic_write import replace_file


@checked
@dataclass
class QuantizationSpec:
    """How one tensor is quantized. None means that a wider level, or the default, says it.

    The fields from `percentage` on are additions: `percentage` is read by
    `PerTensorPercentileObserver`; `mx_element_dtype` is the element of `Dtype.mx`;
    `scale_format="e8m0"` gives groups of another format a shared exponent, too, which
    `scale_calculation_mode` ("floor", "even" or "ceil") finds, and "e4m3" gives them scales of
    8 bits (NVFP4 is `Dtype.fp4` with it); `symmetric_scale` ("quant_max" or "half_range") is
    what the largest magnitude of symmetric integers is divided by.
    """

    dtype: Dtype
    is_dynamic: bool | None = None
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


@checked
@dataclass
class QuantizationConfig:
    """The specs of a layer's tensors. None inherits: layer from layer type, layer type from
    global; there, float.
    """

    input_tensors: QuantizationSpec | None = None
    output_tensors: QuantizationSpec | None = None
    weight: QuantizationSpec | None = None
    bias: QuantizationSpec | None = None
    target_device: DeviceType | None = None


@checked
@dataclass
class Config:
    """A whole configuration: global < layer type < layer name < exclude, field by field.

    `to_dict` gives the hierarchical file form, so `save` writes a file for `--config_file`.
    """

    global_quant_config: QuantizationConfig
    layer_type_quant_config: dict[str, QuantizationConfig] = field(default_factory=dict)
    layer_quant_config: dict[str, QuantizationConfig] = field(default_factory=dict)
    exclude: list[str] = field(default_factory=list)
    algo_config: AlgoConfig | list[AlgoConfig] | None = None
    pre_quant_opt_config: PreQuantOptConfig | list[PreQuantOptConfig] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The config in the words of the hierarchical form; fields that are None are left out.

        Raises:
            UsageError: a field has been given a value of another type.
        """
        document: dict[str, Any] = _to_json(self)
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Config:
        """The config that a document of the hierarchical form says.

        Raises:
            ConfigError: with all findings, if it cannot be used.
            UsageError: it is no dict, or has no `global_quant_config`.
        """
        if not isinstance(document, Mapping):
            raise UsageError(
                f"Config.from_dict got {a_kind(document)}, not a dict",
                help="Config.load(path) reads a file",
            )
        if not document:
            raise UsageError(
                "the document has no global_quant_config, the config of all layers",
                help=(
                    "write it, for example "
                    '{"global_quant_config": {"weight": {"dtype": "int8"}}}'
                ),
            )
        return cls._of(check_document(Document.of(document, cls.__name__)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a config file.

        Raises:
            UsageError: the file cannot be written, or `path` is no path.
        """
        place, text = path_of(path), json.dumps(self.to_dict(), indent=2) + "\n"
        try:
            replace_file(place, text.encode())
        except OSError as error:
            raise UsageError(
                f"cannot write {os.fspath(path)}: {error.strerror or error}"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Config:
        """The config of a file in the hierarchical form.

        Raises:
            ConfigError: with all findings and their places, if it cannot be used.
            UsageError: it is of the layered form, or `path` is no path.
        """
        path_of(path)
        return cls._of(load_config(path))

    @classmethod
    def _of(cls, result: LoadResult) -> Config:
        """The words of other versions end in `config`, and `canonical` turns them into ours."""
        config = result.require()
        assert result.document is not None  # a config came of it
        if config.form != "hierarchical":
            raise UsageError(
                f"{config.source} is of the layered form, which the dataclasses cannot say",
                help="`quantizer convert --to hierarchical` turns it into the form they can",
            )
        read: Config = _from_json(cls, canonical(result.document)[0].value)
        return read


AnyConfig = str | os.PathLike[str] | Mapping[str, Any] | Config
"""A config in whichever way Python gives it: a path, a dict or dataclasses, of either file
form.
"""


def check_kind(config: Any) -> None:
    """Refuse what is no config at all.

    Raises:
        UsageError: saying what it is.
    """
    if not isinstance(config, (str, os.PathLike, Mapping, Config)):
        raise UsageError(
            f"config is {a_kind(config)}, not a config",
            help="give the path of a file, a dict or a quantizer.Config",
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


def path_of(path: Any, name: str = "path") -> Path:
    """A path that was given as text or as a path object.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(
            f"{name} is {a_kind(path)}, not a path", help="give it as text or pathlib.Path"
        )
    return Path(path)


def _to_json(value: Any) -> Any:
    """Enumeration members and classes become their names; what is None, or an algorithm's
    default, is not written.
    """
    if is_dataclass(value):
        check(value)
        named = {f.name: getattr(value, f.name) for f in fields(value)}
        if isinstance(value, AlgoConfig):
            default = vars(type(value)())
            named = {
                name: item
                for name, item in named.items()
                if name == "name" or item != default[name]
            }
        return {name: _to_json(item) for name, item in named.items() if item is not None}
    if isinstance(value, (Enum, type)):
        return value.name if isinstance(value, Enum) else value.__name__
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, list) else value


def _from_json(hint: Any, value: Any) -> Any:
    """A JSON value as what an annotation asks for; keys without a field say nothing, or the
    check had refused them.
    """
    if value is None:
        return None
    if get_origin(hint) in (Union, types.UnionType):
        wanted = [
            member
            for member in get_args(hint)
            if (get_origin(member) is list) == isinstance(value, list)
        ]
        return _from_json(wanted[0], value)
    if get_origin(hint) is type:
        return OBSERVERS.get(value)
    if get_origin(hint) is list:
        return [_from_json(get_args(hint)[0], item) for item in value]
    if get_origin(hint) is dict:
        return {
            key: _from_json(get_args(hint)[1], item)
            for key, item in value.items()
            if not key.startswith("//")
        }
    if is_dataclass(hint):
        cls: Any = hint
        if issubclass(cls, AlgoConfig):
            cls = entry_kinds("hierarchical")[value["name"]]
        hints, stated = (
            get_type_hints(cls),
            [f.name for f in fields(cls) if value.get(f.name) is not None],
        )
        return cls(**{name: _from_json(hints[name], value[name]) for name in stated})
    return hint[value] if isinstance(hint, type) and issubclass(hint, Enum) else value
