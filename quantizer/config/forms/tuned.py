"""Writes into a config's document what a search has changed in it, as comments."""

from collections.abc import Sequence

from quantizer.config.json_types import JsonMapping, JsonObject

_CHANGES_KEY = "// quantizer tune"
_OPTION_KEY = "// calibrate with"
_AFTER = ("$schema", "//")
"""The keys that stay before the comments."""


def with_tuning_comments(
    document: JsonMapping, changes: Sequence[str], fast_finetune: str | None
) -> JsonObject:
    """Return the document with the changes as a comment, and with the option that calibration
    needs besides the config, if any.

    Changes of an earlier search stay in the list.
    """
    earlier = document.get(_CHANGES_KEY) or []
    comments: JsonObject = {}
    if earlier or changes:
        comments[_CHANGES_KEY] = [*earlier, *changes]
    if fast_finetune is not None:
        comments[_OPTION_KEY] = f"--fast_finetune {fast_finetune}"
    before: JsonObject = {}
    after: JsonObject = {}
    for key, value in document.items():
        if key in (_CHANGES_KEY, _OPTION_KEY):
            continue
        if key in _AFTER and not after:
            before[key] = value
        else:
            after[key] = value
    return {**before, **comments, **after}
