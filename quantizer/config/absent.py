"""Find the plug-ins that a config or results need and that are not there. The schemas name the
plug-in of each key and algorithm. Imports no torch.
"""

from collections.abc import Mapping
from typing import Any

from quantizer.config.diagnostics import Diagnostic, Diagnostics, Place
from quantizer.config.document.document import ValidDocument
from quantizer.config.forms.algorithm_words import read_names
from quantizer.config.forms.form import ALGORITHM_LISTS, block_of
from quantizer.config.json_types import JsonMapping
from quantizer.config.resources import load_resource
from quantizer.plugins import absent


def _absent_plugin(entry: JsonMapping) -> str:
    """Return the plug-in that an entry of a schema needs, if it is not there; else ""."""
    name: str = entry.get("plugin", "")
    return name if name and absent(name) else ""


def plugin_of_setting(key: str) -> str:
    """Return the plug-in that a global setting needs, if it is not there; else ""."""
    return _absent_plugin(block_of("layered")["properties"].get(key, {}))


def plugin_of_algorithm(name: str) -> str:
    """Return the plug-in that an algorithm needs, if it is not there; else ""."""
    return _absent_plugin(block_of("hierarchical")["definitions"].get(name, {}))


def plugin_of_results(key: str) -> str:
    """Return the plug-in that an entry of the header of results needs, if it is not there; else
    "".
    """
    header = load_resource("schemas", "quant_info.schema.json")["properties"]["header"]
    return _absent_plugin(header["properties"].get(key, {}))


def remedy(plugin: str) -> str:
    """Return how to get a plug-in that is not there."""
    return f"install a quantizer that has the plug-in {plugin}"


def check_present(document: ValidDocument) -> Diagnostics:
    """Yield an error for each setting that is on and each algorithm without its plug-in."""
    for key, value in document.document.value.items():
        plugin = plugin_of_setting(key) if value is True else ""
        if plugin:
            yield _missing(key, plugin, document.place(key), "set it to false")
    for name, place in read_names(document, "algorithms", *ALGORITHM_LISTS):
        plugin = plugin_of_algorithm(name)
        if plugin:
            yield _missing(name, plugin, place, "remove it")


def _missing(word: str, plugin: str, place: Place | None, otherwise: str) -> Diagnostic:
    text = f"{word} needs the plug-in {plugin}, which is not there"
    return Diagnostic("QZ118", text, place, help=f"{otherwise}, or {remedy(plugin)}")


def missing_of_results(header: Mapping[str, Any]) -> list[str]:
    """Return the plug-ins that results were made with and that are not there.

    Args:
        header: of the results.
    """
    found = [plugin_of_setting(key) for key, value in header["settings"].items() if value]
    found += [plugin_of_algorithm(entry["name"]) for entry in header["algorithms"]]
    found += [plugin_of_results(key) for key, value in header.items() if value]
    return [name for name in dict.fromkeys(found) if name]
