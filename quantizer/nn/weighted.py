"""Layers with weights: torch's own, plus quantizers. The builder fills the parameters; nothing
is random.

Gates and states inside recurrent layers stay float, and the graph gives their first state.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.nn.layer import Layer, channels_last

_OPERATORS = {
    "LSTM": torch.ops.aten.lstm.input,
    "GRU": torch.ops.aten.gru.input,
    "RNN_RELU": torch.ops.aten.rnn_relu.input,
    "RNN_TANH": torch.ops.aten.rnn_tanh.input,
}
"""torch's function for a whole sequence, by the mode of its layer."""
_PROJECTIONS_ARE_SLOW = "LSTM with projections is not supported with oneDNN"


class _Filled(Layer):
    """A layer without torch's random initialization."""

    def reset_parameters(self) -> None:
        """Leave the parameters as they are: the weights come from the model."""


class _Weighted(_Filled):
    """A layer of torch that quantizes its input and output."""

    def forward(
        self,
        input: Tensor,  # noqa: A002
        output_size: list[int] | None = None,
    ) -> Any:
        """Run torch's layer between its quantizers. Only transposed convolutions have an
        `output_size`.
        """
        input = self.quantize_input(input)  # noqa: A001
        if output_size is None:
            return self.quantize_output(super().forward(input))
        return self.quantize_output(super().forward(input, output_size))


def _quantized(cls: type[nn.Module]) -> Any:
    """Return a class of the same name as torch's layer `cls`, with quantizers."""
    words = f"torch.nn.{cls.__name__} with quantizers."
    return type(cls.__name__, (_Weighted, cls), {"__module__": __name__, "__doc__": words})


class Conv2d(_Weighted, nn.Conv2d):
    """torch.nn.Conv2d with quantizers."""

    def forward(self, input: Tensor) -> Any:  # type: ignore[override]  # noqa: A002 - as torch.nn names it
        return super().forward(channels_last(input))


Conv1d = _quantized(nn.Conv1d)
Conv3d = _quantized(nn.Conv3d)
ConvTranspose1d = _quantized(nn.ConvTranspose1d)
ConvTranspose2d = _quantized(nn.ConvTranspose2d)
ConvTranspose3d = _quantized(nn.ConvTranspose3d)
Linear = _quantized(nn.Linear)


class Embedding(_Weighted, nn.Embedding):
    """torch.nn.Embedding with quantizers."""

    def forward(self, indices: Tensor) -> Any:  # type: ignore[override]  # as torch's function names it
        return super().forward(indices)


class ExpertLinear(_Filled):
    """A linear layer that multiplies each row of its input with the weights of one expert.

    The weight is [experts * out_features, in_features], one expert below the other, as for a
    convolution with groups.
    """

    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, experts: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.groups = experts
        weight = torch.empty(experts * out_features, in_features)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None)

    def forward(
        self,
        input: Tensor,  # noqa: A002
        ends: Tensor | None = None,
        picks: Tensor | None = None,
    ) -> Any:
        """Return the outputs [n, out_features] of rows [n, in_features].

        Rows without an expert give zeros.

        Args:
            input: the rows.
            ends: int [experts], for rows that are sorted by expert: the index after the last
                row of each.
            picks: int [n], for rows in any order: the expert of each.
        """
        x = self.quantize_input(input)
        weight = self.weight.view(self.groups, self.out_features, self.in_features)
        if torch.compiler.is_exporting():
            output = _products(x, weight, ends, picks)
        else:
            output = x.new_zeros(len(x), self.out_features)
            for rows, matrix in zip(self.rows(ends, picks), weight, strict=True):
                output[rows] = nn.functional.linear(x[rows], matrix)
        if self.bias is not None:
            output = output + self.bias
        return self.quantize_output(output)

    def rows(
        self, ends: Tensor | None = None, picks: Tensor | None = None
    ) -> Sequence[slice | Tensor]:
        """Return the rows of the input that each expert multiplies.

        Raises:
            ValueError: there are neither `ends` nor `picks`.
        """
        if picks is not None:
            return [(picks == expert).nonzero().flatten() for expert in range(self.groups)]
        if ends is None:
            raise ValueError(
                "Give `ends` or `picks`: the rows of the input for each expert are not known."
            )
        return [slice(start, end) for start, end in pairwise([0, *ends.tolist()])]

    def extra_repr(self) -> str:
        """Return the sizes that `print` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"experts={self.groups}"
        )


def _products(x: Tensor, weight: Tensor, ends: Tensor | None, picks: Tensor | None) -> Tensor:
    """Return the outputs of all experts with operators that all runtimes have.

    A program that torch traces cannot depend on how many rows an expert has. So all experts
    multiply all rows, and the products of other experts are replaced by zero.
    """
    if picks is None:
        assert ends is not None
        numbers = torch.arange(x.shape[0], device=x.device)
        picks = (numbers[:, None] >= ends).sum(1)
    experts = torch.arange(len(weight), device=x.device)
    is_picked = picks == experts[:, None]
    return torch.where(is_picked[..., None], x @ weight.mT, 0.0).sum(0)


class ChannelScale(Layer):
    """What is left of a batch norm that no layer could take up: x * weight + bias, for each
    channel in dimension 1.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_features))
        self.bias = nn.Parameter(torch.empty(num_features))

    def forward(self, input: Tensor) -> Any:  # noqa: A002 - as torch.nn names it
        """Return the scaled and shifted channels of an input [N, C, ...]."""
        input = self.quantize_input(input)  # noqa: A001
        shape = [-1] + [1] * (input.dim() - 2)
        scaled = input * self.weight.reshape(shape)
        return self.quantize_output(scaled + self.bias.reshape(shape))


class _Recurrent(_Filled, nn.RNNBase):
    """A recurrent layer that quantizes its inputs.

    Weights have quantizers as in every layer (`Layer.attach`). The result is a tuple, whose
    items are quantized where they are taken out.
    """

    def forward(
        self,
        input: Tensor,  # noqa: A002
        hx: Tensor | list[Tensor],
    ) -> Any:
        """Return the outputs, then the last state (and an LSTM's last cell state), as torch's
        operator does.
        """
        if self.quantizers:
            (input, hx), _ = self.quantize_inputs((input, hx), {})  # noqa: A001
        if torch.compiler.is_exporting() and not input.is_contiguous():
            # torch.export compares the strides of a slice with sizes, and may fix the batch
            input = input.contiguous()  # noqa: A001
        weights = [getattr(self, name) for name in self._flat_weights_names]
        dropout = 0.0
        is_training = False
        return _OPERATORS[self.mode](
            input,
            hx,
            weights,
            self.bias,
            self.num_layers,
            dropout,
            is_training,
            self.bidirectional,
            self.batch_first,
        )


class LSTM(_Recurrent, nn.LSTM):  # type: ignore[misc]  # torch's forward may go without a state
    """torch.nn.LSTM with quantizers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.proj_size:
            spend_warning()


class GRU(_Recurrent, nn.GRU):  # type: ignore[misc]  # torch's forward may go without a state
    """torch.nn.GRU with quantizers."""


class RNN(_Recurrent, nn.RNN):  # type: ignore[misc]  # torch's forward may go without a state
    """torch.nn.RNN with quantizers."""


def keep_quiet_about(module: nn.Module) -> None:
    """Suppress torch's warning that LSTMs with projections run without oneDNN, which changes no
    result, if a module has any."""
    for part in module.modules():
        if isinstance(part, nn.LSTM) and part.proj_size:
            spend_warning()


@cache
def spend_warning() -> None:
    """Trigger torch's warning on projections where it is ignored.

    Operators in C++ emit it past Python's filters, but only once in a process.
    """
    # The weights are random, and the user's generator must not change
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", message=_PROJECTIONS_ARE_SLOW)
        layer = nn.LSTM(1, 2, proj_size=1, device="cpu", dtype=torch.float32)
        layer(torch.zeros(1, 1, 1, device="cpu", dtype=torch.float32))
