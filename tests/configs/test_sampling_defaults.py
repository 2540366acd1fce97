"""What a model's folder recommends for sampling."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.architectures.base import ArchitectureError
from configs.sampling_defaults import recommended_sampling


def written(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_fields_that_shape_sampling_are_read(tmp_path: Path) -> None:
    fields = {
        "do_sample": True, "eos_token_id": [1, 2], "max_new_tokens": 2048, "min_p": None,
        "repetition_penalty": 1.05, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    }  # fmt: skip
    wanted = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    assert recommended_sampling(written(tmp_path, fields)) == wanted


def test_a_folder_without_the_file_recommends_nothing(tmp_path: Path) -> None:
    assert recommended_sampling(tmp_path) == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "generation_config.json: temperature: .*greater than or equal to 0"),
        ({"top_p": "much"}, "top_p: .*sampling_defaults to openai"),
    ],
)
def test_values_that_no_request_could_have_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArchitectureError, match=message):
        recommended_sampling(written(tmp_path, fields))
