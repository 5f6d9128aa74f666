"""Compares, once and on few samples, the output of a traced network with that of the model.

A trace records one call of the model. Numbers that Python draws or counts, and modes that the
model changes, are frozen in it.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from quantizer.config.wording import first_names
from quantizer.errors import DataError, ModelError
from quantizer.graph.ir import Call, Graph
from quantizer.graph.tracing.batch_axes import axes_of_graph, has_open_batch, with_samples
from quantizer.nn.function import topk
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch
from quantizer.sources.module_state import ModuleState, evaluating, preserve_module_state
from quantizer.sources.user_code import user_exits
from quantizer.torch_state import seed_everything

logger = logging.getLogger(__name__)

COMPARED_SAMPLES = (2, 1, 3)
"""Samples that are compared if the batch is open: as many as a trace is made with, one, for
which models often have code of their own, and one more."""
_COMPARED_LENGTH = 32
"""The length of dynamic axes in the comparison."""
_TOLERANCE = 0.01
"""A difference of more than this share of the output is an error; less is a warning."""
_ROUNDING = 1e-6
"""The share by which inputs are changed, about a rounding error of float32."""
_MOST_OF_ROUNDING = 4.0
"""So many times the effect of such a change may be what rounding makes of the output."""
_UNSTABLE = (
    "rounding errors decide a part of the output of %s, such as the order of nearly equal "
    "scores: with other rounding, outputs differ by %.2g of their size"
)


def compare_with_model(
    module: nn.Module, graph: Graph, batch: Batch, *, twice: bool
) -> tuple[int, ...]:
    """Check that the module computes the same in each call, and the same as its trace.

    With an open batch they are compared at three numbers of samples: a trace is made with
    several samples, and does not see what the model does with a single one. The state of the
    module is restored. A model whose weights stay in their files is not run. If the model
    fails, calibration reports it.

    Args:
        module: the model.
        graph: its trace.
        batch: inputs.
        twice: whether the module is called twice, and differences at all sizes are an error.

    Returns:
        The numbers of samples at which the trace computes something else; empty if it does so
        at all of them, or at none.

    Raises:
        ModelError: it keeps values from call to call, or the trace computes something else.
    """
    if graph.is_deferred:
        return ()
    sizes: tuple[int | None, ...] = (None,)
    if has_open_batch(graph):
        sizes = COMPARED_SAMPLES
    differences: dict[int | None, float] = {}
    network = Network(graph)
    user_code = user_exits("running the model on the first batch again", ModelError)
    with torch.no_grad(), preserve_module_state(module) as state, evaluating(module), user_code:
        for samples in sizes:
            state.restore()
            call = _small(graph, batch, samples)
            try:
                first = _output(module, call, seed=1)
                again = first
                if twice and samples == sizes[0]:
                    again = _output(module, call, seed=2)
            # Whatever users raise: calibration names the layer and the batch
            except Exception as error:  # noqa: BLE001
                logger.debug("the model is not compared with its trace: %s", error)
                continue
            if not _is_near(output_distance(first, again), first):
                _report_change(module, graph, call, state, first=first)
                return ()
            difference = output_distance(first, _output_of_trace(network, call))
            if _is_of_rounding(difference, module, call, first):
                difference = 0.0
            differences[samples] = difference
        far = [samples for samples, difference in differences.items() if difference]
        if twice and far and len(far) == len(differences):
            state.restore()
            call = _small(graph, batch, sizes[0])
            _report_difference(module, graph, call, max(differences.values()))
    if len(far) == len(differences):
        return ()
    # A fixed batch is compared once, so it is not among some of several
    return tuple(size for size in far if size is not None)


def changed_function(original: Graph, changed: Graph, batch: Batch) -> float:
    """Return how far passes and rescaled weights have moved the floating-point outputs, as a
    share of their size. Return 0 if a pass says so, or if rounding explains it.

    Nothing is compared where weights stay in their files, random numbers are drawn, or so few
    samples do not run: the result is 0, too.

    Args:
        original: the model as traced.
        changed: its float graph after all passes.
        batch: inputs, of which few are run.
    """
    is_random = any(node.is_random for node in original.nodes)
    if original.is_deferred or changed.deviations or is_random:
        return 0.0
    samples = COMPARED_SAMPLES[0] if has_open_batch(original) else None
    call = _small(original, batch, samples)
    network = Network(original)
    with torch.no_grad():
        try:
            first = _floats(network, call)
            difference = output_distance(first, _floats(Network(changed), call))
        except DataError as error:
            logger.debug("passes are not compared with the trace: %s", error)
            return 0.0
        if difference <= _TOLERANCE or _is_near(difference, first):
            return 0.0
        # Sums in another order differ as sums with other last bits of the weights
        weights = _with_rounding_errors(dict(network.named_parameters()))
        with_weights = partial(torch.func.functional_call, network, weights)
        rounded = _floats(lambda *args, **kwargs: with_weights(args, kwargs), call)
    is_of_rounding = difference <= _MOST_OF_ROUNDING * output_distance(first, rounded)
    return 0.0 if is_of_rounding else difference


def _floats(function: Callable[..., Any], call: Call) -> list[Tensor]:
    """Return the floating-point tensors that a function returns for copies of the arguments."""
    args, kwargs = _copied(call)
    leaves = pytree.tree_leaves(function(*args, **kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _report_difference(module: nn.Module, graph: Graph, call: Call, difference: float) -> None:
    """Warn of a small difference between a module and its trace.

    Raises:
        ModelError: it is not small.
    """
    layer = _first_difference(module, graph, call)
    name = type(module).__name__
    text = (
        f"the trace of {name} computes something else than {name}: outputs differ by "
        f"{difference:.2g} of their size"
    )
    if layer:
        text += f", first at {layer}"
    if difference <= _TOLERANCE:
        logger.warning("%s", text)
        return
    raise ModelError(
        text,
        help="a trace freezes what forward() counts, draws or looks up in Python: compute it "
        "from the inputs instead",
    )


def _small(graph: Graph, batch: Batch, samples: int | None) -> Call:
    """Return copies of a batch's arguments, with few tokens where axes are open.

    Args:
        graph: of the model.
        batch: inputs.
        samples: so many of them, if the batch is open; None for all.
    """
    call: Call = (batch.args, dict(batch.kwargs))
    if samples is not None:
        call = with_samples(call, axes_of_graph(graph), samples)
    leaves, structure = pytree.tree_flatten(call)
    for length in graph.lengths:
        for index, axis in length.axes:
            tensor = leaves[index]
            size = length.nearest(min(tensor.shape[axis], _COMPARED_LENGTH))
            leaves[index] = tensor.narrow(axis, 0, size)
    return _copied(pytree.tree_unflatten(leaves, structure))


def _copied(call: Call) -> Call:
    copied: Call = pytree.tree_map_only(Tensor, torch.clone, call)
    return copied


def _output(model: nn.Module, call: Call, seed: int) -> list[Tensor]:
    """Return copies of the tensors that a model returns for copies of the arguments."""
    seed_everything(seed)
    args, kwargs = _copied(call)
    with _FirstOfEqual():
        output = model(*args, **kwargs)
    leaves = pytree.tree_leaves(output)
    return [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]


def _output_of_trace(network: Network, call: Call) -> list[Tensor]:
    """Return what a trace computes; nothing if it cannot run on so many samples."""
    try:
        return _output(network, call, seed=1)
    except DataError as error:
        logger.debug("the trace does not run: %s", error)
        return []


def _is_of_rounding(
    difference: float, module: nn.Module, call: Call, first: Sequence[Tensor]
) -> bool:
    """Return whether rounding makes a difference from a module's output `first`, and warn if it
    is not a small one.
    """
    if _is_near(difference, first):
        return True
    effect = output_distance(first, _output(module, _with_rounding_errors(call), seed=1))
    if difference > _MOST_OF_ROUNDING * effect:
        return False
    logger.warning(_UNSTABLE, type(module).__name__, difference)
    return True


def _with_rounding_errors(values: Any) -> Any:
    """Return nested values with other last digits of floating-point tensors."""
    draw = torch.Generator().manual_seed(0)

    def rounded(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        errors = torch.randn(value.shape, generator=draw).to(value) * _ROUNDING
        return value + value * errors

    return pytree.tree_map_only(Tensor, rounded, values)


class _FirstOfEqual(TorchFunctionMode):
    """Makes `topk` pick the first of equal values, as a network does; torch leaves it open."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk) and "out" not in kwargs:
            return topk(*args, **kwargs)
        return func(*args, **kwargs)


def output_distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest relative difference of any tensor from its counterpart.

    Of floating-point values it is the root of the squared error as a share of that of the
    values, of others the root of the share that differs. An output of only the rounding
    errors of the largest one counts as that large.

    >>> boxes, scores = torch.tensor([300.0, 400.0]), torch.tensor([3.0, 4.0])
    >>> output_distance([boxes, scores], [boxes, torch.tensor([3.0, 4.5])])
    0.1
    """
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        return math.inf
    unequal = []
    for one, other in zip(ours, theirs, strict=True):
        is_same = one.dtype == other.dtype and torch.equal(one, other)
        if not is_same:
            unequal.append((one, other))
    if not unequal:
        # Means of the squares of logits take as long as a layer
        return 0.0
    largest = 0.0
    for tensor in ours:
        if tensor.is_floating_point():
            largest = max(largest, _mean_square(tensor))
    farthest = 0.0
    for one, other in unequal:
        share = _relative_difference(one, other, largest)
        # NaN is farther than any distance
        if math.isnan(share):
            return math.inf
        farthest = max(farthest, share)
    return farthest


def _relative_difference(one: Tensor, other: Tensor, largest: float) -> float:
    """Return the relative difference of a tensor from its counterpart, of outputs whose largest
    mean square is `largest`.
    """
    is_equal = (one == other) | (one.isnan() & other.isnan())
    if bool(is_equal.all()):
        return 0.0
    if not one.is_floating_point():
        unequal = (~is_equal).double()
        return math.sqrt(float(unequal.mean()))
    difference = one.double() - other.double()
    difference = torch.where(is_equal, 0.0, difference)
    error = float(difference.square().mean())
    rounding = largest * torch.finfo(one.dtype).eps ** 2
    size = max(_mean_square(one), rounding)
    return math.sqrt(error / size) if size else math.inf


def _mean_square(tensor: Tensor) -> float:
    """Return the mean square of the values; NaN and infinity count as zero."""
    if not tensor.numel():
        return 0.0
    finite = torch.nan_to_num(tensor.double(), posinf=0.0, neginf=0.0)
    return float(finite.square().mean())


def _is_near(difference: float, output: Sequence[Tensor]) -> bool:
    """Return whether a difference may come from another order of additions in these dtypes."""
    eps = 0.0
    for tensor in output:
        if tensor.is_floating_point():
            eps = max(eps, torch.finfo(tensor.dtype).eps)
    return difference <= math.sqrt(eps)


def _report_change(
    module: nn.Module, graph: Graph, call: Call, state: ModuleState, *, first: Sequence[Tensor]
) -> None:
    """Warn of random numbers, with which a model can be quantized.

    Args:
        module: the model.
        graph: its trace.
        call: the arguments.
        state: of the module before the first call.
        first: the output of the first call.

    Raises:
        ModelError: the outputs differ because the model keeps values from call to call.
    """
    name = type(module).__name__
    changed = state.changed()
    state.restore()
    restored = _output(module, call, seed=2)
    if _is_near(output_distance(first, restored), first):
        what = f"{first_names(changed)} in forward()" if changed else "something in forward()"
        raise ModelError(
            f"{name} gives another output when it is called again on the same batch: it "
            f"changes {what}",
            help="a traced network keeps nothing from call to call: compute a new value from "
            "the inputs instead",
        )
    drawing = [node.name for node in graph.nodes if node.is_random]
    layer = drawing[0] if drawing else ""
    where = f", first at {layer}" if layer else ", which its trace has frozen"
    logger.warning(
        "%s gives another output in each call on the same batch: it draws random numbers in "
        "evaluation mode%s; comparisons with the float model include these differences",
        name,
        where,
    )


def _first_difference(module: nn.Module, graph: Graph, call: Call) -> str:
    """Return the first layer with another value than in the module; "" if there is none.

    Layers that are called more than once are left out.
    """
    outputs: dict[str, list[Tensor]] = defaultdict(list)

    def store(path: str, _part: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[path].append(output.clone())

    hooks = []
    for path, part in module.named_modules():
        if path and not any(part.children()):
            hooks.append(part.register_forward_hook(partial(store, path)))
    try:
        _output(module, call, seed=1)
    finally:
        for hook in hooks:
            hook.remove()
    last = {node.scope: node.name for node in graph.nodes}
    expected = {}
    for path, values in outputs.items():
        name = last.get(path)
        if name is not None and graph.by_name[name].is_float and len(values) == 1:
            expected[name] = values
    far = []

    def compare(name: str, value: Tensor) -> None:
        if not _is_near(output_distance(expected[name], [value]), [value]):
            far.append(name)

    seed_everything(1)
    args, kwargs = _copied(call)
    watchers = {name: partial(compare, name) for name in expected}
    Network(graph).observe(args, kwargs, watchers)
    return far[0] if far else ""
