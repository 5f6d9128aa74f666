"""A second device for machines without one, `torch.device("strict")`: it computes on the CPU
and mixes with nothing.

An operator that is given tensors of both devices raises, as with CUDA. What goes from one to
the other is recorded, and what else the CPU would wait for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

import quantizer

aten = torch.ops.aten
STRICT = torch.device("privateuseone:0")
PACKAGE = Path(quantizer.__file__).parent
SCALARS_OF_THE_CPU = (
    aten.where.self,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Tensor,
    aten.index_put_.default,
)
"""Operators that are not elementwise and take a number as a tensor of the CPU, on CUDA too."""
INDEXED = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
)
"""Operators that wait only for the size of what a mask selects."""
COPY, WAIT, UPLOAD = "copy", "wait", "upload"
"""What the CPU waits for: values that go to it, a size or an answer that it asks for, and
values of memory that is not pinned that go to the device.
"""


class Transfer(NamedTuple):
    """What the CPU waited for: in which function of the package, and for how many values."""

    place: str
    values: int
    kind: str = COPY


_recorded: list[Transfer] | None = None


class StrictTensor(Tensor):
    """A tensor of the strict device around one of the CPU that holds its values."""

    values: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor) -> StrictTensor:
        with torch.inference_mode(False):  # which knows no views of wrapped tensors
            made = Tensor._make_wrapper_subclass(
                cls,
                values.shape,
                strides=values.stride(),
                storage_offset=values.storage_offset(),
                dtype=values.dtype,
                device=torch.device("strict:0"),
            )
        made.values = values
        return made

    def __init__(self, values: Tensor) -> None: ...

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StrictTensor({self.values})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: StrictTensor) -> None:
        assert (
            isinstance(value, StrictTensor)
            and value.shape == self.shape
            and value.dtype == self.dtype
        )
        self.values = value.values

    def __getitem__(self, key: Any) -> Tensor:
        return super().__getitem__(_without_lists(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_without_lists(key), value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = self.detach().clone().requires_grad_(self.requires_grad)
        return (
            torch.nn.Parameter(made, self.requires_grad)
            if isinstance(self, torch.nn.Parameter)
            else made
        )


def _without_lists(key: Any) -> Any:
    """An index with tensors for lists, of which torch makes tensors of a Python device in a way
    that fails.
    """
    if isinstance(key, list):
        return torch.tensor(key).to(STRICT)
    return tuple(map(_without_lists, key)) if isinstance(key, tuple) else key


_made_of_data = torch.tensor


def tensor(data: Any, *, device: Any = None, **more: Any) -> Tensor:
    """`torch.tensor`, for which the same holds; tests put it in its place."""
    made = _made_of_data(data, **more)
    return made if device is None else made.to(device)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in given if isinstance(tensor, StrictTensor)]
    _check(func, ours, [tensor for tensor in given if not isinstance(tensor, StrictTensor)])
    device = torch.device(STRICT if kwargs.get("device") is None else kwargs["device"])
    made_here = device.type == "strict"
    if made_here and "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if ours and (
        device.type == "cpu"
        or func is aten._local_scalar_dense.default
        or _is_to_cpu(func, args)
    ):
        _record(max(tensor.numel() for tensor in ours), COPY)
    elif ours and _waits(func, args):
        _record(0, WAIT)
    elif made_here and _is_upload(func, args):
        source = args[1] if func is aten.copy_.default else args[0]
        _record(source.numel(), UPLOAD)
    inside = pytree.tree_map_only(StrictTensor, lambda tensor: tensor.values, (args, kwargs))
    out = func(*inside[0], **inside[1])
    if _is_to_cpu(func, args):
        return args[0]
    known = {id(tensor.values): tensor for tensor in ours}

    def wrapped(tensor: Tensor) -> Tensor:
        """What was changed in place is the same tensor afterwards."""
        return known[id(tensor)] if id(tensor) in known else StrictTensor(tensor)

    return pytree.tree_map_only(Tensor, wrapped, out) if made_here else out


def _is_to_cpu(func: Any, args: Any) -> bool:
    return func is aten.copy_.default and not isinstance(args[0], StrictTensor)


def _waits(func: Any, args: Any) -> bool:
    """Return whether a GPU would have to be done before the operator returns: what comes out,
    or its size, depends on values.
    """
    if func in INDEXED:
        masks = (torch.bool, torch.uint8)
        is_masked = any(index is not None and index.dtype in masks for index in args[1])
        # One value for all that a mask selects is filled in without a count
        return is_masked and not (len(args) > 2 and args[2].numel() == 1)
    return bool(
        {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}
    )


def _is_upload(func: Any, args: Any) -> bool:
    """Return whether an operator copies from the CPU to the device."""
    if func is aten.copy_.default:
        return isinstance(args[0], StrictTensor) and not isinstance(args[1], StrictTensor)
    return func is aten._to_copy.default and not isinstance(args[0], StrictTensor)


def _check(func: Any, ours: list[StrictTensor], others: list[Tensor]) -> None:
    """Refuse to mix devices, but for numbers."""
    if not ours or not others or func is aten.copy_.default:
        return
    takes_numbers = torch.Tag.pointwise in func.tags or func in SCALARS_OF_THE_CPU
    if not takes_numbers or any(tensor.dim() for tensor in others):
        raise RuntimeError(
            f"{func} was given tensors of the strict device and of the CPU, at {_place()}"
        )


def _place() -> str:
    """The innermost function of the package that is running."""
    frame: Any = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _record(values: int, kind: str) -> None:
    if _recorded is not None:
        _recorded.append(Transfer(_place(), values, kind))


@contextmanager
def recorded() -> Iterator[list[Transfer]]:
    """What the CPU waits for while this lasts."""
    global _recorded
    _recorded, before = [], _recorded
    try:
        yield _recorded
    finally:
        _recorded = before


class _Hook(backend_registration._DummyPrivateUse1Hook):
    """Keeps torch itself from choosing the device."""

    def is_available(self) -> bool:
        return False


def _registered() -> torch.library.Library:
    """The device, for this process."""
    backend_registration._setup_privateuseone_for_python_backend("strict", hook=_Hook())  # type: ignore[no-untyped-call]
    backend: Any = torch.strict  # type: ignore[attr-defined]
    # For `torch.random.fork_rng`, which saves the state of every device that there is.
    backend.get_rng_state, backend.set_rng_state = (
        lambda *_: torch.get_rng_state(),
        lambda *_: None,
    )
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")  # type: ignore[no-untyped-call]
    return library


_library = _registered()
