"""Operators as torch traces and runs them: targets, packets, named arguments. Knows torch's
schemas, not the graph.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

_SYMBOLIC = (
    *(math.ceil, math.floor, math.trunc, round),
    *(
        torch.sym_max,
        torch.sym_min,
        torch.sym_int,
        torch.sym_float,
        torch.sym_not,
        torch.sym_ite,
        torch.sym_sqrt,
    ),
)
_OF_SIZES: dict[str, Callable[..., Any]] = {
    f"{each.__module__}.{each.__name__}": each for each in _SYMBOLIC
}
"""What Python computes of sizes beside `operator`: "math.ceil", "builtins.round",
"torch.sym_max".
"""
NORM_WITHOUT_STATISTICS = "aten._native_batch_norm_legit_no_training.default"
CONVOLUTIONS = ("aten._convolution.default", "aten.convolution.default")
LINEAR = "aten.linear.default"


def resolve(target: str) -> Callable[..., Any]:
    """The callable behind "aten.relu.default" or "operator.getitem"; nothing outside torch's
    operators and arithmetic.

    Raises:
        ValueError: the target names something else.
    """
    namespace, packet, *overload = target.split(".")
    if target in _OF_SIZES:
        return _OF_SIZES[target]
    if namespace == "operator" and hasattr(operator, packet) and not packet.startswith("_"):
        return getattr(operator, packet)  # type: ignore[no-any-return]
    if not overload or not namespace.isidentifier():
        raise ValueError(f"{target!r} is not a torch operator such as 'aten.relu.default'")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload[0])  # type: ignore[no-any-return]


def takes_self(function: Callable[..., Any]) -> bool:
    """Whether torch calls the first argument "self", which cannot be a keyword of a method:
    ours is "input".
    """
    schema = getattr(function, "_schema", None)
    return schema is not None and any(argument.name == "self" for argument in schema.arguments)


def call(target: str, arguments: Mapping[str, Any]) -> Any:
    """Run an operator on arguments by our names."""
    function = resolve(target)
    if not hasattr(function, "_schema"):
        return function(*(value for _, value in sorted(arguments.items())))
    if takes_self(function):
        arguments = {
            "self" if name == "input" else name: value for name, value in arguments.items()
        }
    return function(**arguments)


def target_name(node: Any) -> str:
    """`aten.conv2d.default`, `operator.getitem`."""
    target = node.target if isinstance(node, fx.Node) else node
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", str(target))
    of_sizes = f"{getattr(target, '__module__', '')}.{name}"
    return of_sizes if of_sizes in _OF_SIZES else f"operator.{name}"


def packet(target: str) -> str:
    """`conv2d` of `aten.conv2d.default`; Python's integer arithmetic keeps apart from tensor
    arithmetic.
    """
    namespace, name = target.split(".")[:2]
    if target == "operator.getitem":
        return "getitem"
    return name if namespace == "aten" else f"{namespace}_{name}"


def functional(target: str) -> str:
    """The target without the trailing underscore of in-place operations, where torch has such a
    twin.
    """
    namespace, name, *overload = target.split(".")
    if namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return target
    twin = name.removesuffix("_")
    if not hasattr(torch.ops.aten, twin):
        return target
    names = getattr(torch.ops.aten, twin).overloads()
    return f"aten.{twin}.{overload[0] if overload and overload[0] in names else names[0]}"


def refine(op: str, arguments: Mapping[str, Any]) -> str:
    """torch traces ReLU6 as hardtanh between 0 and 6."""
    if op == "hardtanh" and arguments.get("min_val") == 0 and arguments.get("max_val") == 6:
        return "relu6"
    return op


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments by the names of the operator's schema, `self` as "input"."""
    if target_name(node) == NORM_WITHOUT_STATISTICS:
        keys = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
        return {
            **dict(zip(keys, node.args, strict=False)),
            "training": False,
            "cudnn_enabled": False,
        }
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else ["a", "b", "c"]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {"input" if name == "self" else name: value for name, value in arguments.items()}


def convolution(arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return target and arguments of `conv2d` and its kin for `convolution`, the one function
    that `torch.jit.trace` writes for all of them.
    """
    shared = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = {name: arguments[name] for name in shared}
    dims = len(arguments["stride"])
    if not arguments["transposed"]:
        return f"aten.conv{dims}d.default", given
    overload = "default" if dims == 1 else "input"
    return f"aten.conv_transpose{dims}d.{overload}", given | {
        "output_padding": arguments["output_padding"]
    }


def rank(argument: Any) -> int:
    """Return the number of axes of the tensor that an argument is."""
    return int(argument.meta["val"].dim())


def parameter_names(arguments: Mapping[str, Any]) -> list[str]:
    """torch's names for the entries of the list of parameters that a recurrent operator
    takes.
    """
    directions = ("", "_reverse") if arguments["bidirectional"] else ("",)
    each = len(arguments["params"]) // (arguments["num_layers"] * len(directions))
    kinds = ["weight_ih", "weight_hh"]
    kinds += ["bias_ih", "bias_hh"] if arguments["has_biases"] else []
    # The projection of an LSTM with proj_size
    kinds += ["weight_hr"] if each > len(kinds) else []
    layers = range(arguments["num_layers"])
    return [
        f"{kind}_l{layer}{direction}"
        for layer in layers
        for direction in directions
        for kind in kinds
    ]


def pair(value: Any) -> tuple[int, int]:
    """An argument that is one number for height and width, or one for each."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values[0], values[-1]


def is_copy(target: str) -> bool:
    """Whether all that is read of the first argument is what it is made of: its dtype, its
    sizes.
    """
    return packet(target).removesuffix("_") in ("copy", "fill", "zero")


def is_noise(target: str) -> bool:
    """Checks and bookkeeping that compute nothing."""
    name = target.split(".")[1]
    checks = name.startswith(("_assert", "sym_constrain", "lift_fresh", "_guards"))
    return checks or name in ("detach", "detach_", "alias")
