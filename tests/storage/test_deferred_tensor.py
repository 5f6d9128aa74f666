"""Deferred tensors: computed with like any other, read when that happens, and out of memory in
between.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from quantizer.errors import DataError
from quantizer.storage import process_memory
from quantizer.storage.deferred_tensor import DeferredTensor, deferred_like, keep_loaded, loaded
from quantizer.storage.files import write_tensors
from quantizer.storage.process_memory import trim_heap
from quantizer.storage.safetensors_file import DTYPES_BY_NAME, deferred_file


class Counted:
    """Gives 0, 1, 2, … in the shape [2, 3], and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> torch.Tensor:
        self.count += 1
        return torch.arange(6.0).view(2, 3)


@pytest.fixture
def load() -> Counted:
    return Counted()


def deferred(load: Counted) -> DeferredTensor:
    return DeferredTensor((2, 3), torch.float32, load)


def test_facts_read_nothing(load: Counted) -> None:
    x = deferred(load)
    assert (x.shape, x.dtype, x.dim(), len(x), x.numel(), x.nbytes) == (
        (2, 3),
        torch.float32,
        2,
        2,
        6,
        24,
    )
    assert x.device.type == "cpu"
    assert isinstance(x.detach(), DeferredTensor)
    assert isinstance(nn.Parameter(x, requires_grad=False), nn.Parameter)
    assert "DeferredTensor" in repr(x)
    assert load.count == 0


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_its_shape_on_the_meta_device_reads_nothing(device: object, load: Counted) -> None:
    x = deferred(load)
    assert isinstance(device, (str, torch.device))
    shape = x.to(device)
    assert (shape.is_meta, shape.shape, shape.dtype) == (True, (2, 3), torch.float32)
    assert load.count == 0
    assert x.to("meta", torch.float64).dtype == torch.float64


def test_a_held_one_is_read_once_whatever_is_made_of_it(load: Counted) -> None:
    x = deferred(load)
    with keep_loaded([x, torch.ones(1)]):
        assert load.count == 0
        with keep_loaded([x.detach()]):
            assert (x + 1).sum() == 21
        assert (x.detach() + 1).sum() == 21
        assert load.count == 1
    assert (x + 1).sum() == 21
    assert load.count == 2


def test_functions_take_it_for_its_values(load: Counted) -> None:
    x, values = deferred(load), torch.arange(6.0).view(2, 3)
    for function in (
        torch.sum,
        torch.Tensor.abs,
        torch.t,
        lambda y: y[1:],
        lambda y: y @ torch.ones(3),
        torch.isfinite,
    ):
        found = function(x)
        assert torch.equal(found, function(values))
        assert type(found) is torch.Tensor
    assert torch.equal(torch.cat([x, x]), torch.cat([values, values]))
    assert type(loaded({"a": [x]})["a"][0]) is torch.Tensor


def test_a_layer_computes_with_it(load: Counted) -> None:
    layer, x = nn.Linear(3, 2, bias=False), torch.randn(4, 3)
    layer.weight = nn.Parameter(deferred(load), requires_grad=False)
    assert torch.equal(layer(x), nn.functional.linear(x, load()))
    assert load.count == 2


@pytest.mark.parametrize(
    "change", [lambda x: x.add_(1), lambda x: x.zero_(), lambda x: x.__setitem__(0, 1.0)]
)
def test_it_is_not_changed_in_place(change: object, load: Counted) -> None:
    assert callable(change)
    with pytest.raises(RuntimeError, match="cannot be changed"):
        change(deferred(load))


def test_what_is_made_of_it_is_out_of_memory(load: Counted) -> None:
    made = torch.randn(5, 7).to(torch.bfloat16)
    kept = deferred_like(deferred(load), made)
    assert isinstance(kept, DeferredTensor)
    assert torch.equal(loaded(kept), made)
    assert deferred_like(torch.ones(1), made) is made
    assert deferred_like(deferred(load), kept) is kept


def test_a_full_disk_is_one_sentence(load: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        DataError, match=r"cannot write values of .*: No space left on device"
    ) as refused:
        deferred_like(deferred(load), torch.ones(3))
    assert "TMPDIR" in str(refused.value.help)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5).filter(
            lambda s: s != "__metadata__"
        ),
        st.tuples(
            st.sampled_from(list(DTYPES_BY_NAME.values())),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=4,
    )
)
def test_files_are_those_of_safetensors(
    tensors: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    """Of every dtype and shape, with any names: written part by part, read by the package and
    tensor by tensor.
    """
    from tempfile import TemporaryDirectory

    written = {
        name: torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
        .view(dtype)
        .view(shape)
        for name, (dtype, shape) in tensors.items()
    }
    with TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        write_tensors(path, written, {"of": "a test"})
        read, mapped = load_file(path), deferred_file(path)
        assert read.keys() == mapped.keys() == written.keys()
        for name, tensor in written.items():
            for found in (read[name], loaded(mapped[name])):
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(
                    found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
                )


ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "no object": [],
    "no shape": {"x": {"dtype": "F32", "data_offsets": [0, 8]}},
    "a shape of words": {"x": ROW | {"shape": ["2"]}},
    "a negative shape": {"x": ROW | {"shape": [-1, -2]}},
    "three offsets": {"x": ROW | {"data_offsets": [0, 4, 8]}},
    "beyond the end": {"x": ROW | {"shape": [4], "data_offsets": [0, 16]}},
    "another size": {"x": ROW | {"shape": [1]}},
    "a gap": {"x": ROW | {"data_offsets": [4, 12]}},
    "an overlap": {"x": ROW, "y": ROW},
}


@pytest.mark.parametrize("header", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_header_is_said_to_be_one(header: object, tmp_path: Path) -> None:
    content, path = json.dumps(header).encode(), tmp_path / "x.safetensors"
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))
    with pytest.raises(SafetensorError):
        deferred_file(path)


def test_what_is_fetched_ahead_is_read_once_in_another_thread() -> None:
    threads, values = list[int](), torch.arange(3.0)

    def read() -> Tensor:
        threads.append(threading.get_ident())
        return values

    tensor = DeferredTensor((3,), torch.float32, read)
    tensor.prefetch()
    tensor.prefetch()
    assert torch.equal(tensor + 1, values + 1)
    assert len(threads) == 1 and threads[0] != threading.get_ident()
    assert torch.equal(tensor + 1, values + 1)
    assert threads[1:] == [threading.get_ident()]


def test_what_cannot_be_fetched_ahead_is_told_where_it_is_needed(tmp_path: Path) -> None:
    tensor = DeferredTensor((3,), torch.float32, lambda: torch.load(tmp_path / "nothing.pt"))
    tensor.prefetch()
    with pytest.raises(FileNotFoundError):
        tensor.sum()


@pytest.mark.skipif(
    process_memory.resident_bytes() is None, reason="the system does not say what is resident"
)
def test_freed_memory_is_given_back_once_the_process_has_grown_by_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resident, trims, found = 1000, list[int](), list[int]()

    class Library:
        @staticmethod
        def malloc_trim(_: int) -> None:
            trims.append(resident)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library)
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: resident)
    trim_heap()
    for resident in (1050, 1100, 1150, 900, 950, 1000):  # noqa: B007 - what is resident from now on
        trim_heap(100)
        found.append(len(trims))
    assert found == [1, 2, 2, 2, 2, 3]


def test_the_peak_is_in_bytes_where_the_system_has_no_files_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """getrusage counts kilobytes, but bytes on macOS."""
    monkeypatch.setattr(process_memory, "_numbers", lambda path: {})
    kilobytes = pytest.importorskip("resource").getrusage(0).ru_maxrss
    monkeypatch.setattr(sys, "platform", "linux")
    assert process_memory.peak_bytes() == pytest.approx(kilobytes * 1024, rel=0.1)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert process_memory.peak_bytes() == pytest.approx(kilobytes, rel=0.1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_after_a_fork_do_not_write_over_tensors_of_each_other() -> None:
    source = DeferredTensor((1,), torch.float32, lambda: torch.ones(1))
    deferred_like(source, torch.zeros(8))
    received, sent = os.pipe()
    child = os.fork()
    if child == 0:
        stored = deferred_like(source, torch.full((8,), 2.0))
        # Wait until the parent has written its tensor
        os.read(received, 1)
        is_whole = loaded(stored).tolist() == [2.0] * 8
        os._exit(0 if is_whole else 1)
    deferred_like(source, torch.full((8,), 3.0))
    os.write(sent, b"!")
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
