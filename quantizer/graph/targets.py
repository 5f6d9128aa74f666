"""Operators as torch traces and runs them: targets, packets, named arguments.

This file knows torch's schemas, but not the graph.
"""

import math
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

_SIZE_FUNCTIONS: tuple[Any, ...] = (
    math.ceil,
    math.floor,
    math.trunc,
    round,
    torch.sym_max,
    torch.sym_min,
    torch.sym_int,
    torch.sym_float,
    torch.sym_not,
    torch.sym_ite,
    torch.sym_sqrt,
)
"""What Python computes with sizes besides `operator`."""
_OF_SIZES: dict[str, Callable[..., Any]] = {
    f"{function.__module__}.{function.__name__}": function for function in _SIZE_FUNCTIONS
}
"""The same by target: "math.ceil", "builtins.round", "torch.sym_max"."""
NORM_WITHOUT_STATISTICS = "aten._native_batch_norm_legit_no_training.default"
CONVOLUTIONS = ("aten._convolution.default", "aten.convolution.default")
_SWITCHES = frozenset({"training", "train", "dropout_p"})
"""Arguments without which an operator draws no random numbers."""
LINEAR_TARGET = "aten.linear.default"


def resolve_target(target: str) -> Callable[..., Any]:
    """Return the callable behind "aten.relu.default" or "operator.getitem".

    Only torch's operators and arithmetic are allowed.

    Raises:
        ValueError: the target names something else.
    """
    if target in _OF_SIZES:
        return _OF_SIZES[target]
    namespace, name, *overload = target.split(".")
    if namespace == "operator" and hasattr(operator, name) and not name.startswith("_"):
        return getattr(operator, name)  # type: ignore[no-any-return]
    if not overload or not namespace.isidentifier():
        raise ValueError(f"{target!r} is not a torch operator such as 'aten.relu.default'")
    overloads = getattr(getattr(torch.ops, namespace), name)
    return getattr(overloads, overload[0])  # type: ignore[no-any-return]


def takes_self(function: Callable[..., Any]) -> bool:
    """Return whether torch calls an argument "self". We call it "input", because "self" cannot
    be a keyword of a method.
    """
    schema = getattr(function, "_schema", None)
    if schema is None:
        return False
    return any(argument.name == "self" for argument in schema.arguments)


def call(target: str, arguments: Mapping[str, Any]) -> Any:
    """Run an operator on arguments by our names."""
    function = resolve_target(target)
    if not hasattr(function, "_schema"):
        return function(*(arguments[name] for name in sorted(arguments)))
    named = dict(arguments)
    if "input" in named and takes_self(function):
        named["self"] = named.pop("input")
    return function(**named)


def target_name(node: Any) -> str:
    """Return the target of a node or a function: `aten.conv2d.default`, `operator.getitem`."""
    target = node.target if isinstance(node, fx.Node) else node
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", str(target))
    of_sizes = f"{getattr(target, '__module__', '')}.{name}"
    return of_sizes if of_sizes in _OF_SIZES else f"operator.{name}"


def packet(target: str) -> str:
    """Return the packet of a target: `conv2d` of `aten.conv2d.default`.

    Outside aten the namespace stays, which distinguishes integer arithmetic of Python.
    """
    namespace, name = target.split(".")[:2]
    if namespace == "aten" or target == "operator.getitem":
        return name
    return f"{namespace}_{name}"


def functional(target: str) -> str:
    """Return the out-of-place twin of an in-place target, the target itself if it has none."""
    namespace, name, *overload = target.split(".")
    if namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return target
    twin = name.removesuffix("_")
    if not hasattr(torch.ops.aten, twin):
        return target
    names = getattr(torch.ops.aten, twin).overloads()
    same = [known for known in names if known in overload[:1]]
    return f"aten.{twin}.{[*same, *names][0]}"


def refine(op: str, arguments: Mapping[str, Any]) -> str:
    """Return "relu6" for a hardtanh between 0 and 6, as torch traces ReLU6; else `op`."""
    if op == "hardtanh" and arguments.get("min_val") == 0 and arguments.get("max_val") == 6:
        return "relu6"
    return op


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments by the names of the operator's schema, `self` as "input"."""
    if target_name(node) == NORM_WITHOUT_STATISTICS:
        keys = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
        norm = dict(zip(keys, node.args, strict=False))
        return {**norm, "training": False, "cudnn_enabled": False}
    schema = getattr(node.target, "_schema", None)
    names = ["a", "b", "c"]
    if schema:
        names = [argument.name for argument in schema.arguments]
    arguments: dict[str, Any] = {}
    for name, value in (*zip(names, node.args, strict=False), *node.kwargs.items()):
        arguments["input" if name == "self" else name] = value
    return arguments


@cache
def argument_defaults(target: str) -> Mapping[str, Any]:
    """Return the arguments of an operator of torch in their order, with the default of each."""
    operator_function: Any = resolve_target(target)
    defaults: dict[str, Any] = {}
    for argument in operator_function._schema.arguments:
        defaults[argument.name] = argument.default_value
    return defaults


def convolution(arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the target and the arguments of `conv2d` and its kin for `convolution`, the one
    function that `torch.jit.trace` writes for all of them.
    """
    names = ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
    dims = len(arguments["stride"])
    target = f"aten.conv{dims}d.default"
    if arguments["transposed"]:
        overload = "default" if dims == 1 else "input"
        target = f"aten.conv_transpose{dims}d.{overload}"
        names.append("output_padding")
    return target, {name: arguments[name] for name in names}


def rank(argument: Any) -> int:
    """Return the number of axes of the tensor that an argument is."""
    return int(argument.meta["val"].dim())


def parameter_names(arguments: Mapping[str, Any]) -> list[str]:
    """Return torch's names for the entries of the list of parameters that a recurrent operator
    takes.
    """
    directions = ("", "_reverse") if arguments["bidirectional"] else ("",)
    kinds = ["weight_ih", "weight_hh"]
    if arguments["has_biases"]:
        kinds += ["bias_ih", "bias_hh"]
    layers = arguments["num_layers"]
    count = len(arguments["params"]) // (layers * len(directions))
    # An LSTM with proj_size has a projection
    if count > len(kinds):
        kinds.append("weight_hr")
    names: list[str] = []
    for layer in range(layers):
        for direction in directions:
            names += [f"{kind}_l{layer}{direction}" for kind in kinds]
    return names


def pair(value: Any) -> tuple[int, int]:
    """Return an argument as (height, width), which may be one number for both."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values[0], values[-1]


def is_copy(target: str) -> bool:
    """Return whether an operator reads only the dtype and the sizes of its first argument."""
    return packet(target).removesuffix("_") in ("copy", "fill", "zero")


def is_noise(target: str) -> bool:
    """Return whether an operator is a check or bookkeeping and computes nothing."""
    name = target.split(".")[1]
    if name in ("detach", "detach_", "alias"):
        return True
    return name.startswith(("_assert", "sym_constrain", "lift_fresh", "_guards"))


def draws_numbers(target: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether an operator draws random numbers. Some do so only in training, or with a
    share of values to drop.

    >>> draws_numbers("aten.rand_like.default", {})
    True
    >>> draws_numbers("aten.dropout.default", {"p": 0.5, "train": False})
    False
    """
    if not target.startswith("aten."):
        return False
    function = resolve_target(target)
    tags = getattr(function, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    defaults = argument_defaults(target)
    switches = _SWITCHES.intersection(defaults)
    return not switches or any(map(arguments.get, switches))
