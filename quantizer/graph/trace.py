"""From a module and one example batch to a `Graph`, through `torch.export` with the batch and
lengths left open.
"""

import contextlib
import inspect
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import config as fx_config
from torch.utils import _pytree as pytree

from quantizer.errors import ModelError
from quantizer.graph.exported_program import Converter, marked
from quantizer.graph.functionalize import functionalize
from quantizer.graph.ir import Graph
from quantizer.graph.lengths import (
    excludes_single_batches,
    length_axes,
    open_lengths,
    shortened,
)
from quantizer.graph.names import check_names
from quantizer.graph.parameters import without_values
from quantizer.storage.process_memory import uncollected

logger = logging.getLogger(__name__)


def trace(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Graph:
    """The graph of `module` for calls shaped like the example; the first dimension of the
    inputs stays dynamic, and so does the number of tokens where the model allows it.

    `args` and `kwargs` may be nested; tensors are cut or repeated to a batch of two, which
    torch needs to keep the batch symbolic.

    Raises:
        ModelError: a name is unsafe, the module raises, or its control flow depends on tensor
            values.
    """
    check_names(module)
    with without_values(module) as deferred:
        graph = _traced(module, args, kwargs)
    tensors = {
        path: deferred[path].detach() if path in deferred else own
        for path, own in graph.tensors.items()
    }
    return graph.replaced(tensors=tensors)


def _traced(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> Graph:
    given = (tuple(args), dict(kwargs or {}))
    sizes = {
        leaf.shape[0]
        for leaf in pytree.tree_leaves(given)
        if isinstance(leaf, Tensor) and leaf.dim()
    }
    # Where they disagree, nothing is taken for a batch
    size = sizes.pop() if len(sizes) == 1 else None
    example = _resized(given, size, 2)
    program = _with_lengths(module, example) if size is not None else None
    try:
        program = program or _export(
            module, *example, batch=None if size is None else Dim("batch", min=1)
        )
    except ModelError as error:
        if size is None or isinstance(error, _SameForAllExamplesError):
            raise
        example = _resized(given, size, UNUSUAL)
        program = _compared_with_others(module, example)
        # The model writes its batch size into its code: then only batches of this size can run
        if program is None:
            example = given
            program = _export(module, *example, batch=None)
            logger.warning(
                "%s fixes its batch size at %d: only such batches can run%s",
                *_fixed(module, size, given),
            )
    leaves = pytree.tree_flatten_with_path(example)[0]
    paths = tuple(
        tuple(
            getattr(key, "idx", getattr(key, "key", getattr(key, "name", None))) for key in path
        )
        for path, _ in leaves
    )
    return Converter(program, module).graph(
        paths, [getattr(leaf, "shape", ()) for _, leaf in leaves]
    )


UNUSUAL = 7
"""Samples in a batch that a model has hardly seen before, so that it is none of the sizes that
it may have noted.
"""


def _compared_with_others(
    module: nn.Module, example: tuple[Any, ...]
) -> ExportedProgram | None:
    """The program of a model that asks whether its batch is of another size than the last one,
    as those do that keep what they made for it; None if it asks for more than that.
    """
    try:
        program = _export(module, *example, batch=Dim.AUTO)
    except ModelError:
        return None
    return program if excludes_single_batches(program) else None


def _fixed(module: nn.Module, size: int, call: tuple[Any, ...]) -> tuple[str, int, str]:
    """What a warning says of a model that has a batch size of its own."""
    parameters = inspect.signature(module.forward).parameters.values()
    rest = [p.name for p in parameters if p.kind == p.VAR_KEYWORD]
    undeclared = bool(rest) and not call[1].keys() <= {p.name for p in parameters}
    why = (
        f"; name the arguments in forward() instead of taking **{rest[0]}" if undeclared else ""
    )
    return type(module).__name__, size, why


def _with_lengths(module: nn.Module, example: tuple[Any, ...]) -> ExportedProgram | None:
    """The program with those lengths open that the model leaves open; None if there are none,
    or torch fails.
    """
    axes = length_axes(example)
    try:
        program = (
            _export(module, *example, batch=Dim("batch", min=1), lengths=axes)
            if any(axes)
            else None
        )
    except ModelError:
        return None
    if program is None or open_lengths(program):
        return program
    # A table of positions that is read whole looks like a fixed length, and is none where fewer
    # tokens fit.
    sizes = {
        size for tensor in (*module.parameters(), *module.buffers()) for size in tensor.shape
    }
    longest = {
        leaf.shape[axis]
        for leaf, own in zip(pytree.tree_leaves(example), axes, strict=True)
        for axis in own
    }
    shorter = shortened(example) if longest <= sizes else None
    try:
        found = (
            _export(module, *shorter, batch=Dim("batch", min=1), lengths=axes)
            if shorter is not None
            else program
        )
    except ModelError:
        return program
    is_open = {at for length in open_lengths(found).values() for at, _ in length.axes}
    return (
        found if is_open.issuperset(index for index, own in enumerate(axes) if own) else program
    )


class _SameForAllExamplesError(ModelError):
    """What another example does not change: control flow that depends on values, or the end of
    the process.
    """


def _resized(call: tuple[Any, ...], size: int | None, count: int) -> tuple[Any, ...]:
    """The call with its batch cut or repeated to so many samples, if it has one."""

    def resized(value: Any) -> Any:
        if not isinstance(value, Tensor) or size is None or not value.dim():
            return value
        return torch.cat([value.detach()[:count]] * -(-count // size))[:count]

    return pytree.tree_map(resized, call)  # type: ignore[no-any-return]


def _export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    batch: Any,
    lengths: Sequence[Sequence[int]] = (),
) -> ExportedProgram:
    """`torch.export`, quietly, with its failures turned into sentences.

    `batch` is what torch is told of the first axes, None for the sizes of this call; `lengths`
    are axes that may be dynamic, too.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    axes = iter(lengths or [()] * len(leaves))
    shapes: list[Any] = [
        {0: batch, **dict.fromkeys(own, Dim.AUTO)}
        if isinstance(leaf, Tensor) and leaf.dim()
        else None
        for leaf, own in zip(leaves, axes, strict=True)
    ]
    spec = pytree.tree_unflatten(shapes, structure)
    try:
        # by the parameters of `forward`, so that `*args` is one tuple; TypeError if it does not
        # take these arguments
        named = (
            dict(inspect.signature(module.forward).bind(*spec[0], **spec[1]).arguments)
            if batch is not None
            else None
        )
        with (
            quiet(),
            uncollected(),
            torch.no_grad(),
            marked(module),
            _left_as_it_was(module),
            without_stack_traces(),
        ):
            program = torch.export.export(module, args, kwargs, dynamic_shapes=named)
            return functionalize(program, type(module).__name__)
    except (ModelError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise _explain(module, error) from error
    except BaseException as error:
        # sys.exit() in forward(): the process goes on, so that it ends with a sentence.
        text = (
            f"{type(module).__name__} cannot be traced: its forward() raised "
            f"{type(error).__name__}"
        )
        raise _SameForAllExamplesError(
            f"{text}{_where(error)}", help="return from forward() instead"
        ) from error


@contextlib.contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """torch 2.8 leaves fake tensors in recurrent layers' lists of their weights, with which
    they no longer compute.
    """
    layers = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    lists = [
        (vars(child), name, [*vars(child)[name]])
        for child in layers
        for name in _LISTS
        if name in vars(child)
    ]
    try:
        yield
    finally:
        for attributes, name, weights in lists:
            attributes[name] = weights


_LISTS = ("_flat_weights", "_flat_weight_refs")


@contextlib.contextmanager
def without_stack_traces() -> Iterator[None]:
    """torch notes for each node where it was called, a tenth to a quarter of the time of a
    trace or an export; nothing here reads that.

    Versions that have no such switch ignore it.
    """
    before = getattr(fx_config, _SWITCH, False)
    setattr(fx_config, _SWITCH, True)
    try:
        yield
    finally:
        setattr(fx_config, _SWITCH, before)


_SWITCH = "do_not_emit_stack_traces"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's loggers, warnings and dumps on stderr: what matters comes back as an
    exception.
    """
    known = [
        each
        for each in logging.Logger.manager.loggerDict.values()
        if isinstance(each, logging.Logger)
    ]
    of_torch = [each for each in known if each.name.partition(".")[0] == "torch"]
    loud = [each for each in of_torch if not each.disabled]
    # Of loggers that are made meanwhile, too
    handlers = [handler for each in of_torch for handler in each.handlers]
    for each in loud:
        # SetLevel would empty the caches of all loggers of the process, for each of torch's
        each.disabled = True
    for handler in handlers:
        handler.addFilter(_nothing)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(_nothing)
        for each in loud:
            each.disabled = False


def _nothing(_record: logging.LogRecord) -> bool:
    return False


def _explain(module: nn.Module, error: Exception) -> ModelError:
    """One sentence for a failed trace, with the line of the user's code where there is one."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if "data-dependent" in text.lower():
        where = re.search(
            r'File "([^"]+)", line (\d+), in (\w+)\s*\n\s*(.+)',
            text[text.find("The following call") :],
        )
        line = _where(error)
        if where:
            line = (
                f" at line {where.group(2)} of {where.group(1).rpartition('/')[2]}: "
                f"{where.group(4).strip()}"
            )
        # Transformers has two that trace
        chooses = hasattr(module, "set_experts_implementation") and "expert" in line
        remedy = (
            "compute both branches and choose with torch.where, or keep that part outside "
            "the quantized model"
        )
        return _SameForAllExamplesError(
            f"{type(module).__name__} cannot be traced: its control flow depends on the "
            f"values of a tensor{line}",
            help='call its set_experts_implementation("grouped_mm")' if chooses else remedy,
        )
    compiled = next(
        (
            path
            for path, part in module.named_modules()
            if isinstance(part, torch.jit.ScriptModule)
        ),
        None,
    )
    if compiled is not None:
        return ModelError(
            f"{type(module).__name__} cannot be traced: {compiled} is compiled by torch.jit",
            help="give the Python module in its place, and compile it after quantization",
        )
    return ModelError(
        f"{type(module).__name__} cannot be traced: {type(error).__name__}: "
        f"{first}{_where(error)}",
        help="check that the model runs on the first batch, in eval mode, as `model(*batch)`",
    )


def _where(error: BaseException) -> str:
    """` at line 12 of net.py` for the innermost frame outside torch, if any."""
    inside = ("/torch/", "/quantizer/graph/", "contextlib")
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not any(part in f.filename for part in inside)
    ]
    if not frames:
        return ""
    frame = frames[-1]
    file = frame.filename.rpartition("/")[2]
    return f" at line {frame.lineno} of {file}: {frame.line or ''}".rstrip(": ")
