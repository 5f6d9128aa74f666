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
    network = opened(work_folder.folder() / "model.pt2")
    floating = opened(work_folder.folder() / "float.pt2")
    values = [torch.from_numpy(array) for array in work_folder.inputs()]
    with torch.no_grad():
        outputs = [leaf.numpy() for leaf in pytree.tree_leaves(network(*values))]
        facts: dict[str, Any] = {"version": torch.__version__.partition("+")[0]}
        facts |= work_folder.times(lambda: network(*values), lambda: floating(*values))
    work_folder.finish(outputs, facts)


def opened(path: Path) -> Any:
    """Return the network of a program."""
    return torch.export.load(path).module()


if __name__ == "__main__":
    main()
