"""The .float.pt2 target: the quantized network as a `torch.export` program of plain torch
operators on floats. Loads without quantizer.
"""

import dataclasses
from pathlib import Path

from quantizer.export.agreement import Verification
from quantizer.export.deployment import Deployment
from quantizer.export.torch_export.program import exported, saved
from quantizer.export.torch_export.verify import verify_program
from quantizer.storage.files import write_bytes


def export(deployment: Deployment, path: Path) -> Verification:
    """Write the program; `torch.export.load(path).module()` is called as the model was, with
    any batch size, and returns dicts, lists and tuples.

    Weights are stored as the float32 values of their codes, and the stored example call is
    zeros. The file computes what test mode does; sums of convolutions are added up in another
    order on some processors.

    Raises:
        ModelError: torch.export refuses the network.
        VerificationError: the program does not give test mode's outputs.
    """
    plain = dataclasses.replace(deployment, graph=deployment.graph.replaced(rebuild=None))
    content = saved(exported(plain.network(), plain.graph, *deployment.blank))
    verification = verify_program(
        content, deployment, path.name, "--deploy safetensors writes the tensors alone"
    )
    write_bytes(path, content)
    return verification
