"""Load the user's model in eval mode, as `--model` and `--weights` name it. Python files run as
code.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from quantizer.config.wording import a_kind, joined
from quantizer.errors import DataError, ModelError, QuantizerError
from quantizer.nn.layer import check_float
from quantizer.plugins import loaded, plugins
from quantizer.sources.batches import Batch
from quantizer.sources.directions import BY_NAME, Directions
from quantizer.sources.module_state import prepare_for_traces
from quantizer.sources.tensor_kinds import WEIGHT_SUFFIXES, check_finite
from quantizer.sources.user_code import (
    UserModule,
    import_user_module,
    require_callable,
    split_spec,
    user_errors,
    user_exits,
)

_logger = logging.getLogger(__name__)

_REFUSED_WEIGHTS = (
    "{path} holds weights, not a model",
    "give the Python that builds it: <--model FILE.py --weights {path}>",
)
_REFUSED: Mapping[str, tuple[str, str]] = {
    ".onnx": (
        "{path}: an ONNX graph is not a PyTorch model, and quantizer has no converter",
        "give the PyTorch model it was exported from, or convert it to a torch.nn.Module first",
    ),
    ".json": ("{path} is not a model", "a config is given as <--config_file {path}>"),
    ".ipynb": (
        "{path} is a notebook, not a Python file",
        "`jupyter nbconvert --to script {path}` writes one",
    ),
    **dict.fromkeys(WEIGHT_SUFFIXES, _REFUSED_WEIGHTS),
}
"""The reason and the help of the error for files that are not models, by suffix."""
_LOOKED_FOR = ("calibration_data", "evaluation_data", "evaluate", "example_input")
"""The functions of the model's file that may be missing."""
_SIMILAR = 0.76
"""How similar a name must be to pass for a wrong one; `calib_data` is."""
Measure = Callable[[Callable[..., Any], Iterable[Any]], dict[str, float]]
"""A function that runs a model on the data and returns metrics by name."""


@dataclass(frozen=True)
class Evaluate:
    """The user's `evaluate(model, data)`. It is called like the function.

    Args:
        function: the user's.
        directions: which of its metrics are better when they are lower, as its file declares.
    """

    function: Measure
    directions: Directions

    def __call__(self, model: Callable[..., Any], data: Iterable[Any]) -> dict[str, float]:
        """Return the metrics of a model on the data."""
        return self.function(model, data)


class UserFunction(NamedTuple):
    """A function of the user's without arguments, and what names it in messages."""

    call: Callable[[], Any]
    label: str


@dataclass(frozen=True)
class LoadedModel:
    """A float model to trace, and what else its file defines under the conventional names.

    Args:
        module: the model.
        calibration_data: returns a `source` of `load_batches`.
        evaluation_data: the same, for evaluation; by default `calibration_data`.
        evaluate: the user's function.
        directions: of the metrics that the file declares.
        tokenizer: what splits texts into tokens: a folder, or a function of the user's.
        example: returns an item with the shapes of the data, for a number of tokens. Its values
            mean nothing.
    """

    module: nn.Module
    calibration_data: Callable[[], Any] | None = None
    evaluation_data: Callable[[], Any] | None = None
    evaluate: Evaluate | None = None
    directions: Directions = BY_NAME
    tokenizer: Path | UserFunction | None = None
    example: Callable[[int], Any] | None = None

    @property
    def name(self) -> str:
        """Return the class name of the model."""
        return type(self.module).__name__


def load_model(
    spec: str,
    weights: str | None = None,
    *,
    trust: bool = False,
    max_unpacked: int | None = None,
) -> LoadedModel:
    """Return the model of `--model`, with the weights of `--weights` if given.

    Args:
        spec: `FILE.py` (its `model()`), `FILE.py:factory`, `package.module:factory`, an
            exported `.pt2`, or a Hugging Face folder.
        weights: a file of weights.
        trust: whether code in a `.pt2` or in a Hugging Face folder may run.
        max_unpacked: bytes that a smaller file of weights may unpack to.

    Raises:
        ModelError: the model cannot be loaded or checked.
    """
    path = Path(spec)
    suffix = "" if path.is_dir() else path.suffix.lower()
    if suffix in _REFUSED:
        reason, remedy = _REFUSED[suffix]
        raise ModelError(reason.format(path=path), help=remedy.format(path=path))
    if suffix == ".pt2":
        loaded = LoadedModel(_from_pt2(path, trust))
    elif suffix == ".py":
        loaded = _from_python(spec)
    else:
        loaded = _from_plugin(spec, trust) or _from_python(spec)
    check_float(loaded.module, traced=True)
    if weights is not None:
        # Only --weights needs it
        from quantizer.sources.tensor_files import load_weights

        load_weights(loaded.module, weights, max_unpacked)
    check_finite(loaded.module)
    return loaded


def materialize_lazy_layers(module: nn.Module, batch: Batch) -> None:
    """Run the first batch if the model has lazy layers, so that they get their shapes. Their
    weights are drawn from a fixed seed.

    Raises:
        ModelError: the module cannot run the batch, or the drawn weights are not finite.
    """
    if not any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        return
    _logger.warning(
        "%s has lazy layers: their weights are drawn at random", type(module).__name__
    )
    with (
        torch.random.fork_rng(),
        torch.no_grad(),
        user_errors("running the model on the first batch", ModelError),
    ):
        torch.manual_seed(0)
        module(*batch.args, **batch.kwargs)
    check_finite(module)


def load_evaluate(spec: str, fallback: Directions = BY_NAME) -> Evaluate:
    """Return the function `evaluate(model, data)` of `--evaluate FILE.py`, or the one that
    `FILE.py:function` names.

    Args:
        spec: the file, or the file and the function.
        fallback: the directions in the model's file, for metrics that this file does not
            declare.

    Raises (also when the function is called):
        DataError: there is none, it raises, or it does not return a dict of numbers. Or the
            file does not declare its metrics as sets of names.
    """
    location, name = split_spec(spec)
    user = import_user_module(location, DataError)
    if name is None:
        name = "evaluate"
    function = _checked_evaluate(user, user.get(name))
    return Evaluate(function, Directions.declared_by(user).with_fallback(fallback))


def _from_plugin(spec: str, trust: bool) -> LoadedModel | None:
    """Return the model that a plug-in loads; None if there is none for this text."""
    for plugin in plugins():
        for kind in plugin.models:
            if kind.is_named_by(spec):
                model: LoadedModel = loaded(kind.loader)(spec, trust=trust)
                return model
    if Path(spec).is_dir():
        raise ModelError(
            f"{spec} is a folder, and no plug-in is there that loads a model from it",
            help=model_forms(),
        )
    return None


def _from_python(spec: str) -> LoadedModel:
    """Return the model that a file or a module of the user builds."""
    location, name = split_spec(spec)
    if name is None:
        name = "model"
        if not location.endswith(".py"):
            if Path(spec).is_file():
                raise ModelError(f"{spec} is not a Python file", help=model_forms())
            message = f"{spec!r} is neither a file, a folder nor module:factory"
            file = Path(f"{spec}.py")
            remedy = f"did you mean {file}?" if file.is_file() else model_forms()
            raise ModelError(message, help=remedy)
    user = import_user_module(location, ModelError)
    module = _build(user, name)
    _note_similar_names(user)
    with user_errors("eval() of the model", ModelError):
        prepare_for_traces(module)
    directions = Directions.declared_by(user)
    evaluate = None
    function = user.find("evaluate")
    if function is not None:
        evaluate = Evaluate(_checked_evaluate(user, function), directions)
    calibration_data = _getter(user, "calibration_data")
    tokenizer = _getter(user, "tokenizer")
    return LoadedModel(
        module=module,
        calibration_data=calibration_data,
        evaluation_data=_getter(user, "evaluation_data") or calibration_data,
        evaluate=evaluate,
        directions=directions,
        tokenizer=tokenizer and UserFunction(tokenizer, f"tokenizer() of {user.label}"),
        example=_example_of(user),
    )


def _build(user: UserModule, name: str) -> nn.Module:
    factory = user.get(name)
    if isinstance(factory, nn.Module):
        return factory
    what = f"{name} of {user.label}"
    if not callable(factory):
        raise ModelError(
            f"{what} is {a_kind(factory)}, not a function that returns a torch.nn.Module"
        )
    require_callable(factory, 0, what, ModelError)
    module = user.call(factory, ModelError)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{what} returned {a_kind(module)}, not a torch.nn.Module", help=_remedy_for(module)
        )
    return module


def _remedy_for(returned: Any) -> str:
    """Return what to do if the function of the model returned something else."""
    if returned is None:
        return "end the function with `return` and the module"
    is_state = isinstance(returned, Mapping) and bool(returned)
    if is_state and all(isinstance(value, torch.Tensor) for value in returned.values()):
        return (
            "this is a state_dict: build the module and load it with "
            "module.load_state_dict(), or give the file as <--weights>"
        )
    return "return the module alone"


def _note_similar_names(user: UserModule) -> None:
    """Warn of a function whose name is close to one that is looked for and not defined."""
    functions: list[str] = []
    for name, value in vars(user.module).items():
        is_own = getattr(value, "__module__", None) == user.module.__name__
        if is_own and callable(value) and name not in _LOOKED_FOR:
            functions.append(name)
    for wanted in _LOOKED_FOR:
        similar = difflib.get_close_matches(wanted, functions, n=1, cutoff=_SIMILAR)
        if user.find(wanted) is None and similar:
            _logger.warning(
                "%s has no %s(), but %s(), which is not used: is the name wrong?",
                user.label,
                wanted,
                similar[0],
            )


def _getter(user: UserModule, name: str) -> Callable[[], Any] | None:
    """Return a function that calls the user's function `name`, or returns a value of that
    name; None if there is none.
    """
    source = user.find(name)
    if source is None:
        return None
    if callable(source):
        return partial(user.call, source, DataError)

    def value() -> Any:
        if isinstance(source, Iterator):
            raise DataError(
                f"{name} of {user.label} is an iterator, which can be read only once",
                help="make it a function that returns the iterator",
            )
        return source

    return value


def _example_of(user: UserModule) -> Callable[[int], Any] | None:
    example = _getter(user, "example_input")
    if example is None:
        return None
    return lambda seq_len: example()


def _checked_evaluate(user: UserModule, function: Any) -> Measure:
    call = partial(user.call, function, DataError)
    return checked_measure(function, f"evaluate of {user.label}", user.error, call=call)


def checked_measure(
    function: Any,
    what: str,
    error: type[QuantizerError] = DataError,
    *,
    call: Callable[..., Any] | None = None,
) -> Measure:
    """Return a function that calls the user's `evaluate(model, data)` and checks its metrics.

    Args:
        function: the user's.
        what: names it in messages.
        error: the error to raise if it is not a function.
        call: how to call it; directly if None.

    Raises (also when the function is called): DataError: it does not take a model and data, or
        does not return a dict of numbers.
    """
    if not callable(function):
        raise error(f"{what} is {a_kind(function)}, not a function of (model, data)")
    require_callable(function, 2, what, DataError)
    called = call or function

    def evaluate(model: Callable[..., Any], data: Iterable[Any]) -> dict[str, float]:
        """Return the metrics of a model on data, by name."""
        metrics = called(model, data)
        try:
            return {str(name): float(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError) as cause:
            raise DataError(
                f"{what} returned {metrics!r:.80}, not a dict of numbers",
                help='return for example {"top1": 0.97}',
            ) from cause

    return evaluate


def _from_pt2(path: Path, trust: bool) -> nn.Module:
    if not path.is_file():
        raise ModelError(f"there is no file {path}", help=model_forms())
    if not trust:
        raise ModelError(
            f"{path} is not loaded: a .pt2 file can run code when torch.export.load opens it",
            help="add <--trust> if you trust its author, or give the Python that builds it",
        )
    try:
        # Registers operators that programs may call
        import torch.ao.quantization.fx._decomposed

        with user_exits(f"loading {path}", ModelError):
            return torch.export.load(path).module()
    except ModelError:
        raise
    except Exception as cause:
        raise ModelError(f"{path} cannot be read as an exported program: {cause}") from cause


def model_forms() -> str:
    """Return the help of errors about `--model`, which says what it may be."""
    forms = ["FILE.py", "FILE.py:factory", "package.module:factory", "an exported .pt2"]
    for plugin in plugins():
        forms += [kind.form for kind in plugin.models]
    return f"give {joined(forms, 'or')}"
