"""Sample sequences of tokens from a language model itself."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import DataError
from quantizer.sources.batches import Batch
from quantizer.sources.module_state import preserve_module_state
from quantizer.sources.user_code import user_errors
from quantizer.storage.deferred_tensor import keep_loaded

GREEDY_TOKENS = 4
"""So many tokens after the first are the most probable ones. The paper has 3 to 5."""
Fill = Callable[[Tensor], Batch]
"""Returns the call of a model with token ids [n, s]."""


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
    if logits is None or logits.shape[:-1] != ids.shape:
        raise _refusal(module, "has no output with a row of logits for each token")
    vocabulary = logits.shape[-1]
    sizes: list[int] = []
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            sizes.append(layer.num_embeddings)
    if vocabulary not in sizes:
        tokens = " and ".join(map(str, sorted(set(sizes)))) or "no"
        raise _refusal(
            module,
            f"gives {vocabulary} values for each token, and its embeddings have {tokens} rows",
        )
    return vocabulary


def _is_of_transformers(module: Any) -> bool:
    return callable(getattr(module, "can_generate", None))


def _refusal(module: nn.Module, reason: str) -> DataError:
    name = type(module).__name__
    return DataError(
        f"no synthetic data can be made for {name}, which takes token ids: it {reason}, so it "
        "does not predict the next token",
        help="give real data with <--data>",
    )


def first_tokens(count: int, vocabulary: int, seed: int) -> Tensor:
    """Return the first token of each sequence, [count, 1], drawn uniformly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count, 1), generator=generator)


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
