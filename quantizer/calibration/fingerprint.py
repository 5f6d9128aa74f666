"""What a calibration was made of, so that results are never used with something else. Hashes
contents, not files.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from quantizer.config.forms.resolved import resolved_document
from quantizer.config.model import Config, QuantizationSpec
from quantizer.graph.ir import Graph
from quantizer.plan.model import Key, Plan
from quantizer.storage.deferred_tensor import bytes_of


def model(graph: Graph) -> dict[str, dict[str, str]]:
    """What results say of a model: digests of its tensors and of its layers."""
    return {"weights": weights(graph), "layers": layers(graph)}


def weights(graph: Graph) -> dict[str, str]:
    """A digest per parameter, buffer and constant, by path: over dtype, shape and bytes."""
    return {path: tensor_digest(tensor) for path, tensor in sorted(graph.tensors.items())}


def layers(graph: Graph) -> dict[str, str]:
    """A digest per layer: operator, constants and what it reads; devices are left out, so
    results move between them.
    """
    found = {}
    for node in graph.nodes:
        attrs = {
            key: value
            for key, value in node.attrs.items()
            if not isinstance(value, torch.device)
        }
        found[node.name] = digest(
            [node.op, node.target, repr(node.inputs), repr(attrs), dict(node.params)]
        )
    return found


def input_shapes(graph: Graph) -> list[list[int | None] | None]:
    """The shape of each input, in the order of the call; None for the batch, and for what is no
    tensor.
    """
    return [
        None if node.shape is None else list(node.shape)
        for node in graph.nodes
        if node.op == "input"
    ]


def call_paths(graph: Graph) -> list[tuple[list[Any], str | None]]:
    """Where each input stands in (args, kwargs), and its dtype; None for what is no tensor."""
    inputs = (node for node in graph.nodes if node.op == "input")
    dtypes = (
        None if node.dtype is None else str(node.dtype).removeprefix("torch.")
        for node in inputs
    )
    return [(list(path), dtype) for path, dtype in zip(graph.input_paths, dtypes, strict=True)]


def config(value: Config) -> str:
    """A digest of what the config says, defaults written out; comments do not count."""
    return digest(resolved_document(value))


def decisions(plan: Plan) -> str:
    """A digest of what a plan decided: the settings, and the spec of each tensor. Where it was
    said does not count, nor what calibration decided of joins.
    """
    settings = {key: value for key, value in asdict(plan.settings).items() if key != "places"}
    return decided(
        settings,
        {key: tensor.spec for key, tensor in (*plan.tensors.items(), *plan.left.items())},
    )


def decided(settings: Mapping[str, Any], specs: Mapping[Key, QuantizationSpec]) -> str:
    """The same of its parts."""
    return digest(
        [
            settings,
            [[*key, spec.to_json()] for key, spec in sorted(specs.items(), key=itemgetter(0))],
        ]
    )


def first_difference(stored: Mapping[str, str], current: Mapping[str, str]) -> str | None:
    """The first name, in the current order, whose digest is new or changed; else a stored name
    that is gone.
    """
    for name, digest in current.items():
        if stored.get(name) != digest:
            return name
    return next((name for name in stored if name not in current), None)


def tensor_digest(tensor: Tensor) -> str:
    """A digest over dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(bytes_of(tensor))
    return digest.hexdigest()[:16]


def digest(value: Any) -> str:
    """A digest of nested values that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[
        :16
    ]
