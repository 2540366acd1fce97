"""Requests with a schema or grammar, for a vocabulary that spells JSON."""

import json

from configs.wire.sampling import Sampling
from tests.fakes import EOS, byte_level_tokenizer, token_id
from tests.modeling.stepping import Asked

NUM_TOKENS = 32
PROMPTS = ([5, 9, 33, 71, 8, 60, 12], [44, 3, 17], [80] * 19)
SCHEMA = json.dumps({
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "dog"]}, "old": {"type": "boolean"}},
    "required": ["kind", "old"], "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
})  # fmt: skip
FREE = Sampling()
ENDS = Sampling(json_schema=SCHEMA)
GOES_ON = Sampling(grammar="start: /(fox|dog|[0-9]{2}-)+/")
DRAWN = Sampling(temperature=1.0, seed=5, json_schema='{"type": "array", "items": {"enum": [1]}}')
WEIGHED = Sampling(grammar=GOES_ON.grammar, frequency_penalty=1.5, logprobs=2)

COSTLY = 'start: e\ne: e e | "a" | "b"'
"""Ambiguous: what a mask costs grows with the answer."""

ENDLESS = ((token_id(byte_level_tokenizer(), EOS), -100.0),)

REQUESTS = [
    Asked(PROMPTS[0], NUM_TOKENS, sampling=ENDS),
    Asked(PROMPTS[1], NUM_TOKENS, 0, GOES_ON),
    Asked(PROMPTS[2], NUM_TOKENS, 1, ENDS, joins_at=2),
    Asked(PROMPTS[1], NUM_TOKENS, sampling=FREE, joins_at=3),
    Asked(PROMPTS[0], NUM_TOKENS, 1, WEIGHED, joins_at=4),
    Asked(PROMPTS[2], NUM_TOKENS, 0, DRAWN),
    Asked(PROMPTS[2], NUM_TOKENS, 0, Sampling(temperature=1.0, seed=9, json_schema=SCHEMA)),
    Asked(PROMPTS[1], NUM_TOKENS, sampling=Sampling(grammar=COSTLY, logit_bias=ENDLESS)),
]
