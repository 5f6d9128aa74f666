"""Runs the float network over the calibration data and shows each planned tensor to its observer; keeps no values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantizer.algorithms.channel_mean import ChannelMean, channel_axis
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.engine.solution import Key, Solution
from quantizer.errors import DataError, ModelError, QuantizerError, ResultError
from quantizer.nn.network import Network, observe
from quantizer.observers import NegativeValuesError, ObservationError, Observer
from quantizer.plan.model import Plan, TensorPlan
from quantizer.sources.batches import Batch


@dataclass
class Calibration:
    """Observers by (layer, role), mean outputs of the layers to correct, and how many batches they have seen."""

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

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
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

    def _parts(self) -> dict[Key, Observer | ChannelMean]:
        return {**self.observers, **{(layer, "output"): mean for layer, mean in self.means.items()}}


def start(plan: Plan, network: Network) -> Calibration:
    """Observers for all integer tensors of the plan; weights and biases are observed here, once."""
    nodes = plan.graph.by_name
    calibration = Calibration(plan, means={name: ChannelMean(channel_axis(nodes[name])) for name in plan.corrected})
    for key, tensor in plan.tensors.items():
        if tensor.spec.dtype != "int":
            continue
        observer = Observer(tensor.spec)
        calibration.observers[key] = observer
        if is_parameter(tensor.role):
            parameter = network.layers[tensor.layer].get_parameter(parameter_name(tensor.role))
            with _located(tensor, ModelError):
                observer.observe(parameter.detach())
    return calibration


def run(
    calibration: Calibration,
    network: Network,
    batches: Iterable[Batch],
    after_batch: Callable[[Calibration], None] | None = None,
) -> None:
    """Observe every batch; `after_batch` is called between batches, for progress and checkpoints.

    Raises:
        DataError: no batch at all, or NaN or Inf in a tensor (layer and batch are named).
    """
    watchers = _watchers(calibration)
    for batch in batches:
        try:
            observe(network, batch.args, batch.kwargs, watchers)
            calibration.batches += 1
        except BaseException as error:
            calibration.forget_after(calibration.batches)
            if isinstance(error, DataError):
                raise DataError(f"batch {calibration.batches}: {error.message}", help=error.help) from error
            raise
        if after_batch is not None:
            after_batch(calibration)
    if not calibration.batches:
        raise DataError("the calibration data has no batches", help="check --data and --subset_len")


def _watchers(calibration: Calibration) -> dict[str, Callable[[Tensor], None]]:
    """Who looks at each node's value."""
    watched: dict[str, list[tuple[TensorPlan, Observer]]] = {name: [] for name in calibration.means}
    for key, observer in calibration.observers.items():
        tensor = calibration.plan.tensors[key]
        if not is_parameter(tensor.role):
            watched.setdefault(tensor.source, []).append((tensor, observer))
    return {name: _watcher(pairs, calibration.means.get(name)) for name, pairs in watched.items()}


def _watcher(pairs: list[tuple[TensorPlan, Observer]], mean: ChannelMean | None) -> Callable[[Tensor], None]:
    def watch(value: Tensor) -> None:
        for tensor, observer in pairs:
            with _located(tensor, DataError):
                observer.observe(value)
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
            help_ = "set signed to true" if isinstance(error, NegativeValuesError) else "check the data and the weights"
            raise self.error(f"{where}: {error}", help=f"{help_}, or leave this tensor float") from error


def solution(calibration: Calibration) -> Solution:
    """Scale and zero point of every planned tensor; floating-point formats have scale 1."""
    tensors = {}
    for key, planned in calibration.plan.tensors.items():
        observer = calibration.observers.get(key)
        if observer is None:
            tensors[key] = planned.spec, torch.ones(()), torch.zeros((), dtype=torch.int32)
        else:
            found = observer.qparams()
            tensors[key] = planned.spec, found.scale, found.zero_point
    return Solution(tensors)
