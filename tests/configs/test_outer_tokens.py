"""Which tokens of Gemma 3n parts beside its decoder embed."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from configs.architectures.base import ArchitectureError
from configs.architectures.generic import GenericArchitecture
from configs.architectures.outer_tokens import OuterTokens
from configs.architectures.select import parse_architecture
from configs.architectures.text_stack import decoder_name

NAME = "Gemma3nForConditionalGeneration"


def tokens(vocab_size: int, **parts: Any) -> tuple[OuterTokens, ...]:
    """Those of a config."""
    text = {"model_type": "gemma3n_text", "vocab_size": vocab_size}
    found = parse_architecture({"architectures": [NAME], "text_config": text, **parts})
    assert isinstance(found, GenericArchitecture)
    return found.outer_tokens


@pytest.mark.parametrize("parts", [{}, {"vision_config": None, "audio_config": {}}])
def test_what_a_file_leaves_unsaid_is_what_transformers_takes(parts: dict[str, Any]) -> None:
    own = CONFIG_MAPPING["gemma3n"]()
    wanted = [
        OuterTokens(
            part=part,
            first=each.vocab_offset,
            count=128,
            table_size=each.vocab_size,
            width=each.hidden_size,
            eps=each.rms_norm_eps,
        )
        for part, each in (("embed_vision", own.vision_config), ("embed_audio", own.audio_config))
    ]
    assert tokens(own.text_config.vocab_size, **parts) == (*wanted,)


@pytest.mark.parametrize(
    ("vision", "audio", "ranges"),
    [
        ((64, 20), (80, 16), [("embed_vision", 64, 16), ("embed_audio", 80, 16)]),
        ((64, 32), (96, 16), [("embed_vision", 64, 32)]),
        ((64, 32), (200, 16), [("embed_vision", 64, 32)]),
        ((80, 16), (64, 32), [("embed_audio", 64, 32)]),
        ((96, 16), (112, 16), []),
    ],
)
def test_each_part_ends_where_the_next_begins(
    vision: tuple[int, int], audio: tuple[int, int], ranges: list[tuple[str, int, int]]
) -> None:
    """As transformers' masks divide the vocabulary, whatever the tables' sizes."""
    fields = [dict(zip(("vocab_offset", "vocab_size"), each, strict=True))
              for each in (vision, audio)]  # fmt: skip
    found = tokens(96, vision_config=fields[0], audio_config=fields[1])
    assert [(each.part, each.first, each.count) for each in found] == ranges


@pytest.mark.parametrize(
    ("vision", "audio", "message"),
    [
        ((64, 8), (80, 16), r"vision_config.vocab_size \(8\) is below the 16 tokens from vision_"),
        ((64, 16), (80, 8), r"audio_config.vocab_size \(8\) is below the 16 tokens from audio_"),
        ((64, 16), (200, 8), r"vision_config.vocab_size \(16\) is below the 32 tokens"),
    ],
)
def test_tokens_that_a_table_lacks_are_refused(
    vision: tuple[int, int], audio: tuple[int, int], message: str
) -> None:
    with pytest.raises(ArchitectureError, match=message):
        tokens(
            96,
            vision_config={"vocab_offset": vision[0], "vocab_size": vision[1]},
            audio_config={"vocab_offset": audio[0], "vocab_size": audio[1]},
        )


def test_values_of_another_kind_are_refused_with_a_sentence() -> None:
    for wrong in ({"vocab_offset": "x"}, {"vocab_size": None}, {"hidden_size": 0}, 7):
        with pytest.raises(ArchitectureError):
            tokens(262400, vision_config=wrong)


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ("model.embed_vision.embedding.weight", "model.embed_vision.embedding.weight"),
        ("embed_vision.embedding.weight", "embed_vision.embedding.weight"),
        ("model.embed_vision.soft_embedding_norm.weight", None),
        ("model.embed_audio.embedding.weight", None),
        ("model.language_model.norm.weight", "model.norm.weight"),
    ],
)
def test_names_of_tensors(stored: str, own: str | None) -> None:
    assert decoder_name(stored, ("embed_vision",)) == own
