"""Writes the encodings target: a float ONNX file, and encodings for AIMET and QNN."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir

from quantizer.config.wording import first_names
from quantizer.export.agreement import EngineCheck, Verification
from quantizer.export.arithmetic import quantized_apart
from quantizer.export.deployment import Deployment, in_float32
from quantizer.export.encodings.document import (
    encoding_refusals,
    encodings_document,
    require_axes,
)
from quantizer.export.encodings.lowering import EncodedNetwork, lower_to_encodings
from quantizer.export.encodings.verify import EncodedFile, aimet_check, verify_encodings
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.onnx.build import DEFAULT_OPSET
from quantizer.export.onnx.files import clean_proto, stored_model
from quantizer.export.onnx.marks import Lowering, name_products
from quantizer.export.onnx.refusals import graph_refusals
from quantizer.export.onnx.translation import translate_network
from quantizer.graph.ir import Graph
from quantizer.plan.model import TensorSpecs
from quantizer.storage.files import write_bytes

VERSION_OPTION = "encodings_version"


class EncodingsExporter(Exporter[EncodedFile]):
    """Writes `<Model>.encodings`, and next to it `<Model>.encodings.onnx`, the float network.

    The network's weights are those of test mode, already rounded to their codes. Whoever rounds
    them again, in any way, gets the same codes.
    """

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> Iterator[Refusal]:
        """Yield what ONNX or encodings cannot hold."""
        opset = DEFAULT_OPSET if opset == -1 else opset
        yield from graph_refusals(graph, opset)
        yield from encoding_refusals(graph, specs)

    def files(self, path: Path) -> tuple[Path, ...]:
        """Return the file of encodings, that of the network, and the latter's tensors."""
        network = _network_path(path)
        return path, network, network.with_name(f"{network.name}.data")

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[EncodedFile]:
        """Write both files; they are verified before they are published.

        Raises:
            UsageError: an encoding does not fit a weight.
            ModelError: torch.onnx does not know an operator of the network.
            ResultError: a file cannot be written.
        """
        solution = deployment.solution.by_rows()
        tested = replace(deployment, solution=solution)
        # Readers quantize the parts of a concatenation, too.
        apart = quantized_apart(deployment.graph, solution, any_rounding=True)
        wide = in_float32(replace(deployment, solution=apart))
        opset = DEFAULT_OPSET if deployment.opset == -1 else deployment.opset
        network = wide.network()
        quantizations = list(wide.encoded.tensors.items())
        model = translate_network(wide, network, quantizations, opset)
        lowering = Lowering(network, quantizations, opset, biases={}, float_layers=())
        name_products(model, lowering)
        lowered = lower_to_encodings(model, lowering)
        proto = ir.to_proto(model)
        clean_proto(proto, deployment.graph, deployment.input_names)
        onnx.helper.set_model_props(proto, deployment.origin.texts())
        version = deployment.choice(VERSION_OPTION)
        require_axes(lowered.encodings, proto, version)
        document = encodings_document(lowered.encodings, version)
        text = json.dumps(document, indent=1) + "\n"
        with stored_model(proto, _network_path(path)) as source:
            yield EncodedFile(path.name, source, text, tested, _remarks(lowered))
        write_bytes(path, text.encode())

    def verify(self, deployment: Deployment, written: EncodedFile) -> Verification:
        """Read both files and compute what the encodings mean on all batches.

        aimet-onnx runs them, too, if it is installed. It refuses nothing.
        """
        verification = verify_encodings(written)
        check: EngineCheck | None = None
        if isinstance(written.source, bytes):
            check = aimet_check(written.name, written.source, written.text, written.tested)
        engines = () if check is None else (check,)
        return replace(verification, remarks=written.remarks, engines=engines)


def _remarks(lowered: EncodedNetwork) -> tuple[str, ...]:
    """Return a sentence on weights without encodings, if there are any."""
    if not lowered.unencoded:
        return ()
    names = first_names(lowered.unencoded)
    return (
        f"{names}: the weights have no encoding, because readers know no axis of channels "
        "there. The file has their rounded values",
    )


def _network_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.onnx")
