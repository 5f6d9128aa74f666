"""Fit the groups and axes of a config to the layers of a model. Choose sizes that divide, a
scale for each channel where none does, and float where a block format leaves no choice.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quantizer.config.document.document import value_at
from quantizer.config.json_types import JsonObject, JsonPath
from quantizer.config.model import SUPERBLOCK, QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.config.wording import first_names
from quantizer.plan.axes import PlannedTensor, TensorView, grouped_length, impossible
from quantizer.plan.fit.fitting import Fitting, per_channel
from quantizer.plan.misfits import super_block_substitute, without_super_blocks
from quantizer.plan.model import TensorPlan

_SMALLEST = 32
"""Groups of this size are the smallest that all engines for integers have, and the blocks of
the formats with fixed ones.
"""
_NEARLY_ALL = 0.95
"""The share of values in layers that a size must divide."""
_MAX_NAMES = 2


@dataclass(frozen=True)
class _Groups:
    """A tensor whose values are quantized in groups.

    Attributes:
        tensor: of the plan.
        length: of the axis along which groups run.
        size: of a group.
        values: how many it has, 0 for activations.
        path: where the document states the size, None if the format does.
    """

    tensor: TensorPlan
    length: int
    size: int
    values: int
    path: JsonPath | None

    @property
    def is_fixed(self) -> bool:
        """Return whether no other size is of use: that of a block format, or the smallest."""
        return self.tensor.spec.dtype != "int" or self.size <= _SMALLEST

    @property
    def fits(self) -> bool:
        """Return whether the size divides the axis."""
        return self.length % self.size == 0


def fit_axes(fitting: Fitting) -> None:
    """Give types of layers their own `ch_axis` where that of all layers is the wrong one:
    outputs of transposed convolutions and inputs of convolutions are elsewhere.
    """
    if not fitting.is_hierarchical:
        return
    layers: dict[tuple[JsonPath, str, int], list[str]] = {}
    for tensor in fitting.plan.tensors.values():
        path = fitting.path_of(tensor, "ch_axis")
        view = fitting.view_of(tensor)
        node = fitting.graph.by_name[tensor.layer]
        axis = _default_axis(tensor.spec, view)
        if path is None or path[0] != "global_quant_config" or not node.row.types:
            continue
        is_elsewhere = node.row.transposed or view.maps
        if is_elsewhere and axis is not None and tensor.spec.ch_axis != axis:
            layers.setdefault((path, node.row.types[0], axis), []).append(tensor.layer)
    for (path, kind, axis), names in layers.items():
        words: JsonObject = value_at(fitting.document, path[:-1])
        is_of_groups = words.get("qscheme") == "per_group"
        if is_of_groups and words.get("observer_cls") == "PerChannelMinMaxObserver":
            # There the key is the axis of the channels that are cut into groups
            continue
        word = str(path[1])
        fitting.give_type(
            kind,
            word,
            {**words, "ch_axis": axis},
            sentence=(
                f"ch_axis {axis} instead of {words['ch_axis']} for {word} of {kind}: "
                f"{_shown(fitting, names)} would share scales between channels"
            ),
        )


def _default_axis(spec: QuantizationSpec, view: TensorView) -> int | None:
    axis = view.channels if spec.qscheme == "per_channel" else view.features
    if axis is not None and view.rank is not None:
        return axis % view.rank
    return axis


def fit_groups(fitting: Fitting) -> None:
    """Make all groups fit: choose a smaller size where that serves nearly all layers, and take
    the other layers out.
    """
    paths = dict.fromkeys(row.path for row in _groups(fitting))
    flexible: set[JsonPath | None] = set()
    for path in paths:
        groups = [row for row in _groups(fitting) if row.path == path]
        if path is not None and groups and not groups[0].is_fixed:
            flexible.add(path)
            _choose_size(fitting, path, groups)
    unfit = [row for row in _groups(fitting) if not row.fits]
    by_channel = []
    for row in unfit:
        if row.path in flexible and is_parameter(row.tensor.role):
            by_channel.append(row)
    _give_channels(fitting, by_channel)
    layers = {row.tensor.layer for row in by_channel}
    _exclude(fitting, [row for row in unfit if row.tensor.layer not in layers])


def replace_super_blocks(fitting: Fitting) -> None:
    """Give weights whose inputs super-blocks do not divide the format that llama.cpp uses
    there.
    """
    layers: dict[tuple[str, QuantizationSpec], dict[str, int]] = {}
    for tensor in fitting.plan.tensors.values():
        spec = tensor.spec
        sizes = fitting.view_of(tensor).sizes
        if spec.scale_type != "superblock" or spec.ch_axis is None or sizes is None:
            continue
        length = sizes[spec.ch_axis] or 0
        if length % SUPERBLOCK:
            key = spec.dtype, without_super_blocks(spec)
            layers.setdefault(key, {})[tensor.layer] = length
    for (dtype, spec), lengths in layers.items():
        names = fitting.names(lengths)
        counts = " or ".join(str(length) for length in sorted({*lengths.values()}))
        fitting.give_weights(
            names,
            spec,
            f"{super_block_substitute(dtype)} in groups of 32 instead of {dtype} for "
            f"{first_names(names)}, as in llama.cpp: super-blocks of {SUPERBLOCK} do not "
            f"divide {counts} inputs",
        )


def _choose_size(fitting: Fitting, path: JsonPath, groups: list[_Groups]) -> None:
    """Change the size of groups at a place of the file, if another one serves more values."""
    before = groups[0].size
    unfit = [row for row in groups if not row.fits]
    size = _best_size(groups)
    if size is None:
        _use_channels(fitting, path, groups)
    elif size != before:
        document = copy.deepcopy(fitting.document)
        value_at(document, path[:-1])[path[-1]] = size
        comment = document.get("//")
        if isinstance(comment, str):
            document["//"] = comment.replace(f"each {before} inputs", f"each {size} inputs")
        reason = _lengths(fitting, unfit)
        fitting.change(document, f"group_size {size} instead of {before}: {reason}")


def leave_out_impossible(fitting: Fitting) -> None:
    """Leave layers in float that lack the axis which their scales would be along."""
    layers: dict[str, None] = {}
    for tensor in fitting.plan.tensors.values():
        view = fitting.view_of(tensor)
        planned = PlannedTensor(tensor.layer, tensor.role, tensor.spec, view, {})
        if next(impossible(planned), None) is not None:
            layers[tensor.layer] = None
    if layers:
        names = fitting.names(layers)
        fitting.leave_float(
            names, f"{first_names(names)} left in float: they lack the axis of the scales"
        )


def _groups(fitting: Fitting) -> Iterator[_Groups]:
    """Yield the tensors in groups along an axis of known length."""
    for tensor in fitting.plan.tensors.values():
        spec = tensor.spec
        length = grouped_length(spec, fitting.view_of(tensor))
        if length is None or spec.group_size is None:
            continue
        values = 0
        if is_parameter(tensor.role):
            values = fitting.plan.parameter((tensor.layer, tensor.role)).numel()
        path = fitting.path_of(tensor, "group_size")
        yield _Groups(tensor, length, spec.group_size, values, path)


def _best_size(groups: list[_Groups]) -> int | None:
    """Return the largest size that divides the axes of nearly all values for which there is a
    size; None if there is none for any.
    """
    sizes = [groups[0].size]
    power = 1 << (groups[0].size.bit_length() - 1)
    while power >= _SMALLEST:
        sizes.append(power)
        power //= 2
    counts: dict[int, int] = {}
    for size in sizes:
        counts[size] = sum(row.values or 1 for row in groups if row.length % size == 0)
    most = max(counts.values())
    if not most:
        return None
    return next(size for size in sizes if counts[size] >= _NEARLY_ALL * most)


def _use_channels(fitting: Fitting, path: JsonPath, groups: list[_Groups]) -> None:
    """Give all weights of a level a scale for each output channel, as no group fits."""
    axis = fitting.view_of(groups[0].tensor).channels or 0
    spec = per_channel(groups[0].tensor.spec, axis)
    words = fitting.words_of_weights(spec)
    spec_path = path[:-1]
    document = copy.deepcopy(fitting.document)
    value_at(document, spec_path[:-1])[spec_path[-1]] = words
    fitting.change(
        document,
        f"per_channel instead of groups of {groups[0].size}: the layers have "
        f"{_inputs(groups)}, which no group of {_SMALLEST} or more divides",
    )


def _give_channels(fitting: Fitting, groups: list[_Groups]) -> None:
    """Give the weights of some layers a scale for each output channel."""
    by_spec: dict[QuantizationSpec, list[_Groups]] = {}
    for row in groups:
        axis = fitting.view_of(row.tensor).channels or 0
        by_spec.setdefault(per_channel(row.tensor.spec, axis), []).append(row)
    for spec, rows in by_spec.items():
        names = fitting.names(dict.fromkeys(row.tensor.layer for row in rows))
        fitting.give_weights(
            names,
            spec,
            f"per_channel instead of groups for {first_names(names)}, with {_inputs(rows)}",
        )


def _exclude(fitting: Fitting, groups: list[_Groups]) -> None:
    """Leave layers in float that blocks of a fixed size do not fit."""
    by_size: dict[int, list[_Groups]] = {}
    for row in groups:
        by_size.setdefault(row.size, []).append(row)
    for size, rows in by_size.items():
        names = fitting.names(dict.fromkeys(row.tensor.layer for row in rows))
        fitting.leave_float(
            names,
            f"{first_names(names)} left in float: blocks of {size} do not divide "
            f"{_inputs(rows)}",
        )


def _inputs(groups: Iterable[_Groups]) -> str:
    """Return how many inputs layers have, such as "7 or 13 inputs"."""
    lengths = sorted({row.length for row in groups})
    counts = " or ".join(str(length) for length in lengths)
    return f"{counts} inputs"


def _lengths(fitting: Fitting, groups: Iterable[_Groups]) -> str:
    """Return a sentence on how many inputs layers have."""
    layers: dict[int, dict[str, None]] = {}
    for row in groups:
        layers.setdefault(row.length, {})[row.tensor.layer] = None
    parts = []
    for length, names in layers.items():
        parts.append(f"the inputs of {_shown(fitting, names)} number {length}")
    return ", ".join(parts)


def _shown(fitting: Fitting, layers: Iterable[str]) -> str:
    """Return the first selectors of layers."""
    return first_names(fitting.names(dict.fromkeys(layers)), _MAX_NAMES)
