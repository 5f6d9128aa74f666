"""Keep the default device that the user's code sets for torch to that code: tensors of this
package are made on the CPU unless a device is given. Seed the global random generators. This
file is imported without torch.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_OF_USER: ContextVar[Any] = ContextVar("_OF_USER", default=None)
"""The default device of the user's code; None for torch's own."""


@contextmanager
def default_device_kept() -> Iterator[None]:
    """Use torch's own default device inside the `with` block; the user's code there has the one
    of before.
    """
    before = _current()
    token = _OF_USER.set(before)
    _change(before, None)
    try:
        yield
    finally:
        _change(_current(), before)
        _OF_USER.reset(token)


@contextmanager
def default_device_of_user() -> Iterator[None]:
    """Use the default device of the user's code inside the `with` block, which may change
    it.
    """
    before = _current()
    _change(before, before or _OF_USER.get())
    try:
        yield
    finally:
        device = _current()
        _OF_USER.set(device)
        _change(device, before)


def _current() -> Any:
    """Return the default device, None for torch's own and if torch is not imported."""
    devices = sys.modules.get("torch.utils._device")
    # torch.get_default_device makes a tensor on the device, which may not exist
    return getattr(devices, "CURRENT_DEVICE", None)


def _change(before: Any, after: Any) -> None:
    if before != after:
        sys.modules["torch"].set_default_device(after)


def seed_everything(seed: int) -> None:
    """Seed Python's, torch's and, if it is loaded, numpy's global generator."""
    import torch

    random.seed(seed)
    # It asks only what torch was built for: looking for devices would break forks
    if torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(seed)
    else:
        # torch.manual_seed would store a traceback for devices that may come later
        torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)
