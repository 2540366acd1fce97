"""Tiny tokenizers of every kind that models use, over one small world of words."""

from collections.abc import Callable, Mapping

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

TEXTS = [
    "the quick brown fox jumps over the lazy dog, isn't it? 'tis so . ",
    "don't say \u201cno\u201d!  two  spaces\tand a tab\nand lines\n\n",
    "zażółć gęślą jaźń — naïve café; 東京 タワー 서울",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
ADDED = [
    AddedToken("<|im_end|>", special=True),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("<é>", special=False, normalized=False),
]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_bpe() -> Tokenizer:
    """As GPT-2, Qwen and Llama-3 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXTS, BpeTrainer(vocab_size=330, special_tokens=SPECIAL, show_progress=False,
                          initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )  # fmt: skip
    return _with_added(tokenizer)


def byte_fallback_bpe(strips: bool) -> Tokenizer:
    """As Llama-2 and Mistral (strips) and Gemma have it: a space in front, or none."""
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "f"), ("o", "x"), ("▁", "▁")]
    letters = sorted({char for char in TEXTS[0] if char != " "})
    tokens = [*SPECIAL, *_BYTES, "▁", *letters, *("".join(merge) for merge in merges)]
    vocab = {token: id for id, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    after: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if strips:
        steps.insert(0, normalizers.Prepend("▁"))
        after.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(after)
    return _with_added(tokenizer)


def mistral() -> Tokenizer:
    """A Metaspace in front of the merges, as newer conversions of Llama and Mistral have it."""
    tokenizer = byte_fallback_bpe(strips=True)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        TEXTS, WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    )
    return _with_added(tokenizer)


def unigram() -> Tokenizer:
    """As T5, XLM-R and XGLM have it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        TEXTS * 4,
        UnigramTrainer(
            vocab_size=140, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        ),
    )
    return _with_added(tokenizer)


def suffixed_bpe() -> Tokenizer:
    """As GPT-1 and XLM have it: words end with </w>."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.train_from_iterator(
        TEXTS,
        BpeTrainer(
            vocab_size=150, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
        ),
    )
    return _with_added(tokenizer)


def without_decoder() -> Tokenizer:
    """Words and nothing that joins them."""
    tokenizer = word_piece()
    tokenizer.decoder = None
    return tokenizer


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level_bpe,
    "llama": lambda: byte_fallback_bpe(strips=True),
    "gemma": lambda: byte_fallback_bpe(strips=False),
    "mistral": mistral,
    "word-piece": word_piece,
    "unigram": unigram,
    "suffixed": suffixed_bpe,
    "without-decoder": without_decoder,
}


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(ADDED)
    return tokenizer
