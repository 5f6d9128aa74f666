"""The axis along which the scales of a tensor are, and whether its groups fit. Reads only
shapes.

A config may name the axis. By default output channels have a scale each, and groups and rows of
values run along the features that the layer sums over.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantizer.config.diagnostics import Diagnostic, Place, Sourced
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.graph.ir import Graph, Node
from quantizer.numerics.formats import SHARED_EXPONENTS

_SAMPLE_AXIS = 0
_FP8 = ("fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class TensorView:
    """A tensor as its layer sees it.

    Attributes:
        sizes: its shape; None for a dynamic size, and in all for an unknown shape.
        channels, features: the axes that scales take by default.
        maps: whether it is a feature map of a convolution, so that a token is a whole sample.
        stacked: of how many tensors it is a stack along the first axis, which share no scale.
        groups: the groups of a transposed convolution whose weight it is, each with output
            channels of its own.
        has_pairs: whether kernels for int8 may add up the products of two neighbouring inputs
            first. They do not for depthwise convolutions.
    """

    sizes: tuple[int | None, ...] | None
    channels: int | None = None
    features: int = -1
    maps: bool = False
    stacked: int = 1
    groups: int = 1
    has_pairs: bool = False

    @property
    def rank(self) -> int | None:
        """Return the number of axes, if it is known."""
        return None if self.sizes is None else len(self.sizes)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of a layer with its merged spec and where each value of that came from."""

    layer: str
    role: str
    spec: QuantizationSpec
    view: TensorView
    sources: Mapping[str, Sourced]

    def place_of(self, *fields: str) -> Place | None:
        """Return the place of the first of `fields` that a file sets."""
        for name in fields:
            if name in self.sources:
                return self.sources[name].place
        return None


@dataclass(frozen=True)
class Misfit:
    """A group size that does not divide the axis of one tensor, or the size of super-blocks of
    a format.
    """

    tensor: str
    length: int
    group_size: int
    place: Place | None
    super_blocks_of: str | None = None


def parameter_view(graph: Graph, node: Node, role: str) -> TensorView:
    """Return the view of a weight or a bias.

    A weight's output channels come first (second in transposed layers). A bias has only its
    features.
    """
    sizes = tuple(graph.tensors[node.params[parameter_name(role)]].shape)
    if base_role(role) == "bias" or node.op == "parameter":
        return TensorView(sizes)
    channels = int(node.row.transposed)
    features = 1 - channels if len(sizes) > 1 else 0
    view = TensorView(sizes, channels, features)
    groups = node.attrs.get("groups", 1)
    if node.row.experts:
        return dataclasses.replace(view, stacked=groups)
    if node.row.transposed:
        return dataclasses.replace(view, groups=groups)
    is_product = role == "weights" and node.row.kind == "mac" and len(sizes) > 1
    return dataclasses.replace(view, has_pairs=is_product and not is_depthwise(graph, node))


def is_depthwise(graph: Graph, node: Node) -> bool:
    """Return whether each input channel of a convolution makes one output channel."""
    groups = int(node.attrs.get("groups", 1))
    outputs, inputs_of_group = graph.weight(node).shape[:2]
    return outputs == groups > 1 and inputs_of_group == 1


def activation_view(graph: Graph, node: Node, source: str) -> TensorView:
    """Return the view that `node` has of the value of `source`. Features of matrices are last,
    those of convolutions along the channels.
    """
    path = node.params.get("weight")
    sizes = graph.by_name[source].shape
    if path is None or node.row.kind != "mac":
        return TensorView(sizes)
    rank = graph.tensors[path].dim()
    features = 1 - rank if rank > 1 else -1
    return TensorView(sizes, features=features, maps=rank > 2)


def fit_spec(spec: QuantizationSpec, view: TensorView, role: str) -> QuantizationSpec:
    """Return the spec for one tensor: axes filled in and counted from the front, and fields
    that it does not read removed.
    """
    if not spec.is_scaled:
        return QuantizationSpec(dtype=spec.dtype)
    if is_parameter(role):
        # A parameter's range is static
        spec = dataclasses.replace(spec, is_dynamic=False)
    if spec.method == "pair_safe" and not view.has_pairs:
        spec = dataclasses.replace(spec, method="maxmin")
    if spec.qscheme == "per_token" and view.maps:
        # Positions share the weights of a kernel, so that no runtime could give each of them
        # its own scale.
        spec = dataclasses.replace(spec, qscheme="per_channel", ch_axis=_SAMPLE_AXIS)
    if spec.qscheme == "per_block":
        return dataclasses.replace(spec, ch_axis=None)
    defaults = {
        "per_channel": view.channels,
        "per_group": view.features,
        "per_token": view.features,
    }
    axis = spec.ch_axis
    if axis is None:
        axis = defaults.get(spec.qscheme)
    first_size = view.sizes[0] or 0 if view.sizes else 0
    if spec.qscheme not in defaults or axis is None:
        rows = first_size // view.stacked if view.stacked > 1 and first_size else None
        return dataclasses.replace(spec, qscheme="per_tensor", ch_axis=None, group_size=rows)
    if view.rank is not None and -view.rank <= axis < view.rank:
        axis %= view.rank
    group_size = spec.group_size if spec.qscheme == "per_group" else None
    is_over_outputs = spec.qscheme == "per_channel" and axis == view.channels
    if is_over_outputs and view.sizes and view.groups > 1:
        # The axis has the outputs of one group. Those of other groups belong to other inputs.
        group_size = first_size // view.groups
    return dataclasses.replace(spec, ch_axis=axis, group_size=group_size)


def impossible(tensor: PlannedTensor) -> Iterator[Diagnostic]:
    """Yield an error for an axis that is missing, has a dynamic size, or has matrices without a
    common scale along it. Also yield one for static scales whose number varies.
    """
    spec = tensor.spec
    view = tensor.view
    axis = spec.ch_axis
    if spec.qscheme == "per_block":
        yield from _impossible_blocks(tensor)
    if axis is None:
        return
    where = f"{tensor.role} of {tensor.layer}"
    place = tensor.place_of("ch_axis", "qscheme")
    is_static_activation = not is_parameter(tensor.role) and not spec.is_dynamic
    if view.sizes is not None and not -len(view.sizes) <= axis < len(view.sizes):
        yield Diagnostic(
            "QZ406",
            f"ch_axis {axis} is out of range: {where} has {len(view.sizes)} axes",
            place,
            help=f"write a ch_axis from {-len(view.sizes)} to {len(view.sizes) - 1}",
        )
    elif view.stacked > 1 and axis != int(spec.qscheme == "per_group"):
        yield Diagnostic(
            "QZ406",
            f"{spec.qscheme} with ch_axis {axis} would have experts share scales ({where})",
            place,
            help=f"write {1 - axis}, or exclude these layers",
        )
    elif is_static_activation and spec.qscheme != "per_channel":
        yield Diagnostic(
            "QZ408",
            f"{spec.qscheme} needs is_dynamic: true ({where}): batches differ in how many "
            "scales they have",
            place,
            help="set is_dynamic to true, or qscheme to per_tensor",
        )
    elif is_static_activation and view.sizes is not None and view.sizes[axis] is None:
        yield Diagnostic(
            "QZ406",
            f"axis {axis} is the batch, which has no scales of its own ({where})",
            place,
            help="write the ch_axis of the channels, or set qscheme to per_tensor",
        )


def _impossible_blocks(tensor: PlannedTensor) -> Iterator[Diagnostic]:
    """Yield an error for blocks of a tensor that has no two axes, or that experts would
    share.
    """
    sizes = tensor.view.sizes or ()
    where = f"{tensor.role} of {tensor.layer}"
    place = tensor.place_of("group_size", "qscheme")
    if len(sizes) < 2:
        yield Diagnostic(
            "QZ406",
            f"per_block needs two axes, and {where} has {len(sizes)}",
            place,
            help="exclude this layer, or choose another qscheme for it",
        )
    elif tensor.view.stacked > 1:
        rows = (sizes[0] or 0) // tensor.view.stacked
        size = tensor.spec.group_size or 1
        if rows % size:
            yield Diagnostic(
                "QZ406",
                f"blocks of {size} rows would have experts share scales ({where}): each has "
                f"{rows} rows",
                place,
                help=f"choose a block_size that divides {rows}, or exclude these layers",
            )


def misfit(tensor: PlannedTensor) -> Misfit | None:
    """Return the misfit if the tensor's groups do not divide its axis. Blocks with a shared
    exponent may end with a shorter one, and so may groups of fp8 at run time.

    Source: OCP Microscaling Formats v1.0, section 5.
    """
    spec = tensor.spec
    length = grouped_length(spec, tensor.view)
    if length is None or spec.scale_type in SHARED_EXPONENTS:
        return None
    size = spec.block_size or spec.group_size or 1
    if length % size == 0:
        return None
    name = f"{tensor.role} of {tensor.layer}"
    if spec.scale_type == "superblock":
        return Misfit(name, length, size, tensor.place_of("dtype"), spec.dtype)
    return Misfit(name, length, size, tensor.place_of("group_size"))


def grouped_length(spec: QuantizationSpec, view: TensorView) -> int | None:
    """Return the length of the axis that groups have to divide; None if it is not known, or
    there is none.

    The last group of fp8 at run time may be shorter, so that inputs of any length meet weights
    in blocks.
    """
    if spec.qscheme != "per_group" or not spec.group_size or spec.group_size < 1:
        return None
    if spec.is_dynamic and spec.dtype in _FP8 and spec.scale_type != "e4m3":
        return None
    axis = spec.ch_axis
    if axis is None or view.sizes is None or not -len(view.sizes) <= axis < len(view.sizes):
        return None
    return view.sizes[axis]
