"""Find the tensors that cause the loss of an output: those that help most in float."""

import math
from collections.abc import Iterable, Iterator

from quantizer.comparison.output_figures import PartFigures, leaves
from quantizer.comparison.samples import LOW_DB
from quantizer.config.wording import named_output
from quantizer.evaluation.network_comparison import LayerNoise, NetworkComparison, Networks
from quantizer.graph.channels.output_parts import Output
from quantizer.graph.ir import Graph
from quantizer.nn.network import Network
from quantizer.plan.model import Key
from quantizer.plugins import if_command

MAX_TRIED = 8
"""Tensors that are tried in float on one batch. Each costs a run of the nodes after it."""


_MIN_GAIN_DB = 0.1
"""A smaller gain is not reported."""


def best_in_float(
    keys: Iterable[Key], networks: Networks, part: str | None = None
) -> tuple[Key, float] | None:
    """Return the tensor that helps most when it stays in float on the first batch, and the gain
    in dB; None if none was measured.

    Args:
        keys: the tensors to try.
        networks: of the test.
        part: the output or part that counts; None for all.
    """
    # Only losses need them
    from quantizer.comparison.output_measure import OutputMeasure
    from quantizer.evaluation.ablation import ablate

    measure: OutputMeasure | None = None
    if part is not None:
        measure = OutputMeasure(networks.outputs, only=part)
    ablation = ablate(
        networks.reference,
        networks.quantized,
        [networks.first],
        keys=list(keys),
        user=networks.user,
        is_alone_measured=False,
        measure=measure,
    )
    return ablation.best


def suspects(
    part: PartFigures, output: Output, compared: NetworkComparison, graph: Graph
) -> Iterator[Key]:
    """Yield the tensors that a part depends on, from the output backwards."""
    measured: dict[str, list[Key]] = {}
    for noise in sorted(compared.layers, key=lambda noise: noise.local.sqnr_db):
        measured.setdefault(noise.layer, []).append((noise.layer, noise.role))
    pending = [output.node]
    layers = {known.name: known.layer for known in output.parts}
    if output.labels is not None and layers.get(part.name):
        nodes = [node.name for node in output.labels.replay.nodes]
        pending = [*reversed(nodes), layers[part.name]]
    seen: set[str] = set()
    joins = set(pending[:-1])
    while pending:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        yield from measured.get(name, ())
        if name not in joins:
            pending += graph.by_name[name].refs()


def remark_on_low_sqnr(
    lowest: PartFigures, compared: NetworkComparison, networks: Networks
) -> str:
    """Return sentences on an output SQNR below LOW_DB: where it begins, and which tensor to
    leave in float.

    Args:
        lowest: the output or part with that SQNR.
        compared: the result of the test.
        networks: what was compared.
    """
    is_only = len(list(leaves(compared.outputs))) == 1
    subject = "the output's SQNR" if is_only else f"the SQNR of {named_output(lowest.name)}"
    sentences = [
        f"{subject} is {lowest.sqnr_db:.1f} dB; below {LOW_DB:g} dB few networks are usable"
    ]
    sources: set[str] = set()
    for noise in compared.layers:
        if _accumulated_db(noise) < LOW_DB:
            sentences.append(
                f"The first tensor below that is the {noise.role} of {noise.layer} "
                f"({_accumulated_db(noise):.1f} dB)"
            )
            sources = set(_sources(noise.layer, networks.reference, compared))
            break
    # The inputs of that layer come first: their own SQNR is high if a few of their values are
    # far larger than the others.
    candidates = sorted(
        compared.layers, key=lambda noise: (noise.layer not in sources, noise.local.sqnr_db)
    )
    sentences += _most_helpful(candidates[:MAX_TRIED], networks)
    more = if_command(
        "analyze",
        "`quantizer analyze --tensors` measures all tensors; `--metric` finds the layers that "
        "have to stay in float",
    )
    return ". ".join(filter(None, (*sentences, more)))


def _accumulated_db(noise: LayerNoise) -> float:
    """Return the SQNR of a tensor in the quantized network; weights have none."""
    return math.inf if noise.accumulated is None else noise.accumulated.sqnr_db


def _sources(layer: str, reference: Network, compared: NetworkComparison) -> Iterator[str]:
    """Yield the layer, and the nearest layers before it that have quantized tensors."""
    yield layer
    measured = {noise.layer for noise in compared.layers}
    seen = {layer}
    pending = [*reference.graph.by_name[layer].refs()]
    while pending:
        name = pending.pop()
        if name in measured:
            yield name
        elif name not in seen:
            pending += reference.graph.by_name[name].refs()
        seen.add(name)


def _most_helpful(candidates: list[LayerNoise], networks: Networks) -> Iterator[str]:
    """Yield a sentence on the tensor that helps most when it stays in float, if any helps."""
    keys = [(noise.layer, noise.role) for noise in candidates]
    best = best_in_float(keys, networks)
    if best is None:
        return
    (layer, role), gain = best
    if gain >= _MIN_GAIN_DB:
        yield (
            f"Of {len(candidates)} tensors that were tried in float, the {role} of {layer} "
            f"helps most: {gain:.1f} dB more on the first batch"
        )
