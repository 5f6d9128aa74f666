"""Tensors that nothing can be computed with, in data, files, weights and models: a sentence
names what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document
from torch import Tensor, nn

from quantizer import Config, ModelQuantizer, calibrate
from quantizer.errors import DataError, ModelError
from quantizer.sources.data import load_batches


def traced() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(4, 3)


VALUES = torch.arange(12.0).reshape(4, 3)
KINDS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (VALUES.to_sparse, "is sparse"),
    "rows": (VALUES.to_sparse_csr, "is sparse"),
    "quantized": (
        lambda: torch.quantize_per_tensor(VALUES, 0.1, 0, torch.quint8),
        "is quantized",
    ),
    "nested": (lambda: torch.nested.nested_tensor([VALUES, VALUES[:2]]), "is nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([VALUES, VALUES[:2]], layout=torch.jagged),
        "is nested",
    ),
    "meta": (lambda: VALUES.to("meta"), "has no values"),
    "traced": (traced, "is a FakeTensor"),
    "float8": (lambda: VALUES.to(torch.float8_e4m3fn), "has the dtype float8_e4m3fn"),
}
STATIC = Config.from_dict(
    {"global_quant_config": {"weight": {"dtype": "int8"}, "input_tensors": {"dtype": "int8"}}}
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_batches(name: str, tmp_path: Path) -> None:
    make, why = KINDS[name]
    sources: dict[str, Any] = {
        "batch 0 of data cannot be computed with: args": [make()],
        "batch 0 of data cannot be computed with: kwargs": [{"input": make()}],
        "batch 0 of data cannot be computed with: target": [(VALUES, make())],
    }
    if name not in ("traced", "jagged"):
        torch.save(make(), tmp_path / "x.pt")
        sources["x.pt cannot be computed with: x"] = str(tmp_path / "x.pt")
    for place, source in sources.items():
        with pytest.raises(DataError, match=why) as refused:
            list(load_batches(source, label="data"))
        assert place in refused.value.message
    with pytest.raises(DataError, match=why):
        ModelQuantizer(STATIC).quantize_model(nn.Linear(3, 2), [make()])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_buffers_of_models(name: str) -> None:
    make, why = KINDS[name]
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_buffer("mask", make())
    with pytest.raises(ModelError, match=f"mask {why}"):
        calibrate(model, document(), [VALUES])
    with pytest.raises(ModelError, match=f"mask {why}"):
        ModelQuantizer(STATIC).quantize_model(model, [VALUES])


@pytest.mark.parametrize(
    "shape", ["(True, 12)", "(12, True)", "(1, 2**70)", f"({1 << 70}, 0)", "('4', 3)"]
)
def test_sizes_in_headers_of_numpy_that_are_none(shape: str, tmp_path: Path) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".encode()
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(48)
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(DataError, match="its NumPy header is damaged"):
        list(load_batches(str(tmp_path / "x.npy")))
