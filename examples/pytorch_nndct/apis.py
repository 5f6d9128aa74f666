"""Runs scripts for vai_q_pytorch with this package, without a change.

    export PYTHONPATH=examples
    python script.py --quant_mode calib
    python script.py --quant_mode test --deploy

`torch_quantizer` has the arguments and methods of that of vai_q_pytorch. In calib mode its
`quant_model` is the float model. It keeps all inputs that it is called with, so calibrate on a
subset of the data. In test mode `quant_model` is the quantized network. Exported files are
judged by the inputs that the script called it with.

What this package does not have ends the script with one sentence, and so do its errors.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch
from torch import nn

import quantizer
from pytorch_nndct.recording import Recording, batch_of
from quantizer.cli.main import run_command
from quantizer.config.load import load_config
from quantizer.errors import QuantizerError

MODES = {"calib": "calib", "test": "test", 1: "calib", 2: "test"}
"""The values of `quant_mode`. Older scripts give numbers."""
JUDGED_BATCHES = 8
"""So many batches of test mode judge an exported file."""
EXPORTS = {"onnx": "export_onnx_model", "torch_script": "export_torch_script"}
"""The method for each format of `deploy`, but for xmodel."""
DPU_NAME = "DPUCZDX8G_ISA1_B4096"
INSPECTED = """from pytorch_nndct.apis import Inspector

def model():
    return Inspector.module

def example_input():
    return Inspector.example
"""
"""A file for `--model` that has the module of this process."""

NO_XMODEL = (
    "no .xmodel can be written here, because Xilinx's compiler takes only those of "
    "vai_q_pytorch: run this script there for a board, and here call export_onnx_model() for "
    "an ONNX file with the same integers"
)
NO_TRAINING = (
    "quantization-aware training is not available here: call torch_quantizer with the trained "
    "model, and fast_finetune() if it loses too much"
)
NO_OPERATORS = (
    "custom_quant_ops is not available here: quantizer.graph.ops.register_op adds an operator"
)
NO_WIDTH = "bitwidth is read from a file: write bit_width into that of quant_config_file"


def stop(sentence: str) -> NoReturn:
    """End the script with exit code 1 and a sentence on standard error."""
    raise SystemExit(f"error: {sentence}")


@contextlib.contextmanager
def errors_end_the_script() -> Iterator[None]:
    """End the script with the message of an error of this package, and without a traceback."""
    try:
        yield
    except QuantizerError as error:
        stop(str(error))


@contextlib.contextmanager
def unjudged() -> Iterator[None]:
    """Keep back warnings about the accuracy of a network."""
    logger = logging.getLogger("quantizer")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


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
        bitwidth: 8, unless `quant_config_file` has the widths.
        qat_proc, custom_quant_ops: refused.
        ignored: arguments that are not needed, such as `lstm`, `mix_bit` and `target`.
    """

    @errors_end_the_script()
    def __init__(
        self,
        quant_mode: str | int,
        module: nn.Module,
        input_args: Any = (),
        input_kwargs: Mapping[str, Any] | None = None,
        state_dict_file: str | None = None,
        output_dir: str | os.PathLike[str] = "quantize_result",
        device: torch.device | str = "cpu",
        quant_config_file: str | os.PathLike[str] | None = None,
        bitwidth: int | None = None,
        qat_proc: bool = False,
        custom_quant_ops: list[str] | None = None,
        **ignored: Any,
    ) -> None:
        if quant_mode not in MODES:
            stop(f"quant_mode is {quant_mode!r}: give 'calib' or 'test'")
        if bitwidth not in (None, 8) and quant_config_file is None:
            stop(NO_WIDTH)
        if qat_proc:
            stop(NO_TRAINING)
        if custom_quant_ops:
            stop(NO_OPERATORS)
        if quant_config_file is not None:
            # What is wrong with it is said before the script runs the model
            load_config(quant_config_file).require()
        if state_dict_file is not None:
            module.load_state_dict(torch.load(state_dict_file, weights_only=True))
        self._model = module.to(device)
        self._device = device
        self._folder = Path(output_dir)
        self._config = quant_config_file
        self._finetune: str | None = None
        self._first_batches: list[Any] = []
        self._is_judged = False
        args = input_args if isinstance(input_args, (tuple, list)) else (input_args,)
        self._example = batch_of(args, input_kwargs or {})
        self._result: Any = None
        self.quant_model = Recording(self._model)
        if MODES[quant_mode] == "test":
            self._open_result()

    @property
    def deploy_model(self) -> NoReturn:
        """End the script: only trained quantization has such a model."""
        stop(NO_TRAINING)

    def _open_result(self) -> None:
        """Let `quant_model` be the quantized network."""
        if self._result is None:
            if not (self._folder / "quant_info.json").exists():
                stop(f"{self._folder} has no results: run the script in calib mode first")
            self._result = quantizer.load(self._folder, self._model)
            network = self._result.network.to(self._device)
            self.quant_model.begin(network, most=JUDGED_BATCHES)

    def quantize(
        self,
        run_fn: Callable[..., Any],
        run_args: tuple[Any, ...],
        ft_run_args: tuple[Any, ...] | None = None,
    ) -> None:
        """Calibrate in one call. `run_fn` calls `quant_model`. With `ft_run_args`, learn how to
        round the weights, too.
        """
        if ft_run_args is not None:
            self.fast_finetune(run_fn, ft_run_args)
        run_fn(*run_args)
        self.export_quant_config()

    def test(self, run_fn: Callable[..., Any], run_args: tuple[Any, ...]) -> None:
        """Test in one call, also after `quantize`."""
        with errors_end_the_script():
            self._open_result()
        run_fn(*run_args)

    def deploy(
        self, run_fn: Callable[..., Any], run_args: tuple[Any, ...], fmt: str = "xmodel"
    ) -> None:
        """Write the file of a format, judged by what `run_fn` calls `quant_model` with."""
        if fmt not in EXPORTS:
            stop(NO_XMODEL)
        self.test(run_fn, run_args)
        getattr(self, EXPORTS[fmt])()

    def fast_finetune(self, run_fn: Callable[..., Any], run_args: tuple[Any, ...]) -> None:
        """Learn how to round the weights, in calib mode. `run_fn` calls `quant_model`. Its
        inputs calibrate unless the script calls `quant_model` again.
        """
        if self._result is not None:
            stop("fast_finetune() belongs to calib mode: test mode has the learned weights")
        self._finetune = "adaround"
        run_fn(*run_args)
        self._first_batches = self.quant_model.batches
        self.quant_model.batches = []

    def load_ft_param(self) -> None:
        """Do nothing: the results have the rounded weights."""

    @errors_end_the_script()
    def export_quant_config(self) -> None:
        """Calibrate on all inputs of `quant_model`, and write the results."""
        if self._result is not None:
            stop("export_quant_config() belongs to calib mode: the results are there")
        batches = self.quant_model.batches or self._first_batches
        if not batches:
            stop("no calibration: call quant_model with data before export_quant_config()")
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
        """End the script: no file for a board can be written."""
        stop(NO_XMODEL)

    @errors_end_the_script()
    def _export(self, target: str, output_dir: str | None, suffix: str) -> None:
        """Write a file, compare it with test mode, and say where it is. The first file is
        judged by the inputs of `quant_model`; `input_args` may be noise, so they only compare.
        """
        if self._result is None:
            stop(f"export to {target} needs quant_mode 'test'")
        path = Path(output_dir or self._folder) / f"{type(self._model).__name__}_int{suffix}"
        batches = self.quant_model.batches
        can_be_judged = bool(batches) and not self._is_judged
        with contextlib.nullcontext() if can_be_judged else unjudged():
            self._result.export(target, path, batches or [self._example], overwrite=True)
        self._is_judged = self._is_judged or can_be_judged
        print(f"wrote {path}")
        if not batches:
            print("how accurate it is, is not known: call quant_model with data before")


class Inspector:
    """Says which operators a DPU runs.

    Args:
        name_or_fingerprint: the DPU. The limits of DPUCZDX8G_ISA1_B4096 hold for all.
    """

    module: nn.Module
    example: Any

    def __init__(self, name_or_fingerprint: str) -> None:
        self._name = name_or_fingerprint

    def inspect(
        self,
        module: nn.Module,
        input_args: Any,
        device: torch.device | str = "cpu",
        output_dir: str | os.PathLike[str] = "quantize_result",
        verbose_level: int = 1,
        image_format: str | None = None,
    ) -> None:
        """Print the table of `quantizer inspect --to DPU`, and write it to
        `inspect_<DPU>.txt`. There are no pictures.
        """
        args = input_args if isinstance(input_args, (tuple, list)) else (input_args,)
        Inspector.module = module.to(device).eval()
        Inspector.example = batch_of(args, {})
        printed = io.StringIO()
        with TemporaryDirectory() as folder:
            file = Path(folder, "inspected.py")
            file.write_text(INSPECTED, encoding="utf-8")
            with contextlib.redirect_stdout(printed):
                words = ["inspect", "--to", "DPU", "--top", "all", "--model", str(file)]
                code = run_command(words)
        if code:
            raise SystemExit(code)
        path = Path(output_dir, f"inspect_{self._name}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(printed.getvalue(), encoding="utf-8")
        print(printed.getvalue(), end="")
        if self._name != DPU_NAME:
            print(f"these are the limits of {DPU_NAME}: those of {self._name} are not known")
        print(f"wrote {path}")


class QatProcessor:
    """Ends the script: this package does not train."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stop(NO_TRAINING)


def dump_xmodel(output_dir: str = "quantize_result", **ignored: Any) -> NoReturn:
    """End the script, as `export_xmodel` does, which has replaced it."""
    stop(NO_XMODEL)
