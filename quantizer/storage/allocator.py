"""Make the C library return freed memory to the system. Only glibc needs and supports this."""

import ctypes
from typing import Any

from quantizer.storage import process_memory

TRIM_AFTER_GROWTH = 128 << 20
"""By how many bytes the process has to grow until `trim_heap` is worth its time after a batch
or a step.
"""
_M_MMAP_THRESHOLD = -3
"""The number of this parameter of `mallopt` in malloc.h."""
_MAPPED_BLOCK_BYTES = 1 << 20
_least_resident = process_memory.resident_bytes() or 0
_is_mapping_large_blocks = False


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


def map_large_blocks() -> None:
    """Make glibc allocate each block above a megabyte in a memory map of its own, which is
    returned to the system when the block is freed.

    By default, glibc raises this limit up to 32 MB when it frees larger blocks. It takes
    smaller blocks from its heap, and small blocks behind them keep the heap from shrinking.
    """
    global _is_mapping_large_blocks
    tune = _c_function("mallopt")
    if tune is not None and not _is_mapping_large_blocks:
        tune(_M_MMAP_THRESHOLD, _MAPPED_BLOCK_BYTES)
        _is_mapping_large_blocks = True


def _c_function(name: str) -> Any:
    """Return a function of the C library, or None if it has none of this name."""
    try:
        library = ctypes.CDLL(None)
    except (TypeError, OSError):
        # Windows cannot open the process itself as a library
        return None
    return getattr(library, name, None)
