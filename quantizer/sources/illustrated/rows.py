"""Turn rows of text with images into batches, by the processor of the model's folder."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from quantizer.errors import DataError
from quantizer.sources.arguments import arguments_of
from quantizer.sources.batches import Batch
from quantizer.sources.images.images import read_image
from quantizer.sources.json_files import load_pretrained
from quantizer.sources.texts.documents import Document, StoredImage
from quantizer.sources.user_code import user_errors
from quantizer.storage.child_process import loaded_twice, run_apart

_MEDIA_TOKENS = ("image_token_id", "image_token_index")
"""Where configs of transformers have the token in whose place an image goes."""
_PIXELS = "pixel_values"
_SAVE = "save the processor of the model there, or give rows without images"


@dataclass(frozen=True)
class IllustratedRows:
    """Rows that are a batch each, as their images may differ in number of tokens.

    Attributes:
        documents: with texts or messages, all of them with images.
        module: the model, whose folder has the processor.
        unscored: the target of a token that is not scored; None for no targets.
        trust: whether the processor may be code of the folder.
    """

    documents: Sequence[Document]
    module: nn.Module | None
    unscored: int | None
    trust: bool = False

    def batches(self) -> Iterator[Batch]:
        """Yield a batch for each row.

        Raises:
            DataError: there is no processor, a row has no image, or it cannot be processed.
        """
        for document in self.documents:
            if not document.images:
                raise DataError(
                    f"{document.place} has no image, and other rows have some",
                    help="give rows with images alone, or texts alone",
                )
        for document, text in zip(self.documents, self._texts(), strict=True):
            yield self._batch(document, text)

    def _texts(self) -> list[str]:
        """Return the text of each row, as the chat template of the processor writes it.

        Templates and tokenizers of files run in another process first, within limits.
        """
        processor = self._processor
        size = sum(len(str(document.content)) for document in self.documents)

        def write_out() -> list[str]:
            texts: list[str] = []
            for document in self.documents:
                with user_errors(self._what(document), DataError):
                    text = document.content
                    if not isinstance(text, str):
                        text = processor.apply_chat_template(text, tokenize=False)
                    processor.tokenizer(text)
                texts.append(text)
            return texts

        if self.trust:
            return write_out()
        what = f"the processor of {self._folder}"
        texts: list[str] = run_apart(write_out, what, DataError, size=size)
        return texts

    def _what(self, document: Document) -> str:
        return f"the processor of {self._folder}, on {document.place},"

    def _batch(self, document: Document, text: str) -> Batch:
        images = [_read(image) for image in document.images]
        with user_errors(self._what(document), DataError):
            values = self._processor(text=[text], images=images, return_tensors="pt")
        known = arguments_of(self.module).known
        inputs: dict[str, Tensor] = {}
        for name, value in values.items():
            if name in known and isinstance(value, Tensor):
                inputs[name] = value
        if self.unscored is None:
            return Batch((), inputs, None, inputs)
        target = inputs["input_ids"].clone()
        for token in self._media_tokens():
            target[target == token] = self.unscored
        return Batch((), inputs, target, {**inputs, "labels": target})

    def _media_tokens(self) -> Iterator[int]:
        """Yield the tokens that stand for images, which no text predicts."""
        config = getattr(self.module, "config", None)
        for name in _MEDIA_TOKENS:
            token = getattr(config, name, None)
            if isinstance(token, int):
                yield token

    @property
    def _folder(self) -> Path:
        return Path(getattr(self.module, "name_or_path", "") or "")

    @cached_property
    def _processor(self) -> Any:
        """Return the processor of the model's folder.

        Raises:
            DataError: the model takes no images, or its folder has no processor of them.
        """
        place = self.documents[0].place
        if _PIXELS not in arguments_of(self.module).known:
            raise DataError(
                f"{place} has images, and {type(self.module).__name__} takes no {_PIXELS}",
                help="give rows without images",
            )
        if not (self._folder / "config.json").is_file():
            raise DataError(
                f"{place} has images, and the model comes from no folder with a processor",
                help="give the folder as <--model>, or batches of your own",
            )
        what = f"transformers, loading the processor of {self._folder},"

        def load() -> Any:
            with user_errors(what, DataError, remedy=_SAVE):
                return load_pretrained("AutoProcessor", self._folder, trust=self.trust)

        if self.trust:
            processor = load()
        else:
            size = sum(file.stat().st_size for file in self._folder.glob("*token*"))
            processor = loaded_twice(load, what.rstrip(","), DataError, size=size)
        if getattr(processor, "image_processor", None) is None:
            raise DataError(
                f"{place} has images, and the folder {self._folder} has no processor of them",
                help=_SAVE,
            )
        return processor


def _read(image: Path | StoredImage) -> Any:
    if isinstance(image, StoredImage):
        return read_image(io.BytesIO(image.content), image.name)
    return read_image(image, str(image))
