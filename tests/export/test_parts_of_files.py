"""A file is refused for one part that it computes otherwise, however good all others together
are.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quantizer.calibration.solution import Solution
from quantizer.comparison.output_comparison import Recorder
from quantizer.errors import VerificationError
from quantizer.export.acceptance import accept_file
from quantizer.export.agreement import Agreement, Verification
from quantizer.export.deployment import Deployment
from quantizer.graph.tracing.trace import trace


class Detector(nn.Module):
    """Boxes in pixels, and scores between 0 and 1 for them."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :4].sigmoid() * 640, x[:, 4:].sigmoid()], 1)


X = torch.randn(8, 7, 16, generator=torch.Generator().manual_seed(0))
GRAPH = trace(Detector(), (X,))


def deployment(**figures: float) -> Deployment:
    """Of a network of which test mode gives what the float one does, but for `figures`."""
    return Deployment(GRAPH, Solution({}), (X,), {}, sqnr_db=60.0, figures=figures)


def verified(change: Callable[[Tensor], object], given: Deployment) -> Verification:
    """Against test mode, of a file that gives something else."""
    agreement = Agreement("outputs", given.outputs, given.part_steps)
    recorder = Recorder(agreement.outputs)
    expected = given.network().observe((X,), {}, recorder.watchers)
    found = expected.clone()
    change(found)
    agreement.add([expected], [found], recorder)
    return accept_file(
        agreement.result(), given, lambda call: [found], refusal="the file", remedy="do this"
    )


def lose_scores(found: Tensor) -> None:
    found[:, 4:] = 0.5


def blur_scores(found: Tensor) -> None:
    found[:, 4:] += 0.3 * torch.randn(8, 3, 16, generator=torch.Generator().manual_seed(1))


def blur_boxes(found: Tensor) -> None:
    found[:, :4] += 0.1 * torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(1))


def test_the_worst_part_decides_and_is_named() -> None:
    with pytest.raises(VerificationError, match=r"0\[4:7\] is 0\.5 everywhere"):
        verified(lose_scores, deployment())
    with pytest.raises(
        VerificationError, match=r"0\[4:7\] has \d+\.\d dB, .*; test mode itself is 60"
    ):
        verified(blur_scores, deployment())
    found = verified(blur_boxes, deployment())
    assert found.sqnr_db is not None
    assert found.sqnr_db_pooled is not None
    assert 60 < found.sqnr_db < found.sqnr_db_pooled
    assert [part["name"] for part in found.to_json()["parts"]] == ["0[0:4]", "0[4:7]"]


def test_each_part_may_lose_what_it_loses_in_test_mode() -> None:
    """A file rounds otherwise: that costs no more than quantization has cost."""
    poor = {"sqnr_db[0[4:7]]": 5.0, "sqnr_db[0[0:4]]": 60.0}
    assert verified(blur_scores, deployment(**poor)).parts[1].sqnr_db == pytest.approx(
        5.6, abs=1.0
    )
    with pytest.raises(VerificationError, match=r"is 0\.5 everywhere"):
        verified(lose_scores, deployment(**poor))
    with pytest.raises(VerificationError, match=r"; 0\[4:7\] has"):
        verified(blur_scores, deployment(**{"sqnr_db[0[4:7]]": 60.0, "sqnr_db[0[0:4]]": 5.0}))


def test_a_part_of_zeros_has_to_be_zeros() -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x * 640, x - x], 1)

    given = Deployment(trace(Half(), (X,)), Solution({}), (X,), {}, sqnr_db=60.0)

    def zeros_become(value: float) -> Callable[[Tensor], object]:
        return lambda found: found[:, 7:].fill_(value)

    verified(zeros_become(1e-7), given)
    with pytest.raises(VerificationError, match=r"0\[7:14\] has 0\.00% equal values"):
        verified(zeros_become(1.0), given)
