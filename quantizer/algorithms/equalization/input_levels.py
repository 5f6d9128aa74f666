"""Finds channels of inputs that one scale cannot serve, and the powers of two that bring them
to one range. An input may hold pressures in Pa and angles in radians.

The decision is measured on the first calibration batches, as the error of what the first
layers read. Ordinary images, whose channels have one unit, stay as they are.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from quantizer.calibration import observing
from quantizer.calibration.solution import quantized_network
from quantizer.comparison.extents import (
    MAX_LOST,
    MIN_EFFECT,
    ChannelNoise,
    column_energy,
    effect_errors,
    ends_along,
)
from quantizer.config.roles import is_parameter, parameter_role
from quantizer.config.wording import first_names
from quantizer.graph.edits import by_channel, input_weights
from quantizer.nn.network import Network, Watchers
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.plan.floating import ancestors, input_values
from quantizer.plan.model import Key, Plan, TensorPlan
from quantizer.plan.readers import InputReaders, channel_names, input_readers
from quantizer.sources.batches import Batch, prefix_batch_errors
from quantizer.storage.deferred_tensor import loaded

LARGEST_EXPONENT = 24
"""Larger factors would make sums in float32 inexact."""
WIDE = (torch.float32, torch.bfloat16, torch.float64)
"""Dtypes in which powers of two change no digit."""
MIN_CODES = 8
"""A channel needs so many codes per standard deviation, an SQNR of 29 dB."""
_MIN_GAIN = 4
"""Channels are scaled if one of them gets so many times more codes."""
_MIN_VALUES = 64
"""The batches that are read have at least so many values of each channel, if there are."""
_MAX_BATCHES = 8
"""No more batches are read, because calibration reads all of them again."""


@dataclass(frozen=True)
class InputLevels:
    """What was decided about the channels of inputs.

    Args:
        exponents: the power of two that each channel is multiplied with, by the value.
        remarks: sentences for the user, each after its level of `logging`.
    """

    exponents: dict[str, list[int]]
    remarks: tuple[tuple[int, str], ...] = ()


@dataclass
class _Channels:
    """What is measured of the channels of one value.

    Args:
        readers: the layers that multiply them.
        bits: of the codes.
        low, high: [channels] ranges.
        noise: None before a batch.
    """

    readers: InputReaders
    bits: int
    low: Tensor
    high: Tensor
    noise: ChannelNoise | None = None

    def add(self, x: Tensor, y: Tensor, axis: int) -> None:
        """Add the float and the quantized values of a batch."""
        if not x.numel():
            return
        noise = ChannelNoise.of(x, y, axis)
        low, high = ends_along(x, axis)
        if self.noise is None:
            self.noise, self.low, self.high = noise, low, high
            return
        self.noise = self.noise.merged(noise)
        self.low = torch.minimum(self.low, low)
        self.high = torch.maximum(self.high, high)

    @property
    def own_codes(self) -> Tensor:
        """Return how many codes each channel would have per standard deviation on a scale of
        its own.
        """
        assert self.noise is not None
        highest = self.high.clamp(min=0)
        lowest = self.low.clamp(max=0)
        spans = highest - lowest
        steps = spans.double() / (2**self.bits - 1)
        codes: Tensor = self.noise.values.deviation / steps
        return codes

    @property
    def sizes(self) -> Tensor:
        """Return the largest magnitude of each channel."""
        return torch.maximum(self.low.abs(), self.high.abs())


def decide_input_levels(
    plan: Plan, batches: Iterable[Batch], *, can_scale: bool
) -> InputLevels:
    """Return the exponents of input channels, and sentences on those that stay coarse.

    Args:
        plan: of the network.
        batches: calibration data on the graph's device. They are read only if several channels
            of an input are quantized with one scale.
        can_scale: whether the device computes factors in float.

    Raises:
        DataError: the network cannot run a batch.
    """
    tensors, readers = _candidates(plan)
    if not readers:
        return InputLevels({})
    exponents: dict[str, list[int]] = {}
    remarks: list[tuple[int, str]] = []
    for channels in _measured(plan, tensors, readers, batches):
        if channels.noise is None:
            continue
        group = channels.readers.group
        columns = _weight_energies(plan, channels)
        effects, errors = effect_errors(channels.noise, columns)
        is_heard = effects >= MIN_EFFECT * effects.max()
        codes = channels.noise.codes_per_deviation
        if can_scale and _is_scalable(plan, channels.readers, readers):
            gain = channels.own_codes / codes
            is_helped = (codes < MIN_CODES) & (gain >= _MIN_GAIN)
            is_small = channels.sizes * _MIN_GAIN <= channels.sizes.max()
            if plan.graph.by_name[group.source].op == "input":
                # What a range clips is lost too, but no factor brings it back
                is_helped &= is_small
            is_helped |= is_small & (errors > MAX_LOST)
            if bool((is_helped & is_heard).any()):
                exponents[group.source] = _exponents(channels.sizes)
                codes = channels.own_codes
        is_coarse = (codes < MIN_CODES) & channels.noise.values.is_varying
        remarks += _remarks(channels.readers, codes, is_coarse, is_heard)
    if exponents:
        layers = [row.group.layers[0] for row in readers if row.group.source in exponents]
        text = _scaled_sentence(layers, exponents)
        remarks.insert(0, (logging.INFO, text))
    return InputLevels(exponents, tuple(remarks))


def _candidates(plan: Plan) -> tuple[dict[Key, TensorPlan], list[InputReaders]]:
    """Return the values of inputs that are quantized to integers of one scale, and the layers
    that multiply them.
    """
    graph = plan.graph
    names = input_values(graph)
    tensors = {}
    for key, tensor in plan.tensors.items():
        if is_parameter(tensor.role) or tensor.source not in names:
            continue
        spec = tensor.spec
        is_one = spec.dtype == "int" and spec.qscheme == "per_tensor"
        if is_one and not graph.by_name[tensor.source].is_join:
            tensors[key] = tensor
    if not tensors:
        return {}, []
    quantized = {tensor.source for tensor in tensors.values()}
    readers = []
    read: set[str] = set()
    for row in input_readers(graph):
        before = ancestors(graph, [row.group.source], names)
        if quantized & before:
            readers.append(row)
            read |= before
    # The others may come after the last layer that multiplies inputs, and are not computed
    tensors = {key: tensor for key, tensor in tensors.items() if tensor.source in read}
    return tensors, readers


def _is_scalable(plan: Plan, reading: InputReaders, readers: Sequence[InputReaders]) -> bool:
    """Return whether the weights of all layers that read the channels can take the factors."""
    group = reading.group
    others = [row for row in readers if row.group.source == group.source]
    if len(others) > 1:
        return False
    graph = plan.graph
    dtypes = [graph.by_name[group.source].dtype]
    for layer in group.layers:
        node = graph.by_name[layer]
        for key in input_weights(node):
            dtypes.append(graph.tensors[node.params[key]].dtype)
    return all(dtype in WIDE for dtype in dtypes)


def _measured(
    plan: Plan,
    tensors: dict[Key, TensorPlan],
    readers: Sequence[InputReaders],
    batches: Iterable[Batch],
) -> list[_Channels]:
    """Return the noise of the channels that layers read, if only inputs are quantized."""
    graph = plan.graph
    stop = 1 + max(graph.index[row.group.source] for row in readers)
    reached: dict[Key, TensorPlan] = {}
    for key, tensor in tensors.items():
        # Values that later nodes have reach none of the readers
        if graph.index[tensor.source] < stop:
            reached[key] = tensor
    part = replace(plan, tensors=reached, joins=())
    calibration = observing.create_observers(part)
    watching = observing.Watching(calibration)
    network = Network(graph)

    def advance(batch: Batch, watchers: Watchers) -> None:
        network.start(batch.args, batch.kwargs).advance(stop, watchers)

    first_batches = [*_few(batches, readers)]
    for number, batch in enumerate(first_batches):
        with prefix_batch_errors(number, batch), torch.no_grad():
            watching.observe(partial(advance, batch))
    quantized = quantized_network(graph, observing.observed_solution(calibration))
    measured = []
    for row in readers:
        bits = min(tensor.spec.bit_width for tensor in tensors.values())
        zeros = torch.zeros(row.group.channels)
        measured.append(_Channels(row, bits, zeros, zeros))
    for batch in first_batches:
        with torch.no_grad():
            _add_batch(measured, (network, quantized), batch, stop)
    return measured


def _few(batches: Iterable[Batch], readers: Sequence[InputReaders]) -> Iterator[Batch]:
    """Yield the first batches, until there are enough values of each channel. No loader
    overwrites their tensors.
    """
    least = min(row.positions for row in readers)
    count = 0
    for batch in islice(batches, _MAX_BATCHES):
        yield batch.stable()
        count += batch.size * least
        if count >= _MIN_VALUES:
            return


def _add_batch(
    measured: Iterable[_Channels], networks: tuple[Network, Network], batch: Batch, stop: int
) -> None:
    """Add the channels of one batch.

    Args:
        measured: added to.
        networks: the float network, and the one with quantized inputs.
        batch: of calibration data.
        stop: the index after the last node that has to run.
    """
    seen: list[dict[str, Tensor]] = []
    for network in networks:
        values: dict[str, Tensor] = {}
        watching = {}
        for row in measured:
            source = row.readers.group.source
            watching[source] = partial(values.__setitem__, source)
        network.start(batch.args, batch.kwargs).advance(stop, watching)
        seen.append(values)
    for row in measured:
        group = row.readers.group
        x, y = seen[0][group.source], seen[1][group.source]
        quantizers = networks[1].layers[group.layers[0]].quantizers
        if "input" in quantizers:
            y = cast(TensorQuantizer, quantizers["input"]).quantized_copy(y)
        row.add(x, y, group.axis)


def _weight_energies(plan: Plan, channels: _Channels) -> list[tuple[Tensor, Tensor]]:
    """Return for each layer the energy of each channel's weights, and that of their rounding.

    The rounding is that of the range of each row, or of all rows.
    """
    graph = plan.graph
    energies = []
    for layer in channels.readers.group.layers:
        node = graph.by_name[layer]
        for key in input_weights(node):
            weight = loaded(graph.tensors[node.params[key]]).detach()
            table = by_channel(node, weight).float()
            error = torch.zeros_like(table)
            tensor = plan.tensors.get((layer, parameter_role(key)))
            if tensor is not None and tensor.spec.dtype == "int" and not tensor.spec.has_groups:
                is_by_row = tensor.spec.qscheme == "per_channel"
                axes = (2, 3) if is_by_row else (0, 1, 2, 3)
                largest = table.abs().amax(axes, keepdim=True)
                largest_code = 2 ** (tensor.spec.bit_width - 1) - 1
                steps = largest / largest_code
                squares = steps.square() / 12
                error = squares.expand_as(table)
            energy = column_energy(table.square())
            energies.append((energy, column_energy(error)))
    return energies


def _exponents(sizes: Tensor) -> list[int]:
    """Return the exponent of each channel, after which all have sizes near 1. If all would get
    the same one, they stay as they are.
    """
    exponents = -torch.log2(sizes.double())
    exponents = torch.where(sizes > 0, exponents.round(), 0.0)
    exponents = exponents.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    if exponents.min() == exponents.max():
        return [0] * len(sizes)
    return [int(exponent) for exponent in exponents.tolist()]


def _scaled_sentence(layers: Sequence[str], exponents: dict[str, list[int]]) -> str:
    """Return a sentence on the values whose channels are scaled."""
    largest = 0
    for levels in exponents.values():
        largest = max(largest, *map(abs, levels))
    text = (
        f"channels read by {first_names(layers, 3)} have units too different for one "
        "scale: what comes before is computed in float"
    )
    if largest:
        text += (
            f", and they are multiplied by powers of two, up to 2^{largest}, which the weights "
            "take back"
        )
    return text


def _remarks(
    readers: InputReaders, codes: Tensor, is_coarse: Tensor, is_heard: Tensor
) -> Iterator[tuple[int, str]]:
    """Yield sentences on channels with few codes: a warning on those that have an effect, and a
    note on the others.
    """
    kinds = ((logging.WARNING, is_coarse & is_heard), (logging.INFO, is_coarse & ~is_heard))
    for level, mask in kinds:
        indices: list[int] = mask.nonzero().flatten().tolist()
        if not indices:
            continue
        channels = readers.channels_text(channel_names(indices))
        text = (
            f"fewer than {MIN_CODES} codes per standard deviation are left of {channels} "
            f"({float(codes[mask].min()):.2g} of the worst)"
        )
        if level == logging.WARNING:
            text += (
                ": their effect is lost or coarse. Subtract the mean and divide by the "
                "standard deviation in the model's forward, or give this input 16 bits"
            )
        yield level, text
