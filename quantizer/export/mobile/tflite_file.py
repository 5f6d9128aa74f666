"""Edits a .tflite file: operators, tensors, inputs, outputs, batch, and what it says of itself.

It needs `ai_edge_litert`, which is imported where it is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_METADATA = "quantizer"


@dataclass
class TfliteFile:
    """A file as tables that can be changed.

    Attributes:
        model: the table of the file.
        schema: the classes of all tables.
        operators: the names of operators by their numbers.
    """

    model: Any
    schema: Any
    operators: dict[int, str]

    @classmethod
    def of(cls, content: bytes) -> "TfliteFile":
        """Return the tables of a file."""
        from ai_edge_litert import schema_py_generated
        from ai_edge_litert.tools import flatbuffer_utils

        model = flatbuffer_utils.read_model_from_bytearray(bytearray(content))
        numbers = vars(schema_py_generated.BuiltinOperator)
        operators = {code: name for name, code in numbers.items() if isinstance(code, int)}
        return cls(model, schema_py_generated, operators)

    def content(self) -> bytes:
        """Return the bytes of the file."""
        from ai_edge_litert.tools import flatbuffer_utils

        return bytes(flatbuffer_utils.convert_object_to_bytearray(self.model))

    @property
    def graph(self) -> Any:
        """Return the table of the network."""
        return self.model.subgraphs[0]

    def name(self, row: Any) -> str:
        """Return the name of an operator."""
        return self._name_of_code(self.model.operatorCodes[row.opcodeIndex])

    def _name_of_code(self, code: Any) -> str:
        return self.operators[max(code.builtinCode, code.deprecatedBuiltinCode)]

    def is_int8(self, place: int) -> bool:
        """Return whether a tensor is int8."""
        return bool(self.graph.tensors[place].type == self.schema.TensorType.INT8)

    def is_float(self, place: int) -> bool:
        """Return whether a tensor is float32."""
        return bool(self.graph.tensors[place].type == self.schema.TensorType.FLOAT32)

    def data(self, place: int) -> bytes:
        """Return the values of a tensor that has them in the file; none for other tensors."""
        buffer = self.model.buffers[self.graph.tensors[place].buffer]
        return b"" if buffer.data is None else bytes(buffer.data)

    def makers(self) -> dict[int, Any]:
        """Return the operator that makes each tensor."""
        return {place: row for row in self.graph.operators for place in row.outputs}

    def readers(self, place: int) -> list[Any]:
        """Return the operators that read a tensor."""
        return [row for row in self.graph.operators if place in row.inputs]

    def has_one_reader(self, place: int) -> bool:
        """Return whether one operator reads a tensor, and the network does not return it."""
        is_returned = place in self.graph.outputs
        return len(self.readers(place)) == 1 and not is_returned

    def tensor(self, kind: str, shape: Sequence[int]) -> int:
        """Add a tensor, and return its place.

        Args:
            kind: a name of `schema.TensorType`.
        """
        tensor = self.schema.TensorT()
        tensor.type = getattr(self.schema.TensorType, kind)
        tensor.shape = np.array(shape, np.int32)
        tensors = self.graph.tensors
        tensor.name = f"added_{len(tensors)}"
        tensors.append(tensor)
        return len(tensors) - 1

    def constant(self, kind: str, values: NDArray[Any]) -> int:
        """Add a tensor with values, and return its place."""
        place = self.tensor(kind, values.shape)
        self.graph.tensors[place].buffer = self.buffer(values.tobytes())
        return place

    def buffer(self, data: bytes) -> int:
        """Add bytes to the file, and return their place."""
        buffer = self.schema.BufferT()
        buffer.data = np.frombuffer(data, np.uint8)
        self.model.buffers.append(buffer)
        return len(self.model.buffers) - 1

    def float_of(self, place: int) -> int:
        """Add a float tensor of the same shape, and return its place."""
        tensor = self.graph.tensors[place]
        added = self.tensor("FLOAT32", tensor.shape)
        self.graph.tensors[added].shapeSignature = tensor.shapeSignature
        return added

    def operator(self, name: str, inputs: Sequence[int], result: int) -> Any:
        """Return an operator with one output, and no options."""
        codes = self.model.operatorCodes
        places = {self._name_of_code(code): index for index, code in enumerate(codes)}
        if name not in places:
            places[name] = len(codes)
            code = self.schema.OperatorCodeT()
            code.builtinCode = getattr(self.schema.BuiltinOperator, name)
            code.deprecatedBuiltinCode = code.builtinCode
            code.version = 1
            codes.append(code)
        row = self.schema.OperatorT()
        row.opcodeIndex = places[name]
        row.inputs = [*inputs]
        row.outputs = [result]
        return row

    def add_options(self, row: Any, kind: str) -> Any:
        """Give an operator options of a kind, and return them."""
        row.builtinOptionsType = getattr(self.schema.BuiltinOptions, kind)
        row.builtinOptions = getattr(self.schema, f"{kind}T")()
        return row.builtinOptions

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

    def give_float_ends(self) -> None:
        """Give int8 inputs a QUANTIZE and int8 outputs a DEQUANTIZE, so that they are float."""
        graph = self.graph
        for index, place in enumerate(graph.inputs):
            if self.is_int8(place):
                graph.inputs[index] = self.float_of(place)
                row = self.operator("QUANTIZE", [graph.inputs[index]], place)
                graph.operators.insert(0, row)
        for index, place in enumerate(graph.outputs):
            if self.is_int8(place):
                graph.outputs[index] = self.float_of(place)
                row = self.operator("DEQUANTIZE", [place], graph.outputs[index])
                graph.operators.append(row)

    def describe(self, inputs: Sequence[str], outputs: Sequence[str], origin: str) -> None:
        """Name inputs and outputs, and add how the file was made."""
        (signature,) = self.model.signatureDefs
        signature.inputs = self._named(inputs, self.graph.inputs)
        signature.outputs = self._named(outputs, self.graph.outputs)
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
