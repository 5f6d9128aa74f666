"""Runs `model.pt2` in torch as it is, without a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # torch registers the operators of the file here
import work_folder
from torch.utils import _pytree as pytree


def main() -> None:
    """Run and measure times."""
    torch.set_num_threads(1)
    network, args, kwargs = opened(work_folder.folder() / "model.pt2")
    floating, _, _ = opened(work_folder.folder() / "float.pt2")
    with torch.no_grad():
        outputs = [leaf.numpy() for leaf in pytree.tree_leaves(network(*args, **kwargs))]
        facts: dict[str, Any] = {"version": torch.__version__.partition("+")[0]}
        facts |= work_folder.times(
            lambda: network(*args, **kwargs), lambda: floating(*args, **kwargs)
        )
    work_folder.finish(outputs, facts)


def opened(path: Path) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the network of a program, and its arguments by position and by name."""
    program = torch.export.load(path)
    values = [torch.from_numpy(array) for array in work_folder.inputs()]
    assert program.example_inputs is not None
    args, kwargs = program.example_inputs
    named = dict(zip(kwargs, values[len(args) :], strict=True))
    return program.module(), values[: len(args)], named


if __name__ == "__main__":
    main()
