"""Text to token ids and back, by the checkpoint's own `tokenizer.json`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec.checkpoint import parse_json
from jaxspec.errors import CheckpointError, JaxspecError, RequestError

if TYPE_CHECKING:
    import tokenizers


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers` tokenizer and what `tokenizer_config.json` adds to it.

    Attributes:
        bos_token_id: put in front of every text that does not start with it; None adds nothing.
    """

    inner: "tokenizers.Tokenizer"
    bos_token_id: int | None

    @classmethod
    def from_checkpoint(cls, path: Path) -> "Tokenizer":
        """Reads the tokenizer that the conversion kept in the checkpoint's `hf` folder.

        Raises:
            CheckpointError: the checkpoint has none, or it cannot be read.
            JaxspecError: the `tokenizers` library is not installed.
        """
        try:
            import tokenizers
        except ImportError:
            raise JaxspecError("tokenizers is not installed; pip install 'jaxspec[text]'") from None
        file = path / "hf" / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{path}: no hf/tokenizer.json; the folder it was converted from had no tokenizer"
            )
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
        return cls(inner, _bos_token_id(inner, file.with_name("tokenizer_config.json")))

    def encode(self, text: str) -> list[int]:
        """The ids of a text.

        Raises:
            RequestError: it is not valid Unicode.
        """
        try:
            ids = self.inner.encode(text).ids
        except TypeError:
            raise RequestError(f"prompt {text!r:.60}: not valid Unicode") from None
        if self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; special tokens, such as the end token, are left out."""
        return self.inner.decode(list(ids), skip_special_tokens=True)


def _bos_token_id(inner: "tokenizers.Tokenizer", file: Path) -> int | None:
    config = parse_json(file) or {}
    if not config.get("add_bos_token"):
        return None
    bos = config.get("bos_token")
    name = bos.get("content") if isinstance(bos, dict) else bos  # older files hold an AddedToken
    token_id = inner.token_to_id(name) if isinstance(name, str) else None
    if token_id is None:
        raise CheckpointError(f"{file}: bos_token {name!r} is not in tokenizer.json")
    return token_id
