"""Defaults of embeddings."""

from pydantic import field_validator

from configs.base import Config
from configs.wire.sampling import Pooling


class EmbeddingsConfig(Config):
    """Defaults of /v1/embeddings and /embed.

    pooling: `mean` of the prompt's final hidden states, or the `last` one. normalize: scale each
    embedding to the length 1, as OpenAI's are.
    """

    pooling: Pooling = Pooling.MEAN
    normalize: bool = True

    @field_validator("pooling")
    @classmethod
    def _is_a_pooling(cls, pooling: Pooling) -> Pooling:
        if pooling not in (Pooling.MEAN, Pooling.LAST):
            raise ValueError("must be mean or last")
        return pooling
