"""What outputs lose that the figures of others would hide: each loss is named, with the
tensor that is to blame."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from quantizer.comparison.noise import Noise
from quantizer.comparison.output_figures import OutputFigures, PartFigures
from quantizer.comparison.output_measure import OutputMeasure
from quantizer.config.wording import shortened
from quantizer.evaluation.ablation import ablate
from quantizer.evaluation.compare import Comparison
from quantizer.evaluation.tested_networks import Networks
from quantizer.graph.ir import Graph
from quantizer.graph.output_parts import Output
from quantizer.plan.model import Key

BELOW_DB = 20.0
"""So far below all other outputs and parts together, a part has lost more than they do."""
ENOUGH_DB = 40.0
"""An error of a hundredth is rounding, however good the others are."""
TRIED = 8
"""Tensors that are tried in float on one batch to find the one that is to blame."""
HELPS_DB = 3.0
"""What is to blame for a loss gives back half of it, or more."""
SHOWN = 4
"""Channels that are named, of more."""


@dataclass(frozen=True)
class OutputWarning:
    """One loss.

    Attributes:
        kind: "constant", "below", "channels", "varies", "rows" or "unmatched".
        output: the output or part that loses.
        text: a sentence for people.
        layer: what is to blame, "" if that is not known; `tensor` is the role of the tensor in
            it.
    """

    kind: str
    output: str
    text: str
    layer: str = ""
    tensor: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the fields by name."""
        return asdict(self)


def output_warnings(
    compared: Comparison,
    networks: Networks,
    explained: Collection[str] = (),
) -> list[OutputWarning]:
    """Return what outputs and parts lose that is not seen in the figures of all together.

    Args:
        compared: what the test found.
        networks: what it compared.
        explained: outputs and parts whose loss has been said to come from somewhere else.
    """
    if compared.spoiled is not None:
        return []
    warnings: list[OutputWarning] = []
    for output, figures in zip(networks.float_outputs, compared.outputs, strict=True):
        if figures.whole.name in explained:
            continue
        open_parts = [part for part in figures.leaves if part.name not in explained]
        lost = [part for part in open_parts if loss_of(part, compared.outputs) is not None]
        for part in lost:
            warnings.append(_with_blame(part, output, compared, networks))
        for part in open_parts:
            if part.appears:
                warnings.append(_of_varying(part))
        if not any(part.collapses for part in lost):
            warnings += _of_channels(figures)
        warnings += _of_rows(figures)
    return warnings


def loss_of(part: PartFigures, outputs: Sequence[OutputFigures]) -> tuple[str, str] | None:
    """Return the kind of loss of a part, and a sentence on it; None if it loses no more than
    the others."""
    sqnr = part.sqnr_db
    if sqnr is None:
        return None
    if part.collapses:
        value = f"{part.other.low:.3g} everywhere in the quantized network"
        spread = f"from {part.reference.low:.3g} to {part.reference.high:.3g}"
        return "constant", f"{part.name} is {value}; in the float one it goes {spread}"
    others_db = _of_others(part, outputs)
    if others_db is None or sqnr >= ENOUGH_DB or sqnr > others_db - BELOW_DB:
        return None
    others = f"where the other outputs have {others_db:.1f} dB"
    return "below", f"{part.name} has {sqnr:.1f} dB {others}"


def _of_others(part: PartFigures, outputs: Sequence[OutputFigures]) -> float | None:
    """Return the SQNR of all other parts and outputs together; None if there is none with an
    error."""
    noise = Noise()
    for output in outputs:
        for other in output.leaves:
            if other is not part and other.kind == "float" and other.noise.error > 0:
                noise.merge(other.noise)
    return noise.sqnr_db if noise.error > 0 else None


def _with_blame(
    part: PartFigures,
    output: Output,
    compared: Comparison,
    networks: Networks,
) -> OutputWarning:
    """Return the warning on a part that has lost, with the tensor that gives it back when it
    is left in float."""
    loss = loss_of(part, compared.outputs)
    assert loss is not None  # only such parts are asked for
    kind, text = loss
    keys = list(islice(_suspects(part, output, compared, networks.reference.graph), TRIED))
    measure = OutputMeasure(networks.outputs, only=part.name)
    pair = networks.reference, networks.quantized
    ablation = ablate(*pair, [networks.first], keys=keys, user=networks.user, measure=measure)
    gains = {effect.key: ablation.gain_db(effect) for effect in ablation.effects}
    key = max(gains, key=gains.__getitem__, default=None)
    if key is None or not gains[key] >= HELPS_DB:
        text += f"; {part.layer} makes it"
        return OutputWarning(kind, part.name, text, part.layer, "activation")
    layer, role = key
    gained = "all of it" if math.isinf(gains[key]) else f"{gains[key]:.1f} dB more"
    text += f". The {role} of {layer} is to blame: "
    text += f"in float, it gives {gained} on the first batch"
    return OutputWarning(kind, part.name, text, layer, role)


def _suspects(
    part: PartFigures,
    output: Output,
    compared: Comparison,
    graph: Graph,
) -> Iterator[Key]:
    """Yield the tensors that a part goes through, from the output back."""
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


def _of_varying(part: PartFigures) -> OutputWarning:
    """Return the warning on what is one value in float alone."""
    spread = f"goes from {part.other.low:.3g} to {part.other.high:.3g} in the quantized network"
    text = f"{part.name} {spread}; in the float one it is {part.reference.low:.3g} everywhere"
    return OutputWarning("varies", part.name, text, part.layer, "activation")


def _of_channels(figures: OutputFigures) -> Iterator[OutputWarning]:
    """Yield the warning on channels that quantization makes one value, if there are any."""
    channels = figures.channels
    lost = [] if channels is None else channels.collapsed
    if channels is None or not lost:
        return
    rank_of_channels = ", ".join([":"] * channels.axis)
    named = [f"{figures.whole.name}[{rank_of_channels}, {channel}]" for channel in lost]
    name, layer = figures.whole.name, figures.whole.layer
    count = f"{len(lost)} of {len(channels.low)} channels of {name}"
    text = f"{count} are one value in the quantized network and not in the float one: "
    text += f"{shortened(named, SHOWN)}; {layer} makes them"
    yield OutputWarning("channels", name, text, layer, "activation")


def _of_rows(figures: OutputFigures) -> Iterator[OutputWarning]:
    """Yield what is to be said of rows that have changed their order, or may have."""
    order = figures.order
    name, layer = figures.whole.name, figures.whole.layer
    if order is not None and order.unmatched:
        text = (
            f"{name}: {order.unmatched} rows that are selected by values cannot be matched "
            "with those of the float "
        )
        text += (
            "network, as it is not known where they were; its figures compare them by place, "
        )
        text += "so that another order counts as an error"
        yield OutputWarning("unmatched", name, text, layer)
    if order is None or not (order.moved or order.exchanged):
        return
    text = f"{name}: of {order.rows} rows that the float network selects, "
    text += f"{order.moved} are in another order in the quantized one, "
    text += f"and {order.exchanged} are others; its figures are of rows that both select"
    yield OutputWarning("rows", name, text, layer)
