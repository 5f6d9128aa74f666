"""Passes: functions from a graph to a graph, which run between tracing and planning.

`GRAPH_PASSES` lists them by name, in the order in which they run. A pass keeps the names of the
layers that survive. Unless its row says otherwise, it also keeps the float function up to
rounding. No pass knows a scale.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from quantizer.config.model import Settings
from quantizer.declarations import GraphPass
from quantizer.graph.ir import Graph
from quantizer.plugins import loaded, plugins

Pass = Callable[..., Graph]
"""Takes a graph, and what was decided on data if its row has a `decision`."""
_FOLDER = "quantizer.graph.passes"


GRAPH_PASSES: dict[str, GraphPass] = {
    "remove_dropout": GraphPass(f"{_FOLDER}.compute_constants:remove_dropout"),
    "compute_weights": GraphPass(f"{_FOLDER}.compute_constants:compute_weights"),
    "compute_constants": GraphPass(f"{_FOLDER}.compute_constants:compute_constants"),
    "separate_biases": GraphPass(f"{_FOLDER}.linear_layers:separate_biases"),
    "linear_from_matmul": GraphPass(f"{_FOLDER}.linear_layers:linear_from_matmul"),
    "linear_of_experts": GraphPass(f"{_FOLDER}.linear_layers:linear_of_experts"),
    "convert_relu6_to_relu": GraphPass(
        f"{_FOLDER}.activations:convert_relu6_to_relu",
        "convert_relu6_to_relu",
        changes="on purpose",
    ),
    "convert_silu_to_hswish": GraphPass(
        f"{_FOLDER}.activations:convert_silu_to_hswish",
        "convert_silu_to_hswish",
        changes="on purpose",
    ),
    "integer_activations": GraphPass(
        f"{_FOLDER}.activations:integer_activations", "integer_activations"
    ),
    "fold_batch_norm": GraphPass(f"{_FOLDER}.fold_batch_norm:fold_batch_norm"),
}
for _plugin in plugins():
    GRAPH_PASSES.update(_plugin.passes)
# A device computes what all other passes have left
GRAPH_PASSES |= {
    "dpu_average_pooling": GraphPass(
        f"{_FOLDER}.activations:dpu_average_pooling", device="DPU", changes="device"
    ),
    "dpu_leaky_relu": GraphPass(
        f"{_FOLDER}.activations:dpu_leaky_relu", device="DPU", changes="device"
    ),
    "dpu_hard_activations": GraphPass(
        f"{_FOLDER}.activations:dpu_hard_activations", device="DPU", changes="device"
    ),
}


def run_passes(
    graph: Graph,
    settings: Settings,
    *,
    device: bool = True,
    kept: Mapping[str, Any] | None = None,
) -> Graph:
    """Return the graph after every pass that the settings ask for.

    Args:
        graph: as traced.
        settings: say which passes run.
        device: whether passes run that compute as a device does. Without them the graph is the
            float network.
        kept: what was decided on data, by name.
    """
    for name in _wanted(settings, device=device):
        row = GRAPH_PASSES[name]
        function = load_pass(name)
        decision = (kept or {}).get(row.decision)
        changed = function(graph, decision) if decision else function(graph)
        is_other = changed.nodes != graph.nodes or changed.changes != graph.changes
        if row.changes != "nothing" and is_other:
            changed = changed.replaced(deviations=(*changed.deviations, name))
        graph = changed
    return graph


def graph_before(last: str, graph: Graph, settings: Settings) -> Graph:
    """Return the float network on which a pass runs that the settings ask for."""
    for name in _wanted(settings, device=False):
        if name == last:
            break
        graph = load_pass(name)(graph)
    return graph


def decided_on_data(
    original: Graph, settings: Settings, batches: Callable[[], Iterable[Any]]
) -> dict[str, Any]:
    """Return what passes have to be decided on data, by the name under which it is kept.

    Args:
        original: the model as traced.
        settings: say which passes run.
        batches: begins a pass over the data, on the graph's device.
    """
    kept = {}
    for name in _wanted(settings, device=False):
        row = GRAPH_PASSES[name]
        if row.decide:
            graph = graph_before(name, original, settings)
            kept[row.decision] = loaded(row.decide)(graph, batches())
    return kept


def _wanted(settings: Settings, *, device: bool = True) -> Iterator[str]:
    """Yield the passes that the settings ask for, in their order.

    Args:
        settings: of the run.
        device: whether passes that compute as a device does are among them.
    """
    for name, row in GRAPH_PASSES.items():
        if row.changes == "device" and not device:
            continue
        if row.device not in (None, settings.target_device):
            continue
        if row.setting is None or getattr(settings, row.setting):
            yield name


def for_device(settings: Settings) -> bool:
    """Return whether the settings ask for a pass that computes as a device does."""
    return any(GRAPH_PASSES[name].changes == "device" for name in _wanted(settings))


def summary(graph: Graph) -> list[str]:
    """Return a line for each pass that changed parameters."""
    lines: list[str] = []
    for name, row in GRAPH_PASSES.items():
        amounts = [change.amount for change in graph.changes if change.rewrite == name]
        if amounts:
            line = row.summary.format(count=len(amounts), amount=max(amounts))
            lines.append(line)
    return lines


def load_pass(name: str) -> Pass:
    """Return the function of a registered pass."""
    function: Pass = loaded(GRAPH_PASSES[name].function)
    return function
