"""Outputs and their parts have figures of their own, whatever joins them, and a lost one is
seen and named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer.calibration.solution import Solution, quantized_network
from quantizer.comparison.output_figures import metric_names
from quantizer.config.model import QuantizationSpec
from quantizer.evaluation.compare import compare
from quantizer.evaluation.network_comparison import NetworkComparison, Networks
from quantizer.evaluation.output_warnings import output_warnings
from quantizer.graph.channels.joined_parts import MAX_PARTS
from quantizer.graph.channels.output_parts import output_parts
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.sources.batches import Batch
from quantizer.sources.data import load_batches

PIXELS = 640
STEP = 5.0
"""A scale that boxes in pixels are served by, and scores are not."""
CPU = torch.device("cpu")


class Head(nn.Module):
    """Boxes in pixels [b, 4, 16] and scores between 0 and 1 [b, 3, 16], put together by
    `join`.
    """

    def __init__(self, join: Callable[[Head, Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.boxes, self.scores = nn.Conv1d(3, 4, 1), nn.Conv1d(3, 3, 1)
        self.register_buffer("anchors", torch.rand(1, 4, 16))
        self.join = join

    def forward(self, x: Tensor) -> Any:
        boxes = self.boxes(x).sigmoid() * PIXELS
        return self.join(self, boxes, self.scores(x).sigmoid())


def cat(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return torch.cat([boxes, scores], 1)


def transposed(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return torch.cat([boxes, scores], 1).transpose(1, 2).reshape(-1, 2, 8, 7)


def nested(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    left = torch.cat([boxes[..., :8], scores[..., :8]], 1)
    return torch.cat([left, torch.cat([boxes[..., 8:], scores[..., 8:]], 1)], 2)


def three_kinds(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return torch.cat([boxes, head.anchors.expand(len(boxes), -1, -1), scores], 1)


def stacked(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return torch.stack([boxes[:, :3], scores], -1)


def bent_later(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return torch.cat([boxes, scores], 1).clamp(min=0) * 0.9 + 0.1


def added_later(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return torch.cat([boxes, scores], 1) + torch.cat([scores, boxes], 1) * 1e-4


def written_in_place(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    y = torch.cat([boxes / PIXELS, scores], 1).clone()
    y[:, :4] *= PIXELS
    return y


def into_empty_memory(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    y = torch.empty(len(boxes), 8, 16)
    y[:, :4] = boxes
    y[:, 4:7] = scores
    return y


def slice_scattered(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return torch.slice_scatter(boxes, scores, 1, 1, 4)


def select_scattered(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return torch.select_scatter(boxes, scores[:, 0], 1, 2)


def chosen_by_constants(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return torch.where(torch.arange(16) % 2 == 0, boxes[:, :3], scores)


def chosen_by_values(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return torch.where(scores > 0.5, boxes[:, :3], scores)


def scattered(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return boxes.scatter(
        1, torch.tensor([0, 2, 3]).view(1, 3, 1).expand(len(boxes), 3, 16), scores
    )


def put_at_indices(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    y = boxes.clone()
    y[:, torch.tensor([1, 3])] = scores[:, :2]
    return y


def copied_to_indices(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return boxes.index_copy(1, torch.tensor([0, 1, 3]), scores)


def padded(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return F.pad(torch.cat([boxes, scores], 1), (1, 2))


def masked_with_the_lowest(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
    return scores.masked_fill(boxes[:, :3] > PIXELS / 2, -1e4)


class Case(NamedTuple):
    """A join, its parts, what lies where, and the part that a scale for all loses."""

    join: Callable[[Head, Tensor, Tensor], Any]
    parts: list[str]
    lost: str
    indices: list[str | None] | None = None


SCORES = ["0.boxes", "0.scores"]
CASES = [
    Case(cat, SCORES, "0.scores", ["0[0:4]", "0[4:7]"]),
    Case(transposed, SCORES, "0.scores", ["0[0:4]", "0[4:7]"]),
    Case(nested, ["0.boxes", "0.scores", "0.boxes.1", "0.scores.1"], "0.scores.1"),
    Case(
        three_kinds,
        ["0.boxes", "0.anchors", "0.scores"],
        "0.scores",
        ["0[0:4]", "0[4:8]", "0[8:11]"],
    ),
    Case(stacked, SCORES, "0.scores", ["0[0:1]", "0[1:2]"]),
    Case(bent_later, SCORES, "0.scores", ["0[0:4]", "0[4:7]"]),
    Case(added_later, SCORES, "0.scores", ["0[0:4]", "0[4:7]"]),
    Case(written_in_place, SCORES, "0.scores", ["0[0:4]", "0[4:7]"]),
    Case(into_empty_memory, SCORES, "0.scores", ["0[0:4]", "0[4:7]"]),
    Case(slice_scattered, SCORES, "0.scores", ["0[0:1]", "0[1:4]"]),
    Case(select_scattered, SCORES, "0.scores", [None, "0[2:3]"]),
    Case(chosen_by_constants, SCORES, "0.scores"),
    Case(chosen_by_values, SCORES, "0.scores"),
    Case(scattered, SCORES, "0.scores"),
    Case(put_at_indices, SCORES, "0.scores"),
    Case(copied_to_indices, SCORES, "0.scores"),
    Case(padded, ["0.constant", *SCORES], "0.scores"),
    Case(masked_with_the_lowest, ["0.constant", "0.scores"], "0.scores"),
]


def data(count: int = 3) -> list[Tensor]:
    return [
        torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(seed))
        for seed in range(count)
    ]


def batches(*tensors: Tensor) -> list[Batch]:
    return [Batch((x,), {}, None, x) for x in tensors]


def quantized_at(graph: Graph, name: str, step: float = STEP) -> Network:
    """The network with one value alone on a code_range of this step."""
    tensor = QuantizedTensor(QuantizationSpec(), torch.tensor(step))
    return quantized_network(graph, Solution({(name, "activation"): tensor}))


def networks_of(graph: Graph, quantized: Network) -> Networks:
    return Networks(
        Network(graph), quantized, None, load_batches(data()), CPU, output_parts(graph)
    )


def node_of(graph: Graph, end: str) -> str:
    return next(node.name for node in graph.nodes if node.name.endswith(end))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.join.__name__)
def test_a_part_that_a_common_scale_loses_is_the_figure_of_all(case: Case) -> None:
    graph = trace(Head(case.join).eval(), (data()[0],))
    [output] = output_parts(graph)
    assert sorted(part.name for part in output.parts) == sorted(case.parts)
    if case.indices is not None:
        found = {part.name: part.index for part in output.parts}
        assert [found[name] for name in case.parts] == case.indices
    quantized = quantized_at(graph, output.node)
    compared = compare(Network(graph), quantized, batches(*data()))
    metrics = compared.metrics() | compared.named_metrics()
    assert metrics["sqnr_db"] == metrics[f"sqnr_db[{case.lost}]"] < 10
    assert metrics["cosine"] == metrics[f"cosine[{case.lost}]"]
    networks = networks_of(graph, quantized)
    warnings = {warning.output: warning for warning in output_warnings(compared, networks)}
    assert warnings[case.lost].layer == output.node
    assert "leaving it in float restores it" in warnings[case.lost].text
    if "0.boxes" in case.parts:
        assert metrics["sqnr_db_pooled"] > 30 < metrics["sqnr_db[0.boxes]"]
        assert not any(name.startswith("0.boxes") for name in warnings)


def test_values_of_a_part_are_its_own() -> None:
    """The figures of each part are those of its values alone."""
    graph = trace(Head(nested).eval(), (data()[0],))
    [output] = output_parts(graph)
    x, y = Network(graph)(data()[0]), quantized_at(graph, output.node)(data()[0])
    found = compare(
        Network(graph), quantized_at(graph, output.node), batches(data()[0])
    ).named_metrics()
    for name, part in {"0.boxes": x[:, :4, :8], "0.scores.1": x[:, 4:, 8:]}.items():
        other = y[:, :4, :8] if name == "0.boxes" else y[:, 4:, 8:]
        noise = float((part - other).double().square().sum())
        expected = 10 * torch.tensor(float(part.double().square().sum()) / noise).log10()
        assert found[f"sqnr_db[{name}]"] == pytest.approx(float(expected), rel=1e-6)
        assert found[f"equal_outputs[{name}]"] == float((part == other).double().mean())


def test_figures_of_batches_add_up_to_those_of_all() -> None:
    """However the batches are shared out, and in other batch sizes."""
    graph = trace(Head(cat).eval(), (data()[0],))
    quantized = quantized_at(graph, output_parts(graph)[0].node)

    def found(*tensors: Tensor) -> NetworkComparison:
        return compare(Network(graph), quantized, batches(*tensors))

    first, second, third = data()
    whole, parts = found(first, second, third[:1]), found(first)
    parts.merge(found(second, third[:1]))
    assert parts.named_metrics() == pytest.approx(whole.named_metrics(), rel=1e-9)
    assert parts.metrics() == pytest.approx(whole.metrics(), rel=1e-9)


def test_outputs_are_compared_with_the_users_model_part_by_part() -> None:
    """And with the float network that was quantized, which a pass has made another one."""
    user = trace(Head(cat).eval(), (data()[0],))
    passed = user.mapped(lambda node: node)
    passed = passed.replaced(
        tensors={**passed.tensors, "scores.bias": passed.tensors["scores.bias"] + 0.5}
    )
    quantized = quantized_at(passed, node_of(passed, "scores]/conv1d"), 0.02)
    compared = compare(Network(passed), quantized, batches(*data()), user=Network(user))
    figures = compared.named_metrics()
    [losses] = compared.losses
    lost = {part.name: part.sqnr_db for part in losses.parts}
    assert compared.metrics()["sqnr_db"] == figures["sqnr_db[0.scores]"]
    assert figures["sqnr_db[0.scores]"] < 20 < 30 < (lost["0.scores"] or 0)
    networks = Networks(
        Network(passed), quantized, Network(user), load_batches(data()), CPU, output_parts(user)
    )
    assert {warning.output for warning in output_warnings(compared, networks)} <= {"0.scores"}


class Returned(NamedTuple):
    boxes: Tensor
    scores: Tensor


@pytest.mark.parametrize(
    ("join", "names"),
    [
        (
            lambda head, boxes, scores: {"out": boxes, "aux": [scores, boxes]},
            ["out", "aux.0", "aux.1"],
        ),
        (lambda head, boxes, scores: Returned(boxes, scores), ["boxes", "scores"]),
        (lambda head, boxes, scores: (boxes, {"s": scores}, 3, None), ["0", "1.s"]),
        (lambda head, boxes, scores: [boxes, boxes], ["0", "1"]),
    ],
)
def test_outputs_have_the_names_of_the_model(join: Any, names: list[str]) -> None:
    graph = trace(Head(join).eval(), (data()[0],))
    assert [output.name for output in output_parts(graph)] == names
    compared = compare(Network(graph), Network(graph), batches(data()[0]))
    assert {f"sqnr_db[{name}]" for name in names} <= compared.named_metrics().keys()
    assert compared.named_metrics().keys() <= metric_names(output_parts(graph))


def test_what_is_integer_constant_or_empty_has_no_sqnr_and_is_not_the_worst() -> None:
    def join(head: Head, boxes: Tensor, scores: Tensor) -> dict[str, Tensor]:
        zero = torch.relu(-boxes)
        return {
            "classes": scores.argmax(1),
            "none": boxes[:, :0],
            "zero": zero,
            "anchors": head.anchors,
            "s": scores,
        }

    graph = trace(Head(join).eval(), (data()[0],))
    compared = compare(
        Network(graph),
        quantized_at(graph, node_of(graph, "scores]/conv1d"), 0.25),
        batches(*data()),
    )
    kinds = {output.whole.name: output.whole.kind for output in compared.outputs}
    assert kinds == {
        "classes": "integer",
        "none": "empty",
        "zero": "constant",
        "anchors": "constant",
        "s": "float",
    }
    metrics = compared.metrics() | compared.named_metrics()
    assert metrics["sqnr_db"] == metrics["sqnr_db[s]"]
    assert metrics["equal_outputs"] == metrics["equal_outputs[classes]"] < 1
    assert metrics["equal_outputs[zero]"] == 1
    assert {name for name in metrics if name.startswith("sqnr_db[")} == {"sqnr_db[s]"}
    known = metric_names(output_parts(graph))
    assert {"equal_outputs[classes]", "equal_outputs[anchors]"} <= known
    assert not {"sqnr_db[classes]", "cosine[anchors]"} & known, "nothing measures them"


def test_constant_outputs_alone_have_a_share_of_equal_values() -> None:
    graph = trace(Head(lambda head, boxes, scores: torch.relu(-boxes)).eval(), (data()[0],))
    assert compare(Network(graph), Network(graph), batches(*data())).metrics() == {
        "equal_outputs": 1.0
    }


def test_an_output_of_one_number_has_an_sqnr() -> None:
    graph = trace(Head(lambda head, boxes, scores: scores.mean()).eval(), (data()[0],))
    compared = compare(
        Network(graph),
        quantized_at(graph, node_of(graph, "sigmoid.1"), 0.1),
        batches(data()[0]),
    )
    assert 10 < compared.metrics()["sqnr_db"] < 100


def test_more_parts_than_have_names_are_pooled_and_say_so() -> None:
    def join(head: Head, boxes: Tensor, scores: Tensor) -> Tensor:
        return torch.cat(
            [boxes[..., at] * (at + 1) for at in range(16)]
            + [scores[..., at] for at in range(24)],
            1,
        )

    class Wide(Head):
        def forward(self, x: Tensor) -> Any:
            return super().forward(torch.cat([x, x], 2))

    graph = trace(Wide(join).eval(), (data()[0],))
    [output] = output_parts(graph)
    assert {part.name: part.pooled for part in output.parts} == {"0.boxes": 16, "0.scores": 24}
    compared = compare(Network(graph), quantized_at(graph, output.node), batches(*data()))
    named = compared.named_metrics()
    assert named["sqnr_db[0.scores]"] == 0
    # A channel that varies by little has lost more
    assert compared.metrics()["sqnr_db"] == named["sqnr_db[0]"] < 0


def test_parts_of_many_layers_are_pooled_under_one_name() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(MAX_PARTS + 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([head(x.mean(2)) for head in self.heads], 1)

    graph = trace(Many().eval(), (data()[0],))
    [output] = output_parts(graph)
    assert len(output.parts) == MAX_PARTS
    assert [(part.name, part.pooled) for part in output.parts[-2:]] == [
        (f"0.heads.{MAX_PARTS - 2}", 1),
        ("0.others", 9),
    ]
    counts = [
        part.count
        for part in compare(Network(graph), Network(graph), batches(*data())).outputs[0].parts
    ]
    assert counts == [12] * (MAX_PARTS - 1) + [9 * 12]


def detected(head: Head, boxes: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """The best ten, as DETR chooses them."""
    values, places = scores.transpose(1, 2).flatten(1).topk(10)
    rows = (places // 3)[..., None].expand(-1, -1, 4)
    picked = boxes.transpose(1, 2).gather(1, rows)
    together = torch.cat([picked, values[..., None]], -1)
    return {"scores": values, "labels": places % 3, "boxes": picked, "all": together}


def sorted_by_score(head: Head, boxes: Tensor, scores: Tensor) -> dict[str, Tensor]:
    order = scores.amax(1).argsort(-1, descending=True)
    samples = torch.arange(len(boxes))[:, None]
    rows = boxes.transpose(1, 2)[samples, order]
    return {
        "boxes": rows,
        "scores": torch.take_along_dim(scores.transpose(1, 2), order[..., None], 1),
    }


def transformed(head: Head, boxes: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """Chosen rows go through layers that keep them apart."""
    _, places = scores.amax(1).topk(8)
    rows = (boxes / PIXELS).transpose(1, 2).gather(1, places[..., None].expand(-1, -1, 4))
    rows = F.layer_norm(rows, (4,)) + F.linear(rows, head.anchors[0, :, :4]).relu()
    weights = (rows @ rows.transpose(1, 2)).softmax(-1)
    return {"boxes": (weights @ rows).sigmoid() * PIXELS}


@pytest.mark.parametrize("join", [detected, sorted_by_score, transformed])
def test_rows_in_another_order_are_matched_before_they_are_compared(join: Any) -> None:
    graph = trace(Head(join).eval(), (data()[0],))
    step = 0.05 if join is transformed else 0.04
    quantized = quantized_at(graph, node_of(graph, "scores]/conv1d"), step)
    compared = compare(Network(graph), quantized, batches(*data()))
    metrics = compared.metrics() | compared.named_metrics()
    orders = [output.order for output in compared.outputs]
    assert all(order is not None and order.moved > 5 for order in orders)
    x, y = Network(graph)(data()[0])["boxes"], quantized(data()[0])["boxes"]
    assert not torch.equal(x, y)
    if join is transformed:
        assert metrics["rows_kept[boxes]"] < 1, "others are there for some"
        return
    assert metrics["sqnr_db"] > 25
    assert metrics["equal_outputs[boxes]"] == 1, "only the order changes, and which are chosen"
    networks = networks_of(graph, quantized)
    warnings = output_warnings(compared, networks)
    assert {warning.kind for warning in warnings} == {"rows"}
    assert "at another position" in warnings[0].text
    if join is sorted_by_score:
        assert metrics["rows_kept"] == 1


def test_a_channel_that_collapses_is_named_whatever_makes_it() -> None:
    class Dull(nn.Module):
        """One channel of eight is so small that its values have one code."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.last = nn.Linear(3, 8)
            with torch.no_grad():
                self.last.weight[5] *= 1e-3
                self.last.bias[5] = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x.transpose(1, 2))

    graph = trace(Dull().eval(), (data()[0],))
    [output] = output_parts(graph)
    assert output.channel_axis == 2
    quantized = quantized_at(graph, output.node, 0.02)
    compared = compare(Network(graph), quantized, batches(*data()))
    networks = networks_of(graph, quantized)
    [warning] = output_warnings(compared, networks)
    assert (warning.kind, warning.layer) == ("channels", output.node)
    assert "1 of 8 channels" in warning.text
    assert "0[:, :, 5]" in warning.text
    fine = quantized_at(graph, output.node, 1e-5)
    assert not output_warnings(compare(Network(graph), fine, batches(*data())), networks)


class Offset(nn.Module):
    """Values around 0, and values around 60 that vary little: one output, or one for each."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2, bias=False)
        self.register_buffer("factor", torch.tensor([30.0, 4.0]))
        self.register_buffer("offset", torch.tensor([0.0, 60.5]))
        self.together = together

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x.transpose(1, 2).tanh()) * self.factor + self.offset
        return x if self.together else (x[..., 0], x[..., 1] * 1)


@pytest.mark.parametrize("size", [1, 4], ids=["single samples", "batches"])
@pytest.mark.parametrize(
    ("together", "kind", "text"),
    [
        (False, "hidden", "output 1 only ranges from 5"),
        (True, "channels", "1 of 2 channels of output 0 have narrow ranges far from 0"),
    ],
    ids=["an output", "a channel"],
)
def test_what_varies_around_a_large_value_is_not_hidden_by_it(
    together: bool, kind: str, text: str, size: int
) -> None:
    graph = trace(Offset(together=together).eval(), (data()[0],))
    output = output_parts(graph)[-1]
    items = batches(*(part for x in data() for part in x.split(size)))
    lost = quantized_at(graph, output.node, 2.0)
    compared = compare(Network(graph), lost, items)
    assert compared.outputs[-1].whole.noise.sqnr_db > 35
    figures = compared.metrics() | compared.named_metrics()
    # An error of a fifth of the deviation or more: 20 log10(1 / 0.2) = 13.98 dB, and the
    # cosine 1 / sqrt(1 + 0.2^2) = 0.981
    for name in ("sqnr_db", f"sqnr_db[{output.name}]"):
        assert figures[name] < 13.98
    for name in ("cosine", f"cosine[{output.name}]"):
        assert figures[name] < 0.981
    [warning] = output_warnings(compared, networks_of(graph, lost))
    assert (warning.kind, warning.output) == (kind, output.name)
    assert text in warning.text
    fine = quantized_at(graph, output.node, 0.5)
    compared = compare(Network(graph), fine, items)
    assert not output_warnings(compared, networks_of(graph, fine))
    assert compared.metrics()["sqnr_db"] > 20


class Deviating(nn.Module):
    """One output, or a channel of it, that varies by so much around 2."""

    def __init__(self, deviation: float, *, together: bool) -> None:
        super().__init__()
        self.deviation = deviation
        self.together = together

    def forward(self, x: Tensor) -> Any:
        near, far = x[:, 0], x[:, 1].mul(self.deviation) + 2
        return torch.stack([near, far * 1], 1) if self.together else (near * 1, far * 1)


@pytest.mark.parametrize("together", [False, True], ids=["an output", "a channel"])
@pytest.mark.parametrize(
    ("deviation", "is_lost"),
    [(0.02, True), (0.1, False), (2e-7, False)],
    ids=["lost", "kept", "float's own rounding"],
)
def test_a_loss_is_judged_by_the_standard_deviation(
    deviation: float, is_lost: bool, together: bool
) -> None:
    """With an error of 0.01, which is 8 % of the range in the first case."""
    x = torch.randn(256, 2, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    graph = trace(Deviating(deviation, together=together).eval(), (x,))
    output = output_parts(graph)[-1]
    rounded = quantized_at(graph, output.node, 0.0346)
    figures = compare(Network(graph), rounded, batches(x)).metrics()
    assert figures["sqnr_db_pooled"] > 39
    assert (figures["sqnr_db"] < 13.98) == is_lost


def test_what_is_one_value_in_float_alone_is_told() -> None:
    graph = trace(
        Head(lambda head, boxes, scores: (scores, boxes - boxes.clone())).eval(), (data()[0],)
    )
    quantized = quantized_at(graph, node_of(graph, "clone"))
    networks = networks_of(graph, quantized)
    [warning] = output_warnings(compare(Network(graph), quantized, batches(*data())), networks)
    assert (warning.kind, warning.output) == ("varies", "1")


def test_good_networks_are_not_warned_of() -> None:
    graph = trace(Head(lambda head, boxes, scores: (boxes, scores)).eval(), (data()[0],))
    quantized = quantized_at(graph, node_of(graph, "scores]/conv1d"), 0.02)
    networks = networks_of(graph, quantized)
    assert not output_warnings(compare(Network(graph), quantized, batches(*data())), networks)


def test_an_output_with_one_axis_has_parts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(4, 4)
            self.narrow = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.wide(x).mean(0), self.narrow(x).mean(0)])

    (output,) = output_parts(trace(Model(), (torch.randn(2, 4),)))
    assert [part.index for part in output.parts] == ["0[0:4]", "0[4:7]"]
