"""Why model types of transformers are padded that look like those with a paged implementation.

Each was tried as a GenericArchitecture: it did not start, or gave other results than transformers.
"""

_OWN_HEAD = "its head is more than one linear layer, as an encoder's is"

REASONS: dict[str, str] = {
    **dict.fromkeys(
        (
            "bert", "big_bird", "electra", "megatron-bert", "rembert", "roberta", "roformer",
            "xmod",
        ), _OWN_HEAD,
    ),
    "doge": "its mask depends on the values",
    "moshi": "its cache forgets by a window that its attention does not read",
}  # fmt: skip
"""By model_type."""
