"""The model that copies: transformers' answers are the known ones, and so are ours with drafts."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.copying import check, main, prompts, ring_of, write_copying
from benchmarks.serving import Case
from benchmarks.workload import SHAPES
from configs.adapters import AdaptersConfig
from configs.engine import CacheConfig, EngineConfig, SpeculationConfig, SpeculationKind
from configs.model import ModelConfig
from deployments.ingress.generation.engine import IngressSettings
from tests.served import demo_app, served

CASE = Case("few", ("copying",), 2, 3, 60, 24)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copying")
    write_copying(folder, "tiny")
    return folder


def test_greedy_answers_go_along_the_ring(model: Path) -> None:
    ring = ring_of(SHAPES["tiny"]["vocab_size"])
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    for prompt, answer in prompts(ring, CASE, 0.1, 3):
        assert len(prompt) == 60
        assert set(answer) & set(prompt[:-1])
        found = oracle.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert found[0, 60:].tolist() == answer


def test_a_server_plays_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(
        model=ModelConfig(id=str(model), name="copying"),
        adapters=AdaptersConfig(enabled=False),
        cache=CacheConfig(num_blocks=64),
        speculation=SpeculationConfig(kind=SpeculationKind.PROMPT_LOOKUP),
    )
    own = ["play", "--shape", "tiny", "--input", "60", "--output", "24", "--concurrency", "2"]
    vocab = SHAPES["tiny"]["vocab_size"]
    with served(demo_app(config, IngressSettings())) as url:
        main([*own, "--url", url, "--wrong", "0.05", "--name", "ours"])
        # Another ring's answers are not this model's.
        with pytest.raises(SystemExit, match="does not copy"):
            asyncio.run(check(url, "copying", ring_of(vocab)[::-1], vocab))
    [line] = capsys.readouterr().out.splitlines()
    row = json.loads(line)
    assert (row["server"], row["case"], row["errors"]) == ("ours", "copy-95%-c2", 0)
    assert row["output_tokens_per_s"] > 0
