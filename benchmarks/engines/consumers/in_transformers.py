"""Runs the folder `model-compressed-tensors` in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
import work_folder


def main() -> None:
    """Run and measure times."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    network = opened(work_folder.folder() / "model-compressed-tensors")
    floating = opened(work_folder.folder() / "float")
    (ids,) = [torch.from_numpy(array) for array in work_folder.inputs()]
    with torch.no_grad():
        outputs = [network(ids).logits.numpy()]
        facts: dict[str, Any] = {"version": transformers.__version__}
        facts |= work_folder.times(lambda: network(ids), lambda: floating(ids))
    work_folder.finish(outputs, facts)


def opened(folder: Path) -> Any:
    """Return the model of a folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


if __name__ == "__main__":
    main()
