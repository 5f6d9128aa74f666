"""Rows that are selected, and then selected again from among these, are matched by where they
were at first.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quantizer.calibration.solution import Solution, quantized_network
from quantizer.config.model import QuantizationSpec
from quantizer.evaluation.compare import compare
from quantizer.evaluation.network_comparison import NetworkComparison, Networks
from quantizer.evaluation.output_warnings import output_warnings
from quantizer.graph.channels.output_parts import output_parts
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.sources.batches import Batch
from quantizer.sources.data import load_batches

Rows = dict[str, Tensor]
Select = Callable[["Detector", Tensor, Tensor, Tensor], Rows]
PLACES = 64


class Detector(nn.Module):
    """Boxes [b, 64, 4], scores [b, 64, 3] and the number of each row [b, 64]; `select` chooses
    among the rows.
    """

    def __init__(self, select: Select) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.boxes, self.scores, self.again = nn.Linear(3, 4), nn.Linear(3, 3), nn.Linear(4, 3)
        self.register_buffer("numbers", torch.arange(1.0, PLACES + 1).expand(1, -1))
        self.select = select

    def forward(self, x: Tensor) -> Rows:
        numbers = self.numbers.expand(len(x), -1) + 0 * x[..., 0]
        return self.select(self, self.boxes(x), self.scores(x).sigmoid(), numbers)


def picked(values: Tensor, index: Tensor) -> Tensor:
    """Return the rows of an index, for each sample."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))


def best_of_best(detector: Detector, boxes: Tensor, scores: Tensor, numbers: Tensor) -> Rows:
    _, first = scores[..., 0].topk(24)
    _, second = picked(scores, first)[..., 1].topk(8)
    return {
        "boxes": picked(picked(boxes, first), second),
        "numbers": numbers.gather(1, first).gather(1, second),
    }


def best_of_sorted(detector: Detector, boxes: Tensor, scores: Tensor, numbers: Tensor) -> Rows:
    ordered, first = scores[..., 0].sort(descending=True)
    _, second = (ordered * picked(scores, first)[..., 1]).topk(8)
    return {
        "boxes": picked(picked(boxes, first), second),
        "numbers": numbers.gather(1, first).gather(1, second),
    }


def sorted_after_suppression(
    detector: Detector, boxes: Tensor, scores: Tensor, numbers: Tensor
) -> Rows:
    """Rows that overlap a better one lose by it, as in matrix NMS."""
    ordered, first = scores[..., 0].topk(32)
    corners = picked(boxes, first)
    overlaps: Tensor = (
        (1 - (corners[:, :, None] - corners[:, None]).abs().sum(-1)).clamp(min=0).triu(1)
    )
    _, second = ((1 - overlaps).amin(1) * ordered).sort(descending=True)
    return {
        "boxes": picked(corners, second),
        "numbers": numbers.gather(1, first).gather(1, second),
    }


def by_one_index(detector: Detector, boxes: Tensor, scores: Tensor, numbers: Tensor) -> Rows:
    _, first = scores[..., 0].topk(24)
    _, second = scores[..., 1].gather(1, first).topk(8)
    index = first.gather(1, second)
    return {"boxes": picked(boxes, index), "numbers": numbers.gather(1, index)}


def of_each_class(detector: Detector, boxes: Tensor, scores: Tensor, numbers: Tensor) -> Rows:
    """The best of each class, and of these the best of all."""
    values, first = scores.transpose(1, 2).topk(12, dim=2)
    _, second = values.flatten(1).topk(10)
    index = first.flatten(1).gather(1, second)
    return {"boxes": picked(boxes, index), "numbers": numbers.gather(1, index)}


def of_all_samples(detector: Detector, boxes: Tensor, scores: Tensor, numbers: Tensor) -> Rows:
    """The rows of all samples are one list when they are selected again."""
    _, first = scores[..., 0].topk(24)
    together = picked(scores, first).flatten(0, 1)
    _, second = together[:, 1].topk(12)
    return {
        "boxes": picked(boxes, first).flatten(0, 1)[second],
        "numbers": numbers.gather(1, first).flatten()[second],
    }


def classes_of_queries(
    detector: Detector, boxes: Tensor, scores: Tensor, numbers: Tensor
) -> Rows:
    """As RT-DETR does: queries are chosen, and of all their classes the best."""
    _, first = scores.amax(-1).topk(16)
    queries = picked(boxes, first)
    _, second = detector.again(queries).add(picked(scores, first)).flatten(1).topk(10)
    index = second // 3
    return {
        "boxes": picked(queries, index),
        "numbers": numbers.gather(1, first).gather(1, index),
    }


def best_class_of_best(
    detector: Detector, boxes: Tensor, scores: Tensor, numbers: Tensor
) -> Rows:
    """The score of the second choice is the largest of several."""
    _, first = scores[..., 0].topk(24)
    _, second = picked(scores, first)[..., 1:].amax(-1).topk(8)
    return {
        "boxes": picked(picked(boxes, first), second),
        "numbers": numbers.gather(1, first).gather(1, second),
    }


def three_times(detector: Detector, boxes: Tensor, scores: Tensor, numbers: Tensor) -> Rows:
    order = scores[..., 0].argsort(1, descending=True)
    _, first = scores[..., 1].gather(1, order).topk(32)
    _, second = scores[..., 2].gather(1, order).gather(1, first).topk(8)
    index = order.gather(1, first).gather(1, second)
    return {"boxes": picked(boxes, index), "numbers": numbers.gather(1, index)}


def beside_fixed_rows(
    detector: Detector, boxes: Tensor, scores: Tensor, numbers: Tensor
) -> Rows:
    """What was selected is joined with rows that are always there."""
    _, first = scores[:, 8:, 0].topk(24)
    fixed = torch.arange(8).expand(len(boxes), -1)
    _, second = torch.cat([scores[:, 8:, 1].gather(1, first), scores[:, :8, 1]], 1).topk(12)
    index = torch.cat([first + 8, fixed], 1).gather(1, second)
    return {"boxes": picked(boxes, index), "numbers": numbers.gather(1, index)}


def summed_up(detector: Detector, boxes: Tensor, scores: Tensor, numbers: Tensor) -> Rows:
    """A score of the second choice depends on all better rows, so nothing says whose it is."""
    _, first = scores[..., 0].topk(24)
    _, second = picked(scores, first)[..., 1].cumsum(1).topk(8)
    return {
        "boxes": picked(picked(boxes, first), second),
        "numbers": numbers.gather(1, first).gather(1, second),
    }


def every_second(detector: Detector, boxes: Tensor, scores: Tensor, numbers: Tensor) -> Rows:
    """The second choice is among those of the first that stand at fixed places."""
    _, first = scores[..., 0].topk(24)
    fixed = torch.arange(0, 24, 2).expand(len(boxes), -1)
    _, second = scores[..., 1].gather(1, first).gather(1, fixed).topk(8)
    index = first.gather(1, fixed).gather(1, second)
    return {"boxes": picked(boxes, index), "numbers": numbers.gather(1, index)}


def reduced(detector: Detector, boxes: Tensor, scores: Tensor, numbers: Tensor) -> Rows:
    _, first = scores[..., 0].topk(24)
    rows = picked(boxes, first)
    return {"largest": rows.amax(-1), "mean": rows.mean(1), "numbers": numbers.gather(1, first)}


SELECTIONS = [
    best_of_best,
    best_of_sorted,
    sorted_after_suppression,
    by_one_index,
    of_each_class,
    of_all_samples,
    classes_of_queries,
    best_class_of_best,
    three_times,
    beside_fixed_rows,
]


def data() -> list[Tensor]:
    return [
        torch.randn(3, PLACES, 3, generator=torch.Generator().manual_seed(seed))
        for seed in range(3)
    ]


def quantized_scores(graph: Graph) -> Network:
    """The network with coarse scores, so that others are selected, in another order."""
    name = next(node.name for node in graph.nodes if node.name.endswith("scores]/linear"))
    tensor = QuantizedTensor(QuantizationSpec(), torch.tensor(0.07))
    return quantized_network(graph, Solution({(name, "activation"): tensor}))


def compared(select: Select) -> tuple[Graph, Network, NetworkComparison]:
    graph = trace(Detector(select).eval(), (data()[0],))
    quantized = quantized_scores(graph)
    batches = [Batch((x,), {}, None, x) for x in data()]
    return graph, quantized, compare(Network(graph), quantized, batches)


def counts_of_rows(numbers: Tensor) -> dict[int, int]:
    values, counts = numbers.unique(return_counts=True)
    return dict(zip(values.long().tolist(), counts.tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("select", SELECTIONS)
def test_rows_of_two_selections_are_matched_by_where_they_were_at_first(select: Select) -> None:
    graph, quantized, found = compared(select)
    figures = found.named_metrics()
    assert figures["equal_outputs[numbers]"] == 1, "each row is compared with itself"
    assert figures["equal_outputs[boxes]"] == 1
    reference = Network(graph)
    rows = kept = 0
    for x in data():
        before, after = reference(x)["numbers"], quantized(x)["numbers"]
        assert not torch.equal(before, after)
        samples = zip(before, after, strict=True) if before.dim() == 2 else [(before, after)]
        for mine, its in samples:
            expected, others = counts_of_rows(mine), counts_of_rows(its)
            rows += sum(expected.values())
            kept += sum(min(count, others.get(number, 0)) for number, count in expected.items())
    share = figures["rows_kept[boxes]"]
    assert share == figures["rows_kept[numbers]"] < 1
    if select in (of_each_class, classes_of_queries, of_all_samples):
        assert share <= kept / rows, (
            "a row may be there with another class, or be that of another sample"
        )
    else:
        assert share == pytest.approx(kept / rows)


@pytest.mark.parametrize("select", [summed_up, every_second])
def test_rows_that_cannot_be_matched_are_said(select: Select) -> None:
    """And nothing claims how many are kept."""
    graph, quantized, found = compared(select)
    assert not any(
        name.startswith("rows_kept") for name in found.metrics() | found.named_metrics()
    )
    networks = Networks(
        Network(graph),
        quantized,
        None,
        load_batches(data()),
        torch.device("cpu"),
        output_parts(graph),
    )
    warnings = {warning.output: warning for warning in output_warnings(found, networks)}
    assert {warning.kind for warning in warnings.values()} == {"unmatched"}
    assert warnings["boxes"].text.startswith(
        f"boxes: {9 * 8} rows that are selected by value cannot be matched"
    )
    assert [
        output.order.to_json()["unmatched"]
        for output in found.outputs
        if output.order is not None
    ] == [72, 72]


@pytest.mark.slow
def test_rows_of_which_one_value_is_left_are_matched_and_a_mean_of_all_rows_needs_it_not() -> (
    None
):
    _, _, found = compared(reduced)
    figures = found.named_metrics()
    assert figures["equal_outputs[largest]"] == figures["equal_outputs[numbers]"] == 1
    assert figures["rows_kept[largest]"] == figures["rows_kept[numbers]"] < 1
    assert "rows_kept[mean]" not in figures
    [mean] = [output for output in found.outputs if output.whole.name == "mean"]
    assert mean.order is None
