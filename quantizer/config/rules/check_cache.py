"""Check what a file of the hierarchical form says of the key-value cache."""

from quantizer.config.diagnostics import Diagnostic, Diagnostics
from quantizer.config.document.document import pointer_to
from quantizer.config.forms.hierarchical import CACHE_BLOCK, Hierarchical
from quantizer.config.wording import quoted

_GROUP = "kv_cache_group"


def check_cache(levels: Hierarchical) -> Diagnostics:
    """Yield scales of heads where heads are not apart, and cached layers without a spec."""
    yield from _heads_before_rotation(levels)
    yield from _unspecified(levels)


def _heads_before_rotation(levels: Hierarchical) -> Diagnostics:
    """Yield each spec with a scale for each head, if it is about the outputs of layers."""
    for level in levels.levels:
        if level.selector.kind != "cache_source":
            continue
        words = level.merged("activation")
        if words.scheme != "per_channel" or words.is_per_token:
            continue
        path = (*level.pointer, "output_tensors", "qscheme")
        if pointer_to(*path) not in levels.document:
            path = (*level.pointer, "output_tensors", "observer_cls")
        yield Diagnostic(
            "QZ335",
            "before the rotation, the outputs of a layer are not split into heads, so that "
            "these cannot have a scale each",
            levels.document.place(pointer_to(*path)),
            help='write "kv_cache_post_rope": true, or "qscheme": "per_tensor"',
        )


def _unspecified(levels: Hierarchical) -> Diagnostics:
    """Yield each item of the list of cached layers that has no entry."""
    document = levels.document.value
    names = document.get(_GROUP)
    if not isinstance(names, list):
        return
    specified = document.get(CACHE_BLOCK)
    if not isinstance(specified, dict):
        specified = {}
    for index, name in enumerate(names):
        if not isinstance(name, str) or name in specified:
            continue
        yield Diagnostic(
            "QZ336",
            f"{quoted(name)} is listed as cached, and {CACHE_BLOCK} has no entry of that name",
            levels.document.place(pointer_to(_GROUP, index)),
            help=f'write "{name}": {{"output_tensors": {{"dtype": "fp8_e4m3"}}}} in '
            f"{CACHE_BLOCK}",
        )
