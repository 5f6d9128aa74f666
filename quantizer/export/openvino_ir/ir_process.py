"""Converts `model.onnx` to OpenVINO's format and runs it, as a program of its own: some files
crash its process.

It works in the folder that it is started in. It writes `model.xml`, reads it back, and answers
each line of its standard input, a JSON list, with a line of JSON:

- ["kernels"]: the operators that multiply, in order: the names of what each was made of, and
  whether it multiplies integers.
- ["products"]: the operators that multiply matrices, each with its names, its type, its
  attributes, and for the last inputs the shapes of its operands and then of its result.
- ["run", number]: runs `inputs_NUMBER.npz` and writes `outputs_NUMBER.npz` for each of the
  settings in `settings.json`.
- ["time", which, runs]: the seconds of one run of the last inputs, as the mean of so many, in
  the default settings. Either "model" or "float" is run.

It imports nothing of this package, so that it starts at once.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13

_COMPILED_PRODUCTS = (
    "Convolution",
    "Deconvolution",
    "FullyConnected",
    "MatMul",
    "GroupConvolution",
    "RNNSeq",
    "RNNCell",
)
"""The types that multiply matrices in a compiled model."""
_MATRIX_PRODUCTS = (
    "BinaryConvolution",
    "Convolution",
    "ConvolutionBackpropData",
    "DeformableConvolution",
    "Einsum",
    "GRUCell",
    "GRUSequence",
    "GroupConvolution",
    "GroupConvolutionBackpropData",
    "LSTMCell",
    "LSTMSequence",
    "MatMul",
    "RNNCell",
    "RNNSequence",
)
"""The types that multiply matrices, before a model is compiled."""
_SIZING_ATTRIBUTES = ("equation", "transpose_a")
"""Those that say how many multiply-adds an operator takes."""
_INTEGERS = ("u8", "i8")
_MOST_STEPS = 4
"""So many operators behind another one may have its name."""
_Product = tuple[list[str], str, dict[str, Any], list[list[int] | None]]
"""The names of an operator, its type, its attributes, and the shapes of its operands and of its
result.
"""
_BY_CHANNEL = ("Add", "Subtract", "Multiply", "Divide", "PRelu", "FakeQuantize")


class Engine:
    """The model, compiled with each of the settings."""

    def __init__(self) -> None:
        model = openvino.convert_model("model.onnx")
        keep_order_of_equals(model)
        round_before_sums(model)
        reduce_before_channels(model)
        openvino.save_model(model, "model.xml", compress_to_fp16=False)
        self.core = openvino.Core()
        known = set(self.core.get_property("CPU", "SUPPORTED_PROPERTIES"))
        self.compiled: list[Any] = []
        for chosen in json.loads(Path("settings.json").read_text("utf-8")):
            settings = {name: chosen[name] for name in chosen if name in known}
            self.compiled.append(self.core.compile_model("model.xml", "CPU", settings))
        self.floating: Any = None
        self.inputs: dict[str, Any] = {}

    def kernels(self) -> list[tuple[list[str], bool]]:
        """Return the names of each operator that multiplies, and whether it does so with
        integers.
        """
        rows: list[tuple[list[str], bool]] = []
        for node in self.compiled[-1].get_runtime_model().get_ordered_ops():
            if _info(node, "layerType") in _COMPILED_PRODUCTS:
                names = _names(node, lambda node: _info(node, "originalLayersNames"))
                precision = _info(node, "runtimePrecision")
                rows.append((names, precision in _INTEGERS))
        return rows

    def products(self) -> list[_Product]:
        """Return the operators that multiply matrices of what follows from the inputs."""
        model = self.core.read_model("model.xml")
        inputs = self._named(model)
        model.reshape({name: list(inputs[name].shape) for name in inputs})
        rows: list[_Product] = []
        varying: set[str] = set()
        for node in model.get_ordered_ops():
            sources = [value.get_node().get_name() for value in node.input_values()]
            kind = node.get_type_name()
            if kind != "Parameter" and varying.isdisjoint(sources):
                continue
            varying.add(node.get_name())
            if kind in _MATRIX_PRODUCTS:
                names = _names(node, lambda node: str(node.get_friendly_name()))
                attributes = node.get_attributes()
                sizing = {
                    name: attributes[name] for name in _SIZING_ATTRIBUTES if name in attributes
                }
                values = (*node.input_values(), node.output(0))
                shapes = [value.get_partial_shape() for value in values]
                # None where a size is open
                sizes = [None if each.is_dynamic else list(each.to_shape()) for each in shapes]
                rows.append((names, kind, sizing, sizes))
        return rows

    def run(self, number: int) -> None:
        """Run all settings on one call and store the outputs by name."""
        with np.load(f"inputs_{number}.npz") as inputs:
            self.inputs = dict(inputs)
        arrays: dict[str, Any] = {}
        for index, compiled in enumerate(self.compiled):
            results = compiled(self._named(compiled))
            for value in compiled.outputs:
                names = value.get_names()
                arrays |= {f"{index}:{name}": results[value] for name in names}
        np.savez(f"outputs_{number}.npz", **arrays)

    def time(self, which: str, runs: int) -> float:
        """Return the seconds of one run."""
        compiled = self.compiled[-1]
        if which == "float":
            if self.floating is None:
                self.floating = self.core.compile_model("float.onnx", "CPU")
            compiled = self.floating
        inputs = self._named(compiled)
        start = time.perf_counter()
        for _ in range(runs):
            compiled(inputs)
        return (time.perf_counter() - start) / runs

    def _named(self, model: Any) -> dict[str, Any]:
        """Return the inputs by the names that a model has for them."""
        # An operator that does nothing has left its name, too.
        return {
            name: self.inputs[name]
            for value in model.inputs
            for name in value.get_names() & self.inputs.keys()
        }


def _info(node: Any, key: str) -> str:
    """Return what a compiled model says of an operator."""
    value = node.get_rt_info()[key]
    return str(value.astype(str))


def _names(node: Any, name_of: Callable[[Any], str]) -> list[str]:
    """Return the names of an operator, and then of those that read it one after the other.

    OpenVINO appends words to the names of what it rewrites, and gives the name of what it takes
    apart to the last part.
    """
    names: list[str] = []
    for _ in range(_MOST_STEPS):
        names += name_of(node).split(",")
        readers = [reader for value in node.outputs() for reader in value.get_target_inputs()]
        if len(readers) != 1:
            break
        (reader,) = readers
        node = reader.get_node()
    return names


def keep_order_of_equals(model: Any) -> None:
    """Let the first of equal values come first, as in ONNX: codes are often equal."""
    for node in model.get_ops():
        if node.get_type_name() == "TopK":
            node.set_attribute("stable", True)


def reduce_before_channels(model: Any) -> None:
    """Keep means, sums and maxima apart from operators with a value for each channel.

    OpenVINO 2026.4 computes both at once, and takes the values of other channels if the
    reduction drops an axis.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() not in _BY_CHANNEL:
            continue
        if sum(map(_has_several_values, node.input_values())) < 2:
            continue
        for value in node.inputs():
            reduced = value.get_source_output().get_node()
            reduced = _source(reduced) or reduced
            is_real = reduced.get_output_element_type(0).is_real()
            if is_real and reduced.get_type_name().startswith("Reduce"):
                _set_apart(value)
    model.validate_nodes_and_infer_types()


def _has_several_values(value: Any) -> bool:
    shape = value.get_partial_shape()
    return shape.is_dynamic or bool(np.prod(shape.to_shape()) > 1)


def _set_apart(value: Any) -> None:
    """Put a maximum that changes nothing before the input of a node."""
    least = opset13.constant(np.finfo(np.float32).min)
    apart = opset13.maximum(value.get_source_output(), least)
    value.replace_source_output(apart.output(0))


def round_before_sums(model: Any) -> None:
    """Keep sums apart from the convolutions before them, if those compute a function.

    OpenVINO 2026.4 computes a convolution, a function such as SiLU and a sum at once, and then
    it does not round the result of the convolution.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Add":
            continue
        for value in node.inputs():
            rounded = value.get_source_output()
            function = _source(rounded.get_node())
            if function is None or function.get_input_size() != 1:
                continue
            if _source(function.input_value(0).get_node()) is not None:
                _set_apart(value)
    model.validate_nodes_and_infer_types()


def _source(node: Any) -> Any:
    """Return what makes the value that a node quantizes; None if it quantizes nothing."""
    if node.get_type_name() != "FakeQuantize":
        return None
    return node.input_value(0).get_node()


def main() -> None:
    """Answer the lines of standard input."""
    engine = Engine()
    methods: dict[str, Callable[..., object]]
    methods = {
        "kernels": engine.kernels,
        "products": engine.products,
        "run": engine.run,
        "time": engine.time,
    }
    for line in sys.stdin:
        word, *arguments = json.loads(line)
        answer = methods[word](*arguments)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
