"""Search the scales of weights before GPTQ, GPTAQ or Qronos round them.

The scale of a range clips nothing. With few bits its steps are so coarse that most weights of a
group become 0. A smaller scale clips a few weights, and rounding the other columns makes up for
part of that.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantizer.algorithms.clip_search import ClipSearch, clip_shares
from quantizer.algorithms.gptq.member import Member
from quantizer.algorithms.gptq.target import Hessian


def with_searched_scales(
    members: Sequence[Member], hessians: Sequence[Hessian], gram: Tensor
) -> list[Member]:
    """Return the layers with the scales that have the least error when each weight is rounded
    on its own. Scales that an earlier algorithm has fixed stay.

    The error of a group is that on its own inputs, as in `ClipSearch`, with the damping that
    rounding has.

    Args:
        members: layers that read one input.
        hessians: of each group of channels.
        gram: the sum of x x^T of each group of channels, [groups, depth, depth].
    """
    dampings = [hessian.restored(hessian.damping) for hessian in hessians]
    damped = gram.clone()
    damped.diagonal(dim1=1, dim2=2).add_(torch.stack(dampings))
    searched = []
    for member in members:
        if not member.is_fixed:
            search = ClipSearch(
                member.layer,
                member.spec,
                member.layer.get_parameter("weight").detach().float(),
                damped,
                shares=clip_shares(member.spec),
                shared_step=member.shared_step,
            )
            member = member.with_fixed(search.qparams)
        searched.append(member)
    return searched
