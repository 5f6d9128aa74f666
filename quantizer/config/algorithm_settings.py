"""How an algorithm's settings are declared: a dataclass is the one definition that file keys,
defaults, schema, pages and the Python API come from. Knows no algorithm; `algorithms.py` is the
table of them.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from quantizer.config.typed_fields import checked

Stage = Literal["rescale", "round"]
A = TypeVar("A", bound="AlgoConfig")


@dataclass
class AlgoConfig:
    """Settings of an algorithm that changes weights: of one that finds codes or ranges of
    weights unless it is a `PreQuantOptConfig`, too.

    `stage` says whether it rescales (the float function stays) or rounds weights, `run` names
    its function as "module:function", or `switch` the setting that has a pass over the graph do
    it, `needs_data` says whether it reads the calibration data. `matrices` is how many float32
    matrices of inputs x inputs of the deepest layer it has in memory at its worst moment, and
    `networks` how many networks it runs side by side. `eases_activations` says that it changes
    weights for the sake of activations that are quantized.
    """

    name: str = ""

    stage: ClassVar[Stage] = "round"
    run: ClassVar[str] = ""
    switch: ClassVar[str] = ""
    needs_data: ClassVar[bool] = True
    matrices: ClassVar[int] = 0
    networks: ClassVar[int] = 1
    eases_activations: ClassVar[bool] = False


@dataclass
class PreQuantOptConfig(AlgoConfig):
    """Settings of an algorithm that changes weights before they are quantized; both lists of a
    config take it.
    """


@dataclass(frozen=True)
class Setting:
    """What a setting is, besides the type and the default that its field has.

    Args:
        description: a sentence for pages and editors.
        needs: a switch that has to be on for this one to be on.
        decided_by: the field of the weights' specification that decides instead of it.
        unread: why nothing reads it, if nothing does.
        is_part: whether it switches a part of the algorithm, which does nothing with all its
            parts off.
        is_searched: whether more than a number is a choice by the error of outputs, that of
            weights included.
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

SHARED: dict[str, Setting] = {}
"""Settings that several algorithms have, by name; a field that says nothing of itself is one of
these.
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
    """A field of settings, with what `Setting` says of it."""
    meant = Setting(description, needs, decided_by, unread, is_part, is_searched, keywords)
    return field(default=default, metadata={"setting": meant})


def algorithm(
    *,
    run: str,
    stage: Stage,
    needs_data: bool = True,
    aliases: Collection[str] = (),
    matrices: int = 0,
    networks: int = 1,
    eases_activations: bool = False,
) -> Callable[[type[A]], type[A]]:
    """A decorator that enters the settings of an algorithm into `ALGORITHMS`, under the default
    of their `name`.

    Args:
        run: "module:function", imported when the algorithm runs.
        aliases: other spellings of its name.
        matrices, networks: what it takes of memory, as `AlgoConfig` says; for the prediction of
            `quantizer plan`.
        eases_activations: whether it has nothing to gain where no activations are quantized.

    Raises (where the class is defined): ValueError: the name is taken, or nothing is said of a
    setting.
    """

    def enter(kind: type[A]) -> type[A]:
        kind.run, kind.stage, kind.needs_data = run, stage, needs_data
        kind.matrices, kind.networks, kind.eases_activations = (
            matrices,
            networks,
            eases_activations,
        )
        known = checked(kind)
        settings_of(known)
        name = known.name
        if name in ALGORITHMS:
            raise ValueError(
                f"the algorithm {name} is registered already, by {ALGORITHMS[name].__name__}"
            )
        ALGORITHMS[name] = known
        ALIASES.update(dict.fromkeys(aliases, name))
        return known

    return enter


def settings_of(kind: type[AlgoConfig]) -> dict[str, Setting]:
    """What is said of each setting, by key, in the order of the fields.

    Raises:
        ValueError: nothing is said of one.
    """
    own = {each.name: each for each in dataclasses.fields(kind) if each.name != "name"}
    if silent := [
        key for key, each in own.items() if "setting" not in each.metadata and key not in SHARED
    ]:
        raise ValueError(
            f"{kind.__name__}.{silent[0]} has no description; give it one with setting(…)"
        )
    return {key: each.metadata.get("setting") or SHARED[key] for key, each in own.items()}


def read_keys(kind: type[AlgoConfig]) -> list[str]:
    """The settings that something reads."""
    return [
        key
        for key, meant in settings_of(kind).items()
        if not meant.unread and not meant.decided_by
    ]


def finds_codes(kind: type[AlgoConfig]) -> bool:
    """Whether the algorithm finds codes or ranges of weights, and so has nothing to do where
    none are quantized.
    """
    return not issubclass(kind, PreQuantOptConfig)
