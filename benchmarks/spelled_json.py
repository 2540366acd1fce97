"""For answers under a schema: a schema, and a tokenizer of the workload that spells JSON."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Chain

PEOPLE = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 16},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["customer", "supplier", "colleague"]},
            "scores": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
        },
        "required": ["name", "age", "kind", "scores"],
        "additionalProperties": False,
    },
}
"""A schema with answers that do not end: the list is too long."""


def json_pieces() -> list[str]:
    """Every byte, the numbers of up to three digits, and what JSON puts between values."""
    bytes_ = ByteLevel.alphabet()
    numbers = [f"{i:0{digits}d}" for digits in (2, 3) for i in range(10**digits)]
    between = ['{"', '":', '",', '"}', "},", "[{", "}]", 'Ġ"', 'Ġ{"', '":Ġ', '",Ġ"', '":Ġ"', "},Ġ"]
    return [*sorted(bytes_), *numbers, *between]


def json_tokenizer(vocab_size: int, ends: Sequence[int]) -> Tokenizer:
    """A byte-level tokenizer: words behind a space are tokens, all else is spelled."""
    words = [f"Ġt{i}" for i in range(vocab_size)]
    for end in ends:
        words[end] = f"t{end}"
    free = [i for i in reversed(range(vocab_size)) if i not in ends]
    for i, piece in zip(free, json_pieces(), strict=False):
        words[i] = piece
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = Chain(
        [Split(" ", "merged_with_next"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([words[end] for end in ends])
    return tokenizer
