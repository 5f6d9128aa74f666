"""Declare the settings of algorithms. Each algorithm has one dataclass, from which its keys in
files, defaults, schema, pages and Python API are generated. `algorithms.py` has them all.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from quantizer.config.typed_fields import type_checked

AlgorithmStage = Literal["rescale", "round"]
_AlgoConfigT = TypeVar("_AlgoConfigT", bound="AlgoConfig")


@dataclass
class AlgoConfig:
    """Settings of an algorithm that changes weights.

    Subclasses of `PreQuantOptConfig` are for algorithms that change float weights. Other
    algorithms find codes or ranges of weights.

    Attributes:
        name: the algorithm's name in files.
        stage: "rescale" if it keeps the network's float function, "round" if it rounds weights.
        run: its function, as "module:function".
        switch: the global setting that turns on a pass over the graph, for an algorithm that is
            a pass and has no `run`.
        needs_data: whether it reads the calibration data.
        matrices: how many float32 matrices of inputs x inputs of the deepest layer it has in
            memory at its peak.
        networks: how many networks it runs side by side.
        eases_activations: whether it changes weights for the sake of quantized activations.
        needs_groups: whether it changes weights in groups only.
    """

    name: str = ""

    stage: ClassVar[AlgorithmStage] = "round"
    run: ClassVar[str] = ""
    switch: ClassVar[str] = ""
    needs_data: ClassVar[bool] = True
    matrices: ClassVar[int] = 0
    networks: ClassVar[int] = 1
    eases_activations: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False


@dataclass
class PreQuantOptConfig(AlgoConfig):
    """Settings of an algorithm that changes weights before they are quantized. It may be in
    either list of algorithms of a config.
    """


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


ALGORITHMS: dict[str, type[AlgoConfig]] = {}
"""The settings of each algorithm, by its name in a file."""

ALIASES: dict[str, str] = {}
"""Other spellings of these names."""

SHARED_SETTINGS: dict[str, Setting] = {}
"""Settings that several algorithms have, by name. A field that is not declared with `setting`
must be one of them.
"""


def setting(
    default: Any,
    description: str,
    *,
    needs: str = "",
    decided_by: str = "",
    unread: str = "",
    is_part: bool = False,
    is_searched: bool = False,
    **keywords: Any,
) -> Any:
    """Return a dataclass field of settings; the arguments are those of `Setting`."""
    meaning = Setting(
        description,
        needs=needs,
        decided_by=decided_by,
        unread=unread,
        is_part=is_part,
        is_searched=is_searched,
        keywords=keywords,
    )
    return field(default=default, metadata={"setting": meaning})


def algorithm(
    *,
    run: str,
    stage: AlgorithmStage,
    needs_data: bool = True,
    aliases: Collection[str] = (),
    matrices: int = 0,
    networks: int = 1,
    eases_activations: bool = False,
    needs_groups: bool = False,
) -> Callable[[type[_AlgoConfigT]], type[_AlgoConfigT]]:
    """Return a decorator that registers a class of settings in `ALGORITHMS`, by the default of
    its field `name`.

    Args:
        run: "module:function", imported when the algorithm runs.
        aliases: other spellings of its name.
        matrices, networks: its peak memory, as `AlgoConfig` says; `quantizer plan` predicts
            with it.
        eases_activations: whether it has nothing to gain where no activations are quantized.
        needs_groups: whether it has nothing to do where no weights are in groups.

    Raises (where the class is defined):
        ValueError: the name is taken, or a setting has no description.
    """

    def enter(kind: type[_AlgoConfigT]) -> type[_AlgoConfigT]:
        """Write the facts of the algorithm into its settings class, and register it."""
        kind.run = run
        kind.stage = stage
        kind.needs_data = needs_data
        kind.matrices = matrices
        kind.networks = networks
        kind.eases_activations = eases_activations
        kind.needs_groups = needs_groups
        settings_of(kind)
        name = kind.name
        if name in ALGORITHMS:
            raise ValueError(
                f"the algorithm {name} is registered already, by {ALGORITHMS[name].__name__}"
            )
        ALGORITHMS[name] = type_checked(kind)
        ALIASES.update(dict.fromkeys(aliases, name))
        return kind

    return enter


def settings_of(kind: type[AlgoConfig]) -> dict[str, Setting]:
    """Return the meaning of each setting, by key, in the order of the fields.

    Raises:
        ValueError: a setting has no description.
    """
    settings: dict[str, Setting] = {}
    for declared in dataclasses.fields(kind):
        key = declared.name
        if key == "name":
            continue
        setting = declared.metadata.get("setting") or SHARED_SETTINGS.get(key)
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
