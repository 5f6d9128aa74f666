"""Every round method is what is computed with, for every tensor of a layer and however finely
its scales are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from api.specs import quantized
from torch import Tensor, nn

from quantizer import Dtype, QSchemeType, QuantizationSpec, RoundType

BY_DEFINITION: Mapping[RoundType, Callable[[Tensor], Tensor]] = {
    RoundType.half_even: lambda x: x.apply_(round),
    RoundType.half_up: lambda x: x.apply_(lambda v: math.floor(v + 0.5)),
    RoundType.half_down: lambda x: x.apply_(
        lambda v: math.copysign(math.ceil(abs(v) - 0.5), v)
    ),
    RoundType.round: lambda x: x.apply_(lambda v: math.copysign(math.floor(abs(v) + 0.5), v)),
    RoundType.floor: lambda x: x.apply_(math.floor),
}
TIES = torch.tensor(
    [[127.0, 2.5, -2.5, -3.5], [-127.0, 0.5, -0.5, 1.4], [127.0, 3.5, -1.5, 2.6], [127.0] * 4]
)
"""The scale of the whole and of each row is 1."""
CUTS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "channel": {"qscheme": QSchemeType.per_channel, "ch_axis": 0},
    "group": {"qscheme": QSchemeType.per_group, "ch_axis": 1, "group_size": 4},
    "token": {"qscheme": QSchemeType.per_token},
}
PLACES = {
    ("weight", False): ("tensor", "channel", "group"),
    ("bias", False): ("tensor",),
    ("input_tensors", False): ("tensor",),
    ("input_tensors", True): ("tensor", "token", "group"),
    ("output_tensors", False): ("tensor",),
    ("output_tensors", True): ("tensor", "token", "group"),
}
CASES = [(key, dynamic, cut) for (key, dynamic), cuts in PLACES.items() for cut in cuts]


def layer() -> nn.Linear:
    """Its weight has ties, and so has what it returns for the unit matrix."""
    made = nn.Linear(4, 4)
    made.weight.data, made.bias.data = TIES.clone(), TIES[0].clone()
    return made


@pytest.mark.parametrize("method", RoundType, ids=lambda method: method.name)
@pytest.mark.parametrize(("key", "dynamic", "cut"), CASES)
def test_a_tie_goes_where_the_method_says(
    method: RoundType, key: str, dynamic: bool, cut: str
) -> None:
    spec = QuantizationSpec(Dtype.int8, round_method=method, is_dynamic=dynamic, **CUTS[cut])
    if key in ("weight", "bias"):
        found = getattr(quantized(layer(), **{key: spec}), key).data
        given = getattr(layer(), key).data
    else:
        role = "input" if key == "input_tensors" else "activation"
        given = TIES.clone()
        if role == "activation":
            plain = layer()
            plain.weight.data, plain.bias.data = TIES.t().contiguous(), torch.zeros(4)
            found = quantized(plain, [torch.eye(4)], **{key: spec})(torch.eye(4)).detach()
        else:
            found = quantized(layer(), [TIES], **{key: spec}).quantizers[role](TIES)
    assert torch.equal(found, BY_DEFINITION[method](given))
