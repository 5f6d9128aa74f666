"""Warns of single outputs and parts that lose much more than the others, and of a low SQNR.
Names the tensor that causes the loss.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from quantizer.comparison.noise import Noise
from quantizer.comparison.output_figures import OutputFigures, PartFigures
from quantizer.comparison.samples import BELOW_DB, LOW_DB, worst_words
from quantizer.config.wording import counted, first_names, named_output
from quantizer.evaluation.network_comparison import NetworkComparison, Networks
from quantizer.graph.channels.output_parts import Output
from quantizer.graph.ir import Graph

_MAX_BELOW_DB = 20.0
"""A part that is further below all other outputs and parts together gets a warning."""
_HIGH_DB = 40.0
"""A part with a higher SQNR gets no warning, however good the others are."""
_MIN_CAUSE_DB = 3.0
"""The cause of a loss gives back at least half of it."""
_MAX_NAMED_CHANNELS = 4
NOTES = ("rows", "silent")
"""Kinds of warnings about what is not lost."""
_MOST_SHARE = 2
"""Larger errors are given as multiples."""


@dataclass(frozen=True)
class OutputWarning:
    """A warning about one output or part.

    Attributes:
        kind: "inputs", "random", "constant", "hidden", "below", "samples", "channels",
            "varies", "rows", "silent" or "unmatched".
        output: the name of the output or part; "" for inputs.
        text: a sentence for people.
        layer: the one that causes the loss; "" if it is not known.
        tensor: the role of the tensor in that layer.
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
    compared: NetworkComparison, networks: Networks, explained: Collection[str] = ()
) -> list[OutputWarning]:
    """Return the warnings about single outputs and parts.

    Args:
        compared: the result of the test.
        networks: what was compared.
        explained: outputs and parts whose loss has another, reported cause.
    """
    if compared.spoiled is not None:
        return []
    warnings: list[OutputWarning] = []
    drawing = _random_origins(networks.reference.graph)
    for row in compared.inputs:
        # Two runs differ in random numbers, whatever quantization does
        if row.warning and row.readers.group.source not in drawing:
            layer = row.readers.group.layers[0]
            warnings.append(OutputWarning("inputs", "", row.warning, layer, "input"))
    for output, figures in zip(networks.float_outputs, compared.outputs, strict=True):
        if figures.whole.name in explained:
            continue
        if output.node in drawing:
            warnings.append(_about_random(figures.whole.name, drawing[output.node]))
            continue
        open_parts = [part for part in figures.leaves if part.name not in explained]
        lost = [part for part in open_parts if loss_of(part, compared.outputs) is not None]
        for part in lost:
            warnings.append(_with_cause(part, output, compared, networks))
        for part in open_parts:
            if part.appears:
                warnings.append(_about_varying_part(part))
        if not any(part.collapses or part.hides_its_loss for part in lost):
            warnings += _about_channels(figures, output)
        warnings += _about_rows(figures)
        warnings += sample_warnings(open_parts)
    return warnings


def sample_warnings(parts: Iterable[PartFigures]) -> Iterator[OutputWarning]:
    """Yield the warnings about parts whose SQNR hides that of samples, and those about silent
    samples.
    """
    for part in parts:
        figures = part.sample_figures
        sqnr_db = part.sqnr_db
        if figures is None or sqnr_db is None:
            continue
        name = named_output(part.name)
        is_typical = sqnr_db - figures.median_db >= BELOW_DB
        looks_usable = figures.worst_db < LOW_DB <= sqnr_db
        if part.hides_samples and (is_typical or looks_usable):
            text = f"{name} has {sqnr_db:.1f} dB over all values, but {figures.worst_db:.1f} "
            text += f"dB on {worst_words(figures.count)} and {figures.median_db:.1f} dB on the "
            text += f"median one; {figures.worst} is the worst"
            yield OutputWarning("samples", part.name, text, part.layer, "activation")
        if figures.silent:
            more = figures.silent - len(figures.first_silent)
            text = f"{counted(figures.silent, 'sample')} of {name}, next to zero in the float "
            text += f"network, counted without an SQNR: {'; '.join(figures.first_silent)}"
            if more:
                text += f" and {more} more"
            yield OutputWarning("silent", part.name, text, part.layer, "activation")


def _random_origins(graph: Graph) -> dict[str, str]:
    """Return the first layer that draws random numbers for each node that depends on them."""
    origins: dict[str, str] = {}
    for node in graph.nodes:
        if node.is_random:
            origins[node.name] = node.name
        for name in node.refs():
            if name in origins:
                origins.setdefault(node.name, origins[name])
    return origins


def _about_random(name: str, layer: str) -> OutputWarning:
    """Return the warning about an output that depends on random numbers."""
    text = f"{named_output(name)} depends on random numbers, which {layer} draws: its figures "
    text += "are of other numbers in each run of a network, and not of quantization alone"
    return OutputWarning("random", name, text, layer, "activation")


def loss_of(part: PartFigures, outputs: Sequence[OutputFigures]) -> tuple[str, str] | None:
    """Return the kind of loss of a part and a sentence; None if it loses no more than the
    others.
    """
    if part.sqnr_db is None:
        return None
    # That of all values
    sqnr = part.noise.sqnr_db
    name = named_output(part.name)
    if part.collapses:
        value = f"{part.other.low:.3g} everywhere in the quantized network"
        spread = range_text(part.reference.low, part.reference.high)
        text = f"{name} is {value}; in the float network it ranges from {spread}"
        return "constant", text
    if part.hides_its_loss:
        assert part.moments is not None
        share = part.rms_error / float(part.moments.deviation)
        spread = range_text(part.reference.low, part.reference.high)
        text = f"{name} only ranges from {spread} in the float network, and its "
        error = f"{share:.0%} of" if share < _MOST_SHARE else f"{share:.3g} times"
        text += f"error is {error} its standard deviation. An SQNR of {sqnr:.1f} dB "
        text += f"would hide it, so {part.sqnr_db:.1f} dB, the SQNR of what varies, counts"
        return "hidden", text
    others_db = _sqnr_of_others(part, outputs)
    if others_db is None or sqnr >= _HIGH_DB or sqnr > others_db - _MAX_BELOW_DB:
        return None
    return "below", f"{name} has {sqnr:.1f} dB; the other outputs have {others_db:.1f} dB"


def range_text(low: float, high: float) -> str:
    """Return both ends of a range, with three digits or as many as they need to differ.

    >>> range_text(-1.23456, 1.5), range_text(1.791712, 1.791759)
    ('-1.23 to 1.5', '1.7917 to 1.7918')
    """
    for digits in range(3, 9):
        texts = f"{low:.{digits}g}", f"{high:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return " to ".join(texts)


def _sqnr_of_others(part: PartFigures, outputs: Sequence[OutputFigures]) -> float | None:
    """Return the SQNR of all other parts and outputs together; None if they have no error."""
    noise = Noise()
    for output in outputs:
        for other in output.leaves:
            if other is not part and other.kind == "float" and other.noise.error > 0:
                noise.merge(other.noise)
    return noise.sqnr_db if noise.error > 0 else None


def _with_cause(
    part: PartFigures, output: Output, compared: NetworkComparison, networks: Networks
) -> OutputWarning:
    """Return the warning about a part that has lost, with the tensor that causes the loss."""
    loss = loss_of(part, compared.outputs)
    # Only such parts are passed.
    assert loss is not None
    kind, text = loss
    # Only losses need it
    from quantizer.evaluation.ablation import MAX_TRIED, best_in_float, suspects

    tensors = suspects(part, output, compared, networks.reference.graph)
    best = best_in_float(islice(tensors, MAX_TRIED), networks, part.name)
    if best is None or not best[1] >= _MIN_CAUSE_DB:
        text += f"; it is computed by {part.layer}"
        return OutputWarning(kind, part.name, text, part.layer, "activation")
    (layer, role), gain = best
    effect = "restores it" if math.isinf(gain) else f"gives {gain:.1f} dB more"
    text += f". The cause is the {role} of {layer}: "
    text += f"leaving it in float {effect} on the first batch"
    return OutputWarning(kind, part.name, text, layer, role)


def _about_varying_part(part: PartFigures) -> OutputWarning:
    """Return the warning about a part that is constant in the float network only."""
    spread = f"{range_text(part.other.low, part.other.high)} in the quantized network"
    text = f"{named_output(part.name)} ranges from {spread}; "
    text += f"in the float network it is {part.reference.low:.3g} everywhere"
    return OutputWarning("varies", part.name, text, part.layer, "activation")


def _about_channels(figures: OutputFigures, output: Output) -> Iterator[OutputWarning]:
    """Yield a warning about channels that become constant, and one about channels with an error
    that is large against their narrow range.
    """
    channels = figures.whole.channels
    if channels is None:
        return
    if channels.collapsed:
        text = "are constant in the quantized network only"
        yield _channel_warning(figures, output, channels.collapsed, text)
    if channels.lost:
        lowest = min(noise.sqnr_db for noise in channels.lost_noise)
        text = "have narrow ranges far from 0, and an error of more than a fifth of their "
        text += f"standard deviation (the SQNR of what varies, {lowest:.1f} dB, counts)"
        yield _channel_warning(figures, output, channels.lost, text)


def _channel_warning(
    figures: OutputFigures, output: Output, indices: Sequence[int], fact: str
) -> OutputWarning:
    """Return the warning about channels of an output, with what is true of them."""
    channels = figures.whole.channels
    assert channels is not None
    name = figures.whole.name
    layer = figures.whole.layer
    axes = ", ".join([":"] * channels.axis)
    named = [f"{name}[{axes}, {index}]" for index in indices]
    what = "channels" if output.has_channels else f"positions along axis {channels.axis}"
    text = f"{len(named)} of {len(channels.low)} {what} of {named_output(name)} {fact}: "
    text += f"{first_names(named, _MAX_NAMED_CHANNELS)}; {layer} computes them"
    return OutputWarning("channels", name, text, layer, "activation")


def _about_rows(figures: OutputFigures) -> Iterator[OutputWarning]:
    """Yield the warnings about rows that have changed their order, or may have."""
    order = figures.order
    if order is None:
        return
    name = figures.whole.name
    called = named_output(name)
    layer = figures.whole.layer
    if order.unmatched:
        text = f"{called}: {order.unmatched} rows that are selected by value cannot be matched "
        text += "with the rows of the float network, because their origin is unknown. "
        text += "They are compared by position, so a changed order counts as an error"
        yield OutputWarning("unmatched", name, text, layer)
    if order.moved or order.exchanged:
        text = f"{called}: of {order.rows} rows that the float network selects, the quantized "
        text += f"network has {order.moved} at another position and does not select "
        text += f"{order.exchanged}. Only rows that both select are compared"
        yield OutputWarning("rows", name, text, layer)
