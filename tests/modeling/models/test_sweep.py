"""The sweep's fast part: a kind for each way in which rows could come to depend on each other."""

from pathlib import Path
from typing import Any

import pytest

from configs.wire.adapters import AdapterError
from modeling.models.base import AttentionLayer
from modeling.models.generic import model, step
from modeling.models.padded.sharing import Sharing
from tests.modeling.models.sweep import main, sweep
from tests.modeling.models.sweep_serving import server
from tests.modeling.models.sweep_truth import NoTruthError, Oracle, write_random_adapter


@pytest.mark.parametrize(
    ("kind", "variant", "why"),
    [
        ("doge", "plain", "an adapter sees the whole cache; the best columns are kept"),
        ("deepseek_v3", "plain", "an adapter expands the whole cache"),
        ("llama4_text", "plain", "queries are scaled by their column, attention is in chunks"),
        ("roformer", "plain", "positions are columns, by little"),
        ("doge", "longrope", "a preempted row's tokens are computed one by one again"),
        ("moshi", "plain", "a cache that forgets what attention looks for"),
        ("gemma2", "longrope", "frequencies by the longest row, beside windows"),
        ("olmo2", "longrope", "frequencies by the longest row; a cache is kept across the border"),
        ("phi3", "longrope", "a cache is computed anew at the border"),
        ("phimoe", "longrope", "another scale too"),
        ("llama", "dynamic", "frequencies by what was computed before"),
    ],
)
def test_no_answer_depends_on_its_mates(tmp_path: Path, kind: str, variant: str, why: str) -> None:
    outcome = sweep(tmp_path, kind, variant, padded=True)
    assert (outcome.word, outcome.served) == ("exact", "padded"), (outcome.why, why)


@pytest.mark.parametrize("kind", ["gemma2", "deepseek_v3", "phi", "gpt2", "bitnet"])
def test_what_is_paged_is_judged_so_on_one_rank_and_on_two(tmp_path: Path, kind: str) -> None:
    outcome = sweep(tmp_path, kind)
    assert (outcome.word, outcome.served) == ("exact", "paged"), outcome.why
    assert [way.split()[0] for way in outcome.why.split(", ")] == ["1", "2", "1", "2"]


def test_a_layer_behind_the_decoder_takes_no_adapters(tmp_path: Path) -> None:
    """It computes only the tokens that get logits."""
    outcome = sweep(tmp_path, "modernbert-decoder")
    assert (outcome.word, outcome.served) == ("exact", "paged"), outcome.why
    assert "dense" not in outcome.targets
    model = tmp_path / "model"
    folder = write_random_adapter(tmp_path / "head", model, ["lm_head.dense"], 0)
    words = r"layer between decoder and head.* name lm_head\.dense in exclude_modules"
    with pytest.raises(AdapterError, match=words):
        next(server(model, padded=False).serve([folder]))


def test_factors_that_peft_does_not_find_again_are_refused(tmp_path: Path) -> None:
    """An older name of Laguna's shared experts is an expression that fits today's too."""
    outcome = sweep(tmp_path, "laguna")
    assert (outcome.word, outcome.served) == ("exact", "paged"), outcome.why
    model = tmp_path / "model"
    lost = "model.layers.1.mlp.shared_experts.gate_proj"
    folder = write_random_adapter(tmp_path / "lost", model, [lost], 0)
    with pytest.raises(NoTruthError):
        Oracle(model, exact=True).told(folder, [3, 4])
    with pytest.raises(AdapterError, match=rf"factors of {lost} .*exclude_modules"):
        next(server(model, padded=False).serve([folder]))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("deepseek_v4", "compressed_sparse_attention: such layers keep one key for several"),
        ("inkling_text", "hybrid: such layers keep a recurrent state"),
        ("openai-gpt", "keeps no cache"),
        ("ernie", "is_decoder is false"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, kind: str, sentence: str) -> None:
    outcome = sweep(tmp_path, kind)
    assert outcome.word == "refused"
    assert sentence in outcome.why


def test_the_sweep_sees_rows_that_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sharing, "group", lambda self, length: 0)
    said: list[str] = []
    assert main(["olmo2", "--variant", "longrope"], said.append) == 1
    assert said[0].startswith("wrong")


def test_the_sweep_sees_a_paged_layer_that_forgets_its_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def form(**fields: Any) -> AttentionLayer:
        return AttentionLayer(**{**fields, "window": None})

    monkeypatch.setattr(step, "AttentionLayer", form)
    monkeypatch.setattr(model, "check_windows", lambda *_: None)
    said: list[str] = []
    assert main(["gemma2"], said.append) == 1
    assert said[0].startswith("wrong     paged")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["plain", "wide"])
@pytest.mark.parametrize("kind", ["gemma3n_text", "glm4", "qwen3_moe"])
def test_what_is_paged_is_judged_so_on_a_gpu(tmp_path: Path, kind: str, variant: str) -> None:
    """`--gpu` sweeps all kinds; the first one's layers share keys and cut off their gates."""
    outcome = sweep(tmp_path, kind, variant, gpu=True)
    assert (outcome.word, outcome.served) == ("exact", "paged"), outcome.why
    assert "bfloat16 launched" in outcome.why
    assert "bfloat16 captured" in outcome.why
