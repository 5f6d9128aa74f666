"""Dequantize folders of compressed-tensors, which llm-compressor and quantizer write.

Source: the compressors of the package compressed-tensors, 0.15 to 0.20. Earlier versions stored
zero points unpacked, and the group of each column in `weight_g_idx`.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantizer.config.json_types import fits
from quantizer.config.wording import quoted
from quantizer.errors import ModelError
from quantizer.numerics.granularity import BlockSize, block_counts
from quantizer.plan.selected import matching_limit
from quantizer.sources.json_files import FLOAT_FOLDER_HELP
from quantizer.sources.quantized_folders.layer_readers import (
    BLOCK_SCALE_DTYPES,
    read_block_size,
    row_blocks,
    scale_shape_of,
    spread_blocks,
)
from quantizer.sources.quantized_folders.stored_layer import (
    FLOAT8_DTYPES,
    INTEGERS,
    SCALE_DTYPES,
    DequantizedLayer,
    GroupedCodes,
    MethodSettings,
    StoredLayer,
    column_groups,
    float_scales,
    listed_groups,
    unpack_fp4,
    unpack_words,
    words_of,
)
from quantizer.storage.deferred_tensor import DeferredTensor

_PATTERN = "re:"
_BITS = tuple(range(1, 9))
_WEIGHT_TYPES = ("int", "float")
_KNOWN_STATUSES = ("compressed", "frozen", None)


@dataclass(frozen=True)
class WeightScheme:
    """How the weights of some layers are quantized.

    Attributes:
        targets: names, patterns and classes of the layers.
        number_type: "int" or "float".
        bits: the width of codes.
        symmetric: whether there are no zero points.
        group_size: the number of inputs that share a scale; None for whole rows.
        block_size: the size of blocks that share a scale; None if it is not by blocks.
    """

    targets: Sequence[str]
    number_type: str
    bits: int
    symmetric: bool
    group_size: int | None
    block_size: BlockSize | None

    def names(self, path: str) -> bool:
        """Return whether a name or a pattern of the targets is that of a layer."""
        for target in self.targets:
            pattern = target.removeprefix(_PATTERN)
            if pattern == target:
                is_named = target == path
            else:
                with matching_limit(pattern, ModelError):
                    is_named = re.match(pattern, path) is not None
            if is_named:
                return True
        return False


def _require_only_codes(settings: MethodSettings) -> None:
    """Check that weights are neither sparse nor transformed.

    Raises:
        ModelError: they are, or they are in a state that the format does not name.
    """
    settings.one_of("quantization_status", _KNOWN_STATUSES)
    sparsity = settings.fields.get("sparsity_config") or {}
    sparse_format = sparsity.get("format") if isinstance(sparsity, dict) else None
    if sparse_format not in (None, "dense"):
        raise settings.refusal("sparsity_config.format", sparse_format, '"dense"')
    transforms = settings.fields.get("transform_config") or {}
    if not isinstance(transforms, dict) or transforms.get("config_groups"):
        raise ModelError(
            f"{settings.file}: the quantized model transforms values while it runs "
            "(transform_config), so its weights alone are not a model",
            help=FLOAT_FOLDER_HELP,
        )


def _scheme_of(settings: MethodSettings, name: str, group: dict[str, Any]) -> WeightScheme:
    """Return the scheme of a group.

    Raises:
        ModelError: it cannot be read.
    """
    place = f"config_groups.{name}"
    targets: Any = group.get("targets")
    if not fits(targets, list[str]):
        raise settings.refusal(f"{place}.targets", targets, "a list of names")
    for target in targets:
        _require_pattern(settings, target)
    fields = group["weights"]
    if not isinstance(fields, dict):
        raise settings.refusal(f"{place}.weights", fields, "an object")
    weights = MethodSettings(settings.file, fields)
    block_size = None
    if fields.get("strategy") == "block":
        block_size = read_block_size(weights, "block_structure")
    return WeightScheme(
        targets=targets,
        number_type=weights.one_of("type", _WEIGHT_TYPES, "int"),
        bits=weights.one_of("num_bits", _BITS, 8),
        symmetric=weights.one_of("symmetric", [True, False], True),
        group_size=weights.group_size(),
        block_size=block_size,
    )


def _require_pattern(settings: MethodSettings, target: str) -> None:
    """Check that a target that is a pattern can be matched.

    Raises:
        ModelError: it cannot.
    """
    pattern = target.removeprefix(_PATTERN)
    if pattern == target:
        return
    try:
        re.compile(pattern)
    except re.error as error:
        message = f"{settings.file}: the target {quoted(target)} is not a regular expression"
        raise ModelError(f"{message}: {error}", help=FLOAT_FOLDER_HELP) from error


_WEIGHT = "weight"
_PACKED = "weight_packed"
_SCALE = "weight_scale"
_SHAPE = "weight_shape"
_ZERO_POINT = "weight_zero_point"
_GROUPS = "weight_g_idx"
_GLOBAL_SCALE = "weight_global_scale"
_NAMES = (_WEIGHT, _PACKED, _SCALE, _SHAPE, _ZERO_POINT, _GROUPS, _GLOBAL_SCALE)
_CODE_DTYPES = (torch.int8, *FLOAT8_DTYPES)
_FP4_SCALE_DTYPES = (*BLOCK_SCALE_DTYPES, torch.float8_e4m3fn)


class CompressedTensorsReader:
    """Reads `weight_packed` or `weight`, and what belongs to it: `weight_scale`,
    `weight_zero_point`, `weight_global_scale`, `weight_shape` and `weight_g_idx`.
    """

    def __init__(self, settings: MethodSettings, dtype: torch.dtype) -> None:
        """Read the schemes, and weights in `dtype`.

        Raises:
            ModelError: the schemes cannot be read.
        """
        _require_only_codes(settings)
        groups = settings.fields.get("config_groups")
        if not isinstance(groups, dict):
            raise settings.refusal("config_groups", groups, "an object")
        self._schemes: list[WeightScheme] = []
        for name, group in groups.items():
            if not isinstance(group, dict):
                raise settings.refusal(f"config_groups.{name}", group, "an object")
            if group.get("weights") is not None:
                self._schemes.append(_scheme_of(settings, name, group))
        self._file = settings.file
        self._dtype = dtype

    def _scheme_of_layer(self, path: str) -> WeightScheme:
        """Return the scheme of a layer: the one that names it, or the one of its class.

        Raises:
            ModelError: there is none.
        """
        for scheme in self._schemes:
            if scheme.names(path):
                return scheme
        of_classes = [
            scheme
            for scheme in self._schemes
            if any(target.isidentifier() for target in scheme.targets)
        ]
        class_name = "Embedding" if "embed" in path.rpartition(".")[2] else "Linear"
        for scheme in of_classes:
            if class_name in scheme.targets or len(of_classes) == 1:
                return scheme
        raise ModelError(
            f"{self._file}: no group in config_groups has {path} as a target, which is stored "
            "as codes",
            help="give the config.json that was saved with these weights",
        )

    def read(self, layer: StoredLayer) -> DequantizedLayer | None:
        """Return the float weight of a layer. Weights that were saved as floats stay as they
        are.

        Raises:
            ModelError: its tensors do not fit each other or the scheme.
        """
        weight = layer.parts.get(_WEIGHT)
        is_coded = weight is not None and weight.dtype in _CODE_DTYPES
        if not is_coded and _PACKED not in layer.parts:
            return None
        compressed = _checked(layer, self._scheme_of_layer(layer.path))
        load = partial(compressed.values, self._dtype)
        values = DeferredTensor(compressed.shape, self._dtype, load)
        return DequantizedLayer({_WEIGHT: values}, _NAMES)


@dataclass(frozen=True)
class _CompressedWeight:
    """A weight whose tensors were checked.

    Attributes:
        layer: that it belongs to.
        shape: of the weight.
        block_size: of the values that share a scale.
        bits: the width of packed integers; 0 if codes are not packed integers.
        has_zero_point: whether the layer has zero points.
    """

    layer: StoredLayer
    shape: tuple[int, int]
    block_size: BlockSize
    bits: int
    has_zero_point: bool

    @property
    def scale_shape(self) -> BlockSize:
        """Return the shape of the scales, as `scale_shape_of` returns it."""
        return block_counts(self.shape, self.block_size)

    @property
    def has_packed_zero_point(self) -> bool:
        """Return whether zero points are words. A missing one counts as packed."""
        stored = self.layer.parts.get(_ZERO_POINT)
        is_byte = stored is not None and stored.dtype != torch.int32
        return self.bits > 0 and not is_byte

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values of the weight."""
        global_scale = None
        if _GLOBAL_SCALE in self.layer.parts:
            global_scale = self.layer.load(_GLOBAL_SCALE).reshape(())
        scale = self._by_row(float_scales(self.layer.load(_SCALE), global_scale))
        codes = GroupedCodes(self._codes(), scale, self._groups(), self._zero_point())
        return codes.values(dtype)

    def _codes(self) -> Tensor:
        """Return the codes. Integers that are packed begin at zero."""
        if _PACKED not in self.layer.parts:
            return self.layer.load(_WEIGHT)
        packed = self.layer.load(_PACKED)
        if not self.bits:
            return unpack_fp4(packed)
        return unpack_words(packed, self.bits, self.shape[1])

    def _groups(self) -> Tensor:
        """Return the group of each column. Early versions stored -1 for the usual order."""
        if _GROUPS in self.layer.parts:
            is_usual = bool((self.layer.load(_GROUPS) == -1).all())
            if not is_usual:
                return listed_groups(self.layer, _GROUPS, self.scale_shape[1])
        return column_groups(self.shape[1], self.block_size[1])

    def _zero_point(self) -> Tensor | None:
        """Return the zero point of each row and group, or None if it is 0 everywhere."""
        middle = 1 << (self.bits - 1) if self.bits else 0
        if not self.has_zero_point:
            middles = torch.full(self.scale_shape, middle)
            return self._by_row(middles) if middle else None
        stored = self.layer.load(_ZERO_POINT)
        if not self.has_packed_zero_point:
            return self._by_row(stored.int() + middle)
        return unpack_words(stored.t(), self.bits, self.shape[0]).t().int()

    def _by_row(self, values: Tensor) -> Tensor:
        """Return values of blocks with a row for each row of the weight."""
        return spread_blocks(values, self.block_size, self.shape)


def _checked(layer: StoredLayer, scheme: WeightScheme) -> _CompressedWeight:
    """Return the weight of a layer.

    Raises:
        ModelError: its tensors do not fit each other or the scheme.
    """
    is_packed = _PACKED in layer.parts
    is_integer = scheme.number_type == "int"
    bits = 0
    scale_dtypes: Collection[torch.dtype] = BLOCK_SCALE_DTYPES
    if is_packed and is_integer:
        bits = scheme.bits
        shape = _packed_shape(layer, bits)
    elif is_packed:
        rows, pairs = layer.part(_PACKED, [torch.uint8]).shape
        if scheme.bits != 4:
            raise layer.damage(_PACKED, f"has floats of {scheme.bits} bits, not of 4")
        shape = (rows, 2 * pairs)
        scale_dtypes = _FP4_SCALE_DTYPES
    else:
        dtypes = [torch.int8] if is_integer else FLOAT8_DTYPES
        rows, columns = layer.part(_WEIGHT, dtypes).shape
        shape = (rows, columns)
    scale_shape = scale_shape_of(layer, _SCALE, scale_dtypes)
    is_matrix = layer.parts[_SCALE].dim() == 2
    if scheme.block_size is not None:
        block_size = scheme.block_size
    elif scheme.group_size is not None and is_matrix:
        block_size = (1, scheme.group_size)
    else:
        block_size = row_blocks(layer, _SCALE, scale_shape, shape)
    weight = _CompressedWeight(layer, shape, block_size, bits, not scheme.symmetric)
    if scale_shape != weight.scale_shape:
        layer.part(_SCALE, scale_dtypes, shape=weight.scale_shape)
    if weight.has_zero_point:
        _require_zero_points(weight)
    _require_extras(layer, shape[1])
    return weight


def _packed_shape(layer: StoredLayer, bits: int) -> tuple[int, int]:
    """Return the shape of a weight whose integers are packed into words.

    Raises:
        ModelError: the words are more or fewer than its values need.
    """
    words = layer.part(_PACKED, [torch.int32])
    layer.part(_SHAPE, INTEGERS, shape=[2])
    rows, columns = layer.load(_SHAPE).tolist()
    if min(rows, columns) < 1:
        raise layer.damage(_SHAPE, f"is {[rows, columns]}, which cannot be a shape")
    if words.shape != (rows, words_of(columns, bits)):
        raise layer.damage(
            _PACKED,
            f"has the shape {list(words.shape)}, which does not hold {[rows, columns]} codes "
            f"of {bits} bits",
        )
    return (rows, columns)


def _require_zero_points(weight: _CompressedWeight) -> None:
    """Check the zero points of a weight. They may be packed if the codes are.

    Raises:
        ModelError: they are missing, or do not fit the scales.
    """
    layer = weight.layer
    rows, groups = weight.scale_shape
    if weight.has_packed_zero_point:
        layer.part(_ZERO_POINT, [torch.int32], shape=[words_of(rows, weight.bits), groups])
    elif scale_shape_of(layer, _ZERO_POINT, [torch.int8]) != weight.scale_shape:
        layer.part(_ZERO_POINT, [torch.int8], shape=weight.scale_shape)


def _require_extras(layer: StoredLayer, columns: int) -> None:
    """Check the global scale and the list of groups of a layer, if it has them.

    Raises:
        ModelError: they have other shapes or dtypes.
    """
    if _GLOBAL_SCALE in layer.parts:
        shape = [1] * min(1, layer.parts[_GLOBAL_SCALE].dim())
        layer.part(_GLOBAL_SCALE, SCALE_DTYPES, shape=shape)
    if _GROUPS in layer.parts:
        layer.part(_GROUPS, INTEGERS, shape=[columns])
