"""Name the weights that algorithms leave to the search of their format."""

from collections.abc import Iterator

from quantizer.layerwise.adjustment import Remark, Task


def super_block_remarks(task: Task) -> Iterator[Remark]:
    """Yield a sentence for each layer whose scales share a factor in super-blocks."""
    for group in task.structure.groups:
        for name in group.layers:
            spec = task.specs.get((name, "weights"))
            if spec is not None and spec.scale_type == "superblock":
                text = (
                    f"groups of {spec.dtype} share the factor of their scales, so it keeps the "
                    "scales of the weights alone; the algorithm imatrix searches them by the "
                    "data"
                )
                yield Remark(name, text)
