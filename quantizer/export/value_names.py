"""The names of the inputs and outputs of exported files: those of the user's model."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from quantizer.config.wording import counted
from quantizer.errors import UsageError
from quantizer.graph.ir import Call, Graph
from quantizer.graph.output_names import output_leaves, unused_names
from quantizer.sources.batches import Batch

_Path = tuple[Any, ...]
"""Keys and indices that lead into a nested value."""


def input_names(model: nn.Module | None, graph: Graph) -> list[str]:
    """Return a name for each tensor of a call, in the order of the graph's inputs.

    It has the parameter of `forward` and the keys of containers in it, joined by dots.

    Without a model, positional arguments are called `input_0`, `input_1`, ….
    """
    parameters: list[str] = []
    prefix = "input_"
    if model is not None:
        for parameter in inspect.signature(model.forward).parameters.values():
            if parameter.kind == parameter.VAR_POSITIONAL:
                prefix = f"{parameter.name}_"
            elif parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
                parameters.append(parameter.name)
    nodes = [node for node in graph.nodes if node.op == "input"]
    names: list[str] = []
    for node, path in zip(nodes, graph.input_paths, strict=True):
        if node.shape is None:
            # A number is part of the program.
            continue
        argument, *keys = path[1:]
        if isinstance(argument, int):
            further = argument - len(parameters)
            argument = f"{prefix}{further}" if further >= 0 else parameters[argument]
        words = [argument, *map(str, keys)]
        names.append(".".join(words))
    return unused_names(names, ())


def in_traced_order(graph: Graph, batch: Batch) -> Call:
    """Return the call of a batch with the keys of its dicts in the order of the call that was
    traced, as exports take tensors by their numbers.
    """
    ordered = _ordered([batch.args, dict(batch.kwargs)], graph.input_paths)
    return tuple(ordered[0]), ordered[1]


def _ordered(value: Any, paths: Sequence[_Path]) -> Any:
    """Return a nested value with the keys of its dicts as they come in paths into it."""
    if isinstance(value, dict):
        traced_keys = [path[0] for path in paths if path and path[0] in value]
        keys = dict.fromkeys([*traced_keys, *value])
        return {key: _ordered(value[key], _inside(paths, key)) for key in keys}
    if type(value) in (list, tuple):
        return type(value)(
            _ordered(item, _inside(paths, index)) for index, item in enumerate(value)
        )
    return value


def _inside(paths: Sequence[_Path], key: Any) -> list[_Path]:
    """Return the paths that begin with a key, without it."""
    return [path[1:] for path in paths if path and path[0] == key]


def output_names(names: Sequence[str]) -> list[str]:
    """Return the outputs' names in a file, for those that a network has for them.

    >>> output_names(["boxes", "aux.0", "1"])
    ['boxes', 'aux.0', 'output_1']
    """
    in_file = [f"output_{name}" if name[0].isdecimal() else name for name in names]
    return unused_names(in_file, ())


def _chosen_names(option: str, value: str, names: Sequence[str]) -> list[str]:
    """Return the names of an option, separated by commas; the given ones if it is empty.

    Raises:
        UsageError: there are more or fewer than there are tensors, or one is empty or
            is there twice.
    """
    if not value:
        return list(names)
    chosen = [word.strip() for word in value.split(",")]
    if len(chosen) != len(names):
        raise UsageError(
            f"<--{option}> has {counted(len(chosen), 'name')}, and the model has "
            f"{counted(len(names), 'tensor')} there: {', '.join(names)}",
            help="give one name for each, separated by commas",
        )
    if "" in chosen or len(set(chosen)) < len(chosen):
        raise UsageError(
            f"<--{option}> is {value!r}: a name is empty or given twice",
            help="give each tensor another name",
        )
    return chosen


def require_fitting_names(
    choices: Mapping[str, str], model: nn.Module | None, graph: Graph
) -> None:
    """Check `--input_names` and `--output_names` against a traced model, before it is run.

    Raises:
        UsageError: they do not fit it.
    """
    names_of_files(choices, model, graph, [name for name, _ in output_leaves(graph)])


def names_of_files(
    choices: Mapping[str, str], model: nn.Module | None, graph: Graph, outputs: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the names of a network's input and output tensors in files.

    Args:
        choices: values of options, by name.
        model: the float model.
        graph: the network.
        outputs: the names that it has for its outputs.

    Raises:
        UsageError: `--input_names` or `--output_names` does not fit the model, or an input and
            an output are to have one name.
    """
    of_inputs = choices.get("input_names", "")
    of_outputs = choices.get("output_names", "")
    inputs = _chosen_names("input_names", of_inputs, input_names(model, graph))
    chosen = _chosen_names("output_names", of_outputs, output_names(outputs))
    for name in chosen:
        if name in inputs and (of_inputs or of_outputs):
            raise UsageError(
                f"an input and an output are both called {name!r}",
                help="give other names with <--input_names> or <--output_names>",
            )
    return inputs, unused_names(chosen, inputs)
