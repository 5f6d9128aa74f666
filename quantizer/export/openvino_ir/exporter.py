"""Writes the openvino target: OpenVINO's own format, `<Model>.xml` and `<Model>.bin`.

Both are compared with test mode in OpenVINO, in float32 and as its users run it.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from quantizer.calibration.solution import Solution
from quantizer.config.roles import is_parameter
from quantizer.errors import VerificationError, or_without
from quantizer.export.acceptance import (
    accept_file,
    compared_calls,
    with_float_figures,
    worst_of,
)
from quantizer.export.agreement import Verification
from quantizer.export.arithmetic.biases import with_runtime_biases
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.onnx.build import BuiltOnnx, build_onnx
from quantizer.export.onnx.exporter import OnnxExporter
from quantizer.export.onnx.kernels import kernels_of_products
from quantizer.export.onnx.marks import RECURRENT
from quantizer.export.onnx.openvino import first_layer_that_differs
from quantizer.export.onnx.speed import speeds_in_turns
from quantizer.export.openvino_ir.session import BY_DEFAULT, IN_FLOAT32, IrSession, ir_session
from quantizer.export.speed import Speed, waited_seconds
from quantizer.graph.ir import Graph
from quantizer.plan.model import TensorSpecs

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


@dataclass(frozen=True)
class OpenVinoIr:
    """A model that OpenVINO has converted and runs, and the ONNX model that it was."""

    session: IrSession
    built: BuiltOnnx


class OpenVinoIrExporter(Exporter[OpenVinoIr]):
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
    def write(self, deployment: Deployment, path: Path) -> Iterator[OpenVinoIr]:
        """Write both files; OpenVINO runs them before they are published.

        Raises:
            ModelError: torch.onnx does not know an operator of the network.
            ResultError: a file cannot be written.
        """
        built = build_onnx(deployment, "int8")
        with TemporaryDirectory() as name:
            folder = Path(name)
            with ir_session(folder, path.name, built, deployment) as session:
                yield OpenVinoIr(session, built)
            network, weights = self.files(path)
            shutil.copyfile(folder / "model.bin", weights)
            shutil.copyfile(folder / "model.xml", network)

    def verify(self, deployment: Deployment, written: OpenVinoIr) -> Verification:
        """Run the files in OpenVINO, in float32 and as users do, and measure their speed."""
        verification = verify_ir(written.session, written.built.tested)
        remarks = (*written.built.remarks, *verification.remarks)
        return replace(verification, remarks=remarks)
