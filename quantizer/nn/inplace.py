"""Quantizers for modules where they stand: the object stays, its class becomes a subclass of
its own class.

Finds no scales and decides nothing. The quantized layers of traced graphs are in `weighted`.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quantizer.config.roles import is_parameter
from quantizer.config.wording import a_kind
from quantizer.errors import DataError, ModelError, QuantizerError
from quantizer.graph.ir import Graph
from quantizer.nn.layer import Layer
from quantizer.observers import ObservationError

Watcher = Callable[[Tensor], None]


class InPlace(Layer):
    """What a quantized module is besides what it was: its first argument and its output pass
    quantizers.

    Its parameters are quantized already. A tuple (of a recurrent layer) passes unchanged.
    Before the first argument is quantized, it passes `input_layers`, where algorithms put some.
    Where a ReLU follows, the output is what that makes of it, `rectifies_output`: it is
    quantized afterwards, and the ReLU leaves it as it is.
    """

    float_class: ClassVar[type[nn.Module]]
    quantized_path = ""
    rectifies_output = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, between its quantizers.

        Raises:
            DataError: a dynamic tensor with NaN or infinity has no range; the layer is named.
        """
        role = "input"
        try:
            if (before := self._modules.get("input_layers")) is not None:
                args, kwargs = on_first(before, args, kwargs)
            if role in self.quantizers:
                args, kwargs = on_first(self.quantizers[role], args, kwargs)
            output = super().forward(*args, **kwargs)
            role = "output"
            if not isinstance(output, Tensor):
                return output
            return self.finish(torch.relu(output) if self.rectifies_output else output)
        except ObservationError as error:
            raise DataError(
                f"{role} of {self.quantized_path}: {error}",
                help="check the data and the weights",
            ) from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For copy and pickle, which cannot import a class that is made while a program
        runs.
        """
        reduced: Any = super().__reduce_ex__(2)
        return (_blank, (self.float_class,), *reduced[2:])


@cache
def quantized_class(cls: Any) -> type[InPlace]:
    """The class that modules of class `cls` get. It has the same name."""
    make: Any = type(cls)
    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    made: type[InPlace] = make(cls.__name__, (InPlace, cls), {**members, "float_class": cls})
    return made


_OUR_NAMES = {*dir(InPlace), "float_class", "quantizers", "input_layers"} - {*dir(nn.Module)}
"""What quantized layers have and others have not."""


def _blank(cls: Any) -> InPlace:
    made = quantized_class(cls)
    return made.__new__(made)


def check_float(model: Any, *, traced: bool = False) -> None:
    """Look whether `model` is one whose layers can be changed in place, with none that is
    quantized.

    Args:
        traced: whether it is only traced, for which compiled parts do no harm.

    Raises:
        ModelError: it is no module, compiled by torch.jit, or quantized already.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model is {a_kind(model)}, not a torch.nn.Module",
            help="give the Python model; quantize it first, then export or compile it",
        )
    for path, module in model.named_modules():
        where = path or "the model"
        is_compiled = isinstance(module, torch.jit.ScriptModule)
        has_parameters = next(module.parameters(), None) is not None
        if is_compiled and (not path or (has_parameters and not traced)):
            raise ModelError(
                f"{where} is compiled by torch.jit, so its layers cannot be changed",
                help="quantize the Python model, then trace it",
            )
        if isinstance(module, InPlace):
            raise ModelError(f"{where} is quantized already", help="start from the float model")


def check_quantizable(module: nn.Module, where: str, roles: Collection[str]) -> None:
    """Look for what would keep quantizers in these roles from working; `where` names the module
    in errors.

    Raises:
        ModelError: it has attributes with our names, rewrites its weight, or is called another
            way than by its class's forward, where quantizers stand.
    """
    taken = next((name for name in sorted(_OUR_NAMES) if hasattr(module, name)), None)
    if taken is not None:
        raise ModelError(
            f"{where} is {a_kind(module)} with an attribute {taken!r} of its own, a name that "
            "quantized layers need",
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
                f"{where} has a forward beside its class's, which would pass the quantizer of "
                f"its {role} by",
                help="remove what replaced it (accelerate: remove_hook_from_module), or "
                "exclude the layer",
            )


def make_quantizable(module: nn.Module, path: str) -> InPlace:
    """Give the module at `path`, in place, room for quantizers; what it computes does not
    change.
    """
    if not isinstance(module, InPlace):
        cls: Any = type(module)
        module.__class__ = quantized_class(cls)
        module.quantizers = nn.ModuleDict()
        object.__setattr__(module, "quantized_path", path or "the model")
    assert isinstance(module, InPlace)
    return module


def rectify_output(module: nn.Module) -> None:
    """Have a quantized module quantize its output after a ReLU."""
    object.__setattr__(module, "rectifies_output", True)


def insert_before(module: nn.Module, path: str, layer: nn.Module) -> None:
    """Have the module at `path` pass its first argument through one more layer, after those
    that are there already.
    """
    made = make_quantizable(module, path)
    if "input_layers" not in made._modules:
        made.add_module("input_layers", nn.Sequential())
    made.get_submodule("input_layers").append(layer)  # type: ignore[operator]  # a Sequential, as made above


def lacks_bias(module: nn.Module) -> bool:
    """Whether it is a layer that could have a bias and has none."""
    return "bias" in module._parameters and module._parameters["bias"] is None


def add_bias(module: nn.Module, value: Tensor) -> None:
    """Give a layer that lacks a bias this one; `has_added_bias` tells that it did not have it
    from the start.
    """
    weight = next(module.parameters())
    device = "cpu" if weight.is_meta else weight.device
    module.bias = nn.Parameter(
        value.detach().to(device, weight.dtype).clone(), requires_grad=False
    )
    object.__setattr__(module, "has_added_bias", True)


def on_first(
    function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with the first one changed, if it is a tensor of floating point
    or a packed sequence.
    """
    if args:
        return (_changed(function, args[0]), *args[1:]), dict(kwargs)
    first = next(iter(kwargs), None)
    return args, {
        key: _changed(function, value) if key == first else value
        for key, value in kwargs.items()
    }


def _changed(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, PackedSequence):
        return PackedSequence(function(value.data), *value[1:])
    return function(value) if isinstance(value, Tensor) and value.is_floating_point() else value


class ModuleTree:
    """The layers of a module graph by name, which can be watched while the model runs;
    `reached` are those that ran.

    Outputs of the layers in `rectified` are shown as a ReLU makes them.
    """

    def __init__(self, model: nn.Module, graph: Graph, rectified: Collection[str] = ()) -> None:
        self.model, self._rectified = model, rectified
        modules = dict(model.named_modules())
        self.layers = {node.name: modules[node.scope] for node in graph.nodes if node.params}
        self.readers = {source: node.name for node in graph.nodes for source in node.refs()}
        self.reached: set[str] = set()

    def observe(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], watch: Mapping[str, Watcher]
    ) -> Any:
        """Run the model and show each watched node's value to its watcher; returns the output.

        Raises:
            DataError: the model cannot run on these arguments.
            ModelError: it would end the process.
        """
        with ExitStack() as hooks, torch.no_grad():
            fused = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)  # it would pass the layers by
            hooks.callback(torch.backends.mha.set_fastpath_enabled, fused)
            for name, watcher in watch.items():
                if reader := self.readers.get(name):
                    show = partial(self._show_input, reader, watcher)
                    hook = self.layers[reader].register_forward_pre_hook(show, with_kwargs=True)
                else:
                    hook = self.layers[name].register_forward_hook(
                        partial(self._show_output, name, watcher)
                    )
                hooks.callback(hook.remove)
            try:
                return self.model(*args, **kwargs)
            except (QuantizerError, ObservationError, MemoryError, KeyboardInterrupt):
                raise
            except Exception as error:
                reason = str(error).strip().partition("\n")[0]
                raise DataError(
                    f"the model cannot run on this batch: {type(error).__name__}: {reason}",
                    help="check shapes, dtypes and devices of the data; a dict gives keyword "
                    "arguments",
                ) from error
            except BaseException as error:
                text = f"forward() of {type(self.model).__name__} raised {type(error).__name__}"
                raise ModelError(text, help="return from forward() instead") from error

    def _show_input(
        self,
        layer: str,
        watcher: Watcher,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.reached.add(layer)
        inserted = module._modules.get("input_layers")

        def look(value: Tensor) -> Tensor:
            watcher(value if inserted is None else inserted(value))
            return value

        on_first(look, args, kwargs)

    def _show_output(
        self, layer: str, watcher: Watcher, _: nn.Module, __: Any, output: Any
    ) -> None:
        self.reached.add(layer)
        if isinstance(output, Tensor) and output.is_floating_point():
            watcher(torch.relu(output) if layer in self._rectified else output)


def keep_layers_called(model: nn.Module) -> None:
    """Switch torch's fused encoder layers off, which read weights directly and would pass input
    quantizers by.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
