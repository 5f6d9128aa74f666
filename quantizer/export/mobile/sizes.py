"""Counts the multiply-adds of a network's layers, as torch runs them."""

from collections.abc import Collection

import torch
from torch.backends import mkldnn
from torch.utils.flop_counter import FlopCounterMode

from quantizer.export.deployment import Deployment
from quantizer.graph.tracing.trace import quiet
from quantizer.nn.network import Execution

_FLOPS = 2
"""Of a multiply-add, as torch counts."""


@torch.no_grad()
def multiply_adds(deployment: Deployment, layers: Collection[str]) -> dict[str, int]:
    """Return how many multiply-adds each of some layers takes for the deployment's call."""
    network = deployment.network()
    inputs = network.inputs(deployment.args, deployment.kwargs)
    execution = Execution(network, inputs)
    sizes: dict[str, int] = {}
    # The recurrent layers of this library hide their products
    with quiet(), mkldnn.flags(enabled=False):
        for node in network.graph.nodes:
            with FlopCounterMode(display=False) as counter:
                value = network.run_node(node, execution.values)
            if node.name in layers:
                sizes[node.name] = counter.get_total_flops() // _FLOPS
            execution.put(value)
    return sizes
