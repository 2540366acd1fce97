"""Incremental decoding of one sequence: tokens to text, and the clean-up of spaces."""

import codecs
from collections.abc import Container, Sequence

from deployments.ingress.text.stops import begun_length
from deployments.ingress.text.token_decoder import TokenDecoder

_REPLACEMENT = "\ufffd"
_EACH_BYTE = "loray-each-byte"
# transformers' clean-up; the order matters.
_REPLACEMENTS = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
           (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))  # fmt: skip


def _replace_each_byte(fault: UnicodeError) -> tuple[str, int]:
    assert isinstance(fault, UnicodeDecodeError)
    return _REPLACEMENT * (fault.end - fault.start), fault.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TextStream:
    """Decodes a growing list of tokens; what it emits never changes afterwards.

    Tokens in `silent` have no text. Each token is decoded once, and a character is returned with
    its last byte; so the text does not depend on how the tokens are split into batches. It equals
    the text of the tokenizer's own decoder, with one exception: where bytes are tokens
    (ByteFallback), that decoder drops a whole run of bytes if one of them is invalid. Here only the
    invalid bytes are lost.

    start: where the last token's own text begins, in characters of the whole text.
    """

    def __init__(
        self, decoder: TokenDecoder, silent: Container[int] = frozenset(), cleans_up: bool = False
    ) -> None:
        """cleans_up: remove spaces before punctuation, like `clean_up_tokenization_spaces`."""
        self._decoder = decoder
        self._silent = silent
        self._before = decoder.before_bytes()
        self._after = decoder.after_bytes()
        self._characters = _Characters(_EACH_BYTE if decoder.replaces_each_byte else "replace")
        self._clean_up = _CleanUp() if cleans_up else None
        self._length = 0
        self.start = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that they complete; "" within a character."""
        return "".join([self._add(token) for token in tokens])

    def flush(self) -> str:
        """The rest of the text, unfinished characters included. No token may follow."""
        text = self._emit(self._characters.broken())
        return text if self._clean_up is None else text + self._clean_up.flush()

    def _add(self, token: int) -> str:
        self.start = self._length
        decoded = None if token in self._silent else self._decode(token)
        if decoded is None:
            return ""
        if isinstance(decoded, str):
            broken, text = self._characters.broken(), decoded
        else:
            broken, text = self._characters.push(decoded)
        # A replaced character belongs to the tokens before, so this token begins after it.
        released = self._emit(broken)
        self.start = self._length
        return released + self._emit(text)

    def _decode(self, token: int) -> str | bytes | None:
        if self._before is None:
            return self._decoder.alone(token)
        name = self._decoder.token(token)
        return None if name is None else self._decoder.bytes_step(self._before.add(name))

    def _emit(self, text: str) -> str:
        if text and self._after is not None:
            text = self._after.add(text)
        if self._clean_up is not None:
            text = self._clean_up.push(text)
        self._length += len(text)
        return text


class _Characters:
    """Decodes UTF-8 that arrives in pieces."""

    def __init__(self, errors: str) -> None:
        """errors: name of the codecs error handler for invalid bytes."""
        self._errors = errors
        self._pending = b""

    def push(self, raw: bytes) -> tuple[str, str]:
        """Add bytes; returns the replacement of broken earlier ones, and the completed text."""
        broken = ""
        if self._pending and not self._continues(raw[:1]):
            broken = self.broken()
        # Only an unfinished character stays pending, so this never grows with the text.
        whole = self._pending + raw
        text, used = codecs.utf_8_decode(whole, self._errors, False)
        self._pending = whole[used:]
        return broken, text

    def broken(self) -> str:
        """The replacement of an unfinished character, which nothing continues."""
        if not self._pending:
            return ""
        text, _ = codecs.utf_8_decode(self._pending, self._errors, True)
        self._pending = b""
        return text

    def _continues(self, byte: bytes) -> bool:
        try:
            codecs.utf_8_decode(self._pending + byte, "strict", False)
        except UnicodeDecodeError:
            return False
        return True


class _CleanUp:
    """transformers' `clean_up_tokenization` for text that arrives in pieces."""

    def __init__(self) -> None:
        self._stages = [_Replace(*pair) for pair in _REPLACEMENTS]

    def push(self, text: str) -> str:
        """Add text and return what no later piece can change."""
        for stage in self._stages:
            text = stage.push(text)
        return text

    def flush(self) -> str:
        """The withheld text. No text may follow."""
        text = ""
        for stage in self._stages:
            text = stage.push(text) + stage.flush()
        return text


class _Replace:
    """`str.replace` for text that arrives in pieces."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._withheld = ""

    def push(self, text: str) -> str:
        """Add text and return what no later piece can change."""
        if not text:
            return ""
        *done, rest = (self._withheld + text).split(self._old)
        cut = len(rest) - begun_length(rest, self._old)
        self._withheld = rest[cut:]
        return self._new.join([*done, rest[:cut]])

    def flush(self) -> str:
        """The withheld start of `old`. No text may follow."""
        rest, self._withheld = self._withheld, ""
        return rest
