"""What GPTQ and its kin leave of round-to-nearest's harm to a trained language model, on text
it has not seen.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.extended import extended_except
from support.rescaling import with_rounded_weights
from support.roundings import CHANNELS, layer_names, task_of, to_nearest, weight_of
from support.tales import Tales, sequences
from torch.nn import functional as F

from quantizer.calibration.run_algorithms import load_run
from quantizer.config.algorithms import ALGORITHMS
from quantizer.graph.edits import with_weights
from quantizer.graph.ir import Graph
from quantizer.layerwise.adjustment import Adjustment
from quantizer.nn.network import Network

# Frantar et al. 2022 (arXiv 2210.17323) close 64 % of the gap for OPT-125M at 4 bits, and the
# README of their code 88 % for LLaMA-7B at 3 bits. Seen here at 4, 3 and 2 bits: GPTQ 68, 77,
# 97 %, GPTAQ 76, 83, 98 %, Qronos 79, 78, 98 %, and GPTQ on the ranges of AWQ 95, 76, 99 %. At
# 4 bits the gap is 0.004 of a perplexity of 2.11: some points are chance.
CLOSED = {4: 0.4, 2: 0.8}
PASSAGES = 256
CALIBRATION_SEED, HELD_OUT_SEED = 2_000_000, 3_000_000
ALGORITHMS_IN_ORDER = {
    4: [("gptq",), ("awq", "gptq")],
    2: [("gptq",), ("gptaq",), ("qronos",), ("awq", "gptq")],
}


@torch.no_grad()
def perplexity(graph: Graph) -> float:
    """Of tokens, on held-out tales."""
    network, losses = Network(graph), []
    for tokens in torch.split(sequences(PASSAGES, HELD_OUT_SEED), 32):
        losses.append(
            F.cross_entropy(network(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        )
    return float(torch.stack(losses).mean().exp())


@pytest.mark.real
@pytest.mark.parametrize("bits", extended_except(CLOSED, 2))
def test_most_of_the_gap_is_closed(bits: int) -> None:
    """All linear layers, symmetric per output channel."""
    calibration = torch.split(sequences(PASSAGES, CALIBRATION_SEED), 16)
    task = task_of(Tales(), calibration, replace(CHANNELS, bit_width=bits))
    weights = {name: weight_of(task.graph, name) for name in layer_names(task.graph)}
    plain_weights = {
        name: {"weight": to_nearest(weight, task.specs[name, "weights"])}
        for name, weight in weights.items()
    }
    float_ = perplexity(task.graph)
    plain = perplexity(with_weights(task.graph, plain_weights))
    assert len(weights) == 15
    for names in ALGORITHMS_IN_ORDER[bits]:
        found = Adjustment()
        for name in names:
            found = load_run(name)(task, ALGORITHMS[name](), found)
        left = perplexity(with_rounded_weights(task.graph, found))
        assert (plain - left) / (plain - float_) >= CLOSED[bits]
