"""Writes the .gguf target: one file that llama.cpp and transformers load.

Weights are blocks of codes, activations are float.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor, nn

from quantizer.calibration.solution import Solution
from quantizer.config.model import CAST_ONLY
from quantizer.config.roles import base_role, is_parameter
from quantizer.errors import VerificationError, first_line
from quantizer.export.agreement import Verification, verify
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Reason, Refusal
from quantizer.export.gguf.architectures import outline_of_architecture
from quantizer.export.gguf.blocks import block_refusal, block_type, with_float16_scale
from quantizer.export.gguf.file import Outline, file_bytes, stored_tensors, write_gguf
from quantizer.export.gguf.template import outline_of_template
from quantizer.export.hugging_face_folder import model_config
from quantizer.export.transformers_models import (
    CHANGE_REMEDY,
    READER_HELP,
    ExpectedCall,
    cannot_store,
    expected_calls,
    first_names,
    insertion_refusals,
    model_of,
    parameter_values,
    require_all_keys,
    state_of,
    value_refusal,
    verify_calls,
    with_scales_of_file,
    without_codes,
)
from quantizer.graph.ir import Graph, Node
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.option_words import Sentence
from quantizer.plan.model import Plan, TensorSpecs
from quantizer.sources.hugging_face.loader import read_checkpoint

_TARGET = "gguf"
_NO_LANGUAGE_MODEL = Refusal(
    "holds language models, and this model has no embedding of tokens",
    "<--deploy onnx, pt2 and safetensors> hold any network",
)
_ROUNDED = Sentence(
    "its scales are rounded to float16; test mode with <--deploy gguf> computes with these"
)
_ACTIVATION = (
    "is quantized at run time, and a .gguf has only weights",
    "quantize only weights (`quantizer init --preset gguf_q4_0`); llama.cpp rounds inputs to "
    "int8 by itself",
)
_NO_WEIGHT = Refusal(
    "finds no quantized weight", "quantize weights (`quantizer init --preset gguf_q4_0`)"
)


@dataclass(frozen=True)
class GgufFile:
    """A file that was written, and the network and the values that it stands for.

    Attributes:
        values: by their names in the model.
        decoded: those of blocks, by the same names, as matrices with a row for each output.
    """

    path: Path
    outline: Outline
    values: Mapping[str, Tensor]
    decoded: Mapping[str, Tensor]
    network: Network
    remarks: tuple[str, ...]


class GgufExporter(Exporter[GgufFile]):
    """Writes a file for llama.cpp and engines built on it.

    Keys and names come from a template, or from an architecture that is known here. The codes
    are those of the calibration, with their scales rounded to float16.
    """

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> tuple[Refusal, ...]:
        """Return what blocks cannot hold."""
        if not any(node.row.looks_up for node in graph.nodes):
            return (_NO_LANGUAGE_MODEL,)
        return tuple(_refusals(graph, specs))

    def require_model(self, model: nn.Module) -> None:
        """Check that keys and names are known, from the template or the architecture."""
        _outline(self.choice("gguf_template"), model)

    def file_bytes(self, plan: Plan, model: nn.Module) -> int:
        """Return the size of the file with its vocabulary."""
        outline = _outline(self.choice("gguf_template"), model)
        names = first_names(model)
        kinds: dict[str, str] = {}
        for layer, node in _layers_of_blocks(plan.graph, plan.specs).items():
            kind = block_type(plan.specs[layer, "weights"])
            if kind is not None:
                kinds[names[node.params["weight"].partition("@")[0]]] = kind.name
        return file_bytes(outline, kinds, state_of(model))

    def as_run(self, graph: Graph, solution: Solution) -> Solution:
        """Return the solution with the file's scales, which are float16; codes stay."""
        if any(_refusals(graph, solution.specs)):
            return solution
        layers = _layers_of_blocks(graph, solution.specs)
        return with_scales_of_file(graph, solution, layers, with_float16_scale)

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[GgufFile]:
        """Write the file; transformers runs it on all calls before it is published.

        Raises:
            UsageError: blocks cannot hold what the config asks for, the template is of another
                model, or there is none and the architecture is unknown.
            ResultError: the file cannot be written.
        """
        model = model_of(deployment, _TARGET)
        outline = _outline(deployment.choice("gguf_template"), model)
        graph = deployment.graph
        solution = self.as_run(graph, deployment.solution)
        stored = replace(deployment, solution=solution)
        network = stored.network()
        layers = _layers_of_blocks(graph, solution.specs)
        values = parameter_values(stored, network, layers, _TARGET)
        blocks = _blocks(model, solution, layers)
        decoded = {name: tensor.parameter() for name, tensor in blocks.items()}
        remarks = outline.remarks
        tensors = deployment.solution.tensors
        if any(tensors[key].scale is not solution.tensors[key].scale for key in tensors):
            remarks = (*remarks, _ROUNDED)
        write_gguf(path, outline, stored_tensors(outline, blocks, values))
        yield GgufFile(path, outline, values, decoded, network, remarks)

    def verify(self, deployment: Deployment, written: GgufFile) -> Verification:
        """Compare what transformers computes with test mode."""
        verification = _verified(written, deployment)
        return replace(verification, remarks=(*written.remarks, *verification.remarks))


def _blocks(
    model: nn.Module, solution: Solution, layers: Mapping[str, Node]
) -> dict[str, QuantizedTensor]:
    """Return the weights that become blocks, by their names in the model.

    Raises:
        UsageError: one has no codes, or other codes in another layer that shares it.
    """
    names = first_names(model)
    blocks: dict[str, QuantizedTensor] = {}
    for layer, node in layers.items():
        tensor = solution.tensors[layer, "weights"]
        name = names[node.params["weight"].partition("@")[0]]
        if tensor.codes is None:
            raise without_codes(_TARGET, layer)
        if name in blocks and not torch.equal(blocks[name].decoded(), tensor.decoded()):
            why = f"{layer} has other codes than another use of its weight"
            raise cannot_store(_TARGET, why, CHANGE_REMEDY)
        blocks[name] = tensor
    return blocks


def _outline(template: str, model: nn.Module) -> Outline:
    model_config(model)
    if template:
        return outline_of_template(Path(template), state_of(model), first_names(model))
    return outline_of_architecture(model, state_of(model))


def _layers_of_blocks(graph: Graph, specs: TensorSpecs) -> dict[str, Node]:
    """Return the linear layers and embeddings whose weights become blocks, by name.

    Other parameters stay values.
    """
    layers: dict[str, Node] = {}
    for node in graph.nodes:
        spec = specs.get((node.name, "weights"))
        if spec is not None and spec.dtype not in CAST_ONLY and _is_matrix(graph, node):
            layers[node.name] = node
    return layers


def _refusals(graph: Graph, specs: TensorSpecs) -> Iterator[Refusal]:
    """Yield what blocks cannot hold. Only specs are read: this is known before calibration."""
    layers = _layers_of_blocks(graph, specs)
    yield from insertion_refusals(graph)
    if not any(
        base_role(role) == "weights" and spec.dtype != "float32"
        for (_, role), spec in specs.items()
    ):
        yield _NO_WEIGHT
    for (layer, role), spec in specs.items():
        if spec.dtype == "float32":
            continue
        reason: Reason | None
        if not is_parameter(role):
            reason = _ACTIVATION
        elif role == "weights" and layer in layers:
            path = layers[layer].params["weight"]
            inputs = graph.tensors[path].shape[-1]
            reason = block_refusal(spec, inputs)
            reason = reason or value_refusal(graph, specs, layer, role)
            reason = reason or _other_use_refusal(graph, layers, layer)
        else:
            reason = value_refusal(graph, specs, layer, role)
        if reason is not None:
            yield Refusal(*reason, layer, role)


def _other_use_refusal(graph: Graph, layers: Mapping[str, Node], layer: str) -> Reason | None:
    """Return why a weight cannot be blocks if something else computes with its values."""
    path = layers[layer].params["weight"]
    for node in graph.nodes:
        if path in node.params.values() and node.name not in layers:
            why = (
                f"is also a parameter of {node.name}, which is not a linear layer or embedding"
            )
            return why, "exclude both"
    return None


def _is_matrix(graph: Graph, node: Node) -> bool:
    """Return whether a node's weight is a matrix with a row for each output."""
    path = node.params.get("weight")
    is_linear = node.row.spatial == 0
    if path is None or not (is_linear or node.row.looks_up):
        return False
    weight = graph.tensors[path]
    return weight.dim() == 2


def _verified(written: GgufFile, deployment: Deployment) -> Verification:
    """Compare the outputs of a file, loaded by transformers, with test mode's over all calls.

    If transformers cannot load the architecture, the tensors are compared instead, as the
    package gguf reads them. This is so for templates, and for families whose files it does not
    read by itself.

    Raises:
        VerificationError: transformers cannot load or run it, or its outputs differ; or a
            tensor differs.
    """
    file, config = written.path, written.outline.config
    reader = f"transformers {transformers.__version__} with gguf"
    generates = model_of(deployment, _TARGET).can_generate()  # type: ignore[operator]
    auto_class = "AutoModelForCausalLM" if generates else "AutoModel"
    dtype = next(iter(written.values.values())).dtype
    settings: dict[str, Any] = {"dtype": dtype, "gguf_file": file.name}
    if config is not None:
        settings["config"] = config

    def load(call: ExpectedCall) -> nn.Module:
        """Return the network that transformers reads from the file, after a first call."""
        module, report = read_checkpoint(file.parent, auto_class, **settings)
        require_all_keys(report, reader, file.name)
        module(*call.args, **call.kwargs)
        return module

    try:
        calls = expected_calls(deployment, written.network)
        return verify_calls(load, calls, 0.0, file.name, is_exact=True)
    except VerificationError:
        raise
    except Exception as error:
        reason = first_line(error).rstrip(".")
        why = f"{reader} cannot run it: {type(error).__name__}: {reason}"
        # An engine has loaded a file with the keys of a template before
        if not deployment.choice("gguf_template") and config is None:
            raise VerificationError(
                f"{file.name} is not written: {why}", help=READER_HELP
            ) from error
    verification = _verify_tensors(written)
    return replace(verification, remarks=(f"{why}; its tensors were compared instead",))


def _verify_tensors(written: GgufFile) -> Verification:
    """Compare each tensor of the model as it is read back, one after the other.

    Raises:
        VerificationError: one differs.
    """
    file = written.path
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name, (source, arrangement) in written.outline.tensors.items():
        arranged = arrangement.values(written.values[source])
        if source in written.decoded:
            arranged = arrangement.coded(written.decoded[source], written.values[source])
        decoded = gguf.dequantize(stored[name].data, stored[name].tensor_type)
        # Test mode has decoded values in the dtype of the model
        actual = torch.from_numpy(decoded.copy()).to(arranged.dtype)
        verification = verify("tensors", [arranged.float()], [actual.float()])
        if verification.max_difference:
            text = f"{file.name} is not written: {name}: {verification.figures()}"
            raise VerificationError(text, help=READER_HELP)
    return verification
