"""Holds what the targets for models of transformers share.

It finds the tensors of a model by name, with the values of the quantized network, and what
files have no place for. It compares what transformers loads on the CPU with test mode.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.calibration.solution import Solution, encode_parameters
from quantizer.errors import ModelError, UsageError, VerificationError
from quantizer.export.acceptance import least_db
from quantizer.export.agreement import Agreement, Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.exporter import Reason, Refusal
from quantizer.export.hugging_face_folder import model_config
from quantizer.export.targets import offered
from quantizer.graph.ir import Graph, Node
from quantizer.graph.names import is_operator_name
from quantizer.graph.tracing.trace import quiet
from quantizer.nn.inplace import InPlace
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.plan.model import TensorSpecs

_FAMILY = re.compile(r"transformers\.models\.(\w+)\.")
CHANGE_REMEDY = (
    f"leave out the algorithm or the setting that makes it, or use {offered('program')}"
)


def model_of(deployment: Deployment, target: str) -> nn.Module:
    """Return the float model.

    Raises:
        UsageError: there is none, or it is not a model of transformers.
    """
    if deployment.model is None:
        raise UsageError(
            f"<--deploy {target}> needs the float model", help="give it to Deployment.of"
        )
    model_config(deployment.model)
    return deployment.model


def with_scales_of_file(
    graph: Graph,
    solution: Solution,
    layers: Iterable[str],
    change: Callable[[QuantizedTensor], QuantizedTensor],
) -> Solution:
    """Return the solution with the scales that a file has; codes stay.

    Args:
        graph: the graph of the solution.
        solution: of the calibration.
        layers: whose weights are codes in the file.
        change: gives a weight its scales in the file.
    """
    solution = encode_parameters(graph, solution)
    tensors = dict(solution.tensors)
    for layer in layers:
        weight = tensors[layer, "weights"]
        if weight.codes is not None:
            tensors[layer, "weights"] = change(weight)
    return replace(solution, tensors=tensors)


def family_of(node: Node) -> str:
    """Return the family of transformers whose code has a layer, as `mixtral`; empty for code of
    other packages.
    """
    families = map(_FAMILY.match, node.classes)
    return next((family[1] for family in families if family), "")


def parameter_values(
    deployment: Deployment, network: Network, coded: Collection[str], target: str
) -> dict[str, Tensor]:
    """Return the model's state, with the values that parameters have in the network.

    Args:
        coded: layers whose weight is stored as codes; it keeps the model's value here.
        target: stands for the exporter in messages.

    Raises:
        UsageError: a parameter has changed that the model has no place for, or in one of the
            layers that share it.
    """
    model = model_of(deployment, target)
    state = state_of(model)
    names = first_names(model)
    values: dict[str, Tensor] = {}
    for node in deployment.graph.nodes:
        if node.name not in network.layers:
            continue
        for key, parameter in network.layers[node.name].state_dict().items():
            if key.startswith("quantizers.") or (key == "weight" and node.name in coded):
                continue
            path = node.params.get(key, f"{node.scope}.{key}")
            name = names.get(path, path)
            value = parameter.detach().cpu()
            if name in state:
                if name in values and not torch.equal(values[name], value):
                    why = f"{name} has one value in {node.name} and another elsewhere"
                    raise cannot_store(target, why, CHANGE_REMEDY)
                values[name] = value
                continue
            traced = deployment.graph.tensors.get(path)
            if traced is None or not torch.equal(traced.cpu(), value):
                why = f"{node.name} has a {key} now that the model has no place for"
                raise cannot_store(target, why, CHANGE_REMEDY)
    return state | values


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state, each under the first of its names."""
    names = first_names(model)
    return {
        name: tensor.detach().cpu()
        for name, tensor in model.state_dict().items()
        if names.get(name, name) == name
    }


def quantized_layers(model: nn.Module) -> dict[str, InPlace]:
    """Return the layers of a model that were quantized in place, by their paths.

    Raises:
        ModelError: there are none.
    """
    modules = model.named_modules()
    layers = {path: module for path, module in modules if isinstance(module, InPlace)}
    if not layers:
        raise ModelError(
            "the model has no quantized layer",
            help="call ModelQuantizer(config).quantize_model first",
        )
    return layers


def first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter and buffer, by each of its names."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def without_codes(
    target: str, name: str, remedy: str = "leave it out of the algorithms"
) -> UsageError:
    """Return the error for a weight that no codes give."""
    return cannot_store(target, f"no codes give the weight of {name} back exactly", remedy)


def cannot_store(target: str, why: str, remedy: str) -> UsageError:
    """Return the error for what the file of a target has no place for."""
    return UsageError(f"<--deploy {target}>: {why}", help=remedy)


INSERTION_REASON = (
    "was inserted by an algorithm, and the model of the checkpoint has no such operator",
    "let the algorithm fold it into a layer (no online rotations), or use "
    f"{offered('program')}",
)
_COMPUTED = (
    "is computed from other tensors of the model, which has no place for a rounded one",
    f"use {offered('program')}, or exclude it",
)
_SHARING_HELP = "quantize both alike, or neither: kind:head and kind:embedding name them"


def scales_by_row(values: Tensor, codes: Tensor) -> Tensor:
    """Return scales or zero points as [outputs, groups]; one of a tensor is repeated."""
    if values.dim():
        groups = values.reshape(len(codes), -1)
    else:
        groups = values.expand(len(codes), 1)
    return groups.contiguous()


def value_refusal(graph: Graph, specs: TensorSpecs, layer: str, role: str) -> Reason | None:
    """Return why a rounded weight cannot be stored as values: the model computes it from other
    tensors, or another layer quantizes it otherwise.
    """
    path = graph.by_name[layer].params.get("weight", "")
    # A weight that is computed has the name of the operator that computes it
    if role == "weights" and is_operator_name(path):
        return _COMPUTED
    for node in graph.nodes:
        if path not in node.params.values() or node.name == layer:
            continue
        if specs.get((node.name, role)) != specs[layer, role]:
            why = f"is the weight of {node.name}, too, and is quantized differently there"
            return why, _SHARING_HELP
    return None


def insertion_refusals(graph: Graph) -> Iterator[Refusal]:
    """Yield a refusal for each operator that an algorithm has put before a layer."""
    for node in graph.nodes:
        if node.target.startswith("rescale."):
            yield Refusal(*INSERTION_REASON, node.name)


# For float32 networks with quantized weights only, whose sums are the same except for their
# order. Elsewhere readers round scales to the model's dtype and compute ranges in it, which
# moves some codes by a step.
EXACT_DB = 100.0
READER_HELP = f"{offered('program', 'weights')} needs no such reader"
_KEY_KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys")


@dataclass(frozen=True)
class ExpectedCall:
    """A call of the model, and the tensors of test mode's output."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: list[Tensor]


def expected_calls(deployment: Deployment, network: Network) -> Iterator[ExpectedCall]:
    """Yield the calls of a deployment with what a network gives for them."""
    for args, kwargs in deployment.calls():
        yield ExpectedCall(args, kwargs, tensor_leaves(network(*args, **kwargs)))


def verify_calls(
    load: Callable[[ExpectedCall], nn.Module],
    calls: Iterable[ExpectedCall],
    sqnr_db: float,
    name: str,
    *,
    is_exact: bool,
) -> Verification:
    """Compare the outputs of a loaded module with test mode's over all calls.

    Args:
        load: returns the module; its argument is the first call.
        calls: at least one, iterated once.
        sqnr_db: what quantization costs the outputs, in dB. A reader that rounds in another way
            may cost no more.
        name: stands for the file or folder in messages.
        is_exact: whether the reader rounds nothing, as with quantized weights only.

    Raises:
        VerificationError: the outputs differ.
    """
    agreement = Agreement("outputs")
    remaining = iter(calls)
    with torch.no_grad():
        first = next(remaining)
        # The report of transformers has what matters of its bars, warnings and logs
        with silenced("transformers"), quiet():
            module = load(first)
        for call in chain([first], remaining):
            agreement.add(call.outputs, tensor_leaves(module(*call.args, **call.kwargs)))
    verification = agreement.result()
    is_float32 = all(output.dtype == torch.float32 for output in first.outputs)
    least = EXACT_DB if is_exact and is_float32 else least_db(sqnr_db)
    if verification.sqnr_db is not None and verification.sqnr_db < least:
        raise VerificationError(
            f"{name} is not written: transformers does not compute what test mode does: "
            f"{verification.figures()}",
            help=READER_HELP,
        )
    return verification


def require_all_keys(
    report: Mapping[str, Any], reader: str, name: str, unused: Collection[str] = ()
) -> None:
    """Check the keys in the loading report of `from_pretrained`.

    Args:
        report: of missing and unexpected keys, among others.
        reader: the packages that loaded the file.
        name: of the file.
        unused: the tensors that the float model does not read, either.

    Raises:
        VerificationError: a tensor is missing, or nothing reads it.
    """
    faults = []
    for kind in _KEY_KINDS:
        what, _, _ = kind.partition("_")
        keys = set(map(str, report.get(kind, ()))).difference(unused)
        faults += [f"{key} {what}" for key in sorted(keys)]
    if faults:
        raise VerificationError(
            f"{name} is not written: {reader} finds {', '.join(faults[:3])}", help=READER_HELP
        )


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Suppress the messages of a logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
