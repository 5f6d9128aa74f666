"""Ask the C library to return freed memory to the system."""

import ctypes
from typing import Any

from quantizer.storage import process_memory

GROWTH = 128 << 20
"""Bytes that are worth the time to return them after a batch, or a step."""
_MMAP_THRESHOLD = -3  # the number of this parameter in malloc.h
_least_resident = process_memory.resident() or 0
_is_mapping_large_blocks = False


def give_back(beyond: int = 0) -> None:
    """Call glibc's `malloc_trim`, if the C library has it.

    Large tensors come and go among small ones that stay. The heap then keeps freed memory
    resident, up to the size of the network.

    Args:
        beyond: do nothing until the process has grown by so many bytes since the last call.
            Returned memory has to be mapped again, which costs a tenth of a pass if it is done
            after each batch.
    """
    global _least_resident
    resident = process_memory.resident() or 0
    _least_resident = min(resident, _least_resident)
    if beyond and resident - _least_resident < beyond:
        return
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(0)
        _least_resident = process_memory.resident() or 0


def map_large_blocks() -> None:
    """Make glibc map each block above a megabyte on its own, so that freeing returns it.

    By default it takes blocks of up to 32 MB from its heap once it has freed one of that size.
    Small blocks that lie behind them keep the heap from shrinking.
    """
    global _is_mapping_large_blocks
    tune = _c_function("mallopt")
    if tune is not None and not _is_mapping_large_blocks:
        tune(_MMAP_THRESHOLD, 1 << 20)
        _is_mapping_large_blocks = True


def _c_function(name: str) -> Any:
    """Return a function of the C library, or None if it has none of this name."""
    try:
        library = ctypes.CDLL(None)
    except (TypeError, OSError):
        # Windows has no library of the process.
        return None
    return getattr(library, name, None)
