"""Make the C library return freed memory to the system. Only glibc needs and supports this."""

import ctypes
from typing import Any

from quantizer.storage import process_memory

TRIM_AFTER_GROWTH = 128 << 20
"""By how many bytes the process has to grow until `trim_heap` is worth its time after a batch
or a step.
"""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
"""The numbers of these parameters of `mallopt` in malloc.h."""
_MAPPED_BLOCK_BYTES = 1 << 20
_KEPT_AT_THE_END = 64 << 20
"""Bytes of free memory at the end of the heap that are not returned to the system."""
_KEPT_AFTER_MOVES = 300 << 20
_MUCH_MEMORY = 16 << 30
_LARGE_MODEL = 2 << 30
"""Holes in the heap take half a gigabyte with matrices of 50 MB, and two with GPTQ."""
_least_resident = process_memory.resident_bytes() or 0
_is_tuned = False
_keeps_freed_blocks = False


def trim_heap(beyond: int = 0) -> None:
    """Call glibc's `malloc_trim`, if the C library has it.

    Large tensors are freed while small ones between them stay. glibc then keeps the freed
    memory resident, up to the size of the network.

    Args:
        beyond: do nothing unless the resident memory is larger by so many bytes than its least
            value since the last call that trimmed. Memory that was returned has to be mapped
            again when it is needed: trimming after each batch costs a tenth of a pass.
    """
    global _least_resident
    resident = process_memory.resident_bytes() or 0
    _least_resident = min(resident, _least_resident)
    if beyond and resident - _least_resident < beyond:
        return
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(0)
        _least_resident = process_memory.resident_bytes() or 0


def tune_for_large_tensors(model_bytes: int) -> None:
    """Decide once how glibc allocates the memory of large tensors.

    For a large model, if the machine and the control group of this process have much memory,
    all blocks are in the heap, where the next tensor uses them again. The system clears new
    memory page by page, which takes a third of the time of round-to-nearest.

    Otherwise, each block above a megabyte is in a memory map of its own, which is
    returned to the system when the block is freed. By default, glibc raises this limit up to
    32 MB when it frees larger blocks. It takes smaller blocks from its heap, and small blocks
    behind them keep the heap from shrinking.

    Args:
        model_bytes: of all tensors of the model.
    """
    global _is_tuned, _keeps_freed_blocks
    tune = _c_function("mallopt")
    if tune is None or _is_tuned:
        return
    total = process_memory.total_bytes() or 0
    if total >= _MUCH_MEMORY and model_bytes >= _LARGE_MODEL:
        tune(_M_MMAP_MAX, 0)
        tune(_M_TRIM_THRESHOLD, _KEPT_AT_THE_END)
        _keeps_freed_blocks = True
    else:
        tune(_M_MMAP_THRESHOLD, _MAPPED_BLOCK_BYTES)
    _is_tuned = True


def kept_after_moves() -> int:
    """Return by how many bytes the process may grow until memory of values that are now in a
    file is returned to the system.
    """
    if _keeps_freed_blocks:
        return _KEPT_AFTER_MOVES
    return 0


def keeps_freed_blocks() -> bool:
    """Return whether `tune_for_large_tensors` chose the heap, so that freed blocks stay
    resident until `trim_heap`.
    """
    return _keeps_freed_blocks


def _c_function(name: str) -> Any:
    """Return a function of the C library, or None if it has none of this name."""
    try:
        library = ctypes.CDLL(None)
    except (TypeError, OSError):
        # Windows cannot open the process itself as a library
        return None
    return getattr(library, name, None)
