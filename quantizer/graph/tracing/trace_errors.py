"""The sentences for traces that fail or fix the number of samples: the reason, what to do."""

import inspect
import re
import traceback

import torch
from torch import nn
from torch.export import ExportedProgram

from quantizer.config.wording import with_article
from quantizer.errors import ModelError, SameForAllExamplesError, UntraceableError
from quantizer.graph.ir import Call

_UNKNOWN_OUTPUT = re.compile(r"Found <class '(?:[\w.]+\.)?(\w+)'> in output, which is not")
"""The beginning of torch's message about an output of a class that it does not know."""
_RECURRENT = ("torch/nn/modules/rnn.py", "torch/nn/utils/rnn.py")
_CONVOLUTIONS = (
    torch.ops.aten.conv1d.default,
    torch.ops.aten.conv2d.default,
    torch.ops.aten.conv3d.default,
)
NOT_USER_CODE = ("/torch/", "/sympy/", "/quantizer/graph/", "contextlib")
"""Parts of the paths of files that are not the user's."""


def explain_failure(module: nn.Module, error: Exception) -> ModelError:
    """Return one sentence for a failed trace, with the line of the user's code if known."""
    text = str(error).strip()
    if "data-dependent" in text.lower():
        return _explain_branch(module, error)
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            return ModelError(
                f"{type(module).__name__} cannot be traced: {path} is compiled by torch.jit",
                help="give the Python module in its place, and compile it after quantization",
            )
    unknown = _UNKNOWN_OUTPUT.search(text)
    if unknown:
        name = unknown[1]
        return SameForAllExamplesError(
            f"{type(module).__name__} cannot be traced: it returns {with_article(name)}, of "
            "which torch does not know the tensors",
            help="return a tensor, tuple, list or dict; or, for a dataclass, call "
            f"torch.export.register_dataclass({name}) in the model's file",
        )
    reason = text.splitlines()[0] if text else type(error).__name__
    remedy = "write that line with other operators, or keep it outside the quantized model"
    if _fails_in_packed_sequences(error):
        remedy = (
            "torch.export knows no packed sequences: give the layer padded ones, and select "
            "the last output of each with gather"
        )
    return UntraceableError(
        f"{type(module).__name__} cannot be traced: {type(error).__name__}: "
        f"{reason}{place_of(error)}",
        help=remedy,
    )


def _fails_in_packed_sequences(error: Exception) -> bool:
    """Return whether a recurrent layer, or what packs its sequences, raised the error."""
    for frame in traceback.extract_tb(error.__traceback__):
        path = frame.filename.replace("\\", "/")
        if path.endswith(_RECURRENT):
            return True
    return False


def _explain_branch(module: nn.Module, error: Exception) -> ModelError:
    """Return the sentence for control flow that depends on the values of a tensor."""
    text = str(error)
    call = re.search(
        r'File "([^"]+)", line (\d+), in (\w+)\s*\n\s*(.+)',
        text[text.find("The following call") :],
    )
    where = place_of(error)
    if call:
        file = call.group(1).rpartition("/")[2]
        where = f" at line {call.group(2)} of {file}: {call.group(4).strip()}"
    remedy = (
        "compute both branches and choose with torch.where, or keep that part outside "
        "the quantized model"
    )
    # transformers has two other implementations of experts, which can be traced
    if hasattr(module, "set_experts_implementation") and "expert" in where:
        remedy = 'call its set_experts_implementation("grouped_mm")'
    return SameForAllExamplesError(
        f"{type(module).__name__} cannot be traced: its control flow depends on the "
        f"values of a tensor{where}",
        help=remedy,
    )


def place_of(error: BaseException) -> str:
    """Return ` at line 12 of net.py` for the innermost frame outside torch, "" without one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename for part in NOT_USER_CODE):
            file = frame.filename.rpartition("/")[2]
            line = frame.line or ""
            return f" at line {frame.lineno} of {file}: {line}".rstrip(": ")
    return ""


def missing_axis(program: ExportedProgram) -> str:
    """Return the remedy for images that have no axis of samples, "" if they have it."""
    for node in program.graph.find_nodes(op="placeholder"):
        for reader in node.users:
            if reader.target not in _CONVOLUTIONS or reader.args[0] is not node:
                continue
            shape = list(node.meta["val"].shape)
            weight = reader.args[1]
            if len(shape) < weight.meta["val"].dim():
                return f"; {shape} has no axis of samples: add it with unsqueeze(0)"
    return ""


def undeclared_arguments(module: nn.Module, call: Call) -> str:
    """Return the remedy for keyword arguments that `forward` does not declare, "" without."""
    parameters = inspect.signature(module.forward).parameters
    catch_all = [name for name, value in parameters.items() if value.kind == value.VAR_KEYWORD]
    if not catch_all or call[1].keys() <= parameters.keys():
        return ""
    return f"; name the arguments in forward() instead of taking **{catch_all[0]}"
