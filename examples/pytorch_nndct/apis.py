"""Runs scripts for vai_q_pytorch with this package, without a change.

    export PYTHONPATH=examples
    python script.py --quant_mode calib
    python script.py --quant_mode test

`torch_quantizer` has the arguments and methods of that of vai_q_pytorch. In calib mode its
`quant_model` is the float model. It keeps all inputs that it is called with, so calibrate on a
subset of the data. In test mode `quant_model` is the quantized network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quantizer


class Recording(nn.Module):
    """Calls a model, and keeps the inputs of each call as `batches`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()
        self.batches: list[Any] = []

    def train(self, mode: bool = True) -> Recording:
        """Leave the model in eval mode, in which it is calibrated."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the model."""
        self.batches.append(batch_of(args, kwargs))
        with torch.no_grad():
            return self.model(*args, **kwargs)


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the inputs of a call as a batch: by name if the call names them.

    Raises:
        ValueError: the call names only some of them.
    """
    if args and kwargs:
        raise ValueError("call quant_model with all inputs in order, or all of them by name")
    kept = [_kept(value) for value in args]
    if kwargs:
        return {name: _kept(value) for name, value in kwargs.items()}
    return kept[0] if len(kept) == 1 else tuple(kept)


def _kept(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


class torch_quantizer:  # noqa: N801 - the name in vai_q_pytorch
    """Quantizes a model as a script for vai_q_pytorch asks for it.

    Args:
        quant_mode: "calib" or "test".
        module: the float model.
        input_args: an example of its inputs: a tensor or a tuple of tensors.
        input_kwargs: the same by name.
        state_dict_file: weights of the model, from `torch.save`.
        output_dir: the folder of the results.
        device: where the model runs.
        quant_config_file: the JSON config; None for the default of vai_q_pytorch, for the DPU.
        ignored: arguments that have no counterpart, such as `lstm`, `mix_bit` and `target`.
    """

    def __init__(
        self,
        quant_mode: str,
        module: nn.Module,
        input_args: Any = (),
        input_kwargs: Mapping[str, Any] | None = None,
        state_dict_file: str | None = None,
        output_dir: str | os.PathLike[str] = "quantize_result",
        device: torch.device | str = "cpu",
        quant_config_file: str | os.PathLike[str] | None = None,
        **ignored: Any,
    ) -> None:
        if quant_mode not in ("calib", "test"):
            raise ValueError(f"quant_mode is {quant_mode!r}: give 'calib' or 'test'")
        if ignored.get("bitwidth") not in (None, 8):
            raise ValueError("bitwidth: write bit_width into the file of quant_config_file")
        if state_dict_file is not None:
            module.load_state_dict(torch.load(state_dict_file, weights_only=True))
        self._model = module.to(device)
        self._folder = Path(output_dir)
        self._config = quant_config_file
        self._finetune: str | None = None
        self._recording = Recording(self._model)
        self._first_batches: list[Any] = []
        self._result: Any = None
        self.quant_model: nn.Module = self._recording
        if quant_mode == "test":
            self._result = quantizer.load(self._folder, self._model)
            self.quant_model = self._result.network.to(device)
        args = input_args if isinstance(input_args, (tuple, list)) else (input_args,)
        self._example = batch_of(args, input_kwargs or {})

    def fast_finetune(self, run_fn: Callable[..., Any], run_args: tuple[Any, ...]) -> None:
        """Learn how to round the weights, in calib mode. `run_fn` calls `quant_model`. Its
        inputs calibrate unless the script calls `quant_model` again.
        """
        self._finetune = "adaround"
        run_fn(*run_args)
        self._first_batches = self._recording.batches
        self._recording.batches = []

    def load_ft_param(self) -> None:
        """Do nothing: the results have the rounded weights."""

    def export_quant_config(self) -> None:
        """Calibrate on all inputs of `quant_model`, and write the results."""
        batches = self._recording.batches or self._first_batches
        if not batches:
            raise RuntimeError("no calibration: call quant_model before export_quant_config()")
        result = quantizer.calibrate(
            self._model, self._config, batches, fast_finetune=self._finetune
        )
        result.save(self._folder, overwrite=True)

    def export_onnx_model(self, output_dir: str | None = None, **ignored: Any) -> None:
        """Write `<Model>_int.onnx`, in test mode."""
        self._export("onnx", output_dir, ".onnx")

    def export_torch_script(self, output_dir: str | None = None, **ignored: Any) -> None:
        """Write `<Model>_int.pt2`, a program of `torch.export`, in test mode."""
        self._export("pt2", output_dir, ".pt2")

    def export_xmodel(self, output_dir: str | None = None, **ignored: Any) -> None:
        """Say that no file for a board can be written."""
        raise NotImplementedError("no .xmodel is written here: see docs/dpu.md")

    def _export(self, target: str, output_dir: str | None, suffix: str) -> None:
        if self._result is None:
            raise RuntimeError(f"export to {target} needs quant_mode 'test'")
        path = Path(output_dir or self._folder) / f"{type(self._model).__name__}_int{suffix}"
        self._result.export(target, path, [self._example], overwrite=True)
