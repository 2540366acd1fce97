"""The parameters that ranks warm up with."""

from configs.wire.sampling import ALL_PARAMETERS, Sampling

SAME_PATH = {
    "seed", "presence_penalty", "masked_ids", "masked_tokens", "json_schema", "grammar",
    "prompt_logprobs", "pooling", "second_at", "free_until", "free_from",
}  # fmt: skip
"""Fields that add no operation to the sampler's, or that a warm-up cannot have."""


def test_a_warm_up_takes_every_path_of_the_sampler() -> None:
    off = Sampling()
    names = Sampling.__struct_fields__
    assert {n for n in names if getattr(ALL_PARAMETERS, n) == getattr(off, n)} == SAME_PATH
