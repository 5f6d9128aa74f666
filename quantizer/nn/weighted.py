"""Layers with weights: torch's own, plus quantizers. Whoever builds them fills the parameters;
nothing is random.

Gates and states inside recurrent layers stay float, and their state is given by the graph.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.nn.image_layout import channels_last
from quantizer.nn.layer import Layer
from quantizer.nn.projections import spend_warning

_OPERATORS = {
    "LSTM": torch.ops.aten.lstm.input,
    "GRU": torch.ops.aten.gru.input,
    "RNN_RELU": torch.ops.aten.rnn_relu.input,
    "RNN_TANH": torch.ops.aten.rnn_tanh.input,
}
"""torch's function for a whole sequence, by the mode of its layer."""


class _Filled(Layer):
    """Skips torch's random initialization."""

    def reset_parameters(self) -> None:
        """Nothing: the weights come from the model."""


class _Weighted(_Filled):
    """Quantizes input and output."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Any:  # noqa: A002 - as torch.nn names it
        """torch's layer, between its quantizers; `output_size` is for transposed
        convolutions.
        """
        input = self.quantize_input(input)  # noqa: A001
        output = (
            super().forward(input)
            if output_size is None
            else super().forward(input, output_size)
        )
        return self.finish(output)


def _quantized(cls: type[nn.Module]) -> Any:
    """torch's layer of the same name with quantizers."""
    words = f"torch.nn.{cls.__name__} with quantizers."
    return type(cls.__name__, (_Weighted, cls), {"__module__": __name__, "__doc__": words})


class Conv2d(_Weighted, nn.Conv2d):
    """torch.nn.Conv2d with quantizers."""

    def forward(self, input: Tensor) -> Any:  # type: ignore[override]  # noqa: A002 - as torch.nn names it
        return super().forward(channels_last(input))


Conv1d, Conv3d = map(_quantized, (nn.Conv1d, nn.Conv3d))
ConvTranspose1d, ConvTranspose2d = map(_quantized, (nn.ConvTranspose1d, nn.ConvTranspose2d))
ConvTranspose3d, Linear = map(_quantized, (nn.ConvTranspose3d, nn.Linear))


class Embedding(_Weighted, nn.Embedding):
    """torch.nn.Embedding with quantizers."""

    def forward(self, indices: Tensor) -> Any:  # type: ignore[override]  # as torch's function names it
        return super().forward(indices)


class ExpertLinear(_Filled):
    """A linear layer each row of whose input has the weights of one expert.

    The weight is [experts * out_features, in_features], that of one expert below that of
    another, as a convolution with groups has it.
    """

    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, experts: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.groups = in_features, out_features, experts
        self.weight = nn.Parameter(
            torch.empty(experts * out_features, in_features), requires_grad=False
        )
        self.register_parameter("bias", None)

    def forward(
        self,
        input: Tensor,  # noqa: A002
        ends: Tensor | None = None,
        picks: Tensor | None = None,
    ) -> Any:
        """Of rows [n, in_features] those [n, out_features]: sorted by expert, those of each end
        before its `ends` [experts]; or `picks` [n] has the expert of each. Rows of none give
        zeros.
        """
        x, weight = (
            self.quantize_input(input),
            self.weight.view(self.groups, self.out_features, self.in_features),
        )
        if torch.compiler.is_exporting():
            output = _products(x, weight, ends, picks)
        else:
            output = x.new_zeros(len(x), self.out_features)
            for own, matrix in zip(self.rows(ends, picks), weight, strict=True):
                output[own] = nn.functional.linear(x[own], matrix)
        return self.finish(output if self.bias is None else output + self.bias)

    def rows(
        self, ends: Tensor | None = None, picks: Tensor | None = None
    ) -> Sequence[slice | Tensor]:
        """Which rows of the input are each expert's."""
        if picks is not None:
            return [(picks == expert).nonzero().flatten() for expert in range(self.groups)]
        if ends is None:
            raise ValueError("Nothing says which rows of the input are whose.")
        return [slice(*pair) for pair in pairwise([0, *ends.tolist()])]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"experts={self.groups}"
        )


def _products(x: Tensor, weight: Tensor, ends: Tensor | None, picks: Tensor | None) -> Tensor:
    """The same by operators that all runtimes have, for programs that torch traces, which
    cannot ask how many rows an expert has: all experts multiply all rows, and of each row one
    product is kept.
    """
    if picks is None:
        assert ends is not None
        picks = (torch.arange(x.shape[0], device=x.device)[:, None] >= ends).sum(1)
    kept = picks == torch.arange(len(weight), device=x.device)[:, None]
    return torch.where(kept[..., None], x @ weight.mT, 0.0).sum(0)


class ChannelScale(Layer):
    """What remains of a batch norm that could not fold: x * weight + bias, for each channel in
    dimension 1.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(num_features)),
            nn.Parameter(torch.empty(num_features)),
        )

    def forward(self, input: Tensor) -> Any:  # noqa: A002 - as torch.nn names it
        input = self.quantize_input(input)  # noqa: A001
        shape = [-1] + [1] * (input.dim() - 2)
        return self.finish(input * self.weight.reshape(shape) + self.bias.reshape(shape))


class _Recurrent(_Filled, nn.RNNBase):
    """Quantizes its view of the inputs. Weights have quantizers as in every layer
    (`Layer.attach`); results, a tuple, are quantized where they are taken out.
    """

    def forward(self, input: Tensor, hx: Tensor | list[Tensor]) -> Any:  # noqa: A002 - as torch names it
        """Outputs, then the last state (an LSTM's last cell state, too), as torch's operator
        returns them.
        """
        if self.quantizers:
            (input, hx), _ = self.quantize_inputs((input, hx), {})  # noqa: A001
        weights = [getattr(self, name) for name in self._flat_weights_names]
        sizes = self.bias, self.num_layers, 0.0, False, self.bidirectional, self.batch_first
        return _OPERATORS[self.mode](input, hx, weights, *sizes)


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
