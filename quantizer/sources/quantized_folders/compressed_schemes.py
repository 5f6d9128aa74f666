"""Find the scheme of a layer in the `quantization_config` of compressed-tensors.

Source: the package compressed-tensors, 0.15 to 0.20.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantizer.config.patterns import matching_limit
from quantizer.config.typed_fields import fits
from quantizer.config.wording import quoted
from quantizer.errors import ModelError
from quantizer.numerics.granularity import BlockSize
from quantizer.sources.files.transformers_folder import FLOAT_FOLDER_HELP
from quantizer.sources.quantized_folders.float_readers import read_block_size
from quantizer.sources.quantized_folders.stored_layer import MethodSettings

_PATTERN = "re:"
_BITS = tuple(range(1, 9))
_WEIGHT_TYPES = ("int", "float")
_KNOWN_STATUSES = ("compressed", "frozen", None)


@dataclass(frozen=True)
class WeightScheme:
    """How the weights of some layers are quantized.

    Attributes:
        targets: names, patterns and classes of the layers.
        number_type: "int" or "float".
        bits: the width of codes.
        symmetric: whether there are no zero points.
        group_size: the number of inputs that share a scale; None for whole rows.
        block_size: the size of blocks that share a scale; None if it is not by blocks.
    """

    targets: Sequence[str]
    number_type: str
    bits: int
    symmetric: bool
    group_size: int | None
    block_size: BlockSize | None

    def names(self, path: str) -> bool:
        """Return whether a name or a pattern of the targets is that of a layer."""
        for target in self.targets:
            pattern = target.removeprefix(_PATTERN)
            if pattern == target:
                is_named = target == path
            else:
                with matching_limit(pattern, ModelError):
                    is_named = re.match(pattern, path) is not None
            if is_named:
                return True
        return False


@dataclass(frozen=True)
class WeightSchemes:
    """The schemes of a folder."""

    settings: MethodSettings
    schemes: Sequence[WeightScheme]

    @classmethod
    def of(cls, settings: MethodSettings) -> "WeightSchemes":
        """Return the schemes of `config_groups`.

        Raises:
            ModelError: they cannot be read, or something else than codes is stored.
        """
        _require_only_codes(settings)
        groups = settings.fields.get("config_groups")
        if not isinstance(groups, dict):
            raise settings.refusal("config_groups", groups, "an object")
        schemes: list[WeightScheme] = []
        for name, group in groups.items():
            if not isinstance(group, dict):
                raise settings.refusal(f"config_groups.{name}", group, "an object")
            if group.get("weights") is not None:
                schemes.append(_scheme_of(settings, name, group))
        return cls(settings, schemes)

    def scheme_of(self, path: str) -> WeightScheme:
        """Return the scheme of a layer: the one that names it, or the one of its class.

        Raises:
            ModelError: there is none.
        """
        for scheme in self.schemes:
            if scheme.names(path):
                return scheme
        of_classes = [
            scheme
            for scheme in self.schemes
            if any(target.isidentifier() for target in scheme.targets)
        ]
        class_name = "Embedding" if "embed" in path.rpartition(".")[2] else "Linear"
        for scheme in of_classes:
            if class_name in scheme.targets:
                return scheme
        if len(of_classes) == 1:
            return of_classes[0]
        raise ModelError(
            f"{self.settings.file}: no group in config_groups has {path} as a target, which is "
            "stored as codes",
            help="give the config.json that was saved with these weights",
        )


def _require_only_codes(settings: MethodSettings) -> None:
    """Check that weights are neither sparse nor transformed.

    Raises:
        ModelError: they are, or they are in a state that the format does not name.
    """
    settings.one_of("quantization_status", _KNOWN_STATUSES)
    sparsity = settings.fields.get("sparsity_config") or {}
    sparse_format = sparsity.get("format") if isinstance(sparsity, dict) else None
    if sparse_format not in (None, "dense"):
        raise settings.refusal("sparsity_config.format", sparse_format, '"dense"')
    transforms = settings.fields.get("transform_config") or {}
    if not isinstance(transforms, dict) or transforms.get("config_groups"):
        raise ModelError(
            f"{settings.file}: the quantized model transforms values while it runs "
            "(transform_config), so its weights alone are not a model",
            help=FLOAT_FOLDER_HELP,
        )


def _scheme_of(settings: MethodSettings, name: str, group: dict[str, Any]) -> WeightScheme:
    """Return the scheme of a group.

    Raises:
        ModelError: it cannot be read.
    """
    place = f"config_groups.{name}"
    targets: Any = group.get("targets")
    if not fits(targets, list[str]):
        raise settings.refusal(f"{place}.targets", targets, "a list of names")
    for target in targets:
        _require_pattern(settings, target)
    fields = group["weights"]
    if not isinstance(fields, dict):
        raise settings.refusal(f"{place}.weights", fields, "an object")
    weights = MethodSettings(settings.file, fields)
    block_size = None
    if fields.get("strategy") == "block":
        block_size = read_block_size(weights, "block_structure")
    return WeightScheme(
        targets=targets,
        number_type=weights.one_of("type", _WEIGHT_TYPES, "int"),
        bits=weights.one_of("num_bits", _BITS, 8),
        symmetric=weights.one_of("symmetric", [True, False], True),
        group_size=weights.group_size(),
        block_size=block_size,
    )


def _require_pattern(settings: MethodSettings, target: str) -> None:
    """Check that a target that is a pattern can be matched.

    Raises:
        ModelError: it cannot.
    """
    pattern = target.removeprefix(_PATTERN)
    if pattern == target:
        return
    try:
        re.compile(pattern)
    except re.error as error:
        message = f"{settings.file}: the target {quoted(target)} is not a regular expression"
        raise ModelError(f"{message}: {error}", help=FLOAT_FOLDER_HELP) from error
