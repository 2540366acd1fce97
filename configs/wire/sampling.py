"""Sampling parameters and stop conditions of one sequence, as plans carry them."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from math import isfinite

import msgspec

MAX_LOGIT_BIAS = 300
"""Biased tokens of one sequence: OpenAI's limit."""


MAX_ALLOWED_IDS = 1024
"""Tokens to which one sequence may be limited."""

MAX_BAD_TOKENS = 2048
"""Tokens of all sequences that one sequence must not contain."""


class FinishReason(StrEnum):
    """Why a sequence ended by itself; the values are LoRAX's."""

    LENGTH = "length"
    STOP_TOKEN = "eos_token"
    STOP_STRING = "stop_sequence"


class Pooling(StrEnum):
    """What a prompt's final hidden states are made into.

    MEAN, LAST, CLS, MAX: an embedding, of their mean, the last one, the first one, or the largest
    value of each column.
    SCORE: the logits of a classification head, which reads one of them.
    """

    NONE = "none"
    MEAN = "mean"
    LAST = "last"
    CLS = "cls"
    MAX = "max"
    SCORE = "score"

    @property
    def reads_all(self) -> bool:
        """Whether it needs the states of all positions, not the last one's alone."""
        return self in (Pooling.MEAN, Pooling.CLS, Pooling.MAX)


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is drawn from the logits.

    First the logits are adjusted:
    logit_bias: pairs (token id, value to add).
    masked_ids: tokens that are excluded from the first masked_tokens generated tokens.
    allowed_ids: no others are sampled; () for all.
    bad_words: sequences of tokens; the last one of each is excluded after its others.
    repetition_penalty: over the sequence's own prompt and output; 1 is off.
    frequency_penalty, presence_penalty: over its output; 0 is off.
    watermark: whether the output is watermarked.
    json_schema, grammar: the schema, or the grammar in llguidance's Lark, that the answer must
    fit; "" for none, and at most one of them.
    free_until: tokens after which the schema or grammar begins, others may come before the last;
    () for the first token. Until then only the tokens that end an answer are excluded.
    free_from: the answer is free only if this is its first token, which the schema or grammar need
    not allow; -1: in any case.
    Then, unless temperature is 0 (greedy):
    temperature, top_k, top_p, min_p, typical_p: 0 (top_k, min_p) and 1 (top_p, typical_p) are off.
    seed: the noise depends on (seed, position, vocabulary id) alone, so other requests of the
    batch never change a sample.
    Reports:
    logprobs: how many most likely alternatives to report with each token, -1 for no logprobs;
    they are those of the model's own distribution, without adjustments and temperature.
    prompt_logprobs: the same for the prompt's tokens from the second on.
    pooling: return an embedding or scores of the prompt; such a sequence generates nothing.
    second_at: where the second of two texts begins, for models with token types; 0: there is one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int = -1
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    watermark: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    masked_ids: tuple[int, ...] = ()
    masked_tokens: int = 0
    json_schema: str = ""
    grammar: str = ""
    prompt_logprobs: int = -1
    pooling: Pooling = Pooling.NONE
    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    free_until: tuple[int, ...] = ()
    free_from: int = -1
    second_at: int = 0

    def __post_init__(self) -> None:
        """Refuse values outside their domain; the messages name the field."""
        for name, (holds, domain) in _DOMAINS.items():
            value = getattr(self, name)
            if not holds(value):
                raise ValueError(f"{name} must be {domain}, got {value}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            count = len(self.logit_bias)
            raise ValueError(f"logit_bias has {count} tokens; at most {MAX_LOGIT_BIAS} are allowed")
        if len(self.allowed_ids) > MAX_ALLOWED_IDS:
            count = len(self.allowed_ids)
            raise ValueError(
                f"allowed_ids has {count} tokens; at most {MAX_ALLOWED_IDS} are allowed"
            )
        if not all(self.bad_words) or sum(map(len, self.bad_words)) > MAX_BAD_TOKENS:
            raise ValueError(f"bad_words must be of 1 to {MAX_BAD_TOKENS} tokens together")
        if self.json_schema and self.grammar:
            raise ValueError("json_schema and grammar exclude each other")
        if not all(id >= 0 and isfinite(bias) for id, bias in self.logit_bias):
            raise ValueError("logit_bias must have ids >= 0 and finite values")

    @property
    def about_prompt(self) -> bool:
        """Whether the request needs prompt logprobs, an embedding or scores."""
        return self.prompt_logprobs >= 0 or self.pooling is not Pooling.NONE

    @property
    def constraint(self) -> str:
        """The schema (it begins with {) or grammar of the answer; "" for none."""
        return self.json_schema or self.grammar

    @property
    def penalised(self) -> bool:
        """Whether the sequence's own tokens change the logits of the next one."""
        return bool(self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty)

    @property
    def adjusted(self) -> bool:
        """Whether the logits may change before a token is selected."""
        own = self.logit_bias or self.masked_ids or self.watermark or self.constraint
        return bool(own or self.allowed_ids or self.bad_words) or self.penalised

    @property
    def filtered(self) -> bool:
        """Whether some tokens are excluded after temperature."""
        return bool(self.top_k or self.top_p < 1 or self.min_p or self.typical_p < 1)


LARGEST_TOP_K = 2**31 - 1
"""More than the size of any vocabulary; a larger top_k would mean the same."""

_Domain = tuple[Callable[[float], bool], str]

_PENALTY: _Domain = (lambda value: -2 <= value <= 2, "in [-2, 2]")
_SHARE: _Domain = (lambda value: 0 < value <= 1, "in (0, 1]")

_DOMAINS: Mapping[str, _Domain] = {
    "temperature": (lambda value: 0 <= value < float("inf"), ">= 0 and finite"),
    "top_k": (lambda value: 0 <= value <= LARGEST_TOP_K, "in [0, 2**31) (0 = off)"),
    "top_p": _SHARE,
    "seed": (lambda value: 0 <= value < 2**64, "in [0, 2**64)"),
    "min_p": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "typical_p": _SHARE,
    "repetition_penalty": (lambda value: 0 < value < float("inf"), "> 0 and finite"),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
}


ALL_PARAMETERS = Sampling(
    temperature=1.0, top_k=5, top_p=0.9, logprobs=1, min_p=0.01, typical_p=0.9,
    repetition_penalty=1.1, frequency_penalty=0.1, watermark=True, logit_bias=((0, 1.0),),
    allowed_ids=(1, 2, 3, 4, 5, 6, 7), bad_words=((1, 2),),
)  # fmt: skip
"""Parameters that take every path of the sampler: ranks warm up with them."""


class Stopping(msgspec.Struct, frozen=True, array_like=True):
    """When a sequence ends; stop strings are matched by the ingress, not here.

    max_new_tokens: the most generated tokens, the end-of-sequence token included; at 0 only the
    prompt is computed.
    stop_token_ids: any of them ends the sequence after min_new_tokens tokens; () when they are
    ignored. To exclude them from the first tokens, mask them too (see Sampling).
    """

    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse a negative budget."""
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be >= 0, got {self.max_new_tokens}")
