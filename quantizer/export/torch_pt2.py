"""The .pt2 target: the quantized network as a `torch.export` program of plain torch operators. Loads without
quantizer.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import torch

from quantizer.engine.result_files import write_bytes
from quantizer.export.agreement import Verification, verify
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.program import exported
from quantizer.graph.trace import quiet


def export(deployment: Deployment, path: Path) -> Verification:
    """Write the program; `torch.export.load(path).module()` is called as the model was, with any batch size, and
    returns dicts, lists and tuples.

    Weights are stored as the float32 values of their codes, and the stored example call is zeros. The file's output
    equals test mode's bit for bit.
    """
    args, kwargs = deployment.blank
    plain = dataclasses.replace(deployment, graph=deployment.graph.replaced(rebuild=None))
    program = exported(plain.network(), plain.graph, args, kwargs)
    buffer = io.BytesIO()
    with quiet():
        torch.export.save(program, buffer)
    content = buffer.getvalue()
    with quiet(), torch.no_grad():
        loaded = torch.export.load(io.BytesIO(content)).module()
        found = tensor_leaves(loaded(*deployment.args, **deployment.kwargs))
    verification = verify("outputs", deployment.expected, found)
    write_bytes(path, content)
    return verification
