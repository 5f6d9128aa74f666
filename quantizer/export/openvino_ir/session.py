"""Runs a model in OpenVINO, in a process of its own, call by call."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import ModelProto
from torch import Tensor

from quantizer.errors import VerificationError
from quantizer.export.acceptance import Outputs
from quantizer.export.deployment import Deployment
from quantizer.export.engine_checks import failure_of, started
from quantizer.export.kernels import Product, Shape, einsum_multiply_adds
from quantizer.export.onnx.build import BuiltOnnx
from quantizer.export.onnx.executed import names_of_products
from quantizer.export.onnx.files import LARGEST_MESSAGE
from quantizer.export.onnx.openvino import DEFAULT_SETTINGS, EXACT_SETTINGS
from quantizer.export.onnx.verify import named_inputs

IN_FLOAT32 = 0
BY_DEFAULT = 1
"""The two settings, by their places in the answers of the process."""
_SETTINGS = (EXACT_SETTINGS, DEFAULT_SETTINGS)
_PROCESS = Path(__file__).with_name("ir_process.py")
_HELP = "<--deploy pt2> needs no such runtime"


@dataclass
class IrSession:
    """A process that has converted a model to `folder` and runs it.

    Attributes:
        name: stands for the file in messages.
        built: the ONNX model that it has converted.
        count: how many calls it has run.
    """

    name: str
    folder: Path
    built: BuiltOnnx
    deployment: Deployment
    process: subprocess.Popen[str]
    count: int = 0

    @property
    def model(self) -> ModelProto:
        """Return the ONNX model."""
        return self.built.proto

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[list[Tensor]]:
        """Return what the model gives for a call with each of the settings.

        Raises:
            VerificationError: OpenVINO cannot run it.
        """
        feed: dict[str, Any] = named_inputs(self.model, self.deployment, args, kwargs)
        self.count += 1
        inputs = self.folder / f"inputs_{self.count}.npz"
        results = self.folder / f"outputs_{self.count}.npz"
        np.savez(inputs, **feed)
        self.ask("run", self.count)
        outputs: list[list[Tensor]] = []
        with np.load(results) as arrays:
            for index in range(len(_SETTINGS)):
                outputs.append(self._tensors(arrays, index))
        inputs.unlink()
        results.unlink()
        return outputs

    def outputs(self, setting: int) -> Outputs:
        """Return a function that gives the outputs of a call with one of the settings."""

        def call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
            return self.run(args, kwargs)[setting]

        return call

    def _tensors(self, arrays: Mapping[str, NDArray[Any]], index: int) -> list[Tensor]:
        """Return the outputs of one of the settings, in order."""
        tensors: list[Tensor] = []
        for value in self.model.graph.output:
            tensors.append(torch.from_numpy(arrays[f"{index}:{value.name}"]))
        return tensors

    def products(self) -> list[Product]:
        """Return the multiplications of the last call in the default settings.

        They have the names of the ONNX model, as far as OpenVINO keeps names.
        """
        named = names_of_products(self.model)
        rows = self.ask("products")
        names = [_known_name(row[0], named) for row in rows]
        unnamed: list[bool] = []
        integer: dict[str, bool] = {}
        for words, is_integer in self.ask("kernels"):
            name = _known_name(words, named)
            if name in names:
                integer[name] = integer.get(name, True) and is_integer
            else:
                unnamed.append(is_integer)
        # What OpenVINO takes apart may lose its name, but not its place in the order
        left = [name for name in names if name not in integer]
        if len(left) == len(unnamed):
            integer.update(zip(left, unnamed, strict=True))
        products: list[Product] = []
        for name, (_, kind, attributes, shapes) in zip(names, rows, strict=True):
            size = multiply_adds(kind, attributes, shapes)
            products.append(Product(name, kind, integer.get(name, False), size))
        return products

    def seconds(self, which: str, runs: int) -> float:
        """Return the seconds of one run of the last call, "model" or "float"."""
        return float(self.ask("time", which, runs))

    def ask(self, *question: object) -> Any:
        """Return the answer of the process to one line.

        Raises:
            VerificationError: the process ends instead.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise self._failure()
        return json.loads(answer)

    def _failure(self) -> VerificationError:
        """Return why the process has ended."""
        assert self.process.stderr is not None
        why = failure_of(self.process.wait(), self.process.stderr.read())
        text = f"{self.name} is not written: OpenVINO cannot run it: {why}"
        return VerificationError(text, help=_HELP)


def multiply_adds(
    kind: str, attributes: Mapping[str, Any], shapes: Sequence[Shape | None]
) -> int:
    """Return how many multiply-adds an operator of OpenVINO takes; 0 if a size is open.

    Args:
        kind: its type.
        attributes: those that OpenVINO has for this type.
        shapes: of its operands, and then of its result.

    >>> multiply_adds("Convolution", {}, [[1, 3, 8, 8], [4, 3, 1, 1], [1, 4, 8, 8]])
    768
    >>> multiply_adds("MatMul", {"transpose_a": True}, [[3, 2], [3, 5], [2, 5]])
    30
    """
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return 0
    *operands, result = known
    first = operands[0]
    if kind == "Einsum":
        return einsum_multiply_adds(attributes["equation"], operands)
    if kind == "MatMul":
        is_transposed = attributes["transpose_a"]
        return prod(result) * first[-2 if is_transposed else -1]
    if kind.endswith(("Sequence", "Cell")):
        *_, weights, recurrent, _ = operands
        return prod(first[:-1]) * (prod(weights) + prod(recurrent))
    moved = first if kind.endswith("BackpropData") else result
    # The offsets of a deformable convolution stand before its weights
    weights = operands[2 if kind == "DeformableConvolution" else 1]
    # The sizes of groups stand first in the weights
    return prod(moved) * prod(weights) // moved[1]


def _known_name(names: Sequence[str], named: Mapping[str, str]) -> str:
    """Return the first name that the ONNX model has, perhaps before words that OpenVINO has
    appended to it; the first name if there is none.
    """
    for name in names:
        while name:
            if name in named:
                return named[name]
            name = name.rpartition("/")[0]
    return names[0]


@contextmanager
def ir_session(
    folder: Path, name: str, built: BuiltOnnx, deployment: Deployment
) -> Iterator[IrSession]:
    """Yield a session of OpenVINO that works in an empty folder.

    Args:
        folder: in which `model.xml` and `model.bin` will be.
        name: stands for the file in messages.
        built: an ONNX model.
        deployment: whose calls are run.
    """
    _save(built.proto, folder / "model.onnx")
    if built.floating is not None:
        (folder / "float.onnx").write_bytes(built.floating)
    settings = [dict(setting) for setting in _SETTINGS]
    (folder / "settings.json").write_text(json.dumps(settings), "utf-8")
    with started(_PROCESS, folder) as process:
        try:
            yield IrSession(name, folder, built, deployment, process)
        finally:
            process.kill()


def _save(model: ModelProto, path: Path) -> None:
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if size <= LARGEST_MESSAGE:
        path.write_bytes(model.SerializeToString())
        return
    copy = ModelProto()
    copy.CopyFrom(model)
    onnx.save_model(copy, path, save_as_external_data=True, location="tensors")
