"""Make glibc return freed memory to the system. With other C libraries, all this does nothing.

glibc allocates small blocks in a heap, which shrinks only from its end. Large blocks have
memory maps of their own, which the system gets back when a block is freed.
"""

import ctypes
from typing import Any

from quantizer.storage import process_memory

TRIM_AFTER_GROWTH = 128 << 20
"""The bytes by which the process has to grow until `trim_heap` is worth its time after a batch
or a step.
"""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
"""The numbers of these parameters of `mallopt` in malloc.h."""
_MAPPED_BLOCK_BYTES = 1 << 20
"""The size from which a block has a memory map of its own."""
_KEPT_AT_THE_END = 64 << 20
"""The bytes of free memory at the end of the heap that are not returned to the system."""
_KEPT_AFTER_MOVES = 300 << 20
"""The growth in bytes from which `trim_heap` is called after tensors were moved to a file."""
# Blocks stay in the heap if the machine has so much memory and the model is so large. Free
# blocks between used ones then take half a gigabyte with matrices of 50 MB, and two with GPTQ
_MUCH_MEMORY = 16 << 30
_LARGE_MODEL = 2 << 30
_least_resident = process_memory.resident_bytes() or 0
_is_tuned = False
_keeps_freed_blocks = False


def trim_heap(beyond: int = 0) -> None:
    """Return free memory inside the heap to the system, by glibc's `malloc_trim`.

    Large tensors are freed while small ones between them stay. glibc then keeps the freed
    memory resident, up to the size of the network. But memory that was returned has to be
    mapped again when it is needed: trimming after each batch costs a tenth of a pass.

    Args:
        beyond: the bytes by which the resident memory has to have grown from its least value
            since the last call that trimmed. Otherwise nothing is done. 0 trims always.
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
    """Decide how glibc allocates the memory of large tensors. Only the first call counts.

    If the model is large and there is much memory, all blocks are in the heap, where the next
    tensor uses them again. The system would clear new memory page by page, which takes a third
    of the time of round-to-nearest. The control group of this process counts, too.

    Otherwise, each block above a megabyte has a memory map of its own. By default, glibc raises
    this limit up to 32 MB when it frees larger blocks. Blocks below the limit are in the heap,
    and a small block after them keeps the heap from shrinking.

    Args:
        model_bytes: the size of all tensors of the model.
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
    """Return the bytes `beyond` for `trim_heap` after tensors were moved to a file."""
    if _keeps_freed_blocks:
        return _KEPT_AFTER_MOVES
    return 0


def keeps_freed_blocks() -> bool:
    """Return whether freed blocks stay resident until `trim_heap`, because
    `tune_for_large_tensors` chose the heap.
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
