"""Digests of what a calibration was made of, so that results are not used with something else.

They are of contents, not of files.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from quantizer.config.forms.resolved import resolved_document
from quantizer.config.model import ResolvedConfig
from quantizer.graph.ir import Graph, Node
from quantizer.plan.model import Plan, TensorSpecs
from quantizer.storage.deferred_tensor import DeferredTensor, bytes_of


def model_digests(graph: Graph) -> dict[str, dict[str, str]]:
    """Return the digests of a model's tensors and layers."""
    return {"weights": weight_digests(graph), "layers": layer_digests(graph)}


def weight_digests(graph: Graph) -> dict[str, str]:
    """Return a digest of each parameter, buffer and constant, by path."""
    return {path: tensor_digest(tensor) for path, tensor in sorted(graph.tensors.items())}


def layer_digests(graph: Graph) -> dict[str, str]:
    """Return a digest of each layer: its operator, its constants and its inputs.

    Devices are left out, so that results can be used on another one.
    """
    digests = {}
    for node in graph.nodes:
        attrs = {
            key: value
            for key, value in node.attrs.items()
            if not isinstance(value, torch.device)
        }
        parts = [node.op, node.target, repr(node.inputs), repr(attrs), dict(node.params)]
        digests[node.name] = value_digest(parts)
    return digests


def _inputs(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "input"]


def input_shapes(graph: Graph) -> list[list[int | None] | None]:
    """Return the shape of each input, in the order of the call.

    The size of the batch is None, and so is the shape of what is not a tensor.
    """
    shapes: list[list[int | None] | None] = []
    for node in _inputs(graph):
        if node.shape is None:
            shapes.append(None)
        else:
            shapes.append(list(node.shape))
    return shapes


def input_call_paths(graph: Graph) -> list[tuple[list[Any], str | None]]:
    """Return the place of each input in (args, kwargs), and its dtype; None for what is no
    tensor.
    """
    paths = []
    for node, path in zip(_inputs(graph), graph.input_paths, strict=True):
        dtype = None
        if node.dtype is not None:
            dtype = str(node.dtype).removeprefix("torch.")
        paths.append((list(path), dtype))
    return paths


def config_digest(value: ResolvedConfig) -> str:
    """Return a digest of a config with its defaults written out, without comments."""
    return value_digest(resolved_document(value))


def plan_digest(plan: Plan) -> str:
    """Return a digest of the settings of a plan, and of the spec of each tensor.

    The places in the config are left out, and so are the decisions of calibration on joins.
    """
    settings = asdict(plan.settings)
    del settings["places"]
    specs = {}
    for tensors in (plan.tensors, plan.left):
        for key, tensor in tensors.items():
            specs[key] = tensor.spec
    return settings_digest(settings, specs)


def settings_digest(settings: Mapping[str, Any], specs: TensorSpecs) -> str:
    """Return the digest `plan_digest` of settings and specs."""
    rows = [[*key, specs[key].to_json()] for key in sorted(specs)]
    return value_digest([settings, rows])


def first_difference(stored: Mapping[str, str], current: Mapping[str, str]) -> str | None:
    """Return the first name, in the current order, whose digest is new or changed.

    If there is none, it is a stored name that is gone.
    """
    for name, current_digest in current.items():
        if stored.get(name) != current_digest:
            return name
    for name in stored:
        if name not in current:
            return name
    return None


def tensor_digest(tensor: Tensor) -> str:
    """Return a digest of dtype, shape and bytes."""
    header = f"{tensor.dtype} {tuple(tensor.shape)} "
    sha256 = hashlib.sha256(header.encode())
    if isinstance(tensor, DeferredTensor) and tensor.place is not None:
        for block in tensor.place.blocks():
            sha256.update(block)
    else:
        sha256.update(bytes_of(tensor))
    return sha256.hexdigest()[:16]


def value_digest(value: Any) -> str:
    """Return a digest of nested values that JSON can hold."""
    text = json.dumps(value, sort_keys=True, default=str)
    sha256 = hashlib.sha256(text.encode())
    return sha256.hexdigest()[:16]
