"""Explains a low output SQNR: where the loss begins, and which tensor to leave in float."""

import math
from collections.abc import Iterator

from quantizer.comparison.output_figures import leaves, worst
from quantizer.config.wording import named_output
from quantizer.evaluation.network_comparison import LayerNoise, NetworkComparison
from quantizer.evaluation.pass_loss import PassLoss
from quantizer.evaluation.tested_networks import Networks
from quantizer.nn.network import Network

LOW_DB = 15.0
"""No network that was tried kept its accuracy below this output SQNR."""
_MAX_TRIED = 8
"""Tensors that are tried in float on one batch. Each costs a run of the nodes after it."""
_MIN_GAIN_DB = 0.1
"""A smaller gain is not reported."""


def lost_to_passes(passes: PassLoss | None) -> frozenset[str]:
    """Return the outputs and parts that passes alone leave below LOW_DB."""
    if passes is None:
        return frozenset()
    ratios = passes.by_output.items()
    return frozenset(name for name, ratio in ratios if ratio < LOW_DB)


def remark_on_passes(passes: PassLoss | None) -> str | None:
    """Return a sentence if passes alone leave an output below LOW_DB, else None."""
    if passes is None or passes.passes.db >= LOW_DB:
        return None
    output = "the model's output"
    if passes.passes.name is not None:
        output += f" {passes.passes.name}"
    return (
        f"before anything is quantized, {', '.join(passes.names)} reduce {output} to "
        f"{passes.passes.db:.1f} dB on one batch: switch them off, or train the model with the "
        "functions that they insert"
    )


def remark(compared: NetworkComparison, networks: Networks) -> str | None:
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
    sentences.append(
        "`quantizer analyze --tensors` measures all tensors; `--metric` finds the layers "
        "that have to stay in float"
    )
    return ". ".join(sentences)


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
    # Only low outputs need it
    from quantizer.evaluation.ablation import ablate

    keys = {(noise.layer, noise.role) for noise in candidates}
    ablation = ablate(
        networks.reference,
        networks.quantized,
        [networks.first],
        keys=keys,
        user=networks.user,
        is_alone_measured=False,
    )
    if ablation.best is None:
        return
    (layer, role), gain = ablation.best
    if gain >= _MIN_GAIN_DB:
        yield (
            f"Of {len(candidates)} tensors that were tried in float, the {role} of {layer} "
            f"helps most: {gain:.1f} dB more on the first batch"
        )
