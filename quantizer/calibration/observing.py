"""Runs the float network over the calibration data and shows each planned tensor to its
observer. Observers keep statistics, and nothing keeps the values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.calibration.statistics import ChannelMean, channel_axis, warn_of_saturation
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.config.wording import first_names
from quantizer.errors import DataError, ModelError, QuantizerError, ResultError
from quantizer.layerwise.sequential_runner import no_batches
from quantizer.nn.network import Watchers
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.observers import (
    NegativeValuesError,
    ObservationError,
    Observer,
    find_ranges,
    require_finite,
)
from quantizer.plan.joining.tied_scales import tied_layers, tied_steps
from quantizer.plan.model import Key, Plan, TensorPlan
from quantizer.plan.readers import useful_magnitude
from quantizer.sources.batches import Batch, prefix_batch_errors
from quantizer.storage.deferred_tensor import deferred_like

if TYPE_CHECKING:
    from quantizer.observers.device_batch import DeviceBatch

logger = logging.getLogger(__name__)


DISTRIBUTION = QuantizationSpec(symmetric=False, statistic="pooled")
"""The spec of the histogram of all values of a tensor, for any spec of the tensor."""
_RESTART = "run without <--resume>"
_Watch = tuple[TensorPlan, Observer | None, Observer | None, float | None]
"""A tensor of a plan, its observer, one of the same values, and a bound, if there are any.
Beyond the bound the readers of the tensor do the same for all magnitudes.
"""


class Observable(Protocol):
    """A model that shows the values of its nodes to watchers."""

    def observe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], watch: Watchers) -> Any:
        """Run, show each watched node's value to its watcher, and return the output."""


@dataclass
class Calibration:
    """The observers of a plan's tensors, and the mean outputs of layers whose biases are
    corrected.

    Tensors with the same source and spec share one observer, such as a value that several
    layers read.

    Args:
        plan: whose tensors are observed.
        observers: by (layer, role); those of parameters have observed them.
        histograms: the distribution of a tensor's values over all batches, by
            `TensorPlan.place`, for tensors whose observers have no histogram.
        means: the mean output of each channel, by layer.
        batches: how many batches were observed.
    """

    plan: Plan
    observers: dict[Key, Observer] = field(default_factory=dict)
    histograms: dict[str, Observer] = field(default_factory=dict)
    means: dict[str, ChannelMean] = field(default_factory=dict)
    batches: int = 0

    def state_dict(self) -> dict[str, Tensor]:
        """Return all statistics, with keys `<layer>|<role>|<name>`.

        The role is "output" for mean outputs and "histogram" for histograms.
        """
        state = {}
        for (layer, role), part in self._parts().items():
            for name, tensor in part.state_dict().items():
                state[f"{layer}|{role}|{name}"] = tensor
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the statistics that `state_dict` has returned.

        Raises:
            ResultError: the statistics are of other tensors.
        """
        states: dict[Key, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            layer, role, statistic = name.rsplit("|", 2)
            part_state = states.setdefault((layer, role), {})
            part_state[statistic] = tensor
        parts = self._parts()
        if states.keys() - parts.keys():
            raise ResultError("the checkpoint is of another model or config", help=_RESTART)
        for key, tensors in states.items():
            part = parts[key]
            part.load_state_dict(tensors)
            if isinstance(part, ChannelMean):
                shape = self.plan.graph.by_name[key[0]].shape
                if shape and part.batches and len(tensors["sum"]) != shape[part.ch_axis]:
                    text = f"the checkpoint has another number of channels of {key[0]}"
                    raise ResultError(text, help=_RESTART)
            else:
                self._expect_shape(key, part)

    def _expect_shape(self, key: Key, observer: Observer) -> None:
        """Check the statistics of an activation against the shape of its value in the graph."""
        tensor = self.plan.tensors.get(key)
        if tensor is None or not tensor.is_calibrated:
            return
        shape = self.plan.graph.by_name[tensor.source].shape
        if shape is not None:
            # Dynamic sizes, such as that of the batch, count as 1
            sizes = [1 if size is None else size for size in shape]
            observer.expect(tuple(sizes))

    def merge(self, other: Calibration) -> None:
        """Merge the statistics of another calibration of this plan, which has observed later
        batches.
        """
        for key, observer in self.calibrated.items():
            observer.merge(other.calibrated[key])
        for layer, mean in self.means.items():
            other_mean = other.means[layer]
            mean.merge(other_mean)
        self.batches += other.batches

    def fresh(self) -> Calibration:
        """Return a calibration that has observed nothing and has no parameters.

        It has new observers of activations and new means. Tensors that share an observer still
        share one.
        """
        new = {id(observer): Observer(observer.spec) for observer in self.calibrated.values()}
        observers = {}
        for key, observer in self.observers.items():
            if id(observer) in new:
                observers[key] = new[id(observer)]
        histograms = {place: new[id(observer)] for place, observer in self.histograms.items()}
        means = {layer: ChannelMean(mean.ch_axis) for layer, mean in self.means.items()}
        return Calibration(self.plan, observers, histograms, means)

    def unseen(self) -> Calibration:
        """Return the calibration as it was before the first batch.

        It has the `fresh` observers of activations, and the observers of parameters.
        """
        fresh = self.fresh()
        observers = {**self.observers, **fresh.observers}
        return replace(fresh, observers=observers)

    def forget_after(self, batches: int) -> None:
        """Drop the statistics of a batch that failed, and keep those of the first `batches`."""
        for (_, role), part in self._parts().items():
            if not is_parameter(role):
                part.forget_after(batches)

    def without(self, layers: Collection[str]) -> Calibration:
        """Return the calibration without the activations of these layers, which stay float."""
        tensors = {}
        places = set()
        for key, tensor in self.plan.tensors.items():
            if tensor.is_calibrated and key[0] in layers:
                continue
            tensors[key] = tensor
            if tensor.is_calibrated:
                places.add(tensor.place)
        observers = {
            key: observer for key, observer in self.observers.items() if key in tensors
        }
        histograms = {
            place: observer for place, observer in self.histograms.items() if place in places
        }
        plan = replace(self.plan, tensors=tensors)
        return replace(self, plan=plan, observers=observers, histograms=histograms)

    @property
    def calibrated(self) -> dict[Key, Observer]:
        """Return the observers of activations, each once, and their histograms."""
        observers = {
            key: observer
            for key, observer in self._unique_observers().items()
            if not is_parameter(key[1])
        }
        return {**observers, **self._histograms()}

    def _parts(self) -> dict[Key, Observer | ChannelMean]:
        """Return the observers and means whose statistics are stored, each once.

        Groups of weights have too many scales to store: they are observed again when a
        calibration is resumed.
        """
        parts: dict[Key, Observer | ChannelMean] = {
            key: observer
            for key, observer in self._unique_observers().items()
            if not observer.spec.has_groups
        }
        parts |= self._histograms()
        for layer, mean in self.means.items():
            parts[layer, "output"] = mean
        return parts

    def _unique_observers(self) -> dict[Key, Observer]:
        """Return each observer once, by the first key that has it."""
        keys: dict[int, Key] = {}
        for key, observer in self.observers.items():
            keys.setdefault(id(observer), key)
        return {key: self.observers[key] for key in keys.values()}

    def _histograms(self) -> dict[Key, Observer]:
        return {(place, "histogram"): observer for place, observer in self.histograms.items()}


def create_observers(plan: Plan) -> Calibration:
    """Return the observers of all tensors of the plan with static scales.

    The observers of weights and biases have already observed the values.

    Raises:
        ModelError: NaN or Inf in a weight or a bias, in any format (layer and tensor are
            named).
    """
    warn_of_saturation(plan)
    means = {}
    for name in plan.corrected:
        ch_axis = channel_axis(plan.graph.by_name[name])
        means[name] = ChannelMean(ch_axis)
    calibration = Calibration(plan, means=means)
    shared: dict[tuple[str, QuantizationSpec], Observer] = {}
    for key, tensor in plan.tensors.items():
        if is_parameter(tensor.role):
            parameter = plan.parameter(key).detach()
            with _located(tensor, ModelError):
                observer = _parameter_observer(parameter, tensor.spec)
            if observer is not None:
                calibration.observers[key] = observer
        elif tensor.is_calibrated:
            new = Observer(tensor.spec.stored)
            observer = shared.setdefault((tensor.place, tensor.spec), new)
            calibration.observers[key] = observer
            if not observer.has_histogram and not tensor.spec.is_dynamic:
                histogram = Observer(DISTRIBUTION)
                calibration.histograms.setdefault(tensor.place, histogram)
    _warn_of_zeros(calibration.observers)
    return calibration


def _parameter_observer(parameter: Tensor, spec: QuantizationSpec) -> Observer | None:
    """Return an observer that has observed a parameter; None if it has no scale.

    Raises:
        NonFiniteError: NaN or Inf in the parameter.
    """
    if not spec.is_scaled:
        require_finite(parameter)
        return None
    observer = Observer(spec)
    observer.observe(parameter)
    # The statistics of a parameter that is on disk go to disk, too
    observer.set_aside(partial(deferred_like, parameter))
    return observer


def _warn_of_zeros(observers: Mapping[Key, Observer]) -> None:
    """Warn of weight tensors or channels that are all zero, which have the scale 1."""
    layers = []
    for (layer, role), observer in observers.items():
        if role == "weights" and observer.spec.qscheme in ("per_tensor", "per_channel"):
            zero = (observer.low == 0) & (observer.high == 0)
            if zero.any():
                count = int(zero.sum())
                layers.append(f"{layer} ({count} of {zero.numel()} scales)")
    if layers:
        logger.warning(
            "the scale of weights that are all zero is 1, and they stay zero: %s",
            first_names(layers),
        )


def observe_batches(
    calibration: Calibration, network: Observable, batches: Iterable[Batch]
) -> None:
    """Observe every batch.

    Tensors without a static scale are checked for NaN and Inf.

    Raises:
        DataError: no batch though the plan needs data, or NaN or Inf in a tensor (layer and
            batch are named).
    """
    watching = Watching(calibration)
    for batch in batches:
        try:
            watching.observe(partial(network.observe, batch.args, batch.kwargs))
            calibration.batches += 1
        except BaseException as error:
            # Ctrl-C as well: what is stored then must end with a whole batch
            calibration.forget_after(calibration.batches)
            if isinstance(error, DataError):
                with prefix_batch_errors(calibration.batches, batch):
                    raise
            raise
    require_batches(calibration)


def require_batches(calibration: Calibration) -> None:
    """Check that at least one batch was observed if the plan needs data.

    Raises:
        DataError: there was none.
    """
    if not calibration.batches and calibration.plan.needs_data:
        raise no_batches()


class Watching:
    """Shows the values of nodes to the observers of a calibration, each value once.

    A value without an observer is checked for NaN and Inf. What is on a device is read there,
    and nothing waits for it until the batch ends.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._observers = calibration.calibrated.values()
        self._device_batch: DeviceBatch | None = None
        # Whether to look at values one by one, on a device too
        self._at_once = False
        # By node, observer and channels, as several layers that read a value may share an
        # observer
        watched: dict[str, dict[object, _Watch]] = {layer: {} for layer in calibration.means}
        histograms = dict(calibration.histograms)
        for key, tensor in calibration.plan.tensors.items():
            if is_parameter(tensor.role):
                continue
            observer = calibration.observers.get(key)
            companion = None
            if observer is not None:
                companion = histograms.pop(tensor.place, None)
            bound = useful_magnitude(calibration.plan.graph, tensor.source, tensor.spec)
            watches = watched.setdefault(tensor.source, {})
            watch = (tensor, observer, companion, bound)
            watches.setdefault((id(observer), tensor.channels), watch)
        self._watchers: Watchers = {
            name: partial(self._show, list(watches.values()), calibration.means.get(name))
            for name, watches in watched.items()
        }

    def observe(self, run: Callable[[Watchers], object]) -> None:
        """Let a network run over a batch with the watchers, and find what follows from it.

        Raises:
            DataError: NaN or Inf in a tensor, which is named.
        """
        self._device_batch = None
        try:
            run(self._watchers)
            if self._device_batch is not None:
                self._device_batch.finish()
        except ObservationError:
            # Only on a device: the first value that is wrong is still to be found
            self._at_once = True
            run(self._watchers)
            raise
        find_ranges(self._observers)

    def _show(self, watches: Iterable[_Watch], mean: ChannelMean | None, value: Tensor) -> None:
        """Show a node's value to all who watch it, and to the mean of its channels."""
        look: Callable[[Tensor], None] = require_finite
        observe: Callable[..., None] = Observer.observe
        batch = None
        if not (value.is_cpu or self._at_once):
            # Only runs on a device need it
            from quantizer.observers.device_batch import DeviceBatch

            batch = self._device_batch = self._device_batch or DeviceBatch()
            look = batch.require_finite
            observe = batch.observe
        for tensor, observer, companion, bound in watches:
            with _located(tensor, DataError):
                shown = value
                if bound is not None:
                    look(value)
                    shown = value.clamp(-bound, bound)
                if tensor.channels is not None:
                    shown = shown.narrow(*tensor.channels)
                if observer is None:
                    look(shown)
                else:
                    observe(observer, shown, companion)
        if mean is not None and batch is not None:
            batch.add(mean.sum_of(value), partial(mean.add, values=value.numel()))
        elif mean is not None:
            mean.observe(value)


@contextmanager
def _located(tensor: TensorPlan, error_type: type[QuantizerError]) -> Iterator[None]:
    """Raise an error that names the tensor's layer for the errors of an observer."""
    try:
        yield
    except ObservationError as reason:
        remedy = "check the data and the weights"
        if isinstance(reason, NegativeValuesError):
            remedy = "make it signed, or asymmetric"
        raise error_type(
            f"{tensor.role} of {tensor.layer}: {reason}",
            help=f"{remedy}, or leave this tensor float",
        ) from reason


def observed_solution(calibration: Calibration) -> Solution:
    """Return scale and zero point of every planned tensor; 1 and 0 for those that have none."""
    plan = calibration.plan
    observers = calibration.observers
    groups = tied_layers(plan.graph, plan.specs)
    steps = tied_steps(groups, lambda layer: observers[layer, "weights"])
    tensors = {}
    for key, planned in plan.tensors.items():
        tensor = QuantizedTensor(planned.spec)
        layer, role = key
        step = steps.get(layer) if role == "weights" else None
        observer = observers.get(key)
        if observer is not None:
            tensor = tensor.with_qparams(observer.qparams(step))
        if is_parameter(role) and planned.spec.has_groups:
            # The scales of groups are large: those of a parameter on disk go to disk, too
            parameter = plan.parameter(key)
            tensor = tensor.mapped(partial(deferred_like, parameter))
        tensors[key] = tensor
    return Solution(tensors)
