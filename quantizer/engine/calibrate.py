"""Runs the float network over the calibration data and shows each planned tensor to its observer; keeps no values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from quantizer.algorithms.bias_correction import ChannelMean, channel_axis
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.engine.parameter_remarks import dead_channels, saturated
from quantizer.engine.solution import Solution
from quantizer.errors import DataError, ModelError, QuantizerError, ResultError
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.observers import NegativeValuesError, NonFiniteError, ObservationError, Observer
from quantizer.plan.model import Key, Plan, TensorPlan
from quantizer.sources.batches import Batch

logger = logging.getLogger(__name__)

Watchers = Mapping[str, Callable[[Tensor], None]]


class Observable(Protocol):
    """A model that shows the values of its nodes to who watches them."""

    def observe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], watch: Watchers) -> Any:
        """Run once; each watched node's value goes to its watcher."""


@dataclass
class Calibration:
    """Observers by (layer, role), mean outputs of the layers to correct, and how many batches they have seen.

    Tensors with one source and one spec have one observer in common, such as a value that several layers read.
    """

    plan: Plan
    observers: dict[Key, Observer] = field(default_factory=dict)
    means: dict[str, ChannelMean] = field(default_factory=dict)
    batches: int = 0

    def state_dict(self) -> dict[str, Tensor]:
        """All statistics, keys `<layer>|<role>|<name>`; the role of mean outputs is "output"."""
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
            raise ResultError("the checkpoint is of another model or config", help="run without --resume")
        for where, tensors in parts.items():
            known[where].load_state_dict(tensors)

    def forget_after(self, batches: int) -> None:
        """Drop what was seen of a batch that broke off after the first `batches`."""
        for key, found in self._parts().items():
            if not is_parameter(key[1]):
                found.forget_after(batches)

    def without(self, layers: Collection[str]) -> Calibration:
        """Without the calibrated activations of these layers, which stay float."""
        tensors = self.plan.tensors
        kept = {key: tensor for key, tensor in tensors.items() if key[0] not in layers or not tensor.is_calibrated}
        observers = {key: observer for key, observer in self.observers.items() if key in kept}
        return replace(self, plan=replace(self.plan, tensors=kept), observers=observers)

    def _parts(self) -> dict[Key, Observer | ChannelMean]:
        """What has statistics to keep, each once; groups of weights have so many that they are found anew."""
        owners = {id(observer): key for key, observer in reversed(self.observers.items())}
        kept = {key: self.observers[key] for key in self.observers if owners[id(self.observers[key])] == key}
        observers = {key: found for key, found in kept.items() if found.spec.qscheme != "per_group"}
        return {**observers, **{(layer, "output"): mean for layer, mean in self.means.items()}}


def start(plan: Plan) -> Calibration:
    """Observers for all tensors of the plan whose scale stays; weights and biases are observed here, once.

    Raises:
        ModelError: NaN or Inf in a weight or a bias, whatever its format (layer and tensor are named).
    """
    for remark in saturated(plan):
        logger.warning("%s", remark)
    nodes = plan.graph.by_name
    calibration = Calibration(plan, means={name: ChannelMean(channel_axis(nodes[name])) for name in plan.corrected})
    shared: dict[tuple[str, QuantizationSpec], Observer] = {}
    for key, tensor in plan.tensors.items():
        if is_parameter(tensor.role):
            parameter = plan.graph.tensors[nodes[tensor.layer].params[parameter_name(tensor.role)]].detach()
            with _located(tensor, ModelError):
                if tensor.spec.is_scaled:
                    calibration.observers[key] = Observer(tensor.spec)
                    calibration.observers[key].observe(parameter)  # refuses NaN and infinity itself
                else:
                    check_finite(parameter)
        elif tensor.is_calibrated:
            calibration.observers[key] = shared.setdefault((tensor.source, tensor.spec), Observer(tensor.spec))
    for remark in dead_channels(calibration.observers):
        logger.warning("%s", remark)
    return calibration


def run(
    calibration: Calibration,
    network: Observable,
    batches: Iterable[Batch],
    after_batch: Callable[[Calibration], None] | None = None,
) -> None:
    """Observe every batch; `after_batch` is called between batches, for progress and checkpoints.

    A plan that needs no data may be given no batches; tensors without a scale to find are looked at all the same.

    Raises:
        DataError: no batch though the plan needs data, or NaN or Inf in a tensor (layer and batch are named).
    """
    watchers = _watchers(calibration)
    for batch in batches:
        try:
            network.observe(batch.args, batch.kwargs, watchers)
            calibration.batches += 1
        except BaseException as error:
            calibration.forget_after(calibration.batches)
            if isinstance(error, DataError):
                raise DataError(f"batch {calibration.batches}: {error.message}", help=error.help) from error
            raise
        if after_batch is not None:
            after_batch(calibration)
    if not calibration.batches and calibration.plan.needs_data:
        raise DataError("the calibration data has no batches", help="check --data and --subset_len")


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


Watch = Callable[[Tensor], None]


def _watchers(calibration: Calibration) -> Watchers:
    """Who looks at each node's value: every observer once, and where there is none, whether it is finite."""
    watched: dict[str, dict[int, tuple[TensorPlan, Watch]]] = {name: {} for name in calibration.means}
    for key, tensor in calibration.plan.tensors.items():
        if not is_parameter(tensor.role):
            observer = calibration.observers.get(key)
            look = check_finite if observer is None else observer.observe
            watched.setdefault(tensor.source, {}).setdefault(id(observer), (tensor, look))
    return {name: _watcher([*looks.values()], calibration.means.get(name)) for name, looks in watched.items()}


def _watcher(looks: list[tuple[TensorPlan, Watch]], mean: ChannelMean | None) -> Watch:
    def watch(value: Tensor) -> None:
        for tensor, look in looks:
            with _located(tensor, DataError):
                look(value)
        if mean is not None:
            mean.observe(value)

    return watch


class _located:  # noqa: N801 - reads as a verb: with _located(...)
    """Adds the tensor's layer to what an observer finds wrong."""

    def __init__(self, tensor: TensorPlan, error: type[QuantizerError]) -> None:
        self.tensor, self.error = tensor, error

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, ObservationError):
            where = f"{self.tensor.role} of {self.tensor.layer}"
            signs = isinstance(error, NegativeValuesError)
            help_ = "make it signed, or asymmetric" if signs else "check the data and the weights"
            raise self.error(f"{where}: {error}", help=f"{help_}, or leave this tensor float") from error


def solution(calibration: Calibration) -> Solution:
    """Scale and zero point of every planned tensor; 1 and 0 for those that have none."""
    tensors = {}
    for key, planned in calibration.plan.tensors.items():
        observer = calibration.observers.get(key)
        tensor = QuantizedTensor(planned.spec)
        tensors[key] = tensor if observer is None else tensor.at(observer.qparams())
    return Solution(tensors)
