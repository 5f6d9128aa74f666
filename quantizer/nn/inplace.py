"""Quantize modules in place: an object gets a subclass of its class as its new class.

The quantized layers of traced graphs are in `weighted`.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quantizer.config.roles import is_parameter
from quantizer.config.wording import a_kind
from quantizer.errors import DataError, ModelError, QuantizerError, first_line
from quantizer.graph.ir import Call, Graph
from quantizer.nn.layer import Layer
from quantizer.observers import ObservationError

Watcher = Callable[[Tensor], None]


class InPlace(Layer):
    """A base class of quantized modules, which quantizes the first argument and the output.

    Parameters are not quantized here: they hold quantized values already. Before the first
    argument is quantized, it passes the `input_layers` that algorithms inserted. An output that
    is a tuple, such as that of a recurrent layer, stays as it is. If a ReLU follows,
    `rectifies_output` makes the module apply it before its output is quantized. The ReLU itself
    then changes nothing.
    """

    float_class: ClassVar[type[nn.Module]]
    quantized_path = ""
    rectifies_output = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward between its quantizers.

        Raises:
            DataError: a dynamic tensor with NaN or infinity has no range. The message names the
                layer.
        """
        role = "input"
        try:
            input_layers = self._modules.get("input_layers")
            if input_layers is not None:
                args, kwargs = on_first(input_layers, args, kwargs)
            if "input" in self.quantizers:
                args, kwargs = on_first(self.quantizers["input"], args, kwargs)
            output = super().forward(*args, **kwargs)
            role = "output"
            if not isinstance(output, Tensor):
                return output
            if self.rectifies_output:
                output = torch.relu(output)
            return self.quantize_output(output)
        except ObservationError as error:
            raise DataError(
                f"{role} of {self.quantized_path}: {error}",
                help="check the data and the weights",
            ) from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how copy and pickle rebuild the module: from its float class. They cannot
        import a class that is created while a program runs.
        """
        reduced: Any = super().__reduce_ex__(2)
        return (_blank, (self.float_class,), *reduced[2:])


@cache
def quantized_class(cls: Any) -> type[InPlace]:
    """Return the subclass that quantized modules of class `cls` get. It has the same name."""
    metaclass: Any = type(cls)
    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "float_class": cls,
    }
    subclass: type[InPlace] = metaclass(cls.__name__, (InPlace, cls), members)
    return subclass


_RESERVED_NAMES = {*dir(InPlace), "float_class", "quantizers", "input_layers"} - {
    *dir(nn.Module)
}
"""The attributes that only quantized layers have."""


def _blank(cls: Any) -> InPlace:
    """Return an empty module of the quantized class of `cls`; pickle then sets its state."""
    subclass = quantized_class(cls)
    return subclass.__new__(subclass)


def check_quantizable(module: nn.Module, where: str, roles: Collection[str]) -> None:
    """Check that a module can have quantizers in these roles. `where` names it in errors.

    Raises:
        ModelError: the module has an attribute with a name that we need, or changes its weight
            in calls. Or its `forward` was replaced on the object: then the class's forward
            would not run, and quantizers are called there.
    """
    taken = [name for name in sorted(_RESERVED_NAMES) if hasattr(module, name)]
    if taken:
        raise ModelError(
            f"{where} is {a_kind(module)} with an attribute {taken[0]!r} of its own, a name "
            "that quantized layers need",
            help="rename it in the class, or exclude the layer",
        )
    if "weights" in roles and isinstance(module, nn.Embedding) and module.max_norm is not None:
        raise ModelError(
            f"{where} has max_norm, by which it changes its quantized weight whenever it is "
            "called",
            help="call it once on torch.arange(num_embeddings) and set its max_norm to None, "
            "or exclude the layer",
        )
    for role in roles:
        if not is_parameter(role) and "forward" in vars(module):
            raise ModelError(
                f"{where} has a forward that replaces that of its class and would bypass "
                f"the quantizer of its {role}",
                help="remove what replaced it (accelerate: remove_hook_from_module), or "
                "exclude the layer",
            )


def make_quantizable(module: nn.Module, path: str) -> InPlace:
    """Make the module at `path` an `InPlace`. Until it gets quantizers, its outputs stay the
    same.
    """
    if not isinstance(module, InPlace):
        cls: Any = type(module)
        module.__class__ = quantized_class(cls)
        module.quantizers = nn.ModuleDict()
        object.__setattr__(module, "quantized_path", path or "the model")
    assert isinstance(module, InPlace)
    return module


def rectify_output(module: nn.Module) -> None:
    """Make a quantized module apply a ReLU before it quantizes its output."""
    object.__setattr__(module, "rectifies_output", True)


def insert_before(module: nn.Module, path: str, layer: nn.Module) -> None:
    """Insert a layer that the first argument of the module at `path` passes, after the layers
    that were inserted before.
    """
    module = make_quantizable(module, path)
    if "input_layers" not in module._modules:
        module.add_module("input_layers", nn.Sequential())
    input_layers = module.get_submodule("input_layers")
    assert isinstance(input_layers, nn.Sequential)
    input_layers.append(layer)


def lacks_bias(module: nn.Module) -> bool:
    """Return whether the module could have a bias and has none."""
    return "bias" in module._parameters and module._parameters["bias"] is None


def add_bias(module: nn.Module, value: Tensor) -> None:
    """Add a bias to a layer that has none, and mark the layer with `has_added_bias`."""
    weight = next(module.parameters())
    device = "cpu" if weight.is_meta else weight.device
    bias = value.detach().to(device, weight.dtype).clone()
    module.bias = nn.Parameter(bias, requires_grad=False)
    object.__setattr__(module, "has_added_bias", True)


def on_first(
    function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Call:
    """Apply `function` to the first argument of a call if that is a floating-point tensor or a
    packed sequence, and return all arguments.
    """
    new_kwargs = dict(kwargs)
    if args:
        return (_applied(function, args[0]), *args[1:]), new_kwargs
    for name in list(new_kwargs)[:1]:
        new_kwargs[name] = _applied(function, new_kwargs[name])
    return args, new_kwargs


def _applied(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `function` of a floating-point tensor or a packed sequence, and others as they
    are.
    """
    if isinstance(value, PackedSequence):
        return PackedSequence(function(value.data), *value[1:])
    if isinstance(value, Tensor) and value.is_floating_point():
        return function(value)
    return value


class ModuleTree:
    """A model that runs as it is, while watchers see the values of its layers.

    Watchers see the outputs of the layers in `rectified` after a ReLU.

    Attributes:
        model: the model.
        layers: its layers with parameters, by the graph's names.
        readers: by node whose value a layer reads, that layer. It shows the value, because the
            node itself may be no module.
        reached: the layers that have run.
    """

    def __init__(self, model: nn.Module, graph: Graph, rectified: Collection[str] = ()) -> None:
        self.model = model
        self._rectified = rectified
        modules = dict(model.named_modules())
        self.layers: dict[str, nn.Module] = {}
        self.readers: dict[str, str] = {}
        for node in graph.nodes:
            if node.params:
                self.layers[node.name] = modules[node.scope]
            for source in node.refs():
                self.readers[source] = node.name
        self.reached: set[str] = set()

    def observe(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], watch: Mapping[str, Watcher]
    ) -> Any:
        """Run the model, show each watched node's value to its watcher, and return the output.

        Raises:
            DataError: the model cannot run on these arguments.
            ModelError: the model raised an exception that would end the process.
        """
        with ExitStack() as hooks, torch.no_grad():
            # torch's fused attention bypasses the layers
            fused = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            hooks.callback(torch.backends.mha.set_fastpath_enabled, fused)
            for name, watcher in watch.items():
                reader = self.readers.get(name)
                if reader:
                    show_input = self._input_hook(reader, watcher)
                    layer = self.layers[reader]
                    handle = layer.register_forward_pre_hook(show_input, with_kwargs=True)
                else:
                    show_output = self._output_hook(name, watcher)
                    handle = self.layers[name].register_forward_hook(show_output)
                hooks.callback(handle.remove)
            try:
                return self.model(*args, **kwargs)
            except (QuantizerError, ObservationError, MemoryError, KeyboardInterrupt):
                raise
            except Exception as error:
                reason = first_line(error)
                raise DataError(
                    f"the model cannot run on this batch: {type(error).__name__}: {reason}",
                    help="check shapes, dtypes and devices of the data; a dict gives keyword "
                    "arguments",
                ) from error
            except BaseException as error:
                text = f"forward() of {type(self.model).__name__} raised {type(error).__name__}"
                raise ModelError(text, help="return from forward() instead") from error

    def _input_hook(self, layer: str, watcher: Watcher) -> Callable[..., None]:
        """Return a hook that shows the input of a layer as it is before it is quantized."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.reached.add(layer)
            input_layers = module._modules.get("input_layers")

            def show(value: Tensor) -> Tensor:
                shown = value if input_layers is None else input_layers(value)
                watcher(shown)
                return value

            on_first(show, args, kwargs)

        return hook

    def _output_hook(self, layer: str, watcher: Watcher) -> Callable[..., None]:
        """Return a hook that shows the output of a layer."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.reached.add(layer)
            if isinstance(output, Tensor) and output.is_floating_point():
                if layer in self._rectified:
                    output = torch.relu(output)
                watcher(output)

        return hook


def keep_layers_called(model: nn.Module) -> None:
    """Disable torch's fused encoder layers, which read weights directly and would bypass input
    quantizers.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


_CONTAINERS = (dict, OrderedDict, list)


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Undo what the block does to the modules of `model` and to their parameters if it raises
    or is interrupted.

    Classes, attributes and the values of parameters are restored, and the objects stay the
    same. Values are stored without a copy: the block must replace the `data` of a parameter and
    write nothing into it.
    """
    modules = [(module, type(module), _contents(module)) for module in model.modules()]
    values = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, cls, contents in modules:
            module.__class__ = cls
            for container, content in contents:
                container.clear()
                if isinstance(container, list):
                    container.extend(content)
                else:
                    container.update(content)
        for parameter, value in values:
            parameter.data = value
        raise


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return the module's attributes and the plain containers among them (its parameters,
    buffers, hooks), each with a copy.
    """
    attributes = vars(module)
    containers = [value for value in attributes.values() if type(value) in _CONTAINERS]
    return [(container, container.copy()) for container in (attributes, *containers)]
