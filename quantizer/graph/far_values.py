"""Numbers that stand for "none": a model adds or inserts them to decide the result of a
softmax, a sigmoid or a maximum.
"""

from torch import Tensor

FAR_VALUE = 100.0
"""The smallest magnitude of such numbers: 100, 1e4, the largest of a dtype, infinity."""


def far_value(values: Tensor) -> float | None:
    """Return the least of `values` if that is -100 or below, else the greatest if that is 100
    or above, else None.

    >>> import torch
    >>> (
    ...     far_value(torch.tensor([-1e4, 300.0])),
    ...     far_value(torch.tensor([1.0, 100.0])),
    ...     far_value(torch.ones(2)),
    ... )
    (-10000.0, 100.0, None)
    """
    if values.numel() == 0:
        return None
    # torch does not compare floats of 8 bits
    if values.dtype.itemsize == 1:
        values = values.float()
    least, greatest = (float(end) for end in values.aminmax())
    if least <= -FAR_VALUE:
        return least
    return greatest if greatest >= FAR_VALUE else None
