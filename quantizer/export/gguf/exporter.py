"""The .gguf target: one file that llama.cpp and transformers load. Weights are blocks of codes,
activations float.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from quantizer.calibration.solution import Solution, encoded
from quantizer.config.model import QuantizationSpec
from quantizer.errors import UsageError
from quantizer.export import Refusal, check
from quantizer.export.agreement import Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.gguf import architectures as gguf_architectures
from quantizer.export.gguf import template as gguf_template
from quantizer.export.gguf.blocks import halved
from quantizer.export.gguf.file import Outline, stored, write
from quantizer.export.gguf.placement import Placement, place
from quantizer.export.gguf.verify import verify_file
from quantizer.export.hugging_face_folder import described
from quantizer.export.model_tensors import MADE, first_names, state_of, unheld, values_of
from quantizer.export.transformers_verify import Expected
from quantizer.graph.ir import Graph
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import Key
from quantizer.storage.atomic_write import replaced_file
from quantizer.storage.files import cannot_write

NAME = "gguf"
_ROUNDED = "its scales are rounded to halfs, which test mode with --deploy gguf counts"


def refusals(
    graph: Graph, specs: Mapping[Key, QuantizationSpec], opset: int
) -> Iterator[Refusal]:
    """What blocks cannot hold; they have no operator set."""
    yield from place(graph, specs).refusals


def as_run(graph: Graph, solution: Solution) -> Solution:
    """The solution with the scales that the file has, which are halfs; codes stay."""
    placement = place(graph, solution.specs)
    if placement.refusals:
        return solution
    solution = encoded(graph, solution)
    keys = [(layer, "weights") for layer in placement.layers]
    coded = {
        key: solution.tensors[key] for key in keys if solution.tensors[key].codes is not None
    }
    return replace(
        solution,
        tensors={**solution.tensors, **{key: halved(each) for key, each in coded.items()}},
    )


def export(deployment: Deployment, path: Path) -> Verification:
    """Write a file for llama.cpp and what is built on it, by a template or of an architecture
    that is known here.

    The codes are those of the calibration, their scales rounded to halfs. transformers loads
    the file and runs it on all calls before it stands at `path`.

    Raises:
        UsageError: blocks cannot hold what the config asks for, the template is of another
            model, or there is none and the architecture is not known.
        VerificationError: transformers does not give test mode's outputs.
        ResultError: the file cannot be written.
    """
    check(NAME, deployment.graph, deployment.solution.specs, deployment.opset)
    if deployment.model is None:
        raise UsageError(
            f"--deploy {NAME} needs the float model", help="give it to Deployment.of"
        )
    # Refuses others than transformers' models before there is any work
    described(deployment.model)
    outline = _outline(deployment)
    given = replace(deployment, solution=as_run(deployment.graph, deployment.solution))
    network, placement = given.network(), place(given.graph, given.solution.specs)
    values, blocks = (
        values_of(given, network, placement.layers, NAME),
        _blocks(given, placement),
    )
    tensors = stored(outline, blocks, values)
    decoded = values | {name: each.parameter() for name, each in blocks.items()}
    calls = (
        Expected(args, kwargs, tensor_leaves(network(*args, **kwargs)))
        for args, kwargs in given.calls()
    )
    try:
        with replaced_file(path) as file:
            write(file, outline, tensors)
            by_template = given.choice("gguf_template") != ""
            found = verify_file(file, outline, decoded, calls, by_template=by_template)
    except OSError as error:
        raise cannot_write(path, error) from error
    is_rounded = any(
        tensor.scale is not given.solution.tensors[key].scale
        for key, tensor in deployment.solution.tensors.items()
    )
    return replace(
        found, remarks=(*outline.remarks, *([_ROUNDED] if is_rounded else []), *found.remarks)
    )


def _blocks(deployment: Deployment, placement: Placement) -> dict[str, QuantizedTensor]:
    """The weights that have codes, by their names in the model.

    Raises:
        UsageError: one has none, or others in another layer that shares it.
    """
    assert deployment.model is not None  # as the target has looked
    first, found = first_names(deployment.model), dict[str, QuantizedTensor]()
    for layer, node in placement.layers.items():
        tensor, name = (
            deployment.solution.tensors[layer, "weights"],
            first[node.params["weight"]],
        )
        if tensor.codes is None:
            raise unheld(
                NAME,
                f"no codes give the weight of {layer} back exactly",
                "leave it out of the algorithms",
            )
        if name in found and not torch.equal(found[name].decoded(), tensor.decoded()):
            raise unheld(NAME, f"{layer} has other codes than another use of its weight", MADE)
        found[name] = tensor
    return found


def _outline(deployment: Deployment) -> Outline:
    model = deployment.model
    assert model is not None  # as the target has looked
    path = deployment.choice("gguf_template")
    if not path:
        return gguf_architectures.outline_of(model, state_of(model))
    return gguf_template.outline_of(Path(path), state_of(model), first_names(model))
