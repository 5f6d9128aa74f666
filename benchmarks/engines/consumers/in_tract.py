"""Runs `model.onnx` in tract."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import tract
import work_folder


def main() -> None:
    """Run and measure times."""
    network = opened(work_folder.folder() / "model.onnx")
    values = work_folder.inputs()
    outputs = [value.to_numpy() for value in network.run(values)]
    facts: dict[str, Any] = {"version": version("tract")}
    floating = opened(work_folder.folder() / "float.onnx")
    facts |= work_folder.times(lambda: network.run(values), lambda: floating.run(values))
    work_folder.finish(outputs, facts)


def opened(path: Path) -> Any:
    """Return a network that is ready to run on inputs of these shapes."""
    model = tract.onnx().load(str(path))
    for index, array in enumerate(work_folder.inputs()):
        shape = ",".join(str(size) for size in array.shape)
        kind = {"float32": "f32", "int64": "i64"}[array.dtype.name]
        model.set_input_fact(index, f"{shape},{kind}")
    return model.into_model().into_runnable()


if __name__ == "__main__":
    main()
