"""A training loop pushes its adapter between steps: the loss falls, the answers change."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModelForCausalLM
from transformers import PreTrainedTokenizerFast

from benchmarks.demo.make_demo import DEMO, greedy_answer
from benchmarks.demo.prompts import prompt_ids
from benchmarks.local import served
from benchmarks.push_loop import QUESTION, PushingTrainer, demo_config


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(DEMO / "model")
    return found


def own_logprobs(model: PeftModelForCausalLM, prompt: list[int], tokens: list[int]) -> Any:
    """What transformers and PEFT compute for these tokens after the prompt."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return pytest.approx(chosen.tolist(), abs=1e-4)


def check_sampled(url: str, model: PeftModelForCausalLM, prompt: list[int]) -> None:
    """Sampled tokens come as ids, with logprobs of the model's own distribution.

    Whatever the temperature, as docs/compatibility.md says; of the adapter and of the base model.
    """
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 1.7, "logprobs": 0, "n": 2,
            "return_token_ids": True, "ignore_eos": True}  # fmt: skip
    for name, adapted in (("policy", nullcontext()), ("loray-demo", model.disable_adapter())):
        reply = httpx.post(f"{url}/v1/completions", json={"model": name, **body}, timeout=60)
        assert reply.status_code == 200, reply.text
        with adapted:
            for choice in reply.json()["choices"]:
                assert choice["prompt_token_ids"] == prompt
                tokens = choice["token_ids"]
                assert len(tokens) == 12
                wanted = own_logprobs(model, prompt, tokens)
                assert choice["logprobs"]["token_logprobs"] == wanted


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
                assert pushed.text == wanted
                assert pushed.logprobs == own_logprobs(trainer.model, prompt, pushed.tokens)
                check_sampled(url, trainer.model, prompt)
                trainer.model.train()
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
    assert all(tokenizer.decode(each.tokens, True) == each.text for each in seen)
    # Of all versions, only the one that is served was kept.
    assert len(list((tmp_path / "pushed" / "entries").iterdir())) == 1
