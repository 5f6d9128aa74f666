"""Writes the openvino target: OpenVINO's own format, `<Model>.xml` and `<Model>.bin`."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from quantizer.calibration.solution import Solution
from quantizer.config.roles import is_parameter
from quantizer.export.agreement import Verification
from quantizer.export.arithmetic.biases import with_runtime_biases
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.onnx.build import BuiltOnnx, build_onnx
from quantizer.export.onnx.exporter import OnnxExporter
from quantizer.export.openvino_ir.session import IrSession, ir_session
from quantizer.export.openvino_ir.verify import verify_ir
from quantizer.graph.ir import Graph
from quantizer.plan.model import TensorSpecs


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
