"""Writes the .gguf target: one file that llama.cpp and transformers load.

Weights are blocks of codes, activations are float.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from quantizer.calibration.solution import Solution
from quantizer.export.agreement import Verification
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.gguf.architectures import outline_of_architecture
from quantizer.export.gguf.blocks import with_float16_scale
from quantizer.export.gguf.file import Outline, stored_tensors, write_gguf
from quantizer.export.gguf.placement import BlockPlacement, place_blocks
from quantizer.export.gguf.template import outline_of_template
from quantizer.export.gguf.verify import GgufFile, verify_gguf
from quantizer.export.hugging_face_folder import model_config
from quantizer.export.model_tensors import (
    CHANGE_REMEDY,
    cannot_store,
    first_names,
    model_of,
    parameter_values,
    state_of,
    with_scales_of_file,
)
from quantizer.export.transformers_verify import expected_calls
from quantizer.graph.ir import Graph
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.option_words import Sentence
from quantizer.plan.model import TensorSpecs

_TARGET = "gguf"
_GENERATING = "AutoModelForCausalLM"
_HEADLESS = "AutoModel"
_NO_LANGUAGE_MODEL = Refusal(
    "holds language models, and this model has no embedding of tokens",
    "<--deploy onnx, pt2 and safetensors> hold any network",
)
_ROUNDED = Sentence(
    "its scales are rounded to float16; test mode with <--deploy gguf> computes with these"
)


class GgufExporter(Exporter[GgufFile]):
    """Writes a file for llama.cpp and engines built on it.

    Keys and names come from a template, or from an architecture that is known here. The codes
    are those of the calibration, with their scales rounded to float16.
    """

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> tuple[Refusal, ...]:
        """Return what blocks cannot hold."""
        if not any(node.row.looks_up for node in graph.nodes):
            return (_NO_LANGUAGE_MODEL,)
        return place_blocks(graph, specs).refusals

    def require_model(self, model: nn.Module) -> None:
        """Check that keys and names are known, from the template or the architecture."""
        _outline(self.choice("gguf_template"), model)

    def as_run(self, graph: Graph, solution: Solution) -> Solution:
        """Return the solution with the file's scales, which are float16; codes stay."""
        placement = place_blocks(graph, solution.specs)
        if placement.refusals:
            return solution
        return with_scales_of_file(graph, solution, placement.layers, with_float16_scale)

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
        placement = place_blocks(graph, solution.specs)
        values = parameter_values(stored, network, placement.layers, _TARGET)
        blocks = _blocks(model, solution, placement)
        tensors = stored_tensors(outline, blocks, values)
        decoded = {name: tensor.parameter() for name, tensor in blocks.items()}
        remarks = outline.remarks
        if _has_other_scales(deployment.solution, solution):
            remarks = (*remarks, _ROUNDED)
        write_gguf(path, outline, tensors)
        yield GgufFile(path, outline, values, decoded, network, remarks)

    def verify(self, deployment: Deployment, written: GgufFile) -> Verification:
        """Compare what transformers computes with test mode."""
        calls = expected_calls(deployment, written.network)
        by_template = deployment.choice("gguf_template") != ""
        auto_class = _HEADLESS
        if model_of(deployment, _TARGET).can_generate():  # type: ignore[operator]
            auto_class = _GENERATING
        verification = verify_gguf(
            written, calls, by_template=by_template, auto_class=auto_class
        )
        return replace(verification, remarks=(*written.remarks, *verification.remarks))


def _has_other_scales(solution: Solution, stored: Solution) -> bool:
    for key, tensor in solution.tensors.items():
        if tensor.scale is not stored.tensors[key].scale:
            return True
    return False


def _blocks(
    model: nn.Module, solution: Solution, placement: BlockPlacement
) -> dict[str, QuantizedTensor]:
    """Return the weights that become blocks, by their names in the model.

    Raises:
        UsageError: one has no codes, or other codes in another layer that shares it.
    """
    names = first_names(model)
    blocks: dict[str, QuantizedTensor] = {}
    for layer, node in placement.layers.items():
        tensor = solution.tensors[layer, "weights"]
        path = node.params["weight"].partition("@")[0]
        name = names[path]
        if tensor.codes is None:
            why = f"no codes give the weight of {layer} back exactly"
            raise cannot_store(_TARGET, why, "leave it out of the algorithms")
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
