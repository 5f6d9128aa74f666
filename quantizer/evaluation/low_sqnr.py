"""What to say of a quantized network that is far from its float one: where the loss begins, and
what helps most.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantizer.comparison.output_figures import leaves, worst
from quantizer.evaluation.ablation import ablate
from quantizer.evaluation.compare import Comparison, LayerNoise
from quantizer.evaluation.pass_loss import PassLoss
from quantizer.evaluation.tested_networks import Networks
from quantizer.nn.network import Network
from quantizer.plan.model import Key

LOW_DB = 15.0
"""Output SQNR below which no network here kept its accuracy."""
TRIED = 8
"""Tensors that are tried in float on one batch: each costs what comes after it. First those of
what the first layer below LOW_DB reads, whose own SQNR is high if a few values are far larger
than the others, then those of the lowest.
"""
LEAST_DB = 0.1
"""What is gained by less is not worth a word."""


def lost_to_passes(passes: PassLoss | None) -> frozenset[str]:
    """Return the outputs and parts of which passes alone leave less than LOW_DB."""
    ratios = {} if passes is None else passes.by_output
    return frozenset(name for name, ratio in ratios.items() if ratio < LOW_DB)


def remark_on_passes(passes: PassLoss | None) -> str | None:
    """Return a sentence on passes that alone leave less than LOW_DB of an output; None if they
    do not.
    """
    if passes is None or passes.passes.db >= LOW_DB:
        return None
    names = ", ".join(passes.names)
    output = (
        "the model's output"
        if passes.passes.name is None
        else f"the model's output {passes.passes.name}"
    )
    return (
        f"before anything is quantized, {names} leave {passes.passes.db:.1f} dB of {output} "
        "on one batch: switch them off, or train the model with what they put in"
    )


def remark(compared: Comparison, networks: Networks) -> str | None:
    """A sentence on an output SQNR below LOW_DB: the first tensor, in execution order, that has
    less, and which one to leave in float.

    Args:
        compared: what the test found.
        networks: what it compared.
    """
    lowest = worst(compared.outputs)
    if lowest is None or compared.spoiled is not None or (lowest.sqnr_db or 0.0) >= LOW_DB:
        return None
    what = (
        "the output's SQNR"
        if len(list(leaves(compared.outputs))) == 1
        else f"the SQNR of {lowest.name}"
    )
    said = f"{what} is {lowest.sqnr_db:.1f} dB, and below {LOW_DB:g} few networks are of use"
    first = next((noise for noise in compared.layers if _reached(noise) < LOW_DB), None)
    if first is not None:
        said += (
            f". It is below that from the {first.role} of {first.layer} on "
            f"({_reached(first):.1f} dB)"
        )
    sources = (
        set(_sources(first.layer, networks.reference, compared)) if first is not None else set()
    )
    tried = sorted(
        compared.layers, key=lambda noise: (noise.layer not in sources, noise.local.sqnr_db)
    )[:TRIED]
    best = _most_helpful(tried, networks)
    if best is not None:
        (layer, role), gain = best
        said += (
            f". Of {len(tried)} tensors that were tried in float, the {role} of {layer} helps "
            f"most: {gain:.1f} dB more on the first batch"
        )
    return (
        said + ". `quantizer analyze` measures all tensors, and with --metric what has to stay "
        "in float"
    )


def _reached(noise: LayerNoise) -> float:
    """What is left at this tensor, where the whole network is quantized; weights have no such
    figure.
    """
    return noise.accumulated.sqnr_db if noise.accumulated is not None else float("inf")


def _sources(layer: str, reference: Network, compared: Comparison) -> Iterator[str]:
    """The layer, and the nearest ones before it that have tensors of their own."""
    yield layer
    measured, seen = {noise.layer for noise in compared.layers}, {layer}
    pending = [*reference.graph.by_name[layer].refs()]
    while pending:
        name = pending.pop()
        if name in measured:
            yield name
        elif name not in seen:
            pending += reference.graph.by_name[name].refs()
        seen.add(name)


def _most_helpful(tried: list[LayerNoise], networks: Networks) -> tuple[Key, float] | None:
    """The tensor that the output gains most from when it is left in float, and how much, in dB;
    None if none helps.
    """
    keys = {(noise.layer, noise.role) for noise in tried}
    pair = networks.reference, networks.quantized
    found = ablate(*pair, [networks.first], keys=keys, user=networks.user)
    gains = {effect.key: found.gain_db(effect) for effect in found.effects}
    key = max(gains, key=gains.__getitem__, default=None)
    return (key, gains[key]) if key is not None and gains[key] >= LEAST_DB else None
