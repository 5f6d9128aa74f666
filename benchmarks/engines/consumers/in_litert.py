"""Runs `model.tflite` in LiteRT's interpreter, with XNNPACK."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import work_folder
from ai_edge_litert.interpreter import Interpreter, OpResolverType

MULTIPLYING = (
    "CONV_2D",
    "CONV_3D",
    "DEPTHWISE_CONV_2D",
    "FULLY_CONNECTED",
    "TRANSPOSE_CONV",
    "BATCH_MATMUL",
)


def main() -> None:
    """Run and measure times."""
    path = work_folder.folder() / "model.tflite"
    interpreter = Interpreter(str(path), num_threads=1)
    inputs = work_folder.inputs()
    outputs = run_together(interpreter, inputs)
    if outputs is None:
        # Some files take one sample at a time.
        interpreter = Interpreter(str(path), num_threads=1)
        outputs = run_apart(interpreter, inputs)
    facts: dict[str, Any] = {"version": version("ai-edge-litert")}
    facts |= kernels(path)
    run_one = with_one_sample(path, inputs).invoke
    run_float = with_one_sample(work_folder.folder() / "float.tflite", inputs).invoke
    facts |= work_folder.times(run_one, run_float)
    work_folder.finish(outputs, facts)


def with_one_sample(path: Path, inputs: Sequence[Any]) -> Interpreter:
    """Return the interpreter of a file that has run on the first sample."""
    interpreter = Interpreter(str(path), num_threads=1)
    run(interpreter, [values[:1] for values in inputs])
    return interpreter


def run_together(interpreter: Interpreter, inputs: Sequence[Any]) -> list[Any] | None:
    """Return the outputs of a whole batch; None if the file does not take it."""
    for row, values in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.resize_tensor_input(row["index"], values.shape)
    try:
        outputs = run(interpreter, inputs)
    except RuntimeError:
        return None
    for output in outputs:
        if len(output) != len(inputs[0]):
            return None
    return outputs


def run(interpreter: Interpreter, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of one call."""
    interpreter.allocate_tensors()
    for row, values in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(row["index"], values.astype(row["dtype"]))
    interpreter.invoke()
    outputs: list[Any] = []
    for row in interpreter.get_output_details():
        outputs.append(interpreter.get_tensor(row["index"]))
    return outputs


def run_apart(interpreter: Interpreter, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a call for each sample, put together."""
    samples: list[list[Any]] = []
    for index in range(len(inputs[0])):
        sample = [values[index : index + 1] for values in inputs]
        samples.append(run(interpreter, sample))
    return [np.concatenate(parts) for parts in zip(*samples, strict=True)]


def kernels(path: Path) -> dict[str, int]:
    """Return how many multiplications of a file are in integers, and of all."""
    resolver = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(str(path), experimental_op_resolver_type=resolver)
    interpreter.allocate_tensors()
    dtypes: dict[int, Any] = {}
    for tensor in interpreter.get_tensor_details():
        dtypes[tensor["index"]] = tensor["dtype"]
    integer = 0
    multiplications = 0
    for operator in interpreter._get_ops_details():
        if operator["op_name"] in MULTIPLYING:
            # A weight is the second input of all of them.
            multiplications += 1
            integer += dtypes[operator["inputs"][1]] == np.int8
    return {"integer": integer, "multiplications": multiplications}


if __name__ == "__main__":
    main()
