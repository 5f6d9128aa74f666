"""Reuse the graph in a result folder for a model whose weights stay in files. Comparing their
outputs would read all weights, so what was traced is compared: the code and the config.
"""

import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from quantizer.graph.ir import Call, Graph, Node, Ref
from quantizer.graph.lengths import Length
from quantizer.graph.parameters import without_values
from quantizer.graph.stored import with_output
from quantizer.results.small_calls import DifferentError, SmallCalls, check_kind
from quantizer.sources.batches import Batch
from quantizer.storage.deferred_tensor import DeferredTensor

_VOLATILE = ("_name_or_path", "transformers_version")
"""Entries of a config that no class reads: where the folder is, and who has written it."""


def code_digest(module: nn.Module) -> str:
    """Return the sha256 of what a trace depends on besides the call.

    These are the versions of torch and transformers, the config of the model, and the files
    with the classes of its modules.

    Return an empty string for a model whose parameters are in memory, as any code may have
    changed it, or that has no config of transformers.
    """
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_dict"):
        return ""
    if not _is_deferred(module):
        return ""
    entries = config.to_dict()
    for name in _VOLATILE:
        entries.pop(name, None)
    transformers = importlib.import_module("transformers")
    traced = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "config": entries,
        "attention": getattr(config, "_attn_implementation", None),
        "files": _file_digests(module),
    }
    # A config may hold dtypes, which JSON lacks
    text = json.dumps(traced, sort_keys=True, default=str)
    return _sha256(text.encode())


def bind_unchanged(graph: Graph, module: nn.Module, batch: Batch) -> Graph:
    """Return a stored graph with the output type of the module, without reading a weight.

    Args:
        graph: the stored graph with the deferred tensors of the module.
        module: the user's model.
        batch: the inputs of this run.

    Raises:
        DifferentError: the module is other code than was traced, or the batch has other sizes.
    """
    if not graph.code:
        raise DifferentError("the code that was traced is not known")
    if graph.code != code_digest(module):
        raise DifferentError("the code or the config of the model has changed")
    calls = SmallCalls(graph, batch)
    call = calls.of(1)
    leaves = pytree.tree_leaves(call)
    inputs = [node for node in graph.nodes if node.op == "input"]
    for node, leaf in zip(inputs, leaves, strict=True):
        _check_input(node, leaf)
    for length in graph.lengths:
        _check_length(length, leaves)
    outputs, structure = pytree.tree_flatten(_run_without_values(module, call))
    _check_outputs(graph, outputs)
    return with_output(graph, graph.output, structure)


def _is_deferred(module: nn.Module) -> bool:
    """Return whether some parameters of the module are in files."""
    return any(isinstance(tensor, DeferredTensor) for tensor in module.parameters())


def _file_digests(module: nn.Module) -> list[str]:
    """Return the sha256 of each file that defines a class of the module or its submodules."""
    files: set[Path] = set()
    for part in module.modules():
        name = type(part).__module__
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            files.add(Path(file))
    digests: list[str] = []
    for file in files:
        content = file.read_bytes()
        digests.append(_sha256(content))
    return sorted(digests)


def _sha256(content: bytes) -> str:
    digest = hashlib.sha256(content)
    return digest.hexdigest()


def _check_input(node: Node, value: Any) -> None:
    """Check that an argument has the traced kind and value. Dynamic sizes may differ.

    Raises:
        DifferentError: it is not.
    """
    if isinstance(value, Tensor):
        check_kind(node, value)
        return
    if node.shape is not None:
        raise DifferentError(f"{node.name} is not a tensor")
    stored = node.attrs["value"]
    # In contrast to ==, this holds for two numbers that are NaN
    if repr(value) != repr(stored):
        raise DifferentError(f"{node.name} is another value")


def _check_length(length: Length, leaves: list[Any]) -> None:
    """Check that all inputs of a dynamic length have the same, and one that the model takes.

    Raises:
        DifferentError: they do not.
    """
    sizes: set[int] = set()
    for index, axis in length.axes:
        leaf = leaves[index]
        sizes.add(leaf.shape[axis])
    size = sizes.pop()
    if sizes:
        raise DifferentError(f"inputs of one length have {size} and {sizes.pop()}")
    if size not in length:
        raise DifferentError(f"the model takes lengths of {length}, not {size}")


def _run_without_values(module: nn.Module, call: Call) -> Any:
    """Return what the module returns, with tensors that have a shape and no values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with without_values(module), mode:
        args, kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, call)
        return module(*args, **kwargs)


def _check_outputs(graph: Graph, outputs: list[Any]) -> None:
    """Check that a module returns the tensors of a graph, with the same dtypes and sizes.

    Raises:
        DifferentError: it does not.
    """
    if len(outputs) != len(graph.output):
        raise DifferentError("the module returns more or less")
    for leaf, output in zip(graph.output, outputs, strict=True):
        is_node = isinstance(leaf, Ref)
        if is_node != isinstance(output, Tensor):
            raise DifferentError("the module returns something else")
        if is_node:
            node = graph.by_name[leaf.name]
            check_kind(node, output)
        elif repr(leaf) != repr(output):
            raise DifferentError("the module returns another value")
