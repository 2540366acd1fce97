"""From tokens to text, one sequence at a time: incremental decoding and clean-up."""

import codecs
from collections.abc import Container, Sequence

from deployments.ingress.text.spelling import Spelling

_REPLACEMENT = "\ufffd"
_EACH_BYTE = "loray-each-byte"
# transformers' clean-up, in its order.
_TIDIED = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
           (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))  # fmt: skip


def _replace_each_byte(fault: UnicodeError) -> tuple[str, int]:
    assert isinstance(fault, UnicodeDecodeError)
    return _REPLACEMENT * (fault.end - fault.start), fault.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TextStream:
    """Decodes a growing list of tokens; what it emits never changes afterwards.

    Tokens in `silent` have no text. Each token is looked at once, and a character comes out with
    its last byte; so the text does not depend on how many tokens come at a time. It is that of
    the tokenizer's own decoder, but in one respect: where bytes are tokens (ByteFallback), that
    gives up a whole run of them for one that fits in no character. Here only those bytes are lost.
    """

    def __init__(
        self, spelling: Spelling, silent: Container[int] = frozenset(), tidies: bool = False
    ) -> None:
        """tidies: spaces before punctuation go, as `clean_up_tokenization_spaces` has it."""
        self._spelling = spelling
        self._silent = silent
        self._before = spelling.before_bytes()
        self._after = spelling.after_bytes()
        self._characters = _Characters(_EACH_BYTE if spelling.replaces_each_byte else "replace")
        self._tidy = _Tidied() if tidies else None
        self._length = 0
        self.start = 0
        """Where the last token's own text begins, in characters of the whole text."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        return "".join([self._take(token) for token in tokens])

    def flush(self) -> str:
        """What is left, unfinished characters included; the stream is over."""
        text = self._emit(self._characters.broken())
        return text if self._tidy is None else text + self._tidy.flush()

    def _take(self, token: int) -> str:
        self.start = self._length
        spelled = None if token in self._silent else self._spelled(token)
        if spelled is None:
            return ""
        if isinstance(spelled, str):
            broken, text = self._characters.broken(), spelled
        else:
            broken, text = self._characters.push(spelled)
        released = self._emit(broken)
        self.start = self._length
        return released + self._emit(text)

    def _spelled(self, token: int) -> str | bytes | None:
        if self._before is None:
            return self._spelling.alone(token)
        written = self._spelling.token(token)
        return None if written is None else self._spelling.parts(self._before.add(written))

    def _emit(self, text: str) -> str:
        if text and self._after is not None:
            text = self._after.add(text)
        if self._tidy is not None:
            text = self._tidy.push(text)
        self._length += len(text)
        return text


class _Characters:
    """Bytes that come in pieces, as characters."""

    def __init__(self, errors: str) -> None:
        """errors: codecs' name for what is done to bytes that fit in no character."""
        self._errors = errors
        self._pending = b""

    def push(self, raw: bytes) -> tuple[str, str]:
        """What becomes of bytes before that these do not continue, and the characters now whole."""
        broken = ""
        if self._pending and not self._continues(raw[:1]):
            broken = self.broken()
        whole = self._pending + raw
        text, used = codecs.utf_8_decode(whole, self._errors, False)
        self._pending = whole[used:]
        return broken, text

    def broken(self) -> str:
        """What becomes of an unfinished character when nothing continues it."""
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


class _Tidied:
    """transformers' `clean_up_tokenization` over text that comes in pieces."""

    def __init__(self) -> None:
        self._stages = [_Replaced(*pair) for pair in _TIDIED]

    def push(self, text: str) -> str:
        """The text that no later piece can change."""
        for stage in self._stages:
            text = stage.push(text)
        return text

    def flush(self) -> str:
        """What was held back; the text is over."""
        text = ""
        for stage in self._stages:
            text = stage.push(text) + stage.flush()
        return text


class _Replaced:
    """`str.replace` over text that comes in pieces."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._held = ""

    def push(self, text: str) -> str:
        """The text that no later piece can change."""
        if not text:
            return ""
        *done, rest = (self._held + text).split(self._old)
        ends = (n for n in range(len(self._old) - 1, 0, -1) if rest.endswith(self._old[:n]))
        kept = len(rest) - next(ends, 0)
        self._held = rest[kept:]
        return self._new.join([*done, rest[:kept]])

    def flush(self) -> str:
        """The beginning of `old` that was held back."""
        held, self._held = self._held, ""
        return held
