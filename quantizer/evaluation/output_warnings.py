"""Warns of single outputs and parts that lose much more than the others, and of a low SQNR.
Names the tensor that causes the loss.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from quantizer.comparison.noise import Noise
from quantizer.comparison.output_figures import OutputFigures, PartFigures, leaves, worst
from quantizer.comparison.samples import BELOW_DB, worst_words
from quantizer.config.wording import counted, first_names, named_output
from quantizer.evaluation.network_comparison import LayerNoise, NetworkComparison, Networks
from quantizer.graph.channels.output_parts import Output
from quantizer.graph.ir import Graph
from quantizer.nn.network import Network
from quantizer.plan.model import Key
from quantizer.plugins import if_command

LOW_DB = 15.0
"""No network that was tried kept its accuracy below this output SQNR."""
_MAX_TRIED = 8
"""Tensors that are tried in float on one batch. Each costs a run of the nodes after it."""
_MIN_GAIN_DB = 0.1
"""A smaller gain is not reported."""
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
    suspects = _suspects(part, output, compared, networks.reference.graph)
    best = _best_in_float(islice(suspects, _MAX_TRIED), networks, part.name)
    if best is None or not best[1] >= _MIN_CAUSE_DB:
        text += f"; it is computed by {part.layer}"
        return OutputWarning(kind, part.name, text, part.layer, "activation")
    (layer, role), gain = best
    effect = "restores it" if math.isinf(gain) else f"gives {gain:.1f} dB more"
    text += f". The cause is the {role} of {layer}: "
    text += f"leaving it in float {effect} on the first batch"
    return OutputWarning(kind, part.name, text, layer, role)


def _best_in_float(
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


def _suspects(
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


def remark_on_low_sqnr(compared: NetworkComparison, networks: Networks) -> str | None:
    """Return sentences on an output SQNR below LOW_DB: where it begins, and which tensor to
    leave in float. Return None if no output is that low.

    Args:
        compared: the result of the test.
        networks: what was compared.
    """
    lowest = worst(compared.outputs)
    if lowest is None or compared.spoiled is not None or lowest.noise.sqnr_db >= LOW_DB:
        return None
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
    sentences += _most_helpful(candidates[:_MAX_TRIED], networks)
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
    best = _best_in_float(keys, networks)
    if best is None:
        return
    (layer, role), gain = best
    if gain >= _MIN_GAIN_DB:
        yield (
            f"Of {len(candidates)} tensors that were tried in float, the {role} of {layer} "
            f"helps most: {gain:.1f} dB more on the first batch"
        )
