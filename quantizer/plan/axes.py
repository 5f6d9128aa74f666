"""Along which axis of a tensor its scales lie, and whether its groups fit. Reads shapes; knows
no values.

A config may name the axis; otherwise a layer knows its own: output channels have a scale each,
groups and rows of values run along the features that the layer sums over.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.model import QuantizationSpec, Sourced
from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.config.wording import shortened
from quantizer.graph.ir import Graph, Node
from quantizer.numerics.qparams import SHARED_EXPONENTS

BATCH = 0
"""The axis of samples."""


@dataclass(frozen=True)
class TensorView:
    """A tensor as its layer sees it: its sizes (None: open, all None: unknown) and the axes
    that are taken unasked.

    `maps`: it holds what a convolution reads or makes, so that a token is a whole sample.
    `stacked`: it is a stack of so many tensors along the first axis, which share no scale.
    `groups`: it is the weight of a transposed convolution with so many groups, each with output
    channels of its own.
    """

    sizes: tuple[int | None, ...] | None
    channels: int | None = None
    features: int = -1
    maps: bool = False
    stacked: int = 1
    groups: int = 1

    @property
    def rank(self) -> int | None:
        """The number of axes, if it is known."""
        return None if self.sizes is None else len(self.sizes)


SMALLEST_GROUP = 16
"""Smaller ones cost as many bits for scales as for values."""


@dataclass(frozen=True)
class Misfit:
    """A group size that does not divide the axis of one tensor."""

    layer: str
    role: str
    length: int
    group_size: int
    place: Place | None


def parameter_view(graph: Graph, node: Node, role: str) -> TensorView:
    """Return the view of a weight or a bias.

    A weight's output channels come first (second in transposed layers); a bias has its features
    alone.
    """
    sizes = tuple(graph.tensors[node.params[parameter_name(role)]].shape)
    if base_role(role) == "bias" or node.op == "parameter":
        return TensorView(sizes)
    channels, stacked = (
        int(node.row.transposed),
        node.attrs["groups"] if node.row.experts else 1,
    )
    features = (1 - channels) if len(sizes) > 1 else 0
    groups = node.attrs.get("groups", 1) if node.row.transposed else 1
    return TensorView(sizes, channels, features, stacked=stacked, groups=groups)


def activation_view(graph: Graph, node: Node, source: str) -> TensorView:
    """What `source` makes, for `node`: features of matrices lie last, those of convolutions
    along the channels.
    """
    path = node.params.get("weight")
    rank = graph.tensors[path].dim() if path and node.row.kind == "mac" else 0
    return TensorView(
        graph.by_name[source].shape, features=1 - rank if rank > 1 else -1, maps=rank > 2
    )


def fitted(spec: QuantizationSpec, view: TensorView, role: str) -> QuantizationSpec:
    """The spec for one tensor: axes filled in and counted from the front, and nothing left that
    it does not read.
    """
    if not spec.is_scaled:
        return QuantizationSpec(dtype=spec.dtype)
    if is_parameter(role):
        # A parameter's range is found once, and stays
        spec = dataclasses.replace(spec, is_dynamic=False)
    if spec.qscheme == "per_token" and view.maps:
        # Positions share the weights of a kernel, so that no runtime could give each of them
        # its own scale.
        spec = dataclasses.replace(spec, qscheme="per_channel", ch_axis=BATCH)
    defaults = {
        "per_channel": view.channels,
        "per_group": view.features,
        "per_token": view.features,
    }
    axis = defaults.get(spec.qscheme) if spec.ch_axis is None else spec.ch_axis
    if spec.qscheme not in defaults or axis is None:
        rows = (
            view.sizes[0] // view.stacked
            if view.sizes and view.sizes[0] and view.stacked > 1
            else None
        )
        return dataclasses.replace(spec, qscheme="per_tensor", ch_axis=None, group_size=rows)
    if view.rank is not None and -view.rank <= axis < view.rank:
        axis %= view.rank
    group_size = spec.group_size if spec.qscheme == "per_group" else None
    if (
        spec.qscheme == "per_channel"
        and axis == view.channels
        and view.sizes
        and view.groups > 1
    ):
        # The axis has the outputs of one group; those of the others are beside other inputs.
        inputs = view.sizes[0] or 0
        group_size = inputs // view.groups
    return dataclasses.replace(spec, ch_axis=axis, group_size=group_size)


def impossible(
    layer: str,
    role: str,
    spec: QuantizationSpec,
    view: TensorView,
    sources: Mapping[str, Sourced],
) -> Iterator[Diagnostic]:
    """Axes that the tensor does not have, whose size is open, or along which matrices lie that
    share no scale; and fixed scales for groups that differ in number.
    """
    if spec.ch_axis is None:
        return
    where, named = f"{role} of {layer}", sources.get("ch_axis") or sources.get("qscheme")
    place = named.place if named else None
    if view.sizes is not None and not -len(view.sizes) <= spec.ch_axis < len(view.sizes):
        text = f"ch_axis {spec.ch_axis} is out of range: {where} has {len(view.sizes)} axes"
        help_ = f"write a ch_axis from {-len(view.sizes)} to {len(view.sizes) - 1}"
        yield Diagnostic("QZ406", text, place, help=help_)
    elif view.stacked > 1 and spec.ch_axis != (1 if spec.qscheme == "per_group" else 0):
        text = (
            f"{spec.qscheme} with ch_axis {spec.ch_axis} would have experts share scales "
            f"({where})"
        )
        yield Diagnostic(
            "QZ406", text, place, help=f"write {1 - spec.ch_axis}, or exclude these layers"
        )
    elif is_parameter(role) or spec.is_dynamic:
        return
    elif spec.qscheme != "per_channel":
        text = (
            f"{spec.qscheme} needs is_dynamic: true ({where}): batches differ in how many "
            "scales they have"
        )
        yield Diagnostic(
            "QZ408", text, place, help="set is_dynamic to true, or qscheme to per_tensor"
        )
    elif view.sizes is not None and view.sizes[spec.ch_axis] is None:
        text = f"axis {spec.ch_axis} is the batch, which has no scales of its own ({where})"
        yield Diagnostic(
            "QZ406",
            text,
            place,
            help="write the ch_axis of the channels, or set qscheme to per_tensor",
        )


def misfit(
    layer: str,
    role: str,
    spec: QuantizationSpec,
    view: TensorView,
    sources: Mapping[str, Sourced],
) -> Misfit | None:
    """The tensor, if its groups do not divide its axis; blocks with a shared exponent may end
    with a shorter one.

    Source: OCP Microscaling Formats v1.0, section 5.
    """
    size = spec.group_size if spec.qscheme == "per_group" else None
    if (
        spec.ch_axis is None
        or size is None
        or size < 1
        or spec.scale_type in SHARED_EXPONENTS
        or view.sizes is None
    ):
        return None
    length = (
        view.sizes[spec.ch_axis] if -len(view.sizes) <= spec.ch_axis < len(view.sizes) else None
    )
    if length is None or length % size == 0:
        return None
    named = sources.get("group_size")
    return Misfit(layer, role, length, size, named.place if named else None)


def misfits(found: Sequence[Misfit]) -> Iterator[Diagnostic]:
    """One error for each place in the file, with its layers by the lengths of their axes."""
    for place in dict.fromkeys(each.place for each in found):
        here = [each for each in found if each.place == place]
        sizes = ", ".join(str(size) for size in sorted({each.group_size for each in here}))
        lengths = dict.fromkeys(each.length for each in here)
        named = {
            at: [f"{each.role} of {each.layer}" for each in here if each.length == at]
            for at in lengths
        }
        rows = "; ".join(
            f"{length} long in {shortened(names)}" for length, names in named.items()
        )
        fitting = math.gcd(*lengths, *(each.group_size for each in here))
        help_ = (
            "-1 takes the whole axis; or choose another qscheme for these layers, or exclude "
            "them"
        )
        yield Diagnostic(
            "QZ407",
            f"group_size {sizes} does not divide the axis of {len(here)} tensor(s): {rows}",
            place,
            help=f"{fitting} divides all of them, {help_}"
            if fitting >= SMALLEST_GROUP
            else help_,
        )
