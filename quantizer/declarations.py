"""What plug-ins declare: values without functions of their own. Imports no torch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quantizer.option_words import Option, Sentence, marked
from quantizer.rows import NumberFormat, RangeMethod

HIGHER = "higher"
LOWER = "lower"
DROP = "_drop"
"""The end of the names of metrics that are the loss of quality of another one."""
RISE = "_rise"
"""The same for another one of which less is better; `DROP` is its other name."""
RATIO = "_ratio"
"""The end of the names of metrics that are the quotient of the quantized and the float one."""
LATENCY = "latency_ms"
FILE_SIZE = "file_mb"
"""The metric of the time of a call."""
FIT_INPUTS = "fits a config to the inputs of linear layers"
"""What a part does: it adds an algorithm to a config that is fitted to a model."""
_TRANSPOSED_LINEAR = "Conv1D"
"""The linear layers of GPT-2, whose weights are transposed."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetOption:
    """An option of a target, on the command line and in Python.

    `values` are what it may be, the default first. With `is_file` any path is a value, too, and
    with `is_text` any text, which `metavar` stands for. `alone` are values with which no other
    target is written. `goes_with` is an option and those of its values with which this option
    has an effect. Help shows it with `--to`; the default of a text is not printed there.
    """

    name: str
    target: str
    help: str
    values: tuple[str, ...]
    is_file: bool = False
    is_text: bool = False
    metavar: str = "NAME,..."
    alone: tuple[str, ...] = ()
    goes_with: tuple[str, tuple[str, ...]] | None = None

    @property
    def default(self) -> str:
        """Return the value that holds if none is given."""
        return self.values[0]


@dataclass(frozen=True)
class ExportTarget:
    """One kind of file or folder, written by the class `exporter` ("module:name").

    Attributes:
        reader: what reads the file back to verify it, for sentences.
        needs: packages, which the extra `extra` installs.
        for_transformers: whether it takes models of transformers only.
        plainly: how `reader` runs the file besides its default settings.
        by_tensor: whether it needs only one weight in memory at a time.
        plans_alone: whether a plan can be checked without these packages.
        int8_share: the metric of the share of multiplications in int8; empty if there is none.
            That of multiply-adds has the same name with `_multiply_adds`.
        is_timed: whether the speed of its file is measured.
        holds_negative_scales: whether the scale of a weight may be negative.
        holds_whole_model: whether its folder has all tensors of a model, also those that no
            data reach.
        offered_for: what errors of other targets offer it for: "weights" of any network, a
            "network", or a "program" with any operators; empty if they do not.
        holds_modules: whether `--to` can write it for modules without a trace.
        modules_exporter: the function ("module:name") that writes the file of modules; empty
            if their state is stored.
    """

    exporter: str
    suffix: str
    reader: str
    needs: tuple[str, ...] = ()
    extra: str = ""
    for_transformers: bool = False
    by_tensor: bool = False
    plainly: str = "without optimizations"
    plans_alone: bool = False
    int8_share: str = ""
    is_timed: bool = False
    holds_negative_scales: bool = False
    holds_whole_model: bool = False
    offered_for: str = ""
    holds_modules: bool = False
    modules_exporter: str = ""
    options: tuple[TargetOption, ...] = ()

    @property
    def int8_metrics(self) -> tuple[str, ...]:
        """Return the metrics of the shares in int8: of multiplications, and of multiply-adds.

        >>> ExportTarget("a:B", ".a", "A", int8_share="a_int8_share").int8_metrics
        ('a_int8_share', 'a_int8_multiply_adds')
        """
        if not self.int8_share:
            return ()
        return self.int8_share, self.int8_share.replace("_share", "_multiply_adds")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return all metrics that are measured on its file."""
        timed = (LATENCY,) if self.is_timed else ()
        return (*self.int8_metrics, *timed, FILE_SIZE)


@dataclass(frozen=True)
class CheckedTarget:
    """What a file is checked for before calibration: a target with values of its options."""

    target: str
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> Sentence:
        """Return the options of test mode that write it.

        >>> print(CheckedTarget("onnx", {"onnx_profile": "npu"}).words)
        --to onnx --onnx_profile npu
        """
        choices = [Option(name, (value,)) for name, value in self.choices.items()]
        return Sentence(marked(Option("deploy", (self.target,)), *choices))


@dataclass(frozen=True)
class Destination:
    """What one value of `--to` stands for.

    Attributes:
        made: what is written, for sentences.
        preset: the config to start from.
        without_data: the preset if there is no calibration data; None if data is needed.
        target: of a network.
        transformers_target: the same for a model of transformers; None if it is `target` too.
        gain: the advice after a run without data; empty if data would change nothing.
        choices: values of the target's options, by name.
        if_slower: those with which the file is made again if it is slower than in float.
        wider: the destination with more bits, if `--max_mb` can choose the width of each weight
            of a model of transformers; otherwise empty.
        smaller: presets with fewer bits, the largest first, of which `--max_mb` takes one.
        stands_for: "network" or "language model" if it is where these go by default.
        also: other names for it, with the preset that each stands for; empty for `preset`.
    """

    made: str
    preset: str
    target: str
    without_data: str | None = None
    transformers_target: str | None = None
    gain: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    if_slower: Mapping[str, str] = field(default_factory=dict)
    wider: str = ""
    smaller: tuple[str, ...] = ()
    stands_for: str = ""
    also: Mapping[str, str] = field(default_factory=dict)

    def target_of(self, model: Any) -> str:
        """Return the target of a model."""
        is_of_transformers = callable(getattr(model, "save_pretrained", None))
        if not is_of_transformers or self.transformers_target is None:
            return self.target
        classes = {type(module).__name__ for module in model.modules()}
        if _TRANSPOSED_LINEAR in classes:
            _logger.warning(
                "%s has layers of the class %s, for which %s has no place: the target %s "
                "is written instead",
                type(model).__name__,
                _TRANSPOSED_LINEAR,
                self.transformers_target,
                self.target,
            )
            return self.target
        return self.transformers_target

    def choices_if_slower(self, given: Mapping[str, Any]) -> Mapping[str, str]:
        """Return `if_slower`, or nothing if one of its options is among those that the user has
        given.
        """
        if any(given.get(name) is not None for name in self.if_slower):
            return {}
        return self.if_slower

    def improvement(self, *, has_data: bool) -> str:
        """Return what would lose less than this run; empty if that is not known."""
        return "" if has_data else self.gain


@dataclass(frozen=True)
class MetricWords:
    """What a metric is.

    Attributes:
        unit: the unit or the range of its values.
        better: "higher" or "lower", or how the direction is decided.
        meaning: a phrase.
        short: the same for the page, where a formula or an explanation is left out; empty if
            `meaning` is short.
        of: "floats" for what any test measures of floating-point outputs, "outputs" for what it
            measures of others.
        is_pooled: whether it is of all outputs together, and so equals another one where a
            network has one output.
    """

    unit: str
    better: str
    meaning: str
    short: str = ""
    of: Literal["", "floats", "outputs"] = ""
    is_pooled: bool = False


def int8_share_metrics(target: str, engine: str, more: str = "") -> dict[str, MetricWords]:
    """Return the metrics of the multiplications that an engine does in int8.

    Args:
        target: the target whose file it runs.
        engine: its name.
        more: the end of the first sentence.
    """
    share = (
        f"with `--to {target}`: the share of multiplications that {engine} does in int8{more}"
    )
    multiply_adds = (
        "the share of the multiply-adds of these multiplications that are in int8, for the "
        "first batch"
    )
    return {
        f"{target}_int8_share": MetricWords("0 to 1", HIGHER, share),
        f"{target}_int8_multiply_adds": MetricWords("0 to 1", HIGHER, multiply_adds),
    }


@dataclass(frozen=True)
class ListedAlgorithm:
    """An algorithm that configs may list.

    Attributes:
        settings: the class of its settings ("module:Class"), which imports no torch.
        aliases: other spellings of its name.
        switch: the global setting that turns it on, if it is a pass. The layered form has that
            setting instead.
    """

    settings: str
    aliases: tuple[str, ...] = ()
    switch: str = ""


@dataclass(frozen=True)
class GraphPass:
    """A rewrite of the graph before planning.

    Attributes:
        function: "module:function", from a graph to a graph.
        setting: the setting that switches it on, None if it always runs.
        device: the device that needs it, None if all do.
        changes: its effect on the float function. "nothing"; "tails" changes only values that
            batch norms have hardly seen; the config asks for "on purpose". "device" computes as
            the device does. Test mode compares layers with a float network without the passes
            of a device.
        tolerance: the largest difference of outputs, as a share of the largest output, of a
            pass that changes nothing or tails.
        summary: a sentence on its `Graph.changes`, with their count and the largest amount.
        decision: the name under which results keep what was decided for it on data. The
            function takes that, too.
        decide: "module:function" of a graph before this pass and batches, which decides it.
    """

    function: str
    setting: str | None = None
    device: str | None = None
    changes: Literal["nothing", "tails", "on purpose", "device"] = "nothing"
    tolerance: float = 1e-5
    summary: str = ""
    decision: str = ""
    decide: str = ""


@dataclass(frozen=True)
class CalibrationStep:
    """A step of the calibration; see `quantizer.calibration.request`.

    Attributes:
        stage: where it runs.
        run: "module:name" of a function from a request and a state to a state, or of a
            `Decision`. It is imported when it runs.
        when: returns, for a request and a state, whether it runs. It imports no torch.
        keeps: the name under which results keep what it has done or decided; empty if nothing.
        setting: the setting that it serves.
        why_data: why the results cannot be made from statistics alone; empty if they can.
    """

    stage: str
    run: str
    when: Callable[[Any, Any], bool]
    keeps: str = ""
    setting: str = ""
    why_data: str = ""


@dataclass(frozen=True)
class DataKind:
    """A kind of data that `--data` names, by files or by a word.

    Attributes:
        name: the plural, for sentences.
        one: the singular.
        opener: the function ("module:name") that returns the `Batches` of a `NamedData`.
        suffixes: of its files. Another plug-in may add some with a kind of the same name.
        word: that `--data` begins with; empty for files.
        form: how `--data` names it; empty for files of which only the suffixes are named.
        options: those that this kind reads, and not each kind, with their help.
        refusal: what errors say of other data if one of the options is given, and the help.
        is_synthetic: whether the data are made from the model.
        advice: for errors about missing data; empty if there is none.
        has_class_folders: whether a folder may have a folder of files for each label.
        batch_size: samples of a batch, if it is not the usual one.
    """

    name: str
    one: str = ""
    opener: str = ""
    suffixes: tuple[str, ...] = ()
    word: str = ""
    form: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    refusal: tuple[str, str] = ("", "leave out the option")
    is_synthetic: bool = False
    advice: str = ""
    has_class_folders: bool = False
    batch_size: int | None = None


@dataclass(frozen=True)
class ModelKind:
    """A kind of model that `--model` names by a path.

    Attributes:
        form: how `--model` names it, for sentences.
        loader: the function ("module:name") that returns the `LoadedModel` of a text, given
            `trust`.
        is_named_by: whether a text of `--model` names one. It imports and opens nothing.
        defers_weights: whether weights stay in their files until a layer needs them.
    """

    form: str
    loader: str
    is_named_by: Callable[[str], bool]
    defers_weights: bool = False


@dataclass(frozen=True)
class Command:
    """One command of the command line.

    Attributes:
        function: the command of click ("module:name").
        help: its line in `--help`.
        place: in the list of commands; those of other packages come last.
    """

    function: str
    help: str
    place: int = 1000


@dataclass(frozen=True)
class Plugin:
    """What a plug-in adds.

    Attributes:
        name: of the plug-in.
        rank: its place in lists; those of other packages come last.
        needs: names of plug-ins without which it cannot work. Without them it is not there.
        targets: the kinds of files, by name.
        profiles: targets with values of their options, by name.
        destinations: the values of `--to`, by name.
        about_destinations: a sentence on them for `--help`.
        metrics: what it measures, by name.
        algorithms: what configs may list, by name.
        passes: of the graph, by name.
        steps: of the calibration.
        search: its step of a search for gates ("module:name" of a `ConfigStep`).
        data: the kinds of data of `--data`.
        models: the kinds of models of `--model`. The first that a text names loads it.
        parts: functions ("module:name") by what they do, for other plug-ins and the core.
        options: the help of options of a run, besides those of its data, that only it reads.
        packages: what it imports, by the extra that installs it.
        range_methods: the values of `method`, by name.
        formats: the number formats, by name.
        operators: "module:name" of rows for the table of operators (`graph/op_row`).
        commands: of the command line, by name.
        report: functions ("module:name") that show the content of report.json: its "page", its
            "plots" and its "events" for TensorBoard.
    """

    name: str
    rank: int = 1000
    needs: tuple[str, ...] = ()
    targets: Mapping[str, ExportTarget] = field(default_factory=dict)
    profiles: Mapping[str, CheckedTarget] = field(default_factory=dict)
    destinations: Mapping[str, Destination] = field(default_factory=dict)
    about_destinations: str = ""
    metrics: Mapping[str, MetricWords] = field(default_factory=dict)
    algorithms: Mapping[str, ListedAlgorithm] = field(default_factory=dict)
    passes: Mapping[str, GraphPass] = field(default_factory=dict)
    steps: tuple[CalibrationStep, ...] = ()
    search: str = ""
    data: tuple[DataKind, ...] = ()
    models: tuple[ModelKind, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    range_methods: Mapping[str, RangeMethod] = field(default_factory=dict)
    formats: Mapping[str, NumberFormat] = field(default_factory=dict)
    operators: str = ""
    commands: Mapping[str, Command] = field(default_factory=dict)
    report: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> frozenset[str]:
        """Return the words that no other plug-in may have: names, and those of `--help`."""
        parts: list[str] = []
        for target in self.targets.values():
            parts += [option.name for option in target.options]
        for kind in self.data:
            parts += [*kind.suffixes, *filter(None, [kind.word])]
        for method in self.range_methods.values():
            parts += method.observers
        kinds = (
            *(self.targets, self.profiles, self.destinations, self.metrics),
            *(self.range_methods, self.formats, self.commands),
        )
        # A target may have the name of an algorithm
        parts += [f"the algorithm {name}" for name in self.algorithms]
        parts += [f"the pass {name}" for name in self.passes]
        return frozenset([f"the name {self.name}", *parts, *itertools.chain(*kinds)])
