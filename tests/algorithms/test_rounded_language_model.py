"""E12: what GPTQ and its kin leave of plain rounding's harm to a trained language model, on text it has not seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from character_model import HELD_OUT, TRAINED_ON, sequences, trained
from roundings import CHANNELS, layer_names, plainly, task_of, weight_of
from torch.nn import functional as F

from quantizer.algorithms.adjustment import Adjustment, adjusted
from quantizer.config.algorithms import ALGORITHMS
from quantizer.engine.adjust import load_run
from quantizer.graph.edits import with_weights
from quantizer.graph.ir import Graph
from quantizer.nn.network import Network

# Frantar et al. 2022 (arXiv 2210.17323) close 64 % of the gap for OPT-125M at 4 bits, and the README of their code 88 %
# for LLaMA-7B at 3 bits. Seen here at 4, 3 and 2 bits: GPTQ 56, 65, 72 %, GPTAQ 65, 70, 78 %, Qronos 80, 83, 87 %, and
# GPTQ on the ranges of AWQ 68, 79, 92 %: at 2 bits the ranges matter more than how one rounds.
CLOSED = {
    ("gptq",): {4: 0.4, 3: 0.65, 2: 0.7},
    ("gptaq",): {4: 0.4, 3: 0.65, 2: 0.7},
    ("qronos",): {4: 0.4, 3: 0.65, 2: 0.8},
    ("awq", "gptq"): {4: 0.4, 3: 0.65, 2: 0.8},
}


@torch.no_grad()
def perplexity(graph: Graph) -> float:
    """Of characters, on held-out text."""
    codes = sequences(HELD_OUT, 128, seed=3)
    logits = Network(graph)(codes)
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), codes[:, 1:].flatten()).exp())


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_most_of_the_gap_is_closed(bits: int) -> None:
    """All linear layers, symmetric per output channel; 8 bits leave no gap that could be closed."""
    calibration = torch.split(sequences(TRAINED_ON, 256, seed=7), 16)
    task = task_of(trained(), calibration, replace(CHANNELS, bit_width=bits))
    weights = {name: weight_of(task.graph, name) for name in layer_names(task.graph)}
    plain_weights = {name: {"weight": plainly(weight, task.specs[name, "weights"])} for name, weight in weights.items()}
    float_, plain = perplexity(task.graph), perplexity(with_weights(task.graph, plain_weights))
    assert plain > float_ and len(weights) == 19
    for names, closed in CLOSED.items():
        found = Adjustment()
        for name in names:
            found = load_run(name)(task, ALGORITHMS[name](), found)
        left = perplexity(adjusted(task.graph, found, rounded=True))
        if bits == 8:
            assert left == pytest.approx(float_, rel=1e-3)
        else:
            assert (plain - left) / (plain - float_) >= closed[bits]
