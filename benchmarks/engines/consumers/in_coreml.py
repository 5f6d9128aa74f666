"""Converts `model.pt2` for Core ML, which runs on a Mac only, and counts kept weights."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import coremltools
import numpy as np
import torch
import torch.ao.quantization.fx._decomposed  # torch registers the operators of the file here
import work_folder
from torch._decomp import get_decompositions

STORED_WEIGHT = "constexpr_affine_dequantize"


def main() -> None:
    """Convert, and compare codes and scales."""
    # The converter knows no recurrent layers.
    aten = torch.ops.aten
    steps = get_decompositions([aten.lstm.input, aten.gru.input])
    program = torch.export.load(work_folder.folder() / "model.pt2").run_decompositions(steps)
    package = coremltools.convert(
        program,
        compute_precision=coremltools.precision.FLOAT32,
        minimum_deployment_target=coremltools.target.iOS17,
    )
    (function,) = package._mil_program.functions.values()
    stored: list[Any] = []
    for operation in function.operations:
        if operation.op_type == STORED_WEIGHT:
            stored.append(operation)
    weights = coded_weights(program)
    kept = sum(is_kept(codes, scales, stored) for codes, scales in weights)
    facts = {"version": version("coremltools"), "kept": kept, "weights": len(weights)}
    work_folder.store_facts(facts)


def coded_weights(program: Any) -> list[tuple[Any, Any]]:
    """Return the codes and the scales of each weight that a program decodes by channels."""
    values = {**program.state_dict, **program.constants}
    signature = program.graph_signature
    names = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    target = torch.ops.quantized_decomposed.dequantize_per_channel.default
    weights: list[tuple[Any, Any]] = []
    for node in program.graph.find_nodes(op="call_function", target=target):
        codes, scales = (values[names[source.name]].numpy() for source in node.args[:2])
        weights.append((codes, scales))
    return weights


def is_kept(codes: Any, scales: Any, stored: list[Any]) -> bool:
    """Return whether a weight is one of those that the converted program stores."""
    for operation in stored:
        same_codes = np.array(operation.quantized_data.val)
        if same_codes.size != codes.size or same_codes.shape[0] != codes.shape[0]:
            continue
        if not np.array_equal(same_codes.reshape(codes.shape), codes):
            continue
        if np.allclose(operation.scale.val, scales, rtol=1e-6):
            return True
    return False


if __name__ == "__main__":
    main()
