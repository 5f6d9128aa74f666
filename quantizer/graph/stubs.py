"""QuantStub and DeQuantStub: modules that compute nothing, so torch.export forgets them unless they leave a mark."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# The operator of a stub, by the name of its class: torch.ao.quantization's own and those of other tools alike.
STUBS = {"QuantStub": "quant_stub", "DeQuantStub": "dequant_stub"}
MARK = "aten.alias.default"  # gives its input; the module that it runs in says which stub it stands for


@contextlib.contextmanager
def marked(module: nn.Module) -> Iterator[None]:
    """While this lasts, each stub inside `module` leaves an operator in a trace."""
    handles = [child.register_forward_hook(_leave_mark) for child in module.modules() if type(child).__name__ in STUBS]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leave_mark(_module: nn.Module, _args: Any, output: Any) -> Any:
    return torch.ops.aten.alias.default(output) if isinstance(output, Tensor) else output
