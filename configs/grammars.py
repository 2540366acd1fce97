"""Matchers of schemas and grammars, and limits of their cost.

The limits are counts, not seconds, so that all processes stop at the same token. They bound one
mask to about 20 ms of a core and one lexer to about 75 MB, for any constraint.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.architectures.select import end_token_ids

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_LEXER_STATES = 50_000
"""States of all answers that share a matcher's lexer, about 1.5 kB each."""

MASK_LEXER_FUEL = 100_000
"""New regular expressions that one mask may need, about 70 ns each."""

MASK_ITEMS = 20_000
"""Earley items of a schema that one mask may visit."""

GRAMMAR_MASK_ITEMS = 5_000
"""The same for a grammar; in an ambiguous one each item is compared with all others of its row."""

GRAMMAR_ROW_ITEMS = 500
"""Earley items of a grammar that one position of an answer may have."""

_PLAIN_TOKEN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)

_UNWRITTEN = "\U0010ffff"
"""A code point that is no character."""

_SPACE = "\u2581"
"""A space, as the vocabularies of SentencePiece have it."""

INSTALL = "llguidance is not installed (pip install llguidance)"


def limits_of(constraint: str) -> "LLParserLimits":
    """The limits of a schema's matcher (a schema begins with a brace) or of a grammar's."""
    from llguidance import LLParserLimits

    schema = constraint.startswith("{")
    return LLParserLimits(
        max_items_in_row=None if schema else GRAMMAR_ROW_ITEMS,
        step_max_items=MASK_ITEMS if schema else GRAMMAR_MASK_ITEMS,
        step_lexer_fuel=MASK_LEXER_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


def tokenizer_of(folder: Path, vocab_size: int) -> "LLTokenizer":
    """The tokenizer of the model in `folder`, with the tokens that end an answer.

    ValueError where the folder has no tokenizer.json.
    """
    from llguidance import LLTokenizer

    ends = [id for id in end_token_ids(folder) if id < vocab_size]
    described = _description(folder)
    _add_prepended(described)
    # Files often add tokens that the model was never resized for: it cannot sample them.
    added = [token for token in described["added_tokens"] if token["id"] < vocab_size]
    described["added_tokens"] = added
    _rename_special_tokens(described, ends)
    _keep_text(described)
    return LLTokenizer(json.dumps(described), n_vocab=vocab_size, eos_token=ends or None)


def _description(folder: Path) -> dict[str, Any]:
    """tokenizer.json, with the tokens that only tokenizer_config.json adds to it."""
    path, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not path.is_file():
        raise ValueError("it has no tokenizer.json: save one with AutoTokenizer's save_pretrained")
    added = json.loads(config.read_text("utf-8")) if config.is_file() else {}
    described = json.loads(path.read_text("utf-8"))
    tokens = described.get("added_tokens") or []
    known = {token["content"] for token in tokens}
    missing = [
        {"id": int(id), **_PLAIN_TOKEN, **token}
        for id, token in sorted(
            (added.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])
        )
        if token["content"] not in known
    ]
    return {**described, "added_tokens": [*tokens, *missing]}


def _rename_special_tokens(described: dict[str, Any], ends: list[int]) -> None:
    """Give special tokens, and those that end an answer, names that no constraint writes.

    llguidance reads the text that a constraint forces with this tokenizer. It would read `</s>` in
    a choice as the token, which ends or breaks the answer.
    """
    model = described["model"]
    special = [one for one in described["added_tokens"] if one["special"] or one["id"] in ends]
    names = {token["content"] for token in special}
    for merge in model.get("merges") or ():
        pair = merge.split(" ") if isinstance(merge, str) else merge
        names -= {*pair, "".join(pair)}  # the merge would name nothing
    renamed = {name: f"{_UNWRITTEN}{name}" for name in names}
    for token in special:
        token |= {"content": renamed.get(token["content"], token["content"]), "special": True}
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {renamed.get(piece, piece): id for piece, id in vocab.items()}
    elif vocab:
        model["vocab"] = [[renamed.get(piece, piece), *rest] for piece, *rest in vocab]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]


def _add_prepended(described: dict[str, Any]) -> None:
    """Give added tokens the space that a normalizer prepends to their text.

    The `tokenizers` library finds and decodes tokens that are marked as normalized with it.
    """
    steps = _steps(described.get("normalizer"), "normalizers")
    if not any(step["type"] == "Prepend" and step["prepend"] == _SPACE for step in steps):
        return
    for token in described["added_tokens"]:
        if token["normalized"] and token["content"] not in described["model"]["vocab"]:
            token |= {"content": f" {token['content']}", "normalized": False}


def _keep_text(described: dict[str, Any]) -> None:
    """Have the tokenizer encode any text without a change, and decode spaces.

    llguidance encodes the text that a constraint forces. A normalizer that changes it (Qwen's NFC)
    would lead to tokens of another text, which the constraint refuses. Metaspace in a decoder is
    nothing to llguidance.
    """
    if normalizer := described.get("normalizer"):
        kept = [step for step in _steps(normalizer, "normalizers") if _only_writes(step)]
        described["normalizer"] = {"type": "Sequence", "normalizers": kept}
    decoder = described.get("decoder")
    if decoder is not None and decoder["type"] == "Sequence":
        steps = [_spaces(step) for step in _steps(decoder, "decoders")]
        described["decoder"] = {"type": "Sequence", "decoders": steps}


def _only_writes(step: dict[str, Any]) -> bool:
    """Whether a normalizer only writes text as a vocabulary has it: spaces and bytes as signs."""
    if step["type"] == "Replace":
        return bool(step["pattern"].get("String") == " ")
    return step["type"] in ("Prepend", "ByteLevel")


def _spaces(step: dict[str, Any]) -> dict[str, Any]:
    """A step of a decoder; Metaspace as the Replace that it is but for a text's first space."""
    if step["type"] != "Metaspace":
        return step
    return {"type": "Replace", "pattern": {"String": step["replacement"]}, "content": " "}


def _steps(component: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or decoder in order; name: of the list in a sequence of them."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [step for part in component[name] for step in _steps(part, name)]


def matcher_of(tokenizer: "LLTokenizer", constraint: str) -> "LLMatcher":
    """A matcher at the start of its answer; ValueError with the reason if there is none."""
    from llguidance import LLMatcher

    schema = constraint.startswith("{")
    grammar = LLMatcher.grammar_from_json_schema(constraint) if schema else constraint
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits_of(constraint))
    if matcher.is_error():
        raise ValueError(reason(matcher.get_error()))
    return matcher


def reason(text: str) -> str:
    """A compiler's message as one line: its first line and the lines that begin with error:."""
    lines = text.strip().split("\n")
    return " ".join([lines[0], *(line.strip() for line in lines[1:] if line.startswith("error:"))])
