"""Writes the .onnx target: the network with QuantizeLinear and DequantizeLinear.

torch.onnx translates the network with a mark where each tensor is quantized. Passes then
replace marks by nodes and weights by codes. OpenVINO, if installed, checks whether it reads the
file as test mode computes it. It refuses nothing.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from inspect import getsource
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, TensorProto
from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.errors import ResultError, UsageError, VerificationError
from quantizer.export.acceptance import engine_check, require_success, started
from quantizer.export.agreement import EngineCheck, Verification
from quantizer.export.arithmetic import with_runtime_biases
from quantizer.export.deployment import HALF, Deployment
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.layer_choice import DEPLOY_FILE, LayerChoice, network_digest, read_choice
from quantizer.export.onnx.build import BuiltOnnx, build_onnx, operator_set, stored_model
from quantizer.export.onnx.executed import FLOAT_WEIGHTS
from quantizer.export.onnx.lowering import CONVENTIONS, Conventions
from quantizer.export.onnx.refusals import float8_key_refusals, graph_refusals, tensor_refusals
from quantizer.export.onnx.speed import Feed
from quantizer.export.onnx.tuned.tuner import Tuner, activation_keys, without_activations
from quantizer.export.onnx.verify import LayerCheck, OnnxFile, named_inputs, verify_sessions
from quantizer.graph.ir import Graph
from quantizer.option_words import Sentence, marked_text
from quantizer.plan.model import TensorSpecs
from quantizer.storage.files import write_json

EngineSettings = Mapping[str, str | int]
"""How OpenVINO compiles a model."""
# Rounding explains at most so many steps between two codes of a layer.
_MAX_ROUNDING_STEPS = 3
# The check is how the file is read, not how coarsely it is computed. Without these settings
# OpenVINO computes in bfloat16 where a processor can. Otherwise it rounds floats that are
# multiplied by uint8 weights to 8 bits, in groups.
EXACT_SETTINGS: EngineSettings = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}
DEFAULT_SETTINGS: EngineSettings = {}


def installed_openvino() -> str | None:
    """Return OpenVINO's name with its version; None if it is not installed."""
    try:
        return f"OpenVINO {version('openvino')}"
    except PackageNotFoundError:
        return None


@contextmanager
def openvino_started(
    file: OnnxFile, deployment: Deployment
) -> Iterator[Callable[[], EngineCheck] | None]:
    """Start to run a file on the deployment's call, in parallel to the `with` statement's body.

    Yields what waits for the outputs and returns how far they are from test mode's. None if
    OpenVINO is not installed, or the file is too large to be held twice.
    """
    engine = installed_openvino()
    if engine is None or not isinstance(file.source, bytes):
        yield None
        return
    model = file.model
    with TemporaryDirectory() as name:
        folder = Path(name)
        inputs = named_inputs(model, deployment, deployment.call)
        settings = [EXACT_SETTINGS, DEFAULT_SETTINGS]
        process, stored = _started(folder / "file", file.source, inputs, settings)

        def outputs() -> list[list[Tensor]]:
            """Return the outputs in order, with each of the settings."""
            names = [value.name for value in model.graph.output]
            return [
                [torch.from_numpy(arrays[name]) for name in names]
                for arrays in _stored_outputs(process, stored)
            ]

        with process:
            try:
                find = partial(first_layer_that_differs, model, deployment, folder)
                yield partial(engine_check, engine, file.name, deployment, outputs, find)
            finally:
                # In case nobody waited for it.
                process.kill()


def first_layer_that_differs(model: ModelProto, deployment: Deployment, folder: Path) -> str:
    """Return the first layer whose codes differ by more than rounding; empty if none is found.

    Each is computed from the codes that it reads.

    Args:
        model: an ONNX model.
        deployment: whose call is run.
        folder: in which a folder for the run is made.
    """
    if any(node.dtype in HALF for node in deployment.graph.nodes):
        return ""
    layers = LayerCheck(model, deployment)
    inputs = named_inputs(model, deployment, deployment.call)
    try:
        content = layers.model.SerializeToString()
        watched = _started(folder / "watched", content, inputs, [EXACT_SETTINGS])
        (codes,) = _stored_outputs(*watched)
        layers.add(deployment.call, codes)
    except VerificationError:
        return ""
    rows = layers.rows.values()
    return next((row.layer for row in rows if row.most_steps > _MAX_ROUNDING_STEPS), "")


def _started(
    folder: Path, model: bytes, inputs: Feed, settings: Sequence[EngineSettings]
) -> tuple[subprocess.Popen[str], list[Path]]:
    """Create a folder, and start to run a serialized model with each of the settings.

    Returns:
        The process, and the file of outputs that it writes for each of the settings.
    """
    folder.mkdir()
    (folder / "model.onnx").write_bytes(model)
    arrays: dict[str, Any] = dict(inputs)
    np.savez(folder / "inputs.npz", **arrays)
    runs = {f"outputs_{index}.npz": dict(chosen) for index, chosen in enumerate(settings)}
    (folder / "runs.json").write_text(json.dumps(runs), "utf-8")
    return started(_PROGRAM, folder), [folder / name for name in runs]


def _stored_outputs(process: subprocess.Popen[str], files: Sequence[Path]) -> list[Feed]:
    """Wait for the outputs, by name, with each of the settings.

    Raises:
        VerificationError: OpenVINO cannot load the model or run it.
    """
    require_success(process)
    every: list[Feed] = []
    for file in files:
        with np.load(file) as arrays:
            every.append(dict(arrays))
    return every


def _run_openvino() -> None:
    """Run `model.onnx` in OpenVINO, as a program of its own: some files crash its process.

    It works in the folder that it is started in. It reads `inputs.npz`, and `runs.json` with
    the settings of each run by the file to write. That file has the outputs by the names of
    tensors. It has only the names of its own imports, so that it starts at once.
    """
    import json
    from pathlib import Path

    import numpy as np
    import openvino

    core = openvino.Core()
    known = set(core.get_property("CPU", "SUPPORTED_PROPERTIES"))
    for path, settings in json.loads(Path("runs.json").read_text("utf-8")).items():
        known_settings = {name: settings[name] for name in settings if name in known}
        compiled = core.compile_model("model.onnx", "CPU", known_settings)
        names = [value.get_any_name() for value in compiled.inputs]
        with np.load("inputs.npz") as inputs:
            results = compiled({name: inputs[name] for name in names})
        values = compiled.outputs
        arrays = {name: results[value] for value in values for name in value.get_names()}
        np.savez(path, **arrays)


_PROGRAM = f"{getsource(_run_openvino)}\n_run_openvino()"


_BYTES = {TensorProto.INT8: "int8", TensorProto.UINT8: "uint8"}
_SLOWER_IN_INTEGERS = f"left there for speed, see {DEPLOY_FILE}"


_Written = tuple[OnnxFile, BuiltOnnx]
"""A model that was written, and what it is compared with."""


class OnnxExporter(Exporter[_Written]):
    """Writes a model with the inputs and outputs of the user's model, by their names.

    They are in the order of the call's tensors. The bytes depend only on network and
    calibration. A network of half precision computes in float32 there.
    """

    @property
    def conventions(self) -> Conventions:
        """Return the conventions of the profile."""
        return CONVENTIONS[self.choice("onnx_profile")]

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> Iterator[Refusal]:
        """Yield what ONNX cannot express, and what ONNX Runtime cannot run."""
        yield from self.format_refusals(graph, specs, opset)
        if self.conventions.activations is None:
            yield from float8_key_refusals(graph, specs)

    def format_refusals(
        self, graph: Graph, specs: TensorSpecs, opset: int
    ) -> Iterator[Refusal]:
        """Yield what ONNX cannot express, for any engine."""
        conventions = self.conventions
        opset = operator_set(specs, conventions) if opset == -1 else opset
        yield from graph_refusals(graph, opset)
        yield from tensor_refusals(conventions, graph, specs, opset)

    def as_run(self, graph: Graph, solution: Solution) -> Solution:
        """Return the solution with biases rounded as the file's engine does."""
        return with_runtime_biases(graph, solution, self.conventions.biases)

    def layer_choice(self, deployment: Deployment, path: Path) -> LayerChoice | None:
        """Return what stays in float in a tuned file: as a deploy.json says, or as measured.

        A profile that keeps integers measures again if the deploy.json next to the file does
        not fit the network.

        Raises:
            ResultError: the deploy.json does not fit the network.
            UsageError: the machine is too busy to measure.
        """
        if not self.conventions.is_tuned:
            return None
        solution = deployment.solution
        weights = self.choice("onnx_weights")
        named = self.choice("deploy_file")
        source = Path(named) if named else path.with_name(DEPLOY_FILE)
        if named or source.exists():
            digest = network_digest(deployment.graph, solution)
            try:
                content = read_choice(source, digest, weights, activation_keys(solution))
            except (ResultError, UsageError):
                if named or not self.conventions.keeps_integers:
                    raise
            else:
                left_out = [(layer, role) for layer, role in content["float_activations"]]
                reduced = without_activations(deployment.graph, solution, left_out)
                return LayerChoice(reduced, content)
        return Tuner(deployment.in_memory(), weights, self.conventions).choice()

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[_Written]:
        """Write the model; it is verified before it is published.

        Raises:
            ModelError: torch.onnx does not know an operator of the network.
            ResultError: the file cannot be written.
        """
        conventions = self.conventions
        built = build_onnx(deployment, self.choice("onnx_weights"), conventions)
        with stored_model(built.proto, path) as source:
            is_for_kernels = conventions.is_for_kernels
            file = OnnxFile(path.name, source, built.proto, built.floating, is_for_kernels)
            yield file, built
        if deployment.layer_choice is not None:
            write_json(path.with_name(DEPLOY_FILE), deployment.layer_choice.content)

    def verify(self, deployment: Deployment, written: _Written) -> Verification:
        """Run the model in ONNX Runtime, without optimizations and as users do.

        OpenVINO runs a file for kernels, too, if it is installed. It refuses nothing, but a
        warning is logged if it reads the file in another way.
        """
        file, built = written
        codes = _activation_codes(file.model)
        remarks = built.remarks
        if not file.is_for_kernels:
            verification = verify_sessions(file, built.tested)
            return replace(verification, remarks=remarks, activation_codes=codes)
        with openvino_started(file, built.tested) as openvino:
            verification = verify_sessions(file, built.tested)
            engines = () if openvino is None else (openvino(),)
        asides = built.storage.asides
        choice = deployment.layer_choice
        if choice is not None:
            line = choice.line
            if self.conventions.keeps_integers:
                # The run may have chosen the profile
                profile = self.choice("onnx_profile")
                line = Sentence(f"profile {profile}: {marked_text(line)}")
            else:
                asides = (line, *asides)
            remarks = (line, *remarks)
            # The user has the file that --deploy_file names
            choice_file = "" if self.choice("deploy_file") else DEPLOY_FILE
            verification = replace(_with_reasons(verification, choice), choice_file=choice_file)
        return replace(
            verification,
            remarks=remarks,
            asides=asides,
            engines=engines,
            uint8_weights=tuple(built.storage.unsigned),
            processors=built.storage.processors,
            activation_codes=codes,
        )


def _activation_codes(model: ModelProto) -> str:
    """Return the most frequent type of the codes of 8 bits that a file computes."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    codes = [types.get(node.input[2], 0) for node in nodes if len(node.input) > 2]
    counts = Counter(_BYTES[code] for code in codes if code in _BYTES)
    return next((name for name, _ in counts.most_common(1)), "")


def _with_reasons(verification: Verification, choice: LayerChoice) -> Verification:
    """Return the verification with the reason for layers that a choice leaves in float."""
    session = verification.default_session
    if session is None or session.kernels is None:
        return verification
    floating = session.kernels.floating
    slower: dict[str, str] = {}
    for layer in choice.float_layers:
        # The config has left others in float
        if floating.get(layer, FLOAT_WEIGHTS) != FLOAT_WEIGHTS:
            slower[layer] = _SLOWER_IN_INTEGERS
    kernels = replace(session.kernels, floating=floating | slower)
    return replace(
        verification,
        default_session=replace(session, kernels=kernels),
        float_activations=choice.float_activations,
    )
