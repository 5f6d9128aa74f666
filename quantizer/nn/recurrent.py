"""Recurrent layers: torch's own, their state given by the graph. Gates and states inside stay float."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantizer.nn.layer import Layer

State = Tensor | list[Tensor]


class _Recurrent(Layer, nn.RNNBase):
    """Skips torch's random initialization, quantizes the weights and its view of the inputs.

    The results are a tuple; each of them is quantized where it is taken out of it.
    """

    def reset_parameters(self) -> None:
        """Nothing: the weights come from the model."""

    def forward(self, input: Tensor, hx: State) -> Any:  # noqa: A002 - as torch names it
        """Outputs, then the last state (an LSTM's last cell state, too), as torch's operator returns them."""
        if self.quantizers:
            (input, hx), _ = self.quantize_inputs((input, hx), {})  # noqa: A001
        weights = [getattr(self, name) for name in self._flat_weights_names]
        sizes = self.bias, self.num_layers, 0.0, False, self.bidirectional, self.batch_first
        return self.operator()(input, hx, weights, *sizes)

    def operator(self) -> Any:
        """torch's function for the whole sequence."""
        return torch.ops.aten.rnn_relu.input if self.mode == "RNN_RELU" else torch.ops.aten.rnn_tanh.input


class LSTM(_Recurrent, nn.LSTM):  # type: ignore[misc]  # torch's forward may go without a state
    """torch.nn.LSTM with quantizers."""

    def operator(self) -> Any:
        """torch's function for the whole sequence."""
        return torch.ops.aten.lstm.input


class GRU(_Recurrent, nn.GRU):  # type: ignore[misc]  # torch's forward may go without a state
    """torch.nn.GRU with quantizers."""

    def operator(self) -> Any:
        """torch's function for the whole sequence."""
        return torch.ops.aten.gru.input


class RNN(_Recurrent, nn.RNN):  # type: ignore[misc]  # torch's forward may go without a state
    """torch.nn.RNN with quantizers."""
