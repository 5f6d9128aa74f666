"""Runs the float network over the calibration data and shows each planned tensor to its
observer; keeps no values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from quantizer.algorithms.bias_correction import ChannelMean, channel_axis
from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.config.wording import shortened
from quantizer.errors import DataError, ModelError, QuantizerError, ResultError
from quantizer.nn.execution import Watchers
from quantizer.nn.inplace import ModuleTree
from quantizer.nn.network import Network
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.formats import format_named
from quantizer.observers import (
    NegativeValuesError,
    NonFiniteError,
    ObservationError,
    Observer,
    find_ranges,
)
from quantizer.plan.model import Key, Plan, TensorPlan
from quantizer.sources.batches import Batch
from quantizer.storage.deferred_tensor import beside

logger = logging.getLogger(__name__)

Watch = Callable[[Tensor], None]


DISTRIBUTION = QuantizationSpec(symmetric=False, statistic="pooled")
"""What all values of a tensor are observed with, whatever its own spec."""
Observable = Network | ModuleTree
"""A model that shows the values of its nodes to who watches them."""


@dataclass
class Calibration:
    """Observers by (layer, role), mean outputs of the layers to correct, and how many batches
    they have seen.

    Tensors with one source and one spec have one observer in common, such as a value that
    several layers read. Where it keeps ranges alone, `histograms` has the distribution of the
    source's values, over all batches.
    """

    plan: Plan
    observers: dict[Key, Observer] = field(default_factory=dict)
    histograms: dict[str, Observer] = field(default_factory=dict)
    means: dict[str, ChannelMean] = field(default_factory=dict)
    batches: int = 0

    def state_dict(self) -> dict[str, Tensor]:
        """All statistics, keys `<layer>|<role>|<name>`; mean outputs have the role "output",
        histograms "histogram".
        """
        return {
            f"{layer}|{role}|{name}": tensor
            for (layer, role), found in self._parts().items()
            for name, tensor in found.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from stored statistics.

        Raises:
            ResultError: they are of other tensors.
        """
        parts: dict[Key, dict[str, Tensor]] = {}
        for key, tensor in state.items():
            layer, role, name = key.rsplit("|", 2)
            parts.setdefault((layer, role), {})[name] = tensor
        known = self._parts()
        if set(parts) - set(known):
            raise ResultError(
                "the checkpoint is of another model or config", help="run without --resume"
            )
        for where, tensors in parts.items():
            found, shape = known[where], self._shape_of(where)
            found.load_state_dict(tensors)
            if isinstance(found, ChannelMean):
                own = self.plan.graph.by_name[where[0]].shape
                if own and found.batches and len(tensors["sum"]) != own[found.ch_axis]:
                    raise ResultError(
                        f"the checkpoint has other channels of {where[0]}",
                        help="run without --resume",
                    )
            elif shape is not None:
                found.expect(shape)

    def merge(self, other: Calibration) -> None:
        """Take in what another calibration of this plan has seen after it."""
        for key, observer in self.calibrated.items():
            observer.merge(other.calibrated[key])
        for layer, mean in self.means.items():
            mean.merge(other.means[layer])
        self.batches += other.batches

    def fresh(self) -> Calibration:
        """Another one of activations and means alone, which has seen nothing."""
        observers = {id(each): Observer(each.spec) for each in self.calibrated.values()}
        shared = {
            key: observers[id(each)]
            for key, each in self.observers.items()
            if id(each) in observers
        }
        histograms = {name: observers[id(each)] for name, each in self.histograms.items()}
        means = {layer: ChannelMean(mean.ch_axis) for layer, mean in self.means.items()}
        return Calibration(self.plan, shared, histograms, means)

    def unseen(self) -> Calibration:
        """Return the same calibration without batches: with new observers of activations."""
        fresh = self.fresh()
        observers = {**self.observers, **fresh.observers}
        return replace(fresh, observers=observers)

    def forget_after(self, batches: int) -> None:
        """Drop what was seen of a batch that broke off after the first `batches`."""
        for key, found in self._parts().items():
            if not is_parameter(key[1]):
                found.forget_after(batches)

    def without(self, layers: Collection[str]) -> Calibration:
        """Without the calibrated activations of these layers, which stay float."""
        tensors = self.plan.tensors
        kept = {
            key: tensor
            for key, tensor in tensors.items()
            if key[0] not in layers or not tensor.is_calibrated
        }
        observers = {key: observer for key, observer in self.observers.items() if key in kept}
        sources = {tensor.place for tensor in kept.values() if tensor.is_calibrated}
        histograms = {
            name: observer for name, observer in self.histograms.items() if name in sources
        }
        return replace(
            self,
            plan=replace(self.plan, tensors=kept),
            observers=observers,
            histograms=histograms,
        )

    def _shape_of(self, key: Key) -> tuple[int, ...] | None:
        """The shape of the value that is observed, as far as the graph has one; the batch
        counts as 1.
        """
        tensor = self.plan.tensors.get(key)
        node = (
            self.plan.graph.by_name[tensor.source]
            if tensor is not None and tensor.is_calibrated
            else None
        )
        return (
            None
            if node is None or node.shape is None
            else tuple(1 if size is None else size for size in node.shape)
        )

    @property
    def calibrated(self) -> dict[Key, Observer]:
        """The observers of activations, each once, and their histograms."""
        found = {
            id(observer): key
            for key, observer in reversed(self.observers.items())
            if not is_parameter(key[1])
        }
        return {
            key: self.observers[key] for key in reversed(found.values())
        } | self._histograms()

    def _parts(self) -> dict[Key, Observer | ChannelMean]:
        """What has statistics to keep, each once; groups of weights have so many that they are
        found anew.
        """
        owners = {id(observer): key for key, observer in reversed(self.observers.items())}
        kept = {
            key: self.observers[key]
            for key in self.observers
            if owners[id(self.observers[key])] == key
        }
        observers = {
            key: found for key, found in kept.items() if found.spec.qscheme != "per_group"
        }
        means = {(layer, "output"): mean for layer, mean in self.means.items()}
        return {**observers, **self._histograms(), **means}

    def _histograms(self) -> dict[Key, Observer]:
        return {(source, "histogram"): observer for source, observer in self.histograms.items()}


def start(plan: Plan) -> Calibration:
    """Observers for all tensors of the plan whose scale stays; weights and biases are observed
    here, once.

    Raises:
        ModelError: NaN or Inf in a weight or a bias, whatever its format (layer and tensor are
            named).
    """
    _warn_of_saturation(plan)
    nodes = plan.graph.by_name
    calibration = Calibration(
        plan, means={name: ChannelMean(channel_axis(nodes[name])) for name in plan.corrected}
    )
    shared: dict[tuple[str, QuantizationSpec], Observer] = {}
    for key, tensor in plan.tensors.items():
        if is_parameter(tensor.role):
            parameter = plan.parameter(key).detach()
            with _located(tensor, ModelError):
                if tensor.spec.is_scaled:
                    calibration.observers[key] = Observer(tensor.spec)
                    # Refuses NaN and infinity itself
                    calibration.observers[key].observe(parameter)
                    calibration.observers[key].set_aside(partial(beside, parameter))
                else:
                    check_finite(parameter)
        elif tensor.is_calibrated:
            calibration.observers[key] = shared.setdefault(
                (tensor.place, tensor.spec), Observer(tensor.spec)
            )
            if not calibration.observers[key].has_histogram:
                calibration.histograms.setdefault(tensor.place, Observer(DISTRIBUTION))
    _warn_of_zeros(calibration.observers)
    return calibration


def _warn_of_saturation(plan: Plan) -> None:
    """Of parameters with values that a cast without a scale cuts to the largest of its
    format.
    """
    for tensor in plan.tensors.values():
        if is_parameter(tensor.role) and not tensor.spec.is_scaled:
            value = plan.parameter((tensor.layer, tensor.role))
            largest, dtype = format_named(tensor.spec.dtype).largest, tensor.spec.dtype
            if count := int((value.isfinite() & (value.abs() > largest)).sum()):
                logger.warning(
                    f"{tensor.role} of {tensor.layer}: {count} of {value.numel()} values are "
                    f"beyond {largest:g}, the largest of {dtype}, and become it; bfloat16 has "
                    "float32's range"
                )


def _warn_of_zeros(observers: Mapping[Key, Observer]) -> None:
    """Of weights, per tensor or per channel, with scales that are for nothing but zeros."""
    found = []
    for (layer, role), observer in observers.items():
        if role == "weights" and observer.spec.qscheme in ("per_tensor", "per_channel"):
            zero = (observer.low == 0) & (observer.high == 0)
            if zero.any():
                found.append(f"{layer} ({int(zero.sum())} of {zero.numel()} scales)")
    if found:
        logger.warning(
            "where all weights of a scale are zero it is 1, and they stay zero: %s",
            shortened(found),
        )


def run(calibration: Calibration, network: Observable, batches: Iterable[Batch]) -> None:
    """Observe every batch.

    A plan that needs no data may be given no batches; tensors without a scale to find are
    looked at all the same.

    Raises:
        DataError: no batch though the plan needs data, or NaN or Inf in a tensor (layer and
            batch are named).
    """
    watching = watchers(calibration)
    for batch in batches:
        try:
            network.observe(batch.args, batch.kwargs, watching)
            find_ranges(calibration.calibrated.values())
            calibration.batches += 1
        except BaseException as error:
            calibration.forget_after(calibration.batches)
            if isinstance(error, DataError):
                raise DataError(
                    f"batch {calibration.batches}: {error.message}", help=error.help
                ) from error
            raise
    require_batches(calibration)


def require_batches(calibration: Calibration) -> None:
    """Refuse a calibration without data where the plan needs some.

    Raises:
        DataError: so it is.
    """
    if not calibration.batches and calibration.plan.needs_data:
        raise DataError(
            "the calibration data has no batches", help="check --data and --subset_len"
        )


def check_finite(value: Tensor) -> None:
    """Refuse NaN and infinity.

    Raises:
        NonFiniteError: how many there are.
    """
    if not value.is_floating_point() or not value.numel():
        return
    low, high = value.aminmax()
    if not bool(low.isfinite() & high.isfinite()):
        raise NonFiniteError(int(value.isnan().sum()), int(value.isinf().sum()), value.numel())


def watchers(calibration: Calibration) -> Watchers:
    """Who looks at each node's value: every observer once, and where there is none, whether it
    is finite.
    """
    watched: dict[str, dict[int, tuple[TensorPlan, Watch]]] = {
        name: {} for name in calibration.means
    }
    histograms = dict(calibration.histograms)
    for key, tensor in calibration.plan.tensors.items():
        if not is_parameter(tensor.role):
            observer = calibration.observers.get(key)
            look = check_finite if observer is None else observer.observe
            if observer is not None and tensor.place in histograms:
                look = partial(observer.observe, beside=histograms.pop(tensor.place))
            if tensor.channels is not None:
                look = partial(_look_at_channels, look, *tensor.channels)
            watched.setdefault(tensor.source, {}).setdefault(id(observer), (tensor, look))
    means = calibration.means
    return {
        name: partial(_show, [*looks.values()], means.get(name))
        for name, looks in watched.items()
    }


def _look_at_channels(look: Watch, axis: int, first: int, length: int, value: Tensor) -> None:
    look(value.narrow(axis, first, length))


def _show(
    looks: list[tuple[TensorPlan, Watch]], mean: ChannelMean | None, value: Tensor
) -> None:
    for tensor, look in looks:
        with _located(tensor, DataError):
            look(value)
    if mean is not None:
        mean.observe(value)


@contextmanager
def _located(tensor: TensorPlan, error: type[QuantizerError]) -> Iterator[None]:
    """Adds the tensor's layer to what an observer finds wrong."""
    try:
        yield
    except ObservationError as found:
        signs = isinstance(found, NegativeValuesError)
        remedy = "make it signed, or asymmetric" if signs else "check the data and the weights"
        where = f"{tensor.role} of {tensor.layer}"
        raise error(
            f"{where}: {found}", help=f"{remedy}, or leave this tensor float"
        ) from found


def solution(calibration: Calibration) -> Solution:
    """Scale and zero point of every planned tensor; 1 and 0 for those that have none."""
    tensors = {}
    for key, planned in calibration.plan.tensors.items():
        observer = calibration.observers.get(key)
        tensor = QuantizedTensor(planned.spec)
        tensors[key] = tensor if observer is None else tensor.at(observer.qparams())
        if is_parameter(key[1]) and planned.spec.qscheme == "per_group":
            tensors[key] = tensors[key].mapped(partial(beside, calibration.plan.parameter(key)))
    return Solution(tensors)
