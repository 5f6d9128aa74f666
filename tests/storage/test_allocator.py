"""How large tensors are allocated, by the memory of the machine and the size of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quantizer.storage import process_memory

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""The numbers in glibc's malloc.h."""


@pytest.mark.parametrize(
    ("total", "model", "parameters"),
    [
        (64 << 30, 6 << 30, [M_MMAP_MAX, M_TRIM_THRESHOLD]),
        (16 << 30, 2 << 30, [M_MMAP_MAX, M_TRIM_THRESHOLD]),
        ((16 << 30) - 1, 2 << 30, [M_MMAP_THRESHOLD]),
        (16 << 30, (2 << 30) - 1, [M_MMAP_THRESHOLD]),
        (None, 6 << 30, [M_MMAP_THRESHOLD]),
    ],
)
def test_memory_is_kept_for_large_models_where_there_is_much(
    total: int | None, model: int, parameters: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[int] = []

    def mallopt(parameter: int, value: int) -> int:
        tuned.append(parameter)
        return 1

    def c_function(name: str) -> Callable[[int, int], int]:
        assert name == "mallopt"
        return mallopt

    monkeypatch.setattr(process_memory, "_c_function", c_function)
    monkeypatch.setattr(process_memory, "_is_tuned", False)
    monkeypatch.setattr(process_memory, "_keeps_freed_blocks", False)
    monkeypatch.setattr(process_memory, "total_bytes", lambda: total)
    process_memory.tune_for_large_tensors(model)
    # Blocks that exist cannot be allocated anew, so only the first call counts
    process_memory.tune_for_large_tensors(model)
    assert tuned == parameters
    keeps = M_MMAP_MAX in parameters
    assert process_memory.keeps_freed_blocks() == keeps
    assert (process_memory.kept_after_moves() > 0) == keeps
