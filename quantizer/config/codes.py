"""The table of codes of findings: what each means and what to do. Those of the rules come from the spec schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantizer.config.rules import spec_rules


@dataclass(frozen=True)
class Code:
    """A page of `quantizer explain`: a title, why it is so, what to do."""

    title: str
    why: str
    remedy: str


CODES: dict[str, Code] = {
    "QZ001": Code(
        "the file cannot be read",
        "There is no such file, it is a directory, or you are not allowed to read it.",
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
    "QZ004": Code("the file is not JSON", "The grammar is that of RFC 8259.", "Fix the JSON at the caret."),
    "QZ005": Code(
        "comment", "JSON has no comments.", 'Remove it, or make it a key that begins with `//`: `"// note": "…"`.'
    ),
    "QZ006": Code(
        "trailing comma", "JSON has commas between members, but none after the last one.", "Remove the comma."
    ),
    "QZ007": Code("duplicate key", "Programs differ in which of the two they use.", "Keep one of the two."),
    "QZ008": Code(
        "not a finite number",
        "JSON has no NaN or Infinity, and numbers must fit a double.",
        "Write a finite number.",
    ),
    "QZ009": Code(
        "not an object",
        "A config is one JSON object.",
        "Begin with `{`; `quantizer init` writes a config to start from.",
    ),
    "QZ101": Code(
        "not one of the options",
        "The key accepts only a few words.",
        "Write one of the options listed at the caret.",
    ),
    "QZ102": Code(
        "unknown key",
        "A misspelt key would silently have no effect. `$schema` and keys that begin with `//` are allowed.",
        "Write the key that is meant; if a key is there in two spellings, keep one.",
    ),
    "QZ103": Code(
        "wrong type",
        'A value in quotes is a string, whatever it says: `"false"` is a string, `false` a boolean.',
        "Write the value that the help line shows.",
    ),
    "QZ104": Code(
        "out of range", "The number or text is outside what the key allows.", "Write a value inside the range."
    ),
    "QZ105": Code(
        "missing keys",
        "A file must have its global settings and a complete overall_quantize_config; a layer entry must have "
        "quantizable_data_type and a complete overall_quantize_config.",
        "Paste the keys that the help line shows. Their values are those of the wider block, or of the ready config "
        "for the device, changed where the rest of the file requires it.",
    ),
    "QZ106": Code(
        "layer_type or layer_name",
        "A layer entry selects layers by type or by name, so exactly one of the two keys must not be null.",
        "Set the other to null.",
    ),
    "QZ107": Code(
        "listed twice",
        "The order and number of tensor types or layers in a list have no meaning.",
        "Remove the repetition.",
    ),
    "QZ108": Code(
        "parameters that nothing reads",
        "A tensor block is for a tensor type that quantizable_data_type does not list.",
        "List the tensor type, or remove the block.",
    ),
    "QZ109": Code(
        "two entries for one selector",
        "Both entries match the same layers; the later one overrides the earlier one, key by key.",
        "Merge the two entries.",
    ),
    "QZ111": Code(
        "key without effect",
        "Only the percentile method reads `percentage`, and only schemes with an axis or a group size read those; a "
        "floating-point datatype without a scale reads no other parameter; numbers of heads are found on the graph.",
        "Remove the keys.",
    ),
    "QZ112": Code(
        "per_channel applies to weights only",
        "per_channel in an overall block applies to the weights; the other tensors have one scale.",
        'Write `"weights": {"per_channel": true}` in tensor_quantize_config to say the same without the warning.',
    ),
    "QZ113": Code(
        "percentage below 50",
        "The unit is percent: at 0.99 the percentile method keeps one value in a hundred, not 99.",
        "Write 99 for 99 %.",
    ),
    "QZ115": Code(
        "setting for the DPU only",
        "Only the DPU has fix positions; elsewhere, the input of a concatenation or pooling layer keeps its scale.",
        "Remove the key, or set it to false.",
    ),
    "QZ116": Code(
        "another spelling",
        "Older and newer files and other frameworks use other words for some keys, values and layer types.",
        "Nothing has to be done; the help line shows the usual word.",
    ),
    "QZ117": Code(
        "an observer that does not fit",
        "An observer finds one range per tensor, per channel or per group, so it only works with that qscheme.",
        "Write another observer_cls or another qscheme; without an observer_cls, a MinMax observer is used.",
    ),
    "QZ118": Code(
        "not supported",
        "Files written by newer versions have keys that are not supported; they are accepted with their default value.",
        "Remove the key.",
    ),
    "QZ119": Code(
        "one device for the whole model",
        "A layer cannot run on another device than the rest of the model.",
        "Write target_device in global_quant_config only.",
    ),
    "QZ122": Code(
        "a word with another meaning here",
        "Parameters do not change, so their range is found once; one scale for each row of an activation is per_token; "
        "with PerChannelMinMaxObserver, the ch_axis of per_group is the channel axis.",
        "Nothing has to be done; the help line shows what to write to avoid the note.",
    ),
    "QZ123": Code(
        "nothing is quantized",
        "No level has a spec for any tensor, so the network stays in float.",
        'Write a spec, for example `"weight": {"dtype": "int8"}` in global_quant_config.',
    ),
    "QZ124": Code(
        "the other form cannot express it",
        "The forms overlap, but the layered one has no groups, dynamic ranges or scaled floating-point formats; the "
        "hierarchical one has no switches, no statistic over batches and no activations of layers without weights.",
        "Change the value at the caret, or keep the file in its form.",
    ),
    "QZ125": Code(
        "the other form may differ",
        "Whether the two files mean the same depends on the model.",
        "Compare `quantizer plan` with both files.",
    ),
    "QZ126": Code(
        "a setting that another one decides",
        "A switch that needs another one cannot be on without it: desc_act rounds the columns of all groups in turn, "
        "so it needs the scales of all groups before the first one, static_groups. Of two such switches a stated one "
        "beats a default.",
        "Nothing has to be done; the help line has the setting that says it without the note.",
    ),
    "QZ127": Code(
        "not what the weights' specification says",
        "bit, sym and group_size are of older files; how weights are quantized is what their specification says, and "
        "algorithms look for codes of that format.",
        "Remove the key, or change the weights' specification.",
    ),
    "QZ128": Code(
        "an algorithm with nothing to do",
        "awq, gptq, gptaq and qronos find codes of weights, and no weights have a scale. An algorithm whose parts are "
        "all switched off does nothing, such as awq without scale_search and clip_search. A second rotation of the "
        "same values spreads them no better than the first.",
        "Quantize weights, switch a part on, or remove the algorithm.",
    ),
    "QZ210": Code(
        "algorithms on the DPU",
        "The DPU shifts by fix positions: after calibration the scales of weights are moved into its limits, which "
        "would undo what an algorithm found. Equalization, fast finetuning and bias correction know them.",
        "Remove the algorithm, or write another target_device.",
    ),
    "QZ330": Code(
        "scaled after rounding",
        "SmoothQuant, rotation and AWQ change float weights: rounded ones would lose their codes, and the ranges that "
        "AWQ has found would not fit any more.",
        "Write the algorithm before the one that rounds, or before AWQ.",
    ),
    "QZ331": Code(
        "rounded twice",
        "GPTQ, GPTAQ and Qronos each round all weights, so a second one would find nothing left to round.",
        "Keep one of them.",
    ),
    "QZ332": Code(
        "an algorithm in the wrong list",
        "pre_quant_opt_config is about changes of the float network before weights have codes.",
        "Write the algorithm in algo_config.",
    ),
    "QZ333": Code(
        "a switch without the one that it needs",
        "desc_act rounds the columns of all groups in turn, so the scale of a group cannot wait until its first "
        "column is reached: static_groups has to be on.",
        "Set static_groups to true, or desc_act to false.",
    ),
    "QZ402": Code(
        "a selector matches no layer",
        "An entry that matches nothing would silently have no effect.",
        'Write one of the closest names, or `"required": false` in the entry.',
    ),
    "QZ403": Code(
        "two entries of one kind for a layer",
        "Neither selector is more specific than the other; the later entry overrides the earlier one, key by key.",
        "Make one of the selectors more specific, or merge the entries.",
    ),
    "QZ404": Code(
        "a name that is not matched literally",
        "The module in the name has exactly one layer, but the last part of its name differs; that layer is used.",
        "Write the name that the note shows.",
    ),
    "QZ405": Code(
        "an entry changes nothing",
        "Its layers have none of the listed tensors, or stay in float for another reason.",
        "Remove the entry, or list the tensor types that the layers have.",
    ),
    "QZ406": Code(
        "a ch_axis that the tensor does not have",
        "The axis is out of range, or it is the batch axis, whose size differs from call to call.",
        "Write the axis of the channels; negative axes count from the end.",
    ),
    "QZ407": Code(
        "a group size that does not divide",
        "Groups of integers must all have one size; with a shared exponent (mx, bfp16), the last group may be shorter.",
        "Give the listed layers a group size that divides, -1 for the whole axis, or another qscheme; or exclude them.",
    ),
    "QZ408": Code(
        "groups of an activation with fixed scales",
        "Batches differ in shape, and so in the number of rows and groups.",
        "Set is_dynamic to true, or qscheme to per_tensor.",
    ),
    "QZ409": Code(
        "embeddings are quantized, too",
        "The global level applies to every layer with weights of its own. Other tools leave embeddings in float unless "
        "an entry names them.",
        "Add them to exclude to leave them in float, or give them an entry of their own.",
    ),
    "QZ306": Code(
        "integer parameters under a floating-point datatype",
        "The block inherits a floating-point datatype from a wider block, so its keys would have no effect.",
        'Write `"datatype": "int"` beside them, or remove them.',
    ),
    "QZ501": Code(
        "a module that the model does not have",
        "Names of blocks and embeddings are paths in the model; the others are relative to a block, and each must be "
        "found in at least one block.",
        "Write one of the closest names; `quantizer inspect --algorithms` shows them.",
    ),
    "QZ502": Code(
        "no blocks",
        "Blocks are the modules in one container, such as `model.layers`.",
        "Write the container's path in model_decoder_layers.",
    ),
    "QZ503": Code(
        "layers in another order than they run",
        "A layer is rounded on what the quantized layers before it make.",
        "List the layers in the order of the help line.",
    ),
    "QZ504": Code(
        "layers that do not read one value",
        "A factor on the channels of a value changes all layers of the entry alike, so all of them must read it, and "
        "a layer stands in one entry.",
        "Make an entry of each value; `quantizer inspect --algorithms` shows which layers read one.",
    ),
    "QZ505": Code(
        "a prev_op that does not feed the layers",
        "The factors of prev_op would affect other layers than those of the entry.",
        'Write the module that the help line names, or `""` to have it found on the graph.',
    ),
}


def all_codes() -> Mapping[str, Code]:
    """Every code in order: this table and the rules of the spec schema."""
    rules = {code: Code(rule["title"], rule["description"], rule["help"]) for code, rule in spec_rules().items()}
    return dict(sorted({**CODES, **rules}.items()))
