"""Trace a module with `torch.export` and convert the program to a `Graph`. The batch size stays
open, and so do sequence lengths where the model allows it, and other sizes that are named.
"""

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import config as fx_config
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from quantizer.config.run_options import AXES
from quantizer.config.wording import listed, with_article
from quantizer.errors import ModelError, SameForAllExamplesError
from quantizer.graph.ir import Call, Graph
from quantizer.graph.names import check_names
from quantizer.graph.tracing.batch_axes import (
    BatchAxes,
    choices_of_axes,
    samples_in,
    with_samples,
)
from quantizer.graph.tracing.exported_program import Converter
from quantizer.graph.tracing.functionalize import functionalize
from quantizer.graph.tracing.lengths import (
    Length,
    excludes_single_batches,
    leaf_shapes,
    length_axes,
    open_lengths,
    shortened_lengths,
    size_axes,
)
from quantizer.graph.tracing.parameters import without_values
from quantizer.graph.tracing.program_nodes import input_paths, mark_stubs
from quantizer.graph.tracing.torch_modules import (
    distributions_are_not_checked,
    masks_are_not_searched,
    recurrent_weights_restored,
    replaced,
    rotations_keep_nothing,
)
from quantizer.storage.process_memory import pause_garbage_collection
from quantizer.torch_state import default_device_of_user

logger = logging.getLogger(__name__)

EXAMPLE_BATCH = 2
"""Samples in the example: torch takes a batch of one for a constant."""
UNUSUAL_BATCH = 7
"""Samples in the second example: probably no size that the model has cached, or that is equal
to another one by chance. torch accepts a comparison with those only with `Dim.AUTO`."""
_BATCH = Dim("batch", min=1)
_BATCH_OF_A_DEVICE = Dim("batch", min=1, max=65535)
"""On a GPU, torch promises batch normalization for no larger batches. Graphs have no limit."""
_FIXED_BATCH = "%s fixes its batch size at %d: only such batches can run%s"
_NO_STACK_TRACES = "do_not_emit_stack_traces"


@dataclass(frozen=True)
class OpenBatch:
    """A number of samples that stays open.

    Args:
        axes: of the inputs that count the samples.
        size: torch's dimension.
    """

    axes: BatchAxes
    size: Any


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    sizes: Sequence[str] = (),
    *,
    fixed: bool = False,
) -> Graph:
    """Return the graph of `module` for calls shaped like the example.

    The number of samples stays dynamic, and so does the number of tokens where the model allows
    it. `args` and `kwargs` may be nested. Their tensors are cut or repeated to a batch of two.

    Args:
        module: what is traced.
        args: the positional arguments of the example.
        kwargs: its keyword arguments.
        sizes: names in `AXES` of the sizes that have to stay dynamic, too.
        fixed: whether the number of samples is that of the example.

    Raises:
        ModelError: a name is unsafe, the module raises, its control flow depends on tensor
            values, or it fixes one of `sizes`.
    """
    check_names(module)
    with without_values(module) as deferred:
        call = (tuple(args), dict(kwargs or {}))
        choices: Sequence[BatchAxes] = []
        if not fixed:
            choices = choices_of_axes(call)
        graph = _trace(module, call, choices, sizes)
    tensors = dict(graph.tensors)
    for path in tensors:
        if path in deferred:
            tensors[path] = deferred[path].detach()
    return graph.replaced(tensors=tensors)


def _trace(
    module: nn.Module, call: Call, choices: Sequence[BatchAxes], sizes: Sequence[str]
) -> Graph:
    """Return the graph; `choices` are the axes of the inputs that may count the samples."""
    paths = input_paths(call, type(module).__name__)
    lengths: Sequence[Length] = ()
    if sizes:
        example, program, lengths = _export_sizes(module, call, choices, sizes)
    else:
        example, program = _export_batches(module, call, choices)
    graph = Converter(program, module).graph(paths, leaf_shapes(example))
    if lengths:
        graph = graph.replaced(lengths=tuple(lengths))
    return graph


def _export_sizes(
    module: nn.Module, call: Call, choices: Sequence[BatchAxes], names: Sequence[str]
) -> tuple[Call, ExportedProgram, Sequence[Length]]:
    """Export with open sizes, and a dynamic batch if the model allows it.

    Returns:
        the call that was traced, its program, and all lengths that are open.

    Raises:
        ModelError: the model fixes one of the sizes, or has no input with it.
    """
    # Only runs with open sizes need them
    from quantizer.graph.tracing.open_sizes import SizedTrace
    from quantizer.graph.tracing.size_guards import GuardedTrace

    asked = size_axes(call, names)
    axes: list[tuple[int, ...]] = []
    for token_axes, asked_axes in zip(length_axes(call), asked, strict=True):
        axes.append((*token_axes, *asked_axes))
    _require_inputs(module, asked, names)
    attempts: list[tuple[Call, OpenBatch | None]] = []
    for batch_axes in choices:
        example = with_samples(call, batch_axes, EXAMPLE_BATCH)
        for dimension in _batch_dimensions(example):
            attempts.append((example, OpenBatch(batch_axes, dimension)))
    attempts.append((call, None))
    failures: list[ModelError] = []
    for example, batch in attempts:
        guarded = GuardedTrace(module)
        sized = SizedTrace(module, guarded, asked, leaf_shapes(example))
        try:
            with guarded.watching():
                program = _export(module, *example, batch=batch, lengths=axes)
        except SameForAllExamplesError:
            raise
        except ModelError as error:
            failures.append(sized.failed(error))
            continue
        lengths = sized.lengths(program)
        for remark in sized.remarks(lengths):
            logger.info("%s", remark)
        if batch is None and choices:
            size = samples_in(call, choices[0])
            logger.warning(_FIXED_BATCH, type(module).__name__, size, "")
        return example, program, lengths
    raise failures[0]


def _require_inputs(
    module: nn.Module, axes: Sequence[Sequence[int]], names: Sequence[str]
) -> None:
    """Raise `ModelError` if no input has all `names`; `axes` are those of each leaf."""
    if any(len(leaf_axes) == len(names) for leaf_axes in axes):
        return
    rank, axis = AXES[names[0]]
    raise ModelError(
        f"{type(module).__name__} has no input with {listed(names)}",
        help=f"{with_article(names[0])} is axis {axis} of a floating-point input with {rank} "
        "axes",
    )


def _export_batches(
    module: nn.Module, call: Call, choices: Sequence[BatchAxes]
) -> tuple[Call, ExportedProgram]:
    """Export with a dynamic batch if the model allows it, else with the batch of `call`.

    Returns:
        the call that was traced, and its program.
    """
    for axes in choices:
        example = with_samples(call, axes, EXAMPLE_BATCH)
        for dimension in _batch_dimensions(example):
            batch = OpenBatch(axes, dimension)
            program = _export_with_lengths(module, example, batch)
            if program is not None:
                return example, program
            try:
                return example, _export(module, *example, batch=batch)
            except SameForAllExamplesError:
                raise
            except ModelError as error:
                logger.debug("no dynamic batch: %s", error)
    for axes in choices[:1]:
        example = with_samples(call, axes, UNUSUAL_BATCH)
        program = _try_export(module, example, batch=OpenBatch(axes, Dim.AUTO))
        if program is not None and excludes_single_batches(program, axes):
            return example, program
    program = _export_with_lengths(module, call, None)
    if program is None:
        program = _export(module, *call, batch=None)
    if choices:
        from quantizer.graph.tracing.size_guards import missing_axis, undeclared_arguments

        remedy = undeclared_arguments(module, call) or missing_axis(program)
        size = samples_in(call, choices[0])
        logger.warning(_FIXED_BATCH, type(module).__name__, size, remedy)
    return call, program


def _batch_dimensions(call: Call) -> list[Dim]:
    """Return the dynamic batch dimensions to try, the wider one first."""
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [_BATCH]
    return [_BATCH, _BATCH_OF_A_DEVICE]


def _export_with_lengths(
    module: nn.Module, example: Call, batch: OpenBatch | None
) -> ExportedProgram | None:
    """Export with those lengths dynamic that the model allows; return None if the example has
    no lengths, or if torch fails.
    """
    axes = length_axes(example)
    if not any(axes):
        return None
    program = _try_export(module, example, batch=batch, lengths=axes, stop="few")
    if program is None or open_lengths(program):
        return program
    # An example as long as a table of positions reads it whole, and torch takes that length for
    # fixed. A shorter example shows whether the model takes other lengths.
    if not _are_weight_sizes(module, example, axes):
        return program
    shorter = shortened_lengths(example)
    if shorter is None:
        return program
    shorter_program = _try_export(module, shorter, batch=batch, lengths=axes, stop="fixed")
    if shorter_program is None:
        return program
    open_leaves: set[int] = set()
    for length in open_lengths(shorter_program).values():
        open_leaves.update(leaf for leaf, _ in length.axes)
    expected = {leaf for leaf, leaf_axes in enumerate(axes) if leaf_axes}
    return shorter_program if expected <= open_leaves else program


def _are_weight_sizes(module: nn.Module, example: Call, axes: Sequence[Sequence[int]]) -> bool:
    """Return whether each length of the example is also a size of a parameter or buffer."""
    sizes: set[int] = set()
    for tensor in (*module.parameters(), *module.buffers()):
        sizes.update(tensor.shape)
    for leaf, leaf_axes in zip(pytree.tree_leaves(example), axes, strict=True):
        if any(leaf.shape[axis] not in sizes for axis in leaf_axes):
            return False
    return True


def _try_export(module: nn.Module, call: Call, **options: Any) -> ExportedProgram | None:
    """Return what `_export` returns, None if it fails."""
    try:
        return _export(module, *call, **options)
    except ModelError:
        return None


def _export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    batch: OpenBatch | None,
    lengths: Sequence[Sequence[int]] = (),
    stop: str = "",
) -> ExportedProgram:
    """Run `torch.export` without its output, and turn its failures into sentences.

    Args:
        module: what is exported.
        args: the positional arguments of the example.
        kwargs: its keyword arguments.
        batch: the dynamic number of samples, None to fix it.
        lengths: for each leaf of the example further axes that may be dynamic.
        stop: "few" to stop if few lengths are accepted, "fixed" also if only one is.

    Raises:
        ModelError: torch cannot export the module.
    """
    watched = None
    watch: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if lengths and stop:
        # Only models with inputs of any length need them
        from quantizer.graph.tracing.size_guards import LengthTrace

        sizes = leaf_shapes((args, kwargs))
        watched = LengthTrace(module, sizes, stops_if_fixed=stop == "fixed")
        watch = watched.watching()
    try:
        shapes: dict[str, Any] | None = None
        if batch is not None or lengths:
            shapes = _dynamic_shapes(module, (args, kwargs), batch, lengths)
        with (
            pause_garbage_collection(),
            torch.no_grad(),
            mark_stubs(module),
            recurrent_weights_restored(module),
            masks_are_not_searched(),
            distributions_are_not_checked(),
            rotations_keep_nothing(module),
            lean_export(),
            default_device_of_user(),
            watch,
        ):
            program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
            return functionalize(program, type(module).__name__)
    except (ModelError, KeyboardInterrupt):
        raise
    except Exception as error:
        if watched is not None and watched.remark:
            logger.info("%s", watched.remark)
        # Only models that cannot be traced need it
        from quantizer.graph.tracing.size_guards import explain_failure

        raise explain_failure(module, error) from error
    except BaseException as error:
        # forward() called sys.exit(): the process goes on, so that it ends with a sentence.
        from quantizer.graph.tracing.size_guards import place_of

        raise SameForAllExamplesError(
            f"{type(module).__name__} cannot be traced: its forward() raised "
            f"{type(error).__name__}{place_of(error)}",
            help="return from forward() instead",
        ) from error


def _dynamic_shapes(
    module: nn.Module, call: Call, batch: OpenBatch | None, lengths: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the `dynamic_shapes` of `torch.export`, by the parameters of `forward`.

    Raises:
        TypeError: `forward` does not accept these arguments.
    """
    leaves, structure = pytree.tree_flatten(call)
    shapes: list[Any] = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.dim():
            shapes.append(None)
            continue
        opened: dict[int, Any] = {}
        if lengths:
            opened = dict.fromkeys(lengths[index], Dim.AUTO)
        axis = None if batch is None else batch.axes[index]
        if batch is not None and axis is not None:
            opened[axis] = batch.size
        shapes.append(opened)
    args, kwargs = pytree.tree_unflatten(shapes, structure)
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)


@contextlib.contextmanager
def lean_export() -> Iterator[None]:
    """Silence torch, and stop it from recording a stack trace for each node and from generating
    code for each graph on the way to the exported one.

    Stack traces take a tenth to a quarter of the time of a trace or an export, code a tenth of
    that of a language model. Versions of torch without the switch for stack traces ignore it.
    """
    with replaced(fx_config, _NO_STACK_TRACES, True), quiet(), _use_lazy_graph_module(True):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's loggers, warnings and writes to stderr. Failures still raise."""
    loggers: list[logging.Logger] = []
    handlers: list[logging.Handler] = []
    for name, candidate in logging.Logger.manager.loggerDict.items():
        if isinstance(candidate, logging.Logger) and name.partition(".")[0] == "torch":
            # Loggers that torch creates inside the context write to these handlers
            handlers += candidate.handlers
            if not candidate.disabled:
                loggers.append(candidate)
    for candidate in loggers:
        # `setLevel` would empty the caches of all loggers of the process, once per logger
        candidate.disabled = True
    for handler in handlers:
        handler.addFilter(_reject)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(_reject)
        for candidate in loggers:
            candidate.disabled = False


def _reject(_record: logging.LogRecord) -> bool:
    return False
