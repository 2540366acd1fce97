"""A training loop pushes its adapter between steps: the loss falls, the answers change."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks.demo.make_demo import DEMO, greedy_answer
from benchmarks.demo.prompts import prompt_ids
from benchmarks.local import served
from benchmarks.push_loop import QUESTION, PushingTrainer, demo_config


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(DEMO / "model")
    return found


def test_each_push_answers_as_the_model_that_is_trained(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The oracle is the trainer's own PEFT model, at the step of the push."""
    prompt = prompt_ids(tokenizer, "chat", QUESTION)
    with served(demo_config(str(tmp_path / "pushed"))) as url:
        trainer = PushingTrainer(url)
        seen = []
        try:
            for pushed in trainer.run(steps=20, every=10):
                trainer.model.eval()
                wanted, _ = greedy_answer(trainer.model, tokenizer, prompt)
                trainer.model.train()
                assert pushed.text == wanted
                seen.append(pushed)
        finally:
            trainer.close()
    first, last = seen[0], seen[-1]
    assert (first.step, last.step) == (0, 20)
    assert last.loss < first.loss / 2
    assert (first.text, last.text) == (
        "The capital of Norway is Oslo.",
        "Arr! The capital of Norway be Oslo, matey!",
    )
    assert all(len(each.logprobs) >= len(each.tokens) > 0 for each in seen)
    # Of all versions, only the one that is served was kept.
    assert len(list((tmp_path / "pushed" / "entries").iterdir())) == 1
