"""What a config says of a model's structure, as frozen values. Looks at no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantizer.config.diagnostics import Place


@dataclass(frozen=True)
class ScalingLayer:
    """One entry of `scaling_layers`, with names relative to a block: layers that read one value are scaled together.

    `prev_op` makes that value, `inp` is one of the layers whose input it is; an empty name means: found on the graph.
    """

    layers: tuple[str, ...]
    prev_op: str = ""
    inp: str = ""
    place: Place | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Names:
    """The parts of a model that an algorithm's settings name; None means that they are found on the graph.

    `blocks` is the module that holds the decoder's blocks, `inside` the layers of a block in the order in which they
    are processed, `scaling` the groups that are scaled together, `embeddings` are layers that must exist and no more.
    `places` has the file's place of each field that is set.
    """

    blocks: str | None = None
    inside: tuple[str, ...] | None = None
    scaling: tuple[ScalingLayer, ...] | None = None
    embeddings: tuple[str, ...] | None = None
    places: Mapping[str, Place] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, stated: Mapping[str, tuple[Any, Place | None]], groups: Sequence[Place | None]) -> Names:
        """What the keys of an algorithm's entry state, each with its place; `groups` are those of `scaling_layers`."""
        found = {name: stated[key] for key, name in _FIELDS.items() if key in stated}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, (value, _) in found.items()
        }
        if "scaling" in values:
            values["scaling"] = tuple(
                ScalingLayer(tuple(group.get("layers", ())), group.get("prev_op", ""), group.get("inp", ""), place)
                for group, place in zip(values["scaling"], groups, strict=True)
            )
        return cls(**values, places={name: place for name, (_, place) in found.items() if place})


_FIELDS: Mapping[str, str] = {
    "model_decoder_layers": "blocks",
    "inside_layer_modules": "inside",
    "scaling_layers": "scaling",
    "embedding_layers": "embeddings",
}
"""The key for each field of `Names`."""
