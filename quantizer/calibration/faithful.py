"""Compares, once and on few samples, what a traced network computes with what the model itself
does.

A trace is one call of the model: numbers that are drawn or counted in Python, and modes that it
changes, are frozen.
"""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from quantizer.calibration.module_target import evaluating
from quantizer.config.wording import shortened
from quantizer.errors import ModelError
from quantizer.graph.ir import Graph
from quantizer.nn.function import topk
from quantizer.nn.network import Network
from quantizer.seeding import seed_everything
from quantizer.sources.batches import Batch
from quantizer.sources.module_state import ModuleState, left_alone
from quantizer.sources.user_code import user_exits

logger = logging.getLogger(__name__)

FEW = 3
"""Samples that are compared where the batch is open: one more than a trace is made with."""
SHORT = 32
"""How long lengths are then that are open."""
FAR = 0.01
"""A share of the output that is more than another order of additions; less is a warning."""
Call = tuple[tuple[Any, ...], dict[str, Any]]


def compare_with_model(module: nn.Module, graph: Graph, batch: Batch) -> None:
    """Look whether the module computes the same in each call, and what its trace does; its
    state stays as it is.

    A model whose weights stay in their files is not run, and one that fails is left to
    calibration.

    Raises:
        ModelError: it keeps something from call to call, or the trace computes something else.
    """
    if graph.is_deferred:
        return
    call = _small(graph, batch)
    again_on_it = user_exits("running the model on the first batch again", ModelError)
    with torch.no_grad(), left_alone(module) as state, evaluating(module), again_on_it:
        try:
            first, again = (_output(module, call, seed) for seed in (1, 2))
        except Exception as error:  # noqa: BLE001 - whatever users raise: calibration names the layer and the batch
            logger.debug("the model is not compared with its trace: %s", error)
            return
        name = type(module).__name__
        if not _is_near(distance(first, again), first):
            _say_what_changes(module, graph, call, state, first)
            return
        found = distance(first, _output(Network(graph), call, seed=1))
        if _is_near(found, first):
            return
        state.restore()
        layer = _first_difference(module, graph, call)
    text = (
        f"the trace of {name} computes something else than {name}: outputs differ by "
        f"{found:.2g} of their size"
    )
    text += f", first at {layer}" if layer else ""
    if found <= FAR:
        logger.warning("%s", text)
        return
    remedy = (
        "a trace freezes what forward() counts, draws or looks up in Python: compute it from "
        "the inputs instead"
    )
    raise ModelError(text, help=remedy)


def _small(graph: Graph, batch: Batch) -> Call:
    """A call with few samples and tokens, where there may be fewer; of tensors that nobody else
    has.
    """
    inputs = [node for node in graph.nodes if node.op == "input"]
    is_open = all(node.shape[0] is None for node in inputs if node.shape)
    few = batch.first(FEW) if is_open else batch
    found, structure = pytree.tree_flatten((few.args, dict(few.kwargs)))
    for length in graph.lengths:
        for index, axis in length.axes:
            size = min(found[index].shape[axis], max(SHORT, length.least))
            found[index] = found[index].narrow(axis, 0, size)
    call: Call = _copied(pytree.tree_unflatten(found, structure))
    return call


def _copied(call: Any) -> Any:
    return pytree.tree_map(
        lambda each: each.clone() if isinstance(each, Tensor) else each, call
    )


def _output(model: nn.Module, call: Call, seed: int) -> list[Tensor]:
    """The tensors that it returns, of arguments of its own."""
    seed_everything(seed)
    args, kwargs = _copied(call)
    with _FirstOfEqual():
        return [
            each.clone()
            for each in pytree.tree_leaves(model(*args, **kwargs))
            if isinstance(each, Tensor)
        ]


class _FirstOfEqual(TorchFunctionMode):
    """Picks the first of equal values in `topk`, as a network does; torch leaves it open."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        picks = func in (torch.topk, Tensor.topk) and "out" not in (kwargs or {})
        return (topk if picks else func)(*args, **(kwargs or {}))


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return how far tensors are from others: the largest share of any of them.

    Of floating-point values it is the root of the squared error as a share of that of the
    values, of others the root of the share that differs. An output that is nothing but rounding
    beside the largest one counts as that large.

    >>> boxes, scores = torch.tensor([300.0, 400.0]), torch.tensor([3.0, 4.0])
    >>> distance([boxes, scores], [boxes, torch.tensor([3.0, 4.5])])
    0.1
    """
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        return math.inf
    largest = max(
        (_mean_square(tensor) for tensor in ours if tensor.is_floating_point()), default=0.0
    )
    shares: list[float] = [0.0]
    for one, other in zip(ours, theirs, strict=True):
        is_equal = (one == other) | (one.isnan() & other.isnan())
        if bool(is_equal.all()):
            continue
        if one.is_floating_point():
            error = float(
                torch.where(is_equal, 0.0, one.double() - other.double()).square().mean()
            )
            least = largest * torch.finfo(one.dtype).eps ** 2
            size = max(_mean_square(one), least)
        else:
            error, size = float((~is_equal).double().mean()), 1.0
        shares.append(math.sqrt(error / size) if size else math.inf)
    return math.inf if any(map(math.isnan, shares)) else max(shares)


def _mean_square(tensor: Tensor) -> float:
    """The mean square of the values, in which NaN and infinity have no part; 0 if there are
    none.
    """
    finite = torch.nan_to_num(tensor.double(), posinf=0.0, neginf=0.0)
    return float(finite.square().mean()) if tensor.numel() else 0.0


def _is_near(found: float, output: Sequence[Tensor]) -> bool:
    """Whether a distance is what another order of additions makes of the number of digits that
    there are.
    """
    digits = [torch.finfo(each.dtype).eps for each in output if each.is_floating_point()]
    return found <= math.sqrt(max(digits, default=0.0))


def _say_what_changes(
    module: nn.Module, graph: Graph, call: Call, state: ModuleState, first: list[Tensor]
) -> None:
    """Tell random numbers, with which a model can be quantized, from what is kept from call to
    call.

    Raises:
        ModelError: something is kept.
    """
    kept, name = state.changed(), type(module).__name__
    state.restore()
    if _is_near(distance(first, _output(module, call, seed=2)), first):
        what = f"{shortened(kept)} in forward()" if kept else "something in forward()"
        text = (
            f"{name} gives another output when it is called again on the same batch: it "
            f"changes {what}"
        )
        remedy = (
            "a traced network keeps nothing from call to call: compute a new value from the "
            "inputs instead"
        )
        raise ModelError(text, help=remedy)
    layer = _first_random(graph, call)
    where = f", first at {layer}" if layer else ", which its trace has frozen"
    logger.warning(
        "%s gives another output in each call on the same batch: it draws random numbers in "
        "evaluation mode%s; comparisons with the float model hold these, too",
        *(name, where),
    )


def _first_random(graph: Graph, call: Call) -> str:
    """The first layer that computes something else with other random numbers; "" if there is
    none.
    """
    sums: list[dict[str, float]] = [{}, {}]
    for seed, found in enumerate(sums):
        _watch(graph, call, seed, partial(_add_up, found))
    return next(
        (name for name, one in sums[0].items() if one != sums[1][name] and not math.isnan(one)),
        "",
    )


def _add_up(found: dict[str, float], name: str, value: Tensor) -> None:
    found[name] = float(value.double().sum())


def _first_difference(module: nn.Module, graph: Graph, call: Call) -> str:
    """The first layer, of those that are called once, where the module makes something else; ""
    if there is none.
    """
    made: dict[str, list[Tensor]] = {}

    def keep(path: str, _part: nn.Module, _args: Any, output: Any) -> None:
        made.setdefault(path, []).extend([output.clone()] if isinstance(output, Tensor) else [])

    inner = [
        (path, part)
        for path, part in module.named_modules()
        if path and not any(part.children())
    ]
    hooks = [part.register_forward_hook(partial(keep, path)) for path, part in inner]
    try:
        _output(module, call, seed=1)
    finally:
        for hook in hooks:
            hook.remove()
    last = {node.scope: node.name for node in graph.nodes}
    places = {
        last[path]: outputs
        for path, outputs in made.items()
        if path in last and len(outputs) == 1
    }
    far: list[str] = []

    def compare(name: str, value: Tensor) -> None:
        if name in places and not _is_near(distance(places[name], [value]), [value]):
            far.append(name)

    _watch(graph, call, 1, compare)
    return far[0] if far else ""


def _watch(graph: Graph, call: Call, seed: int, look: Callable[[str, Tensor], None]) -> None:
    """Run the traced network and show what each layer makes."""
    seed_everything(seed)
    names = [node.name for node in graph.nodes if node.is_float and node.op != "input"]
    args, kwargs = _copied(call)
    Network(graph).observe(args, kwargs, {name: partial(look, name) for name in names})
