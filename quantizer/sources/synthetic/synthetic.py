"""Make calibration data from the model itself, for `--data synthetic`: inputs from the
statistics of batch norms, or sequences sampled from a language model.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.wording import counted
from quantizer.errors import DataError, UsageError
from quantizer.option_words import Sentence
from quantizer.sources.arguments import arguments_of, longest_window
from quantizer.sources.batches import Batch
from quantizer.sources.data import DEFAULT_BATCH_SIZE, Batches
from quantizer.sources.kinds import NamedData, shape_of_spec
from quantizer.sources.module_state import preserve_module_state
from quantizer.sources.synthetic.batch_norm_inputs import (
    STEPS,
    batch_norm_distance,
    best_scaling,
    match_batch_norms,
    trained_batch_norms,
)
from quantizer.sources.user_code import user_errors
from quantizer.sources.user_data import call_once_if_list
from quantizer.storage.deferred_tensor import keep_loaded

_logger = logging.getLogger(__name__)

SYNTHETIC = "synthetic"
"""The value of `--data`."""
STAMP = "synthetic data, made from the model itself"
"""What reports say of these data."""
DEFAULT_SAMPLES = 32
DEFAULT_SEQUENCES = 8
_NO_SHAPE = (
    "<shell:add example_input() to the model's file, or >give the shape, for example "
    f"<--data {SYNTHETIC}:{DEFAULT_SAMPLES}x3x224x224>, or {SYNTHETIC}:{DEFAULT_SEQUENCES}x512 "
    "for a language model"
)
GREEDY_TOKENS = 4
"""So many tokens after the first are the most probable ones. The paper has 3 to 5."""
Fill = Callable[[Tensor], Batch]
"""Returns the call of a model with token ids [n, s]."""


def open_synthetic(data: NamedData) -> Batches:
    """Return batches that are made when the first of them is read, and then kept.

    Args:
        data: "synthetic", or "synthetic:NxCxHxW" for N samples of this shape.

    Raises:
        UsageError: the text is not one of these, or `seq_len` does not fit the model.
        DataError: no data can be made for this model, or their shape is not known.
    """
    module = data.module
    assert module is not None
    if Path(data.spec).exists():
        spec = data.spec
        text = f"<--data {spec}> makes data from the model; ./{spec} is the file or folder"
        _logger.warning("%s", Sentence(text))
    if data.spec != SYNTHETIC:
        count, shape = shape_of_spec(data.spec)
        data = replace(data, samples=min(count, data.samples or count))
        example: Batch | None = _example_of_shape(module, shape)
    else:
        example = data.example and data.example()
    if example is None:
        raise DataError("the shape of synthetic data is not known", help=_NO_SHAPE)
    kinds = {tensor.is_floating_point() for _, tensor in example.tensors()}
    if kinds == {True}:
        if data.options.get("seq_len") is not None:
            raise UsageError(
                "<--seq_len> is for texts, but the input of the model is floating-point",
                help="leave out the option",
            )
        return _input_batches(data, module, example)
    if kinds == {False}:
        return _token_batches(data, module, example)
    raise DataError(
        f"no synthetic data can be made for {type(module).__name__}, which takes integers "
        "and floating-point inputs",
        help="give real data with <--data>",
    )


def _example_of_shape(module: nn.Module, shape: list[int]) -> Batch:
    """Return one sample of this shape: token ids if the model has embeddings and no batch
    norms, else floats.
    """
    has_embeddings = any(isinstance(layer, nn.Embedding) for layer in module.modules())
    takes_tokens = has_embeddings and not trained_batch_norms(module)
    name = getattr(module, "main_input_name", "")
    dtype = torch.float32
    parameter = next(module.parameters(), None)
    if takes_tokens:
        dtype = torch.long
    elif parameter is not None and parameter.is_floating_point():
        dtype = parameter.dtype
    tensor = torch.zeros(1, *shape, dtype=dtype)
    if name in arguments_of(module).known:
        return Batch((), {name: tensor}, None, {name: tensor})
    return Batch.of(tensor)


def _input_batches(data: NamedData, module: nn.Module, example: Batch) -> Batches:
    """Return batches of inputs from the statistics of batch norms."""
    layers = trained_batch_norms(module)
    if not layers:
        name = type(module).__name__
        raise DataError(
            f"no synthetic data can be made for {name}: it has no batch normalization with "
            "statistics of training, and its input is not token ids",
            help="give real data with <--data>",
        )
    samples = data.samples or DEFAULT_SAMPLES
    size = data.batch_size or DEFAULT_BATCH_SIZE
    way = (
        f"{counted(samples, 'input')} from the statistics of "
        f"{counted(len(layers), 'batch norm')}, in {STEPS} steps a batch"
    )

    def starts() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(data.seed)
        for begin in range(0, samples, size):
            count = min(size, samples - begin)
            draw = partial(_normal_like, count=count, generator=generator)
            yield example.with_inputs(draw)

    def make() -> list[Batch]:
        """Return the batches, matched to the batch norms."""
        _logger.info("making %s", way)
        noise = next(starts())
        scaling = best_scaling(module, noise)
        batches: list[Batch] = []
        for batch in starts():
            batches.append(match_batch_norms(module, batch, scaling))
        before = batch_norm_distance(module, noise)
        after = batch_norm_distance(module, batches[0])
        _logger.info(
            "mean distance of a batch norm from its statistics: %.3g nats, and %.3g for noise",
            after,
            before,
        )
        return batches

    return _made_once(make, starts, data.spec, way, length=math.ceil(samples / size))


def _token_batches(data: NamedData, module: nn.Module, example: Batch) -> Batches:
    """Return batches of sequences sampled from the model."""
    shapes = [list(tensor.shape) for _, tensor in example.tensors()]
    if len(shapes) != 1 or len(shapes[0]) != 2:
        texts = " and ".join(map(str, shapes))
        raise DataError(
            f"no synthetic data can be made for {type(module).__name__}: its integer inputs "
            f"have the shapes {texts}, and sequences of tokens are one input [samples, tokens]",
            help="give real data with <--data>",
        )
    length = data.options.get("seq_len") or shapes[0][1]
    longest = longest_window(module)
    if longest is not None and length > longest:
        raise UsageError(
            f"sequences of {length} tokens are too long: the model has {longest} positions",
            help=f"make sequences of at most {longest} tokens",
        )
    fill = partial(_filled, example)
    vocabulary = vocabulary_of(module, example)
    samples = data.samples or DEFAULT_SEQUENCES
    size = data.batch_size or 1
    way = f"{counted(samples, 'sequence')} of {length} tokens sampled from the model"
    generator = torch.Generator().manual_seed(data.seed)
    first = torch.randint(vocabulary, (samples, 1), generator=generator)

    def starts() -> Iterator[Batch]:
        for part in torch.split(first, size):
            yield fill(part.repeat(1, length))

    def make() -> list[Batch]:
        _logger.info("making %s", way)
        ids = sample_tokens(module, fill, first, length, seed=data.seed)
        return [fill(part.clone()) for part in torch.split(ids, size)]

    return _made_once(make, starts, data.spec, way, length=math.ceil(samples / size))


def _made_once(
    make: Callable[[], list[Batch]],
    starts: Callable[[], Iterator[Batch]],
    spec: str,
    way: str,
    *,
    length: int,
) -> Batches:
    """Return batches that `make` returns at the first pass.

    Args:
        make: runs the model.
        starts: yields batches with the same shapes, without running the model.
        spec: the value of `--data`.
        way: says how the batches are made.
        length: how many they are.
    """
    make_once = call_once_if_list(make)
    return Batches(
        lambda: iter(make_once()), spec, stamp=STAMP, length=length, way=way, open_shapes=starts
    )


def _filled(example: Batch, ids: Tensor) -> Batch:
    """Return the example with other token ids."""
    return example.with_inputs(lambda tensor: ids.to(tensor.dtype))


def _normal_like(tensor: Tensor, *, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` samples of normally distributed values in the shape of a batch's."""
    values = torch.randn(count, *tensor.shape[1:], generator=generator)
    return values.to(tensor.dtype)


def vocabulary_of(module: Any, call: Batch) -> int:
    """Return the number of tokens that a model predicts the next one from.

    Args:
        module: the model.
        call: token ids [n, s]. A model that is not of transformers runs them.

    Raises:
        DataError: the model does not predict the next token.
    """
    if _is_of_transformers(module):
        config: Any = module.config
        if module.can_generate() and not config.is_encoder_decoder:
            text_config: Any = config.get_text_config()
            return int(text_config.vocab_size)
        raise _refusal(module, "is not a decoder of transformers that generates text")
    with preserve_module_state(module), torch.no_grad():
        module.eval()
        with user_errors("running the model on its example input", DataError):
            output = module(*call.args, **call.kwargs)
    _, ids = next(call.tensors())
    logits = _logits_of(output)
    sizes: set[int] = set()
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            sizes.add(layer.num_embeddings)
    if logits is not None and logits.shape[:-1] == ids.shape and logits.shape[-1] in sizes:
        return logits.shape[-1]
    raise _refusal(module, "has no output with a logit of each token of its embeddings")


def _is_of_transformers(module: Any) -> bool:
    return callable(getattr(module, "can_generate", None))


def _refusal(module: nn.Module, reason: str) -> DataError:
    name = type(module).__name__
    return DataError(
        f"no synthetic data can be made for {name}, which takes token ids: it {reason}, so it "
        "does not predict the next token",
        help="give real data with <--data>",
    )


def sample_tokens(
    module: nn.Module, fill: Fill, first: Tensor, length: int, *, seed: int
) -> Tensor:
    """Return sequences of token ids [n, length] that the model continues from their first
    token: greedily for a few tokens, then drawn from its distribution at temperature 1.

    Args:
        module: in any mode; it is run in evaluation mode and stays unchanged.
        fill: makes the call of the model.
        first: the first tokens [n, 1].
        length: tokens of a sequence.
        seed: of the draws.

    Raises:
        DataError: the model raises an error.

    Source: Liu et al., "LLM-QAT: Data-Free Quantization Aware Training for Large Language
    Models", arXiv 2305.17888, section 3.1.
    """
    parameter = next(module.parameters(), None)
    if parameter is not None:
        first = first.to(parameter.device)
    loaded_once = keep_loaded(module.parameters())
    with preserve_module_state(module), loaded_once, torch.no_grad():
        module.eval()
        torch.manual_seed(seed)
        with user_errors("sampling text from the model", DataError):
            if _is_of_transformers(module):
                return _generate(module, first, length).cpu()
            return _sample_windows(module, fill, first, length).cpu()


def _generate(module: Any, first: Tensor, length: int) -> Tensor:
    """Return sequences that transformers generates with the model's own cache.

    No sequence ends early, and the model's own settings of sampling have no effect.
    """
    settings = {
        "use_cache": True,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "pad_token_id": 0,
    }
    greedy = min(GREEDY_TOKENS, length - 1)
    ids: Tensor = module.generate(
        first,
        attention_mask=torch.ones_like(first),
        do_sample=False,
        min_new_tokens=greedy,
        max_new_tokens=greedy,
        **settings,
    )
    drawn = length - 1 - greedy
    if drawn == 0:
        return ids
    continued: Tensor = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=drawn,
        max_new_tokens=drawn,
        **settings,
    )
    return continued


def _sample_windows(module: nn.Module, fill: Fill, first: Tensor, length: int) -> Tensor:
    """Return sequences of a model without a cache, which runs the whole window for each token.

    Tokens that are not drawn yet are 0. A model that predicts the next token ignores them.
    """
    ids = first.new_zeros(len(first), length)
    ids[:, :1] = first
    for position in range(1, length):
        call = fill(ids)
        logits = _logits_of(module(*call.args, **call.kwargs))
        assert logits is not None
        row = logits[:, position - 1].float()
        if position <= GREEDY_TOKENS:
            ids[:, position] = row.argmax(-1)
        else:
            ids[:, position] = torch.multinomial(row.softmax(-1), 1)[:, 0]
    return ids


def _logits_of(output: Any) -> Tensor | None:
    """Return the logits in the output of a model: `logits` by name, or the first tensor."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if isinstance(output, Tensor) and output.is_floating_point() and output.dim() == 3:
        return output
    return None
