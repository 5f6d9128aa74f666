"""Runs `model.pt2` in torch after its compiler, Inductor, has made integer kernels of it."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config
import work_folder
from in_torch import opened
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

MULTIPLYING = (
    "convolution",
    "conv1d",
    "conv2d",
    "conv_transpose1d",
    "conv_transpose2d",
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "lstm",
    "scaled_dot_product_attention",
)
INTEGER = ("qconv_weight_prepack_matcher_count", "qlinear_weight_prepack_matcher_count")


def main() -> None:
    """Compile both networks, run, and measure times."""
    torch.set_num_threads(1)
    settings = {"freezing": True, "force_disable_caches": True, "compile_threads": 1}
    program, args, kwargs = opened(work_folder.folder() / "model.pt2")
    float_program, _, _ = opened(work_folder.folder() / "float.pt2")
    network: Any = torch.compile(program)
    floating: Any = torch.compile(float_program)
    with torch.no_grad(), torch._inductor.config.patch(settings):
        outputs = [leaf.numpy() for leaf in pytree.tree_leaves(network(*args, **kwargs))]
        facts: dict[str, Any] = {"version": torch.__version__.partition("+")[0]}
        facts |= kernels(program)
        facts |= work_folder.times(
            lambda: network(*args, **kwargs), lambda: floating(*args, **kwargs)
        )
    work_folder.finish(outputs, facts)


def kernels(program: Any) -> dict[str, int]:
    """Return how many multiplications of a compiled program are in integers, and of all."""
    multiplications = 0
    for node in program.graph.nodes:
        name = getattr(node.target, "__name__", "").partition(".")[0]
        if name in MULTIPLYING:
            multiplications += 1
    integer = sum(counters["inductor"][name] for name in INTEGER)
    return {"integer": integer, "multiplications": multiplications}


if __name__ == "__main__":
    main()
