"""The .float.pt2 target: the quantized network as a `torch.export` program of plain torch operators on floats. Loads
without quantizer.
"""

import dataclasses
from pathlib import Path

import torch

from quantizer.engine.result_files import write_bytes
from quantizer.export.agreement import Verification, verify
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.torch_program import exported, loaded, saved


def export(deployment: Deployment, path: Path) -> Verification:
    """Write the program; `torch.export.load(path).module()` is called as the model was, with any batch size, and
    returns dicts, lists and tuples.

    Weights are stored as the float32 values of their codes, and the stored example call is zeros. The file computes
    what test mode does; sums of convolutions are added up in another order on some processors.
    """
    plain = dataclasses.replace(deployment, graph=deployment.graph.replaced(rebuild=None))
    content = saved(exported(plain.network(), plain.graph, *deployment.blank))
    with torch.no_grad():
        found = tensor_leaves(loaded(content)(*deployment.args, **deployment.kwargs))
    verification = verify("outputs", deployment.expected, found)
    write_bytes(path, content)
    return verification
