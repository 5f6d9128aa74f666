"""Runs `model.pte` in ExecuTorch, where XNNPACK computes it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
import work_folder
from executorch.extension.pybindings import portable_lib
from executorch.runtime import Runtime


def main() -> None:
    """Run and measure times."""
    folder = work_folder.folder()
    # Its other threads wait for work in a loop, which takes time of processors
    portable_lib._unsafe_reset_threadpool(1)
    inputs = [torch.from_numpy(array) for array in work_folder.inputs()]
    # A method reads its program for as long as it lives.
    program = Runtime.get().load_program(folder / "model.pte")
    method = program.load_method("forward")
    float_program = Runtime.get().load_program(folder / "float.pte")
    floating = float_program.load_method("forward")
    assert method is not None and floating is not None
    results = method.execute(inputs)
    outputs = [output.numpy().copy() for output in results]
    facts: dict[str, Any] = {"version": version("executorch")}
    facts |= work_folder.times(lambda: method.execute(inputs), lambda: floating.execute(inputs))
    work_folder.finish(outputs, facts)


if __name__ == "__main__":
    main()
