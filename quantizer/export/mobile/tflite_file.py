"""Reads and edits a .tflite file: inputs, outputs, batch, and what it says of itself.

It needs `ai_edge_litert`, which is imported where it is used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_MULTIPLYING = {
    "CONV_2D": 1,
    "DEPTHWISE_CONV_2D": 1,
    "CONV_3D": 1,
    "FULLY_CONNECTED": 1,
    "TRANSPOSE_CONV": 1,
}
"""The argument with the weight, by the operators with int8 kernels."""
_SLOW_IN_INT8 = (
    "ABS",
    "EXP",
    "GELU",
    "HARD_SWISH",
    "LOG",
    "RELU",
    "RELU6",
    "RELU_N1_TO_1",
    "RSQRT",
    "SQRT",
    "SQUARED_DIFFERENCE",
)
"""Operators that XNNPACK of LiteRT 2.3.0 computes in float only.

LiteRT's own int8 kernels take 0.3 to 8 ns for a value. By way of floats it is 0.1 to 0.2 ns.
"""
_MATRIX_PRODUCT = "BATCH_MATMUL"
"""XNNPACK multiplies two activations in int8 if the second one has the zero point 0."""
_PRODUCT = "MUL"
_HOMOGENEOUS = (
    "AVERAGE_POOL_2D",
    "CONCATENATION",
    "LEAKY_RELU",
    "MAXIMUM",
    "MEAN",
    "MINIMUM",
    "PACK",
    "RESIZE_BILINEAR",
)
"""Operators whose results are twice as large if all their values are."""
_METADATA = "quantizer"


@dataclass(frozen=True)
class TfliteNames:
    """The names of inputs and outputs, in order."""

    inputs: Sequence[str]
    outputs: Sequence[str]


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
    operators: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        content: bytes,
    ) -> "TfliteFile":
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

    def count(self, operator: str) -> int:
        """Return how many operators of a kind the file has."""
        return sum(self._name(row) == operator for row in self._graph.operators)

    def integer_scales(self) -> Iterator[tuple[float, ...]]:
        """Yield the scales of each weight that is multiplied in int8."""
        int8 = self.schema.TensorType.INT8
        tensors = self._graph.tensors
        for row in self._graph.operators:
            index = _MULTIPLYING.get(self._name(row))
            if index is None:
                continue
            value_index = 2 if self._name(row) == "TRANSPOSE_CONV" else 0
            used = [row.inputs[value_index], row.inputs[index], row.outputs[0]]
            if all(tensors[place].type == int8 for place in used):
                yield tuple(tensors[row.inputs[index]].quantization.scale)

    def open_batch(self) -> None:
        """Let the batch, which is one, follow the inputs.

        Reshapes would fix it. Values are stored sample by sample, so the first size of what a
        reshape makes may become -1, unless the batch has been moved from the first axis.
        """
        tensors = self._graph.tensors
        for row in self._graph.operators:
            if self._name(row) != "RESHAPE" or len(row.inputs) < 2:
                continue
            sizes = list(tensors[row.outputs[0]].shape)
            if not sizes or self._is_constant(tensors[row.inputs[0]]):
                continue
            sizes[0] = -1
            shape = tensors[row.inputs[1]]
            # Other reshapes may read the same constant.
            buffer = self.schema.BufferT()
            buffer.data = np.frombuffer(np.array(sizes, np.int32).tobytes(), np.uint8)
            self.model.buffers.append(buffer)
            own_shape = self._copied(shape)
            own_shape.buffer = len(self.model.buffers) - 1
            tensors.append(own_shape)
            row.inputs[1] = len(tensors) - 1
            if row.builtinOptions is not None:
                row.builtinOptions.newShape = sizes
        for place in [*self._graph.inputs, *self._graph.outputs]:
            sizes = list(tensors[place].shape)
            if sizes[:1] == [1]:
                tensors[place].shapeSignature = [-1, *sizes[1:]]

    def finish(
        self,
        names: TfliteNames,
        origin: str,
        *,
        in_float: bool,
    ) -> None:
        """Name inputs and outputs, add how the file was made, and choose their type.

        Args:
            names: of inputs and outputs.
            origin: what the file says of itself.
            in_float: whether inputs and outputs are float, and values with another scale and
                operators without fast int8 kernels are computed in float. Otherwise all of
                them are int8, for devices without floats.
        """
        self._drop_factors()
        if in_float:
            self._convert_inputs()
            self._convert_outputs()
            self._requantize_in_float()
            self._compute_in_float()
        graph = self._graph
        (signature,) = self.model.signatureDefs
        signature.inputs = self._named(names.inputs, graph.inputs)
        signature.outputs = self._named(names.outputs, graph.outputs)
        buffer = self.schema.BufferT()
        buffer.data = np.frombuffer(origin.encode(), np.uint8)
        self.model.buffers.append(buffer)
        entry = self.schema.MetadataT()
        entry.name = _METADATA
        entry.buffer = len(self.model.buffers) - 1
        self.model.metadata = [*(self.model.metadata or []), entry]

    @property
    def _graph(self) -> Any:
        return self.model.subgraphs[0]

    def _name(self, row: Any) -> str:
        """Return the name of an operator."""
        code = self.model.operatorCodes[row.opcodeIndex]
        return self.operators[max(code.builtinCode, code.deprecatedBuiltinCode)]

    def _is_constant(
        self,
        tensor: Any,
    ) -> bool:
        """Return whether a tensor has values in the file."""
        data = self.model.buffers[tensor.buffer].data
        return data is not None and len(data) > 0

    def _copied(self, tensor: Any) -> Any:
        """Return another tensor of the same name, type and shape."""
        copy = self.schema.TensorT()
        copy.name = tensor.name
        copy.type = tensor.type
        copy.shape = tensor.shape
        copy.shapeSignature = tensor.shapeSignature
        return copy

    def _named(
        self,
        names: Sequence[str],
        places: Sequence[int],
    ) -> list[Any]:
        """Return the tensors of a signature."""
        rows: list[Any] = []
        for name, place in zip(names, places, strict=True):
            row = self.schema.TensorMapT()
            row.name = name
            row.tensorIndex = place
            self._graph.tensors[place].name = name
            rows.append(row)
        return rows

    def _convert_inputs(self) -> None:
        """Give int8 inputs a QUANTIZE, so that they are float."""
        graph = self._graph
        for index, place in enumerate(list(graph.inputs)):
            if graph.tensors[place].type != self.schema.TensorType.INT8:
                continue
            graph.inputs[index] = self._float_of(place)
            row = self._operator("QUANTIZE", graph.inputs[index], place)
            graph.operators.insert(0, row)

    def _convert_outputs(self) -> None:
        """Give int8 outputs a DEQUANTIZE, so that they are float."""
        graph = self._graph
        for index, place in enumerate(list(graph.outputs)):
            if graph.tensors[place].type != self.schema.TensorType.INT8:
                continue
            graph.outputs[index] = self._float_of(place)
            graph.operators.append(self._operator("DEQUANTIZE", place, graph.outputs[index]))

    def _requantize_in_float(self) -> None:
        """Give int8 values another scale by way of floats.

        XNNPACK multiplies by the ratio of both scales in 8 bits, so that codes are a step off.
        """
        graph = self._graph
        int8 = self.schema.TensorType.INT8
        rows: list[Any] = []
        for row in graph.operators:
            place = row.inputs[0]
            is_int8 = graph.tensors[place].type == int8
            if is_int8 and self._name(row) == "QUANTIZE":
                floats = self._float_of(place)
                decoding = self._operator("DEQUANTIZE", place, floats)
                rows.append(decoding)
                row.inputs = [floats]
            rows.append(row)
        graph.operators = rows

    def _compute_in_float(self) -> None:
        """Compute operators without fast int8 kernels in float, and round to the same codes."""
        graph = self._graph
        rows: list[Any] = []
        for row in graph.operators:
            if not self._is_slow(row):
                rows.append(row)
                continue
            inputs: list[int] = []
            for place in row.inputs:
                floats = self._float_of(place)
                inputs.append(floats)
                rows.append(self._operator("DEQUANTIZE", place, floats))
            (codes,) = row.outputs
            floats = self._float_of(codes)
            row.inputs = inputs
            row.outputs = [floats]
            rows.append(row)
            rows.append(self._operator("QUANTIZE", floats, codes))
        graph.operators = rows

    def _is_slow(self, row: Any) -> bool:
        """Return whether an operator has int8 values and no fast int8 kernel."""
        tensors = self._graph.tensors
        places = [*row.inputs, *row.outputs]
        name = self._name(row)
        if any(tensors[place].type != self.schema.TensorType.INT8 for place in places):
            return False
        if name == _MATRIX_PRODUCT:
            _, second = row.inputs
            return any(tensors[second].quantization.zeroPoint)
        return name in _SLOW_IN_INT8

    def _drop_factors(self) -> None:
        """Drop products with 2 and 0.5 before and after operators that they do not change.

        They have kept the converter from int8 kernels.
        """
        graph = self._graph
        makers: dict[int, Any] = {}
        for row in graph.operators:
            makers[row.outputs[0]] = row
        for half in list(graph.operators):
            row = makers.get(half.inputs[0])
            if row is None or not self._is_product(half, 0.5):
                continue
            (result,) = half.outputs
            if self._is_product(row, 2.0) and result not in graph.outputs:
                self._read_instead(result, row.inputs[0])
            elif self._is_homogeneous(row):
                doubles = [makers.get(place) for place in row.inputs]
                values = [double for double in doubles if double is not None]
                are_doubled = all(self._is_product(double, 2.0) for double in values)
                if not values or not are_doubled or len(self._readers(row.outputs[0])) != 1:
                    continue
                for index, double in enumerate(doubles):
                    if double is not None:
                        row.inputs[index] = double.inputs[0]
                row.outputs = [result]
                makers[result] = row
                half.outputs = []
        self._drop_unread()

    def _is_product(self, row: Any, factor: float) -> bool:
        """Return whether an operator multiplies floats by a number, and does nothing else."""
        if self._name(row) != _PRODUCT or row.builtinOptions.fusedActivationFunction:
            return False
        tensor = self._graph.tensors[row.inputs[1]]
        data = self.model.buffers[tensor.buffer].data
        if tensor.type != self.schema.TensorType.FLOAT32 or data is None:
            return False
        return bytes(data) == np.float32(factor).tobytes()

    def _is_homogeneous(self, row: Any) -> bool:
        """Return whether factors before an operator of floats may as well come after it."""
        tensors = self._graph.tensors
        activations = self.schema.ActivationFunctionType
        is_float = tensors[row.outputs[0]].type == self.schema.TensorType.FLOAT32
        activation = getattr(row.builtinOptions, "fusedActivationFunction", activations.NONE)
        is_bounded = activation not in (activations.NONE, activations.RELU)
        return self._name(row) in _HOMOGENEOUS and is_float and not is_bounded

    def _readers(self, place: int) -> list[Any]:
        """Return the operators that read a tensor."""
        return [row for row in self._graph.operators if place in row.inputs]

    def _read_instead(self, place: int, other: int) -> None:
        """Let the readers of a tensor read another one."""
        for row in self._readers(place):
            row.inputs = [other if value == place else value for value in row.inputs]

    def _drop_unread(self) -> None:
        """Drop the products whose results nothing reads."""
        graph = self._graph
        read = {*graph.outputs}
        rows: list[Any] = []
        for row in reversed(graph.operators):
            if self._name(row) == _PRODUCT and read.isdisjoint(row.outputs):
                continue
            read.update(row.inputs)
            rows.append(row)
        graph.operators = rows[::-1]

    def _float_of(self, place: int) -> int:
        """Add a float tensor of the same shape, and return its place."""
        tensor = self._copied(self._graph.tensors[place])
        tensor.type = self.schema.TensorType.FLOAT32
        self._graph.tensors.append(tensor)
        return len(self._graph.tensors) - 1

    def _operator(
        self,
        name: str,
        value: int,
        result: int,
    ) -> Any:
        """Return an operator with one input and one output, and no options."""
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
        row.inputs = [value]
        row.outputs = [result]
        return row
