"""Writes the openvino target: OpenVINO's own format, `<Model>.xml` and `<Model>.bin`.

Both are compared with test mode in OpenVINO, in float32 and as its users run it. It runs in a
process of its own, call by call.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto
from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.config.roles import is_parameter
from quantizer.errors import VerificationError, or_without
from quantizer.export.acceptance import (
    Outputs,
    accept_file,
    compared_calls,
    failure_of,
    started,
    with_float_figures,
    worst_of,
)
from quantizer.export.agreement import Verification
from quantizer.export.arithmetic import with_runtime_biases
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.onnx.build import LARGEST_MESSAGE, BuiltOnnx, build_onnx
from quantizer.export.onnx.executed import kernels_of_products, known_name, names_of_products
from quantizer.export.onnx.exporter import (
    DEFAULT_SETTINGS,
    EXACT_SETTINGS,
    OnnxExporter,
    first_layer_that_differs,
)
from quantizer.export.onnx.lowering import RECURRENT
from quantizer.export.onnx.speed import speeds_in_turns
from quantizer.export.onnx.verify import named_inputs
from quantizer.export.performance import (
    Product,
    Shape,
    Speed,
    einsum_multiply_adds,
    waited_seconds,
)
from quantizer.graph.ir import Call, Graph
from quantizer.plan.model import TensorSpecs

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

    def run(self, call: Call) -> list[list[Tensor]]:
        """Return what the model gives for a call with each of the settings.

        Raises:
            VerificationError: OpenVINO cannot run it.
        """
        feed: dict[str, Any] = named_inputs(self.model, self.deployment, call)
        self.count += 1
        inputs = self.folder / f"inputs_{self.count}.npz"
        results = self.folder / f"outputs_{self.count}.npz"
        np.savez(inputs, **feed)
        self.ask("run", self.count)
        names = [value.name for value in self.model.graph.output]
        with np.load(results) as arrays:
            outputs = [
                [torch.from_numpy(arrays[f"{index}:{name}"]) for name in names]
                for index in range(len(_SETTINGS))
            ]
        inputs.unlink()
        results.unlink()
        return outputs

    def outputs(self, setting: int) -> Outputs:
        """Return a function that gives the outputs of a call with one of the settings."""

        return lambda call: self.run(call)[setting]

    def products(self) -> list[Product]:
        """Return the multiplications of the last call in the default settings.

        They have the names of the ONNX model, as far as OpenVINO keeps names.
        """
        named = names_of_products(self.model)
        rows = self.ask("products")
        names = [known_name(row[0], named) for row in rows]
        unnamed: list[bool] = []
        integer: dict[str, bool] = {}
        for words, is_integer in self.ask("kernels"):
            name = known_name(words, named)
            if name in names:
                integer[name] = integer.get(name, True) and is_integer
            else:
                unnamed.append(is_integer)
        # What OpenVINO takes apart may lose its name, but not its place in the order
        left = [name for name in names if name not in integer]
        if len(left) == len(unnamed):
            integer.update(zip(left, unnamed, strict=True))
        return [
            Product(name, kind, integer.get(name, False), multiply_adds(kind, *operands))
            for name, (_, kind, *operands) in zip(names, rows, strict=True)
        ]

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
            assert self.process.stderr is not None
            why = failure_of(self.process.wait(), self.process.stderr.read())
            text = f"{self.name} is not written: OpenVINO cannot run it: {why}"
            raise VerificationError(text, help=_HELP)
        return json.loads(answer)


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
    path = folder / "model.onnx"
    size = sum(len(tensor.raw_data) for tensor in built.proto.graph.initializer)
    if size <= LARGEST_MESSAGE:
        path.write_bytes(built.proto.SerializeToString())
    else:
        copy = deepcopy(built.proto)
        onnx.save_model(copy, path, save_as_external_data=True, location="tensors")
    if built.floating is not None:
        (folder / "float.onnx").write_bytes(built.floating)
    settings = [dict(setting) for setting in _SETTINGS]
    (folder / "settings.json").write_text(json.dumps(settings), "utf-8")
    with started(_PROCESS.read_text("utf-8"), folder) as process:
        try:
            yield IrSession(name, folder, built, deployment, process)
        finally:
            process.kill()


_COARSER = (
    "by its default settings OpenVINO loses more on this processor than quantization itself: "
    "compile the file with INFERENCE_PRECISION_HINT f32"
)
_REMEDY = (
    "<--deploy onnx> is accepted by what ONNX Runtime computes; without VNNI, processors add "
    "up int8 weights of 8 bits wrong: give weights 7 bits there"
)


def verify_ir(session: IrSession, deployment: Deployment) -> Verification:
    """Compare the outputs of a model with test mode's over all calls.

    Raises:
        VerificationError: OpenVINO cannot run it, or its outputs differ in float32.
    """
    in_float32, by_default = compared_calls(deployment, session.run)
    in_float32 = _accepted(in_float32, session)
    by_default = with_float_figures(by_default, session.outputs(BY_DEFAULT), deployment)
    remarks: tuple[str, ...] = ()
    if worst_of(by_default, deployment) is not None:
        # The processor decides that, not the file.
        remarks = (_COARSER,)
    kernels = kernels_of_products(
        session.model,
        session.products(),
        deployment.graph,
        deployment.solution,
        engine="OpenVINO",
        without_kernels=RECURRENT,
    )
    default = replace(by_default, kernels=kernels, speed=_speed(session))
    return replace(in_float32, default_session=default, remarks=remarks)


def _accepted(verification: Verification, session: IrSession) -> Verification:
    """Return the figures in float32.

    Raises:
        VerificationError: the outputs differ.
    """
    try:
        return accept_file(
            verification,
            session.deployment,
            session.outputs(IN_FLOAT32),
            refusal=f"{session.name} is not written: OpenVINO",
            remedy=_REMEDY,
        )
    except VerificationError as error:
        find = partial(
            first_layer_that_differs, session.model, session.deployment, session.folder
        )
        layer = or_without("the first layer that differs", find, "")
        if not layer:
            raise
        text = f"{error.message.marked}; the first layer that differs is {layer}"
        raise VerificationError(text, help=error.help) from error


def _speed(session: IrSession) -> Speed | None:
    """Measure the speed against the float network, both by the default settings."""
    if session.built.floating is None:
        return None
    timers = [partial(session.seconds, which) for which in ("model", "float")]
    waited = partial(waited_seconds, session.process.pid)
    (speed,) = speeds_in_turns(timers, waited=waited)
    return speed


class OpenVinoIrExporter(Exporter[IrSession]):
    """Writes the network that `--deploy onnx` writes, with int8 weights, in OpenVINO's format.

    OpenVINO has integer kernels for int8 weights only.
    """

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> Iterator[Refusal]:
        """Yield what ONNX cannot express, and what OpenVINO cannot run."""
        yield from OnnxExporter().format_refusals(graph, specs, opset)
        for (layer, role), spec in specs.items():
            if spec.qscheme == "per_group" and spec.ch_axis == 0 and is_parameter(role):
                # OpenVINO 2026.4 ends with a division by zero.
                why = "has groups along its outputs, which OpenVINO does not run"
                remedy = "set ch_axis to 1, or use <--deploy onnx or pt2>"
                yield Refusal(why, remedy, layer, role)

    def as_run(self, graph: Graph, solution: Solution) -> Solution:
        """Return the solution with biases rounded as integer kernels do."""
        return with_runtime_biases(graph, solution)

    def files(self, path: Path) -> tuple[Path, ...]:
        """Return the file of the network and that of its weights."""
        return path, path.with_suffix(".bin")

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[IrSession]:
        """Write both files; OpenVINO runs them before they are published.

        Raises:
            ModelError: torch.onnx does not know an operator of the network.
            ResultError: a file cannot be written.
        """
        built = build_onnx(deployment, "int8")
        with TemporaryDirectory() as name:
            folder = Path(name)
            with ir_session(folder, path.name, built, deployment) as session:
                yield session
            network, weights = self.files(path)
            shutil.copyfile(folder / "model.bin", weights)
            shutil.copyfile(folder / "model.xml", network)

    def verify(self, deployment: Deployment, written: IrSession) -> Verification:
        """Run the files in OpenVINO, in float32 and as users do, and measure their speed."""
        verification = verify_ir(written, written.built.tested)
        remarks = (*written.built.remarks, *verification.remarks)
        return replace(verification, remarks=remarks)
