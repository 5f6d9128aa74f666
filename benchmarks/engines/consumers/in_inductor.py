"""Runs `model.pt2` in torch after its compiler, Inductor, has made integer kernels of it."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config
import work_folder
from in_torch import opened
from torch._inductor.utils import fresh_inductor_cache
from torch.utils import _pytree as pytree

INTEGER = ("qconv", "qlinear", "int8", "_weight_int8")
MULTIPLYING = ("convolution", "mkldnn_rnn", "addmm", "mm", "bmm", "linear")


def main() -> None:
    """Compile both networks, run, and measure times."""
    torch._inductor.config.freezing = True
    torch._inductor.config.compile_threads = 1
    network = torch.compile(opened(work_folder.folder() / "model.pt2"))
    floating = torch.compile(opened(work_folder.folder() / "float.pt2"))
    values = [torch.from_numpy(array) for array in work_folder.inputs()]
    with torch.no_grad(), fresh_inductor_cache():
        outputs = [leaf.numpy() for leaf in pytree.tree_leaves(network(*values))]
        facts: dict[str, Any] = {"version": torch.__version__.partition("+")[0]}
        facts |= work_folder.times(lambda: network(*values), lambda: floating(*values))
    work_folder.finish(outputs, facts)


if __name__ == "__main__":
    main()
