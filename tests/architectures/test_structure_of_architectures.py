"""On architectures of all kinds a fold keeps the function, and each layer that multiplies is in
one group.
"""

from __future__ import annotations

import attention  # noqa: F401 - registers
import dense  # noqa: F401
import mobile  # noqa: F401
import plain  # noqa: F401
import pytest
import residual  # noqa: F401
import sequences  # noqa: F401
import torch
from harness import CASES, traced
from support.extended import extended
from support.structures import changed_by_folding

from quantizer.config.model import Settings
from quantizer.graph.passes import run_passes
from quantizer.graph.structure.find import find_structure

pytestmark = pytest.mark.slow

USUAL = "vit densenet shufflenet_v2 yolo dlrm gru_with_attention"
FURTHER = (
    "gpt2 resnet mobilenet_v3 wavenet swin bert t5 mixture_of_experts encoder_decoder convnext"
)


@pytest.mark.parametrize("name", [*USUAL.split(), *extended(*FURTHER.split())])
def test_a_fold_keeps_the_function(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    graph = run_passes(traced(case), Settings())
    structure = find_structure(graph)
    layers = [layer for group in structure.groups for layer in group.layers]
    wanted = [
        n.name
        for n in graph.nodes
        if (n.op == "linear" or n.op.startswith("conv")) and "weight" in n.params
    ]
    assert sorted(layers) == sorted(wanted)
    assert changed_by_folding(graph, case.batches[0], structure) < 1e-5
