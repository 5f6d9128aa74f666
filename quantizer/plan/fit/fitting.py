"""A config's document while it is fitted to a traced model: what it plans now, and edits in the
words of either form, with short selectors for layers.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.document.document import Document, value_at
from quantizer.config.forms.hierarchical_spec import specification, usual_symmetric_scale
from quantizer.config.forms.level_edits import is_stated, with_float
from quantizer.config.json_types import JsonObject, JsonPath
from quantizer.config.load import check_document
from quantizer.config.model import QuantizationSpec, ResolvedConfig, Selector
from quantizer.config.roles import is_parameter
from quantizer.errors import ModelError
from quantizer.graph.ir import Graph, Node
from quantizer.graph.names import call_paths, path_names
from quantizer.plan import axes
from quantizer.plan.axes import TensorView
from quantizer.plan.match import has_own_weights, match
from quantizer.plan.model import Plan, TensorPlan
from quantizer.plan.resolve import resolve_plan
from quantizer.plan.selected import SELECTED_KINDS

_KEY_ORDER = (
    "dtype",
    "observer_cls",
    "symmetric",
    "symmetric_scale",
    "scale_type",
    "round_method",
    "qscheme",
    "ch_axis",
    "group_size",
    "is_dynamic",
)
"""Of a spec in the presets."""
_LEVELS = ("global_quant_config", "layer_type_quant_config", "layer_quant_config")
"""Of the hierarchical form, in the order of the presets."""


@dataclass
class Fitting:
    """A document that is fitted to a graph.

    Attributes:
        document: as changed so far.
        name: of the config, for messages.
        graph: after the passes that the document asks for.
        original: as traced.
        changes: a sentence for each change.
    """

    document: JsonObject
    name: str
    graph: Graph
    original: Graph
    changes: list[str] = field(default_factory=list)
    _added: dict[JsonPath, list[str]] = field(default_factory=dict)
    _read: tuple[Document, ResolvedConfig] | None = None
    _plan: Plan | None = None

    def copied(self) -> Fitting:
        """Return a fitting at the same point, whose changes do not change this one."""
        added = {path: [*sentences] for path, sentences in self._added.items()}
        return replace(self, changes=[*self.changes], _added=added)

    @property
    def parsed(self) -> Document:
        """Return the document with the places of its values."""
        parsed, _ = self._checked()
        return parsed

    @property
    def config(self) -> ResolvedConfig:
        """Return the config.

        Raises:
            ConfigError: the document is refused.
        """
        _, config = self._checked()
        return config

    @property
    def plan(self) -> Plan:
        """Return the plan, which may have errors among its findings."""
        if self._plan is None:
            self._plan = resolve_plan(self.config, self.graph, self.original)
        return self._plan

    @property
    def errors(self) -> list[Diagnostic]:
        """Return why calibration would refuse the config for this model."""
        return [finding for finding in self.plan.diagnostics if finding.severity == "error"]

    @property
    def is_hierarchical(self) -> bool:
        """Return the form of the document."""
        return self.config.form == "hierarchical"

    @property
    def is_for_dpu(self) -> bool:
        """Return whether the config is for the DPU, whose restrictions leave no choice."""
        return self.config.settings.target_device == "DPU"

    def _checked(self) -> tuple[Document, ResolvedConfig]:
        if self._read is None:
            parsed = Document.of(self.document, self.name)
            self._read = parsed, check_document(parsed).require()
        return self._read

    def change(self, document: JsonObject, sentence: str) -> None:
        """Replace the document, and say why."""
        self.document = document
        self.changes.append(sentence)
        self._forget()

    def _forget(self) -> None:
        self._read = None
        self._plan = None

    def path_of(self, tensor: TensorPlan, field_name: str) -> JsonPath | None:
        """Return where the document states a field of a tensor's spec, if it does."""
        return self.parsed.paths_at.get(tensor.origins.get(field_name, ""))

    def view_of(self, tensor: TensorPlan) -> TensorView:
        """Return how the layer of a tensor sees it."""
        node = self.graph.by_name[tensor.layer]
        if is_parameter(tensor.role):
            return axes.parameter_view(self.graph, node, tensor.role)
        return axes.activation_view(self.graph, node, tensor.source)

    def names(self, layers: Collection[str], *, kinds: bool = False) -> list[str]:
        """Return selectors for layers; with `kinds`, also such as `kind:head`."""
        return selectors_for(layers, self.graph, self.original, kinds=kinds)

    def leave_float(self, selectors: Collection[str], sentence: str) -> None:
        """Leave the selected layers in float."""
        self.change(with_float(self.document, selectors), sentence)

    def remove(self, path: JsonPath, sentence: str) -> None:
        """Remove the value at a path, and its block if nothing is left there."""
        document = copy.deepcopy(self.document)
        del value_at(document, path[:-1])[path[-1]]
        block = str(path[0])
        if block in document and not document[block]:
            del document[block]
        self.change(document, sentence)

    def remove_idle(self, path: JsonPath, label: str) -> None:
        """Remove an entry that changes no tensor. One that was added here leaves no trace."""
        sentence = f"{label} left out: the tensors that it is for stay float"
        self.remove(path, sentence)
        added = self._added.pop(path, [])
        for earlier in added:
            self.changes.remove(earlier)
        if added:
            self.changes.remove(sentence)

    def give_type(self, kind: str, word: str, spec: JsonObject, *, sentence: str) -> None:
        """Add what the entry of a type of layers states of one of their tensors."""
        document = copy.deepcopy(self.document)
        block = "layer_type_quant_config"
        entries = document.setdefault(block, {})
        entries.setdefault(kind, {})[word] = spec
        self.change(_ordered(document), sentence)
        self._added.setdefault((block, kind), []).append(sentence)

    def give_weights(
        self, selectors: Collection[str], spec: QuantizationSpec, sentence: str
    ) -> None:
        """Add entries of the hierarchical form that quantize weights of the selected layers."""
        document = copy.deepcopy(self.document)
        entries = document.setdefault("layer_quant_config", {})
        for selector in selectors:
            words = self.words_of_weights(spec)
            entries.setdefault(selector, {})["weight"] = words
        self.change(_ordered(document), sentence)

    def words_of_weights(self, spec: QuantizationSpec) -> JsonObject:
        """Return a spec of weights in the words of the hierarchical form, complete and in the
        order of the presets.
        """
        words = specification(spec)
        if spec.ch_axis is not None:
            words["ch_axis"] = spec.ch_axis
        if spec.qscheme == "per_group" and spec.group_size is not None:
            words["group_size"] = spec.group_size
        is_usual = words.get("symmetric_scale") == usual_symmetric_scale(spec)
        if is_usual and not is_stated(self.document, "symmetric_scale"):
            # Nothing else could be inherited
            del words["symmetric_scale"]
        ordered: JsonObject = {}
        for key in _KEY_ORDER:
            if key in words:
                ordered[key] = words[key]
        return ordered | words

    def give_inputs(self, selectors: Collection[str], spec: JsonObject) -> None:
        """Add what the entries of the selected layers state of their inputs."""
        document = copy.deepcopy(self.document)
        for selector in selectors:
            weight = document["layer_quant_config"][selector]
            document["layer_quant_config"][selector] = {"input_tensors": spec, **weight}
        self.document = document
        self._forget()


def per_channel(spec: QuantizationSpec, axis: int) -> QuantizationSpec:
    """Return a spec of weights with a scale for each output channel."""
    method = spec.method
    if method == "group_mse":
        # It has no observer for channels
        method = "maxmin"
    return replace(spec, qscheme="per_channel", ch_axis=axis, group_size=None, method=method)


def eight_bits(spec: QuantizationSpec) -> QuantizationSpec:
    """Return a symmetric spec of weights in 8 bits with a scale for each output channel."""
    return replace(
        per_channel(spec, 0),
        bit_width=8,
        signed=True,
        symmetric=True,
        symmetric_scale="quant_max",
    )


def _ordered(document: Mapping[str, object]) -> JsonObject:
    """Return a document with the blocks of layers behind the global one, as in the presets."""
    ordered: JsonObject = {}
    for key, value in document.items():
        if key not in _LEVELS:
            ordered[key] = value
        if key == _LEVELS[0]:
            for level in _LEVELS:
                if level in document:
                    ordered[level] = document[level]
    return ordered


_NAMED_KINDS = ("kind:embedding", "kind:head")
"""The kinds by which layers are named."""


def selectors_for(
    layers: Collection[str], graph: Graph, original: Graph, *, kinds: bool = False
) -> list[str]:
    """Return selectors that together match the layers, and no other layer with weights.

    Layers whose paths differ in numbers alone share a pattern. With `kinds`, all embeddings
    are `kind:embedding`, and the last layer is `kind:head`.

    Raises:
        ModelError: nothing that a config can say selects one of the layers alone.
    """
    wanted = set(layers)
    chosen: dict[str, set[str]] = {}
    for kind in _NAMED_KINDS if kinds else ():
        of_kind = set(SELECTED_KINDS[kind](graph))
        if of_kind and of_kind <= wanted:
            chosen[kind] = of_kind
    names = path_names(graph)
    patterns: dict[str, int] = {}
    for layer in layers:
        pattern = _pattern(names[layer])
        patterns[pattern] = patterns.get(pattern, 0) + 1
    for pattern, count in patterns.items():
        matched = _matched(pattern, graph, original)
        if count > 1 and pattern.strip(".*") and matched and matched <= wanted:
            chosen[pattern] = matched
    # A kind or pattern whose layers another one has already is not needed
    needed: list[str] = []
    covered: set[str] = set()
    for text in sorted(chosen, key=lambda text: -len(chosen[text])):
        if not chosen[text] <= covered:
            needed.append(text)
            covered |= chosen[text]
    for layer in layers:
        if layer not in covered:
            text = _name(graph.by_name[layer], names[layer], graph, original)
            needed.append(text)
            covered |= _matched(text, graph, original)
    return needed


def _pattern(path: str) -> str:
    """Return a path with a star for each number.

    >>> _pattern("layers.11.mlp.up")
    'layers.*.mlp.up'
    """
    words = ["*" if word.isdecimal() else word for word in path.split(".")]
    return ".".join(words)


def _name(node: Node, path: str, graph: Graph, original: Graph) -> str:
    """Return the shortest name that selects no other layer with weights."""
    for text in (path, *_more_names(node)):
        if _matched(text, graph, original) == {node.name}:
            return text
    raise ModelError(
        f"no name in a config selects {node.name} alone",
        help="give the module a name of its own, or write the config by hand",
    )


def _more_names(node: Node) -> Iterator[str]:
    yield from reversed(call_paths(node.name, node.scope))
    yield node.name
    yield from node.params.values()


def _matched(text: str, graph: Graph, original: Graph) -> set[str]:
    """Return the layers with weights that a selector matches."""
    found_match = match(Selector("name", text), graph, original)
    layers = set()
    for name in found_match.layers:
        if name in graph.by_name and has_own_weights(graph.by_name[name]):
            layers.add(name)
    return layers
