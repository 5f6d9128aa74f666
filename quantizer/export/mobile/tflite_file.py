"""Edits a .tflite file: inputs, outputs, batch, and what it says of itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantizer.export.mobile.tflite_kernels import compute_in_float, drop_factors
from quantizer.export.mobile.tflite_tables import TfliteTables

_METADATA = "quantizer"


@dataclass(frozen=True)
class TfliteNames:
    """The names of inputs and outputs, in order."""

    inputs: Sequence[str]
    outputs: Sequence[str]


class TfliteFile(TfliteTables):
    """A file whose inputs, outputs and batch can be changed."""

    def open_batch(self) -> None:
        """Let the batch, which is one, follow the inputs.

        Reshapes would fix it. Values are stored sample by sample, so the first size of what a
        reshape makes may become -1, unless the batch has been moved from the first axis.
        """
        tensors = self.graph.tensors
        for row in self.graph.operators:
            if self.name(row) != "RESHAPE" or len(row.inputs) < 2:
                continue
            sizes = list(tensors[row.outputs[0]].shape)
            if not sizes or self.data(row.inputs[0]):
                continue
            sizes[0] = -1
            # Other reshapes may read the same constant.
            row.inputs[1] = self.constant("INT32", np.array(sizes, np.int32))
            if row.builtinOptions is not None:
                row.builtinOptions.newShape = sizes
        for place in [*self.graph.inputs, *self.graph.outputs]:
            sizes = list(tensors[place].shape)
            if sizes[:1] == [1]:
                tensors[place].shapeSignature = [-1, *sizes[1:]]

    def finish(self, names: TfliteNames, origin: str, *, in_float: bool) -> None:
        """Name inputs and outputs, add how the file was made, and choose their type.

        Args:
            names: of inputs and outputs.
            origin: what the file says of itself.
            in_float: whether inputs and outputs are float, and values with another scale and
                operators without fast int8 kernels are computed in float. Otherwise all of
                them are int8, for devices without floats.
        """
        drop_factors(self)
        if in_float:
            self._convert_inputs()
            self._convert_outputs()
            compute_in_float(self)
        graph = self.graph
        (signature,) = self.model.signatureDefs
        signature.inputs = self._named(names.inputs, graph.inputs)
        signature.outputs = self._named(names.outputs, graph.outputs)
        entry = self.schema.MetadataT()
        entry.name = _METADATA
        entry.buffer = self.buffer(origin.encode())
        self.model.metadata = [*(self.model.metadata or []), entry]

    def _named(self, names: Sequence[str], places: Sequence[int]) -> list[Any]:
        """Return the tensors of a signature."""
        rows: list[Any] = []
        for name, place in zip(names, places, strict=True):
            row = self.schema.TensorMapT()
            row.name = name
            row.tensorIndex = place
            self.graph.tensors[place].name = name
            rows.append(row)
        return rows

    def _convert_inputs(self) -> None:
        """Give int8 inputs a QUANTIZE, so that they are float."""
        graph = self.graph
        for index, place in enumerate(list(graph.inputs)):
            if not self.is_int8(place):
                continue
            graph.inputs[index] = self.float_of(place)
            row = self.operator("QUANTIZE", [graph.inputs[index]], place)
            graph.operators.insert(0, row)

    def _convert_outputs(self) -> None:
        """Give int8 outputs a DEQUANTIZE, so that they are float."""
        graph = self.graph
        for index, place in enumerate(list(graph.outputs)):
            if not self.is_int8(place):
                continue
            graph.outputs[index] = self.float_of(place)
            row = self.operator("DEQUANTIZE", [place], graph.outputs[index])
            graph.operators.append(row)
