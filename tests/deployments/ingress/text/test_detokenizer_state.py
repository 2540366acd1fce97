from deployments.ingress.text.detokenizer_state import DetokenizerState
from deployments.ingress.text.stops import StopStrings
from deployments.ingress.text.tokenizer import ModelTokenizer
from tests.fakes import TALE, byte_level_tokenizer, token_id, token_logprobs

TEXT = ModelTokenizer(byte_level_tokenizer())
IDS = byte_level_tokenizer().encode(TALE, add_special_tokens=False).ids


def _transcript(stops: list[str], per_token: bool = True) -> DetokenizerState:
    return DetokenizerState(TEXT.stream(), StopStrings(stops, keep=False), per_token)


def test_one_piece_a_token_or_one_for_all() -> None:
    pieces = _transcript([]).feed(IDS, [token_logprobs(id, 0) for id in IDS])
    assert [piece.token for piece in pieces] == IDS
    assert [piece.logprobs for piece in pieces] == [token_logprobs(id, 0) for id in IDS]
    [piece] = _transcript([], per_token=False).feed(IDS)
    assert piece.text == "".join(piece.text for piece in pieces) == TALE


def test_offsets_are_those_of_the_decoded_text() -> None:
    transcript = _transcript(["over the top"])
    pieces = transcript.feed(IDS)
    for piece in pieces:
        token = TEXT.token_text(piece.token)
        assert "\ufffd" in token or TALE[piece.offset :].startswith(token)


def test_tokens_after_the_stop_string_do_not_count() -> None:
    transcript = _transcript(["END"])
    pieces = transcript.feed(IDS)
    assert transcript.stopped
    assert transcript.num_tokens == len(pieces) < len(IDS)
    assert "".join(piece.text for piece in pieces) == TALE[: TALE.index("END")]
    assert "END" in TEXT.decode(IDS[: transcript.num_tokens])
    assert "END" not in TEXT.decode(IDS[: transcript.num_tokens - 1])


def test_withheld_text_is_returned_at_the_end() -> None:
    transcript = _transcript(["flies. And then"])
    shown = "".join(piece.text for piece in transcript.feed(IDS))
    assert shown == TALE[: TALE.index("flies")]
    assert shown + transcript.end() == TALE
    assert not transcript.stopped


def test_a_stop_string_may_complete_with_the_end() -> None:
    broken = IDS[: len(TEXT.decode(IDS)) and next(
        position for position, id in enumerate(IDS) if "\ufffd" in TEXT.token_text(id)
    ) + 1]  # fmt: skip
    transcript = _transcript(["\ufffd"])
    transcript.feed(broken)
    assert not transcript.stopped
    assert "\ufffd" not in transcript.end()
    assert transcript.stopped


def test_offsets_after_broken_bytes_count_their_replacement() -> None:
    """The text before a token has a U+FFFD for them by then."""
    tokenizer = byte_level_tokenizer()
    first = token_id(tokenizer, "ð")  # The byte F0.
    fox = tokenizer.encode("fox", add_special_tokens=False).ids
    transcript = _transcript([])
    pieces = transcript.feed([*fox, first, *fox])
    shown = "".join(piece.text for piece in pieces)
    assert shown == "fox\ufffdfox"
    assert pieces[len(fox)].offset == 3
    assert pieces[len(fox) + 1].offset == 4
