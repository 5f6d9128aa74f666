"""The table of algorithms that a config may list, as plug-ins declare them, and an algorithm as
a file lists it.

Each has a dataclass of settings with the field names of the file, from which its keys in files,
defaults, schema, pages and Python API are generated. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from quantizer.config.diagnostics import Place, Sourced
from quantizer.config.forms.form import Form
from quantizer.config.json_types import JsonMapping, JsonObject, JsonPath
from quantizer.declarations import ListedAlgorithm
from quantizer.plugins import loaded, plugins

AlgorithmStage = Literal["rescale", "round"]
MAX_SEED = 2**64 - 1
"""The largest seed that torch's generators and result folders take."""
_IGNORED = "The weights' specification decides; another value only draws a warning."
ONLINE = (
    "Whether an operator divides the inputs of layers where no layer before them can. "
    "Checkpoints have no place for it; with false, such layers keep their inputs."
)
LAYERS = {"items": {"title": "layer", "type": "string", "minLength": 1}, "uniqueItems": True}


@dataclass(frozen=True)
class Setting:
    """The meaning of a setting. Its type and default are those of the dataclass field.

    Args:
        description: a sentence for pages and editors.
        needs: a switch that has to be on for this one to be on.
        decided_by: the field of the weights' specification that decides instead of it.
        unread: why nothing reads it, if nothing does.
        is_part: whether it switches a part of the algorithm. An algorithm whose parts are all
            off does nothing.
        is_searched: whether a value that is not a number starts a search for the value with the
            smallest error of outputs. The error of weights is part of that.
        keywords: of its entry in the schema, such as `minimum`.
    """

    description: str
    needs: str = ""
    decided_by: str = ""
    unread: str = ""
    is_part: bool = False
    is_searched: bool = False
    keywords: Mapping[str, Any] = field(default_factory=dict)


_HEADS = Setting(
    "Of older files; not read.",
    unread="heads are found on the graph",
    keywords={"minimum": -1, "title": "heads"},
)
SHARED_SETTINGS: Mapping[str, Setting] = {
    "bit": Setting(
        f"Bits of the weights. {_IGNORED}",
        decided_by="bit_width",
        keywords={"minimum": 2, "maximum": 16},
    ),
    "sym": Setting(
        f"Whether weights are quantized symmetrically. {_IGNORED}", decided_by="symmetric"
    ),
    "group_size": Setting(
        f"Weights per scale, -1 for a whole row. {_IGNORED}",
        decided_by="group_size",
        keywords={"minimum": -1},
    ),
    "algo_processor": Setting(
        "The class that runs the algorithm; not read.",
        unread="an algorithm is run by a function of its own",
    ),
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "model_decoder_layers": Setting(
        "The module that holds the decoder's blocks, such as model.layers; null: found on the "
        "graph."
    ),
    "scaling_layers": Setting(
        "Which layers are scaled together; null or []: found on the graph.",
        keywords={"items": {"$ref": "#/definitions/scaling_layer"}},
    ),
    "embedding_layers": Setting(
        "Names of embedding layers; they have to exist, and nothing else is done with them.",
        keywords=LAYERS,
    ),
}
"""Settings that several algorithms have, by key."""


@dataclass
class AlgoConfig:
    """Settings of an algorithm that changes weights.

    Subclasses of `PreQuantOptConfig` are for algorithms that change float weights. Other
    algorithms find codes or ranges of weights.

    Attributes:
        name: the algorithm's name in files.
        stage: "rescale" if it keeps the network's float function, "round" if it rounds weights.
        run: its function, as "module:function"; empty for a pass over the graph.
        needs_data: whether it reads the calibration data.
        matrices: how many float32 matrices of inputs x inputs of the deepest layer it has in
            memory at its peak.
        networks: how many networks it runs side by side.
        eases_activations: whether it changes weights for the sake of quantized activations.
        needs_groups: whether it changes weights in groups only.
        meanings: of settings that are not declared with `setting`, by key.
    """

    name: str = ""

    stage: ClassVar[AlgorithmStage] = "round"
    run: ClassVar[str] = ""
    needs_data: ClassVar[bool] = True
    matrices: ClassVar[int] = 0
    networks: ClassVar[int] = 1
    eases_activations: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    meanings: ClassVar[Mapping[str, Setting]] = SHARED_SETTINGS


@dataclass
class PreQuantOptConfig(AlgoConfig):
    """Settings of an algorithm that changes weights before they are quantized. It may be in
    either list of algorithms of a config.
    """

    stage: ClassVar[AlgorithmStage] = "rescale"


def setting(default: Any, description: str, **words: Any) -> Any:
    """Return a dataclass field of settings; `words` are arguments of `Setting`, and keywords of
    its entry in the schema.
    """
    names = {declared.name for declared in dataclasses.fields(Setting)}
    arguments = {name: words.pop(name) for name in names & words.keys()}
    meaning = Setting(description, **arguments, keywords=words)
    return field(default=default, metadata={"setting": meaning})


def settings_of(kind: type[AlgoConfig]) -> dict[str, Setting]:
    """Return the meaning of each setting, by key, in the order of the fields.

    Raises:
        ValueError: a setting has no description.
    """
    settings: dict[str, Setting] = {}
    # The first field is the name
    for declared in dataclasses.fields(kind)[1:]:
        key = declared.name
        setting = declared.metadata.get("setting") or kind.meanings.get(key)
        if setting is None:
            raise ValueError(
                f"{kind.__name__}.{key} has no description; give it one with setting(…)"
            )
        settings[key] = setting
    return settings


def read_keys(kind: type[AlgoConfig]) -> list[str]:
    """Return the keys of the settings that the algorithm reads."""
    settings = settings_of(kind).items()
    return [key for key, setting in settings if not setting.unread and not setting.decided_by]


def finds_codes(kind: type[AlgoConfig]) -> bool:
    """Return whether the algorithm finds codes or ranges of weights. It does nothing if no
    weights are quantized.
    """
    return not issubclass(kind, PreQuantOptConfig)


def keeps_super_blocks(kind: type[AlgoConfig]) -> bool:
    """Return whether the algorithm leaves weights as they are whose groups share the factor of
    their scales.
    """
    return finds_codes(kind) and not kind.needs_groups


def named_algorithms(fits: Callable[[type[AlgoConfig]], bool]) -> str:
    """Return the names of the algorithms that fit a remedy; empty if none is there."""
    return " or ".join(name for name, kind in ALGORITHMS.items() if fits(kind))


LISTED: dict[str, ListedAlgorithm] = {}
"""What plug-ins declare, by name."""
PLUGINS: dict[str, str] = {}
"""The name of the plug-in of each."""
for _plugin in plugins():
    LISTED.update(_plugin.algorithms)
    PLUGINS.update(dict.fromkeys(_plugin.algorithms, _plugin.name))
SWITCHES = {name: row.switch for name, row in LISTED.items() if row.switch}
"""The algorithms of the hierarchical form that are passes over the graph, each with the setting
of the layered form that it is.
"""
ALIASES = {alias: name for name, row in LISTED.items() for alias in row.aliases}
"""Other spellings of names."""


class _Settings(Mapping[str, type[AlgoConfig]]):
    """Classes of settings by name, each imported when it is looked up."""

    def __init__(self, *, with_passes: bool) -> None:
        self._with_passes = with_passes

    def _names(self) -> list[str]:
        return [name for name, row in LISTED.items() if self._with_passes or not row.switch]

    def __getitem__(self, name: str) -> type[AlgoConfig]:
        if name not in self:
            raise KeyError(name)
        kind: type[AlgoConfig] = loaded(LISTED[name].settings)
        return kind

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())


ALGORITHMS = _Settings(with_passes=False)
"""The settings of each algorithm, by its name in a file."""
_ENTRIES = _Settings(with_passes=True)


def entry_kinds(form: Form) -> Mapping[str, type[AlgoConfig]]:
    """Return what the lists of a form may hold, by name. The layered form has switches for
    `SWITCHES`.
    """
    return _ENTRIES if form == "hierarchical" else ALGORITHMS


def __getattr__(name: str) -> Any:
    """Return the class of settings with this name.

    Raises:
        AttributeError: no plug-in that is there has it.
    """
    for row in LISTED.values():
        if row.settings.endswith(f":{name}"):
            return loaded(row.settings)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def algorithm_entry(settings: AlgoConfig) -> JsonObject:
    """Return the entry of a file that means the same as settings, with every default that
    something reads.

    >>> algorithm_entry(ALGORITHMS["rotation"](seed=3))
    {'name': 'rotation', 'residual': True, 'values': True, 'online': True, 'seed': 3}
    """
    keys = ("name", *read_keys(type(settings)))
    values = {key: getattr(settings, key) for key in keys}
    return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True)
class ScalingLayer:
    """An entry of `scaling_layers`: layers that read one value and are scaled together.

    Names are relative to a block. A layer with an empty name is found on the graph.

    Attributes:
        layers: the layers that are scaled.
        prev_op: the layer that computes the value.
        inp: one of the layers that read it.
        place: of the entry in the file.
    """

    layers: tuple[str, ...]
    prev_op: str = ""
    inp: str = ""
    place: Place | None = field(default=None, compare=False)

    @classmethod
    def of(cls, entry: JsonMapping, place: Place | None) -> ScalingLayer:
        """Return the group that an entry of a file states."""
        return cls(**{**entry, "layers": tuple(entry.get("layers", ()))}, place=place)


@dataclass(frozen=True)
class StructureNames:
    """The parts of a model that an algorithm's settings name; None means that they are found on
    the graph.

    `blocks` is the module with the decoder's blocks, `inside` the layers of a block in their
    order, `scaling` the groups that are scaled together. `embeddings` only have to exist.
    `places` has the file's place of each field that is set.
    """

    blocks: str | None = None
    inside: tuple[str, ...] | None = None
    scaling: tuple[ScalingLayer, ...] | None = None
    embeddings: tuple[str, ...] | None = None
    places: Mapping[str, Place] = field(default_factory=dict, compare=False)


_STRUCTURE_FIELDS: Mapping[str, str] = {
    "model_decoder_layers": "blocks",
    "inside_layer_modules": "inside",
    "scaling_layers": "scaling",
    "embedding_layers": "embeddings",
}
"""The field of `StructureNames` for each key."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm as a file lists it: its class, its entry's path, and each stated key with
    its place.

    `groups` are the places of the groups in `scaling_layers`. `unread` are stated keys that
    nothing reads, each with the reason and its first place.
    """

    kind: type[AlgoConfig]
    path: JsonPath
    stated: Mapping[str, Sourced]
    place: Place | None = None
    groups: tuple[Place | None, ...] = ()
    unread: Mapping[str, tuple[str, Place | None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name that the file has for it."""
        return self.kind.name

    @property
    def stage(self) -> AlgorithmStage:
        """Return "rescale" or "round"."""
        return self.kind.stage

    @property
    def needs_data(self) -> bool:
        """Return whether it reads the calibration data."""
        return self.kind.needs_data

    @property
    def label(self) -> str:
        """Return `algo_config[0]`, or `algo_config` for an algorithm without a list."""
        block, *indices = self.path
        return str(block) + "".join(f"[{index}]" for index in indices)

    def value(self, key: str) -> Any:
        """Return a setting as it is stated, or its default."""
        return self.stated[key].value if key in self.stated else getattr(self.kind, key)

    @property
    def settings(self) -> AlgoConfig:
        """Return the settings that the algorithm runs with.

        Settings that nothing reads have their default. A switch is off if the switch that it
        needs is off.
        """
        values = {key: self.value(key) for key in read_keys(self.kind)}
        switches = dict(values)
        for key, setting in settings_of(self.kind).items():
            if setting.needs:
                values[key] = switches[key] and switches[setting.needs]
        return self.kind(**values)

    @property
    def names(self) -> StructureNames:
        """Return the parts of the model that it names."""
        values: JsonObject = {}
        places: dict[str, Place] = {}
        for key, name in _STRUCTURE_FIELDS.items():
            sourced = self.stated.get(key, Sourced(None))
            value = sourced.value
            if value is not None:
                values[name] = tuple(value) if isinstance(value, list) else value
            if sourced.place:
                places[name] = sourced.place
        if "scaling" in values:
            groups = zip(values["scaling"], self.groups, strict=True)
            values["scaling"] = tuple(ScalingLayer.of(group, place) for group, place in groups)
        return StructureNames(**values, places=places)


@dataclass(frozen=True)
class ConfigChange:
    """A change of a config that may lose less. A search for gates tries it.

    Attributes:
        text: what it does, as part of a sentence.
        setting: the global setting that it turns on; empty if none.
        algorithm: the entry of an algorithm, which it adds; empty if it adds none.
        fast_finetune: the mode of finetuning that calibrations get; empty if they keep theirs.
        needs_activations: whether activations have to be quantized, or must not be; None if
            either may be.
        most_bits: how many bits the narrowest weights may have.
    """

    text: str
    setting: str = ""
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    fast_finetune: str = ""
    needs_activations: bool | None = None
    most_bits: int = 32


@dataclass(frozen=True)
class ConfigStep:
    """A step of a search for gates: it keeps the best of some changes. Steps of the same name
    are one.

    Attributes:
        name: in tables.
        cost: what it costs to measure and at run time, as words.
        place: in the order from cheap to dear; those of other packages come last.
        changes: in order.
    """

    name: str
    cost: str
    changes: tuple[ConfigChange, ...]
    place: int = 1000
