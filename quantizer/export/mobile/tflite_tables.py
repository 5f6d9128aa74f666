"""The tables of a .tflite file: reads them, and adds operators and tensors.

It needs `ai_edge_litert`, which is imported where it is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Tables = TypeVar("_Tables", bound="TfliteTables")


@dataclass
class TfliteTables:
    """A file as tables that can be changed.

    Attributes:
        model: the table of the file.
        schema: the classes of all tables.
        operators: the names of operators by their numbers.
    """

    model: Any
    schema: Any
    operators: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls: type[_Tables], content: bytes) -> _Tables:
        """Return the tables of a file."""
        from ai_edge_litert import schema_py_generated
        from ai_edge_litert.tools import flatbuffer_utils

        model = flatbuffer_utils.read_model_from_bytearray(bytearray(content))
        operators: dict[int, str] = {}
        for name, number in vars(schema_py_generated.BuiltinOperator).items():
            if isinstance(number, int):
                operators[number] = name
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
        code = self.model.operatorCodes[row.opcodeIndex]
        return self.operators[max(code.builtinCode, code.deprecatedBuiltinCode)]

    def count(self, operator: str) -> int:
        """Return how many operators of a kind the file has."""
        return sum(self.name(row) == operator for row in self.graph.operators)

    def is_int8(self, place: int) -> bool:
        """Return whether a tensor is int8."""
        is_int8: bool = self.graph.tensors[place].type == self.schema.TensorType.INT8
        return is_int8

    def is_float(self, place: int) -> bool:
        """Return whether a tensor is float32."""
        is_float: bool = self.graph.tensors[place].type == self.schema.TensorType.FLOAT32
        return is_float

    def data(self, place: int) -> bytes:
        """Return the values of a tensor that has them in the file; none for other tensors."""
        buffer = self.model.buffers[self.graph.tensors[place].buffer]
        return b"" if buffer.data is None else bytes(buffer.data)

    def makers(self) -> dict[int, Any]:
        """Return the operator that makes each tensor."""
        makers: dict[int, Any] = {}
        for row in self.graph.operators:
            for place in row.outputs:
                makers[place] = row
        return makers

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
        number = getattr(self.schema.BuiltinOperator, name)
        code_index = -1
        for index, code in enumerate(self.model.operatorCodes):
            if max(code.builtinCode, code.deprecatedBuiltinCode) == number:
                code_index = index
        if code_index < 0:
            code = self.schema.OperatorCodeT()
            code.builtinCode = number
            code.deprecatedBuiltinCode = number
            code.version = 1
            self.model.operatorCodes.append(code)
            code_index = len(self.model.operatorCodes) - 1
        row = self.schema.OperatorT()
        row.opcodeIndex = code_index
        row.inputs = [*inputs]
        row.outputs = [result]
        return row
