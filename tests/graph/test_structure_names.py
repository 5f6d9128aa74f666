"""Names that a config gives to blocks, layers and groups: what they find, and what is told of
the others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.structures import Mixture, modules_of, prepared
from torch import Tensor, nn

from quantizer.config.algorithms import ScalingLayer, StructureNames
from quantizer.config.diagnostics import ConfigError, Place
from quantizer.graph.ir import Graph
from quantizer.graph.structure.definitions import Structure
from quantizer.graph.structure.find import find_structure


class Layer(nn.Module):
    """Two layers that read a norm, one that reads their product, and one that reads an
    activation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = (
            nn.LayerNorm(8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
        )
        self.act, self.out = nn.GELU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.out(self.act(self.down(self.gate(y).sigmoid() * self.up(y))))


class Model(nn.Module):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@cache
def graph() -> Graph:
    torch.manual_seed(0)
    return prepared(Model(), torch.randint(16, (2, 5)))


def found(**names: Any) -> Structure:
    return find_structure(graph(), StructureNames(**names))


def problems(**names: Any) -> list[tuple[str, str, str | None]]:
    with pytest.raises(ConfigError) as caught:
        find_structure(graph(), StructureNames(**names))
    return [(each.code, each.message, each.help) for each in caught.value.diagnostics]


def groups(structure: Structure, block: int) -> list[list[str]]:
    return [
        modules_of(graph(), group.layers) for group in structure.groups if group.block == block
    ]


def test_names_that_say_what_the_graph_shows_change_nothing_but_what_is_left_out() -> None:
    shown = find_structure(graph())
    assert found(blocks="blocks", embeddings=("embed",)) == shown
    entries = (
        ScalingLayer(("gate", "up"), "norm", "gate"),
        ScalingLayer(("down",), "up"),
        ScalingLayer(("out",)),
    )
    assert found(scaling=entries).groups == tuple(
        group for group in shown.groups if group.block is not None
    )


def test_inside_takes_the_layers_in_its_order_and_leaves_out_the_others() -> None:
    structure = found(inside=("up", "gate", "out"))
    assert [groups(structure, block) for block in range(3)] == [[["up", "gate"], ["out"]]] * 3
    assert len(structure.groups) == 6
    alone = found(inside=("up",)).groups[0]
    assert alone.fold is not None and modules_of(graph(), alone.fold.extra) == ["gate"]


def test_a_prev_op_may_be_an_activation_that_takes_no_factors() -> None:
    group = found(scaling=(ScalingLayer(("out",), "act", "out"),)).groups[0]
    assert group.fold is None and "act" in group.why_not


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"blocks": "block"}, [("QZ501", "there is no module 'block'", "did you mean blocks?")]),
        ({"blocks": "head"}, [("QZ502", "head holds no modules with linear or convolution "
            "layers",
                               "the graph shows blocks in blocks")]),
        ({"embeddings": ("embed", "emb", "xyz")}, [
            ("QZ501", "there is no module 'emb'", "did you mean embed?"),
            ("QZ501", "there is no module 'xyz'",
             "the model has blocks, blocks.0, blocks.0.act, blocks.0.down, blocks.0.gate, "
             "blocks.0.norm, …"),
        ]),
        ({"inside": ("gates", "ups")}, [
            ("QZ501", "there is no module 'gates'", "did you mean gate?"),
            ("QZ501", "there is no module 'ups'", "did you mean up?"),
        ]),
        ({"inside": ("out", "gate")}, [
            ("QZ503", "the layers of blocks.0 run in another order", "list them as they run: gate, out"),
        ]),
        ({"scaling": (ScalingLayer(("gate", "down")),)}, [
            ("QZ504", "blocks.0.down does not read what blocks.0.gate reads",
             "layers of one entry read one value; make an entry of each value"),
        ]),
        ({"scaling": (ScalingLayer(("gate",), inp="down"),)}, [
            ("QZ504", "blocks.0.down does not read what blocks.0.gate reads",
             "layers of one entry read one value; make an entry of each value"),
        ]),
        ({"scaling": (ScalingLayer(("gate",)), ScalingLayer(("up", "gate")))}, [
            ("QZ504", "blocks.0.gate is in two entries", "list it once"),
        ]),
        ({"scaling": (ScalingLayer(("down",), "gate"),)}, [
            ("QZ505", "blocks.0.gate does not make what blocks.0.down "
                "reads", "it reads what blocks.0.up makes"),
        ]),
        ({"scaling": (ScalingLayer(("gate",), "nrm", "gat"),)}, [
            ("QZ501", "there is no module 'nrm'", "did you mean norm?"),
            ("QZ501", "there is no module 'gat'", "did you mean gate?"),
        ]),
    ],
)  # fmt: skip
def test_names_that_do_not_fit_are_told_all_at_once(
    names: dict[str, Any], expected: list[tuple[str, str, str | None]]
) -> None:
    assert problems(**names) == expected


def test_a_finding_has_the_place_in_the_file() -> None:
    place, other = Place("c.json", 3, 5), Place("c.json", 9, 1)
    names = StructureNames(
        scaling=(ScalingLayer(("gates",), place=place),),
        embeddings=("emb",),
        places={"embeddings": other},
    )
    with pytest.raises(ConfigError) as caught:
        find_structure(graph(), names)
    assert [each.place for each in caught.value.diagnostics] == [other, place]


def test_names_relative_to_blocks_need_blocks() -> None:
    plain = prepared(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 8)
    )
    with pytest.raises(ConfigError, match="shows no blocks that repeat"):
        find_structure(plain, StructureNames(inside=("0",)))


def test_names_of_experts_are_paired_by_their_prefix() -> None:
    torch.manual_seed(0)
    mixture = prepared(Mixture(), torch.randn(2, 5, 16))
    entries = (ScalingLayer(("w1", "w3"), "norm", "w1"), ScalingLayer(("w2",), "w3", "w2"))
    first = [
        g
        for g in find_structure(
            mixture, StructureNames(blocks="layers", scaling=entries)
        ).groups
        if g.block == 0
    ]
    assert [modules_of(mixture, group.layers) for group in first] == [
        ["w1", "w3"] * 3,
        ["w2"],
        ["w2"],
        ["w2"],
    ]
    assert first[0].fold is not None and modules_of(mixture, first[0].fold.extra) == ["router"]
    with pytest.raises(
        ConfigError,
        match=r"experts\.0\.w1 does not make what layers\.0\.moe\.experts\.0\.w2 reads",
    ):
        find_structure(mixture, StructureNames(scaling=(ScalingLayer(("w2",), "w1"),)))
