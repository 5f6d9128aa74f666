"""The table of diagnostic codes: what each means and what to do. Those of the rules come from the spec schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantizer.config.resources import load_resource


@dataclass(frozen=True)
class Code:
    """A page of `quantizer explain`: a title, why it is so, what to do."""

    title: str
    why: str
    remedy: str


CODES: dict[str, Code] = {
    "QZ001": Code(
        "the file cannot be read",
        "There is no such file, or it is a directory, or its rights forbid reading.",
        "Check the path.",
    ),
    "QZ002": Code(
        "the file is not UTF-8",
        "JSON is exchanged in UTF-8; a byte order mark at its start is accepted.",
        "Save the file as UTF-8.",
    ),
    "QZ003": Code(
        "the file is over a limit",
        "A config has at most 1 MB and 64 levels of nesting.",
        "Check that it is the right file.",
    ),
    "QZ004": Code("the file is not JSON", "The grammar is that of RFC 8259.", "Mend the place under the caret."),
    "QZ005": Code(
        "comment", "JSON has no comments.", 'Remove it, or write a key that begins with `//`: `"// note": "…"`.'
    ),
    "QZ006": Code("trailing comma", "JSON has a comma between members, none after the last.", "Remove the comma."),
    "QZ007": Code("duplicate key", "Readers of JSON differ in which of the two they take.", "Keep one of the two."),
    "QZ008": Code(
        "not a finite number",
        "JSON has no NaN and no Infinity, and numbers stay within the range of a double.",
        "Write a finite number.",
    ),
    "QZ009": Code(
        "not an object",
        "A config is one JSON object.",
        "Begin with `{`; `quantizer init` writes a config to start from.",
    ),
    "QZ101": Code(
        "not one of the options",
        "The key takes one of a few words.",
        "Write one of the options listed under the caret.",
    ),
    "QZ102": Code(
        "unknown key",
        "A misspelt key would change nothing, silently. `$schema` and keys that begin with `//` are allowed.",
        "Write the key that is meant.",
    ),
    "QZ103": Code(
        "wrong type",
        'JSON types are JSON types: `"false"` is a string, `false` a boolean.',
        "Write the literal that the help line shows.",
    ),
    "QZ104": Code(
        "out of range", "The number or the text is outside what the key allows.", "Write a value inside the range."
    ),
    "QZ105": Code(
        "missing keys",
        "A file states its global settings and a complete overall_quantize_config; "
        "a layer entry states quantizable_data_type and a complete overall_quantize_config.",
        "Paste the keys that the help line shows; `quantizer validate --fix` writes them.",
    ),
    "QZ106": Code(
        "layer_type or layer_name",
        "A layer entry selects by type or by name: exactly one of the two is not null.",
        "Set the other to null.",
    ),
    "QZ107": Code("listed twice", "A list of tensor types is a set.", "Remove the repetition."),
    "QZ108": Code(
        "parameters that nothing reads",
        "A tensor block is about a tensor type that quantizable_data_type does not list.",
        "List the tensor type, or remove the block.",
    ),
    "QZ109": Code(
        "two entries for one selector",
        "Both entries match the same layers; key by key the later one wins.",
        "Make one entry of the two.",
    ),
    "QZ111": Code(
        "key without effect",
        "`percentage` is read by the percentile method only; a floating-point datatype reads no other parameter.",
        "Remove the keys.",
    ),
    "QZ112": Code(
        "per_channel holds for weights only",
        "per_channel in an overall block holds for the weights; the other tensors have one scale.",
        'Write `"weights": {"per_channel": true}` in tensor_quantize_config to say the same without the warning.',
    ),
    "QZ113": Code(
        "percentage below 50",
        "The percentage is in percent: at 0.99 the percentile method keeps one value in a hundred, not 99.",
        "Write 99 for 99 %.",
    ),
    "QZ114": Code(
        "the other file form",
        "Keys such as global_quant_config and layer_quant_config belong to a form that this version does not read.",
        "Write the file in the form that is read; `quantizer init` writes one to start from.",
    ),
    "QZ115": Code(
        "setting for the DPU only",
        "Only the DPU shifts by fix positions; elsewhere what a concat or a pooling layer reads keeps its scale.",
        "Remove the key, or set it to false.",
    ),
    "QZ402": Code(
        "a selector matches no layer",
        "A rule that silently matches nothing would be lost.",
        'Write one of the closest names, or `"required": false` in the entry.',
    ),
    "QZ403": Code(
        "two equally strong entries for one layer",
        "Both selectors are of the same kind; key by key the later entry wins.",
        "Make one selector more exact, or one entry of the two.",
    ),
    "QZ404": Code(
        "a name that is not taken literally",
        "The scope of the name has exactly one layer, though its last part differs; that layer is taken.",
        "Write the name that the note shows.",
    ),
    "QZ405": Code(
        "an entry changes nothing",
        "Its layers have none of the listed tensors, or they stay in float for another reason.",
        "Remove the entry, or list the tensor types that the layers have.",
    ),
    "QZ406": Code(
        "a ch_axis that the tensor does not have",
        "The axis is out of range, or it is the batch, whose size differs from call to call.",
        "Write the axis of the channels; a negative one counts from the end.",
    ),
    "QZ407": Code(
        "a group size that does not divide",
        "Groups of integers are all of one size. Blocks with a shared exponent (mx, bfp16) may end with a shorter one.",
        "Give the listed layers a group size that divides, -1 for the whole axis, or another qscheme; or exclude them.",
    ),
    "QZ408": Code(
        "groups of an activation with fixed scales",
        "Batches differ in shape, and so in how many rows and groups they have.",
        "Set is_dynamic to true, or qscheme to per_tensor.",
    ),
    "QZ409": Code(
        "embeddings are quantized, too",
        "The global block holds for every layer with weights of its own. Other tools leave embeddings float unless "
        "an entry names them.",
        "Add them to exclude to leave them float, or give them an entry of their own.",
    ),
    "QZ306": Code(
        "integer parameters under a floating-point datatype",
        "A wider block sets a floating-point datatype, which the block inherits; its keys would have no effect.",
        'Write `"datatype": "int"` beside them, or remove them.',
    ),
}


def all_codes() -> Mapping[str, Code]:
    """Every code in order: this table and the rules of the spec schema."""
    schema = load_resource("schemas", "quantization_spec.schema.json")
    rules = {rule["code"]: Code(rule["title"], rule["description"], rule["help"]) for rule in schema["then"]["allOf"]}
    return dict(sorted({**CODES, **rules}.items()))
