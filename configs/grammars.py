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
    # Files often add tokens that the model was never resized for: it cannot sample them.
    added = [token for token in described["added_tokens"] if token["id"] < vocab_size]
    described["added_tokens"] = added
    _rename_special_tokens(described, ends)
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
