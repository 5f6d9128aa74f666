"""Make inputs for which the activations of a model have the statistics of its batch norms."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from quantizer.errors import DataError
from quantizer.sources.batches import Batch
from quantizer.sources.module_state import preserve_module_state
from quantizer.sources.user_code import user_errors
from quantizer.storage.deferred_tensor import keep_loaded

STEPS = 50
"""Steps of Adam for each batch. More steps lower the distance, and no more the loss of
quantization.
"""
LEARNING_RATE = 0.2
"""Of the first step, relative to the deviation of the noise; it falls to 0 along a cosine."""
_GAINS = tuple(2.0**exponent for exponent in range(-8, 11))
_OFFSETS = (0.0, 1.0, 2.0, -1.0, -2.0)
"""The deviations of noise that are tried, and its means as multiples of them. Inputs of models
have values such as 0 to 1, -2 to 2 or 0 to 255.
"""
_SAMPLES_TO_SCALE = 2


def trained_batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Return the batch norms with statistics that training has changed.

    Before training, means are 0 and variances 1.
    """
    layers: list[_BatchNorm] = []
    for layer in module.modules():
        if not isinstance(layer, _BatchNorm) or layer.running_mean is None:
            continue
        assert layer.running_var is not None
        if layer.running_mean.any() or (layer.running_var != 1).any():
            layers.append(layer)
    return layers


@dataclass(frozen=True)
class Scaling:
    """How standard normal noise becomes first inputs: `gain * (noise + offset)`."""

    gain: float
    offset: float

    def of(self, noise: Tensor) -> Tensor:
        """Return the first inputs, in float32."""
        return (noise.float() + self.offset) * self.gain

    def cast(self, noise: Tensor) -> Tensor:
        """Return the first inputs, in the dtype of the noise."""
        return _channels_last(self.of(noise)).to(noise.dtype)


def best_scaling(module: nn.Module, noise: Batch) -> Scaling:
    """Return the scaling of noise that comes nearest to the statistics of batch norms.

    Args:
        module: in any mode; it is run in evaluation mode and stays unchanged.
        noise: standard normal inputs.

    Raises:
        DataError: the module cannot run the inputs.
    """
    # A few samples are enough to tell such scales apart
    noise = noise.first(_SAMPLES_TO_SCALE).to(_device_of(module))
    with _without_parameter_gradients(module), torch.no_grad():
        centred = [Scaling(gain, 0.0) for gain in _GAINS]
        gain = _nearest(module, noise, centred).gain
        shifted = [Scaling(gain, offset) for offset in _OFFSETS]
        return _nearest(module, noise, shifted)


def _nearest(module: nn.Module, noise: Batch, scalings: list[Scaling]) -> Scaling:
    """Return the scaling of noise with the least distance; the first if none is finite."""
    least = math.inf
    best = scalings[0]
    for scaling in scalings:
        distance = float(_distance_on(module, noise.with_inputs(scaling.cast)))
        if distance < least:
            least = distance
            best = scaling
    return best


def match_batch_norms(module: nn.Module, noise: Batch, scaling: Scaling) -> Batch:
    """Return inputs that give the statistics of the module's batch norms, found from noise by
    gradient descent on the inputs.

    The distance of a channel is the Kullback-Leibler divergence between two normal
    distributions: that of the channel's values in the batch, and that which the layer has
    stored. The mean over channels, then over layers, is minimized with Adam.

    Args:
        module: in any mode; it is run in evaluation mode and stays unchanged.
        noise: standard normal inputs, floating-point tensors [n, ...].
        scaling: what makes it the first inputs.

    Raises:
        DataError: the module cannot run these inputs, no gradient reaches them, or the result
            is not finite.

    Source: distilled data of Cai et al., "ZeroQ: A Novel Zero Shot Quantization Framework",
    arXiv 2001.00281, section 3.1, which has squared differences of means and deviations. The
    divergence does not depend on the scale of a layer; it is after Haroush et al., "The
    Knowledge Within: Methods for Data-Free Model Compression", arXiv 1912.01274.
    """
    device = _device_of(module)
    values: list[Tensor] = []
    for _, tensor in noise.tensors():
        value = _channels_last(scaling.of(tensor).to(device))
        values.append(value.requires_grad_())
    rate = LEARNING_RATE * scaling.gain
    adam = torch.optim.Adam(values, lr=rate, eps=1e-8 / scaling.gain)
    with _without_parameter_gradients(module):
        for step in range(STEPS):
            # From 1 to 0
            share = (1 + math.cos(math.pi * (step / STEPS))) / 2
            adam.param_groups[0]["lr"] = rate * share
            distance = _distance_on(module, _filled(noise, values))
            if not distance.requires_grad:
                raise DataError(
                    "no synthetic data can be made: no gradient of the model's batch norms "
                    "reaches its inputs",
                    help="give real data with <--data>",
                )
            adam.zero_grad()
            with user_errors("the gradient of the model's batch norms", DataError):
                distance.backward()  # type: ignore[no-untyped-call]
            adam.step()
    for value in values:
        if not value.isfinite().all():
            raise DataError(
                "synthetic data from the statistics of batch norms are not finite",
                help="give real data with <--data>",
            )
        value.data = value.data.contiguous()
    return _filled(noise, values).detached().to("cpu")


def _channels_last(images: Tensor) -> Tensor:
    """Return images with their channels last, on which convolutions of a CPU are up to three
    times as fast. Other tensors stay as they are.
    """
    if images.dim() != 4:
        return images
    return images.contiguous(memory_format=torch.channels_last)


def _filled(noise: Batch, values: list[Tensor]) -> Batch:
    """Return a batch with these values, in the dtypes of the noise."""
    remaining = iter(values)
    return noise.with_inputs(lambda tensor: next(remaining).to(tensor.dtype))


def batch_norm_distance(module: nn.Module, batch: Batch) -> float:
    """Return the mean distance of a batch from the statistics of batch norms, in nats.

    Args:
        module: with batch norms.
        batch: of inputs.

    Raises:
        DataError: the module cannot run the inputs.
    """
    with _without_parameter_gradients(module), torch.no_grad():
        return float(_distance_on(module, batch.to(_device_of(module))))


def _distance_on(module: nn.Module, batch: Batch) -> Tensor:
    """Return the mean distance over the batch norms that a call of the module runs.

    Raises:
        DataError: the module raises an error, or runs none of them.
    """
    distances: list[Tensor] = []

    def measure(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        distances.append(_distance(layer, args[0]))

    handles = []
    for layer in trained_batch_norms(module):
        handles.append(layer.register_forward_pre_hook(measure))
    try:
        with user_errors("running the model on synthetic data", DataError):
            module(*batch.args, **batch.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    if not distances:
        raise DataError(
            "no synthetic data can be made: the model runs none of its batch norms",
            help="give real data with <--data>",
        )
    return torch.stack(distances).mean()


class _Moments(torch.autograd.Function):
    """The mean and the variance of each channel of a tensor [n, channels, ...].

    Autograd's own gradients of both take several passes over the tensor, and this one pass.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance, [channels] each."""
        axes = [axis for axis in range(values.dim()) if axis != 1]
        variance, mean = torch.var_mean(values, axes, correction=0)
        ctx.save_for_backward(values, mean)
        return mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient of the tensor, from those of the mean and of the variance."""
        values, mean = ctx.saved_tensors
        of_mean, of_variance = gradients
        count = values.numel() / len(mean)
        slope = 2 * of_variance / count
        constant = of_mean / count - slope * mean
        shape = [1, -1] + [1] * (values.dim() - 2)
        return torch.addcmul(constant.view(shape), values, slope.view(shape))


def _distance(layer: nn.Module, values: Tensor) -> Tensor:
    """Return the mean divergence of channels from the statistics of a batch norm, in nats.

    Args:
        layer: the batch norm.
        values: its input, [n, channels, ...].
    """
    assert isinstance(layer, _BatchNorm)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    mean, variance = _Moments.apply(values.float())  # type: ignore[no-untyped-call]
    # The layer's own epsilon keeps dead channels from having an infinite distance
    variance = variance + layer.eps
    stored = layer.running_var.float() + layer.eps
    shift = (mean - layer.running_mean.float()).square() / stored
    ratio = variance / stored
    divergence: Tensor = (ratio + shift - 1 - ratio.log()) / 2
    return divergence.mean()


def _device_of(module: nn.Module) -> torch.device:
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


@contextmanager
def _without_parameter_gradients(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and compute gradients of inputs only."""
    parameters = [entry for entry in module.parameters() if entry.requires_grad]
    deterministic = torch.backends.cudnn.flags(benchmark=False, deterministic=True)
    with preserve_module_state(module), keep_loaded(module.parameters()), deterministic:
        module.eval()
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            with torch.enable_grad():
                yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)
