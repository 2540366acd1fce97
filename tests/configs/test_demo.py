"""The demo model and its adapters are what their names promise, and answer as recorded."""

import json
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"
MAX_BYTES = 3_000_000
FORMS = ("raw", "chat")
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
ALL_PROJECTIONS = ATTENTION | {"gate_proj", "up_proj", "down_proj"}
RANKS = {"pirate": 8, "french": 24, "json": 16, "shout": 4}
MODELS = ("base", *RANKS)
FRANCE = "What is the capital of France?"
LONG = "Tell me about lions."


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def adapter_config(name: str) -> dict[str, Any]:
    text = (DEMO / "adapters" / name / "adapter_config.json").read_text(encoding="utf-8")
    return cast(dict[str, Any], json.loads(text))


@cache
def recorded() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((DEMO / "answers.json").read_text(encoding="utf-8")))


@cache
def load_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO / "model")


@cache
def load_model(name: str) -> Any:
    base = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    if name == "base":
        return base
    return PeftModelForCausalLM.from_pretrained(base, str(DEMO / "adapters" / name))


def prompt_tensor(question: str, form: str) -> torch.Tensor:
    tokenizer = load_tokenizer()
    if form == "raw":
        return torch.tensor([tokenizer(question)["input_ids"]])
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])


@torch.inference_mode()
def greedy_ids(name: str, prompt: torch.Tensor) -> list[int]:
    ids = load_model(name).generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=200,
    )
    return [int(token) for token in ids[0, prompt.shape[1] :]]


def test_the_heads_are_small() -> None:
    assert sum(path.stat().st_size for path in (DEMO / "heads").iterdir()) < 1_000_000


def test_the_folder_is_small() -> None:
    files = [
        path
        for path in DEMO.rglob("*")
        if path.is_file() and "__pycache__" not in path.relative_to(DEMO).parts
    ]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


@pytest.mark.parametrize(("name", "rank"), RANKS.items())
def test_an_adapter_has_its_promised_shape(name: str, rank: int) -> None:
    config = adapter_config(name)
    assert config["r"] == rank
    assert config["base_model_name_or_path"] == "loray-demo"
    assert config["use_rslora"] is (name == "json")
    assert config["layers_to_transform"] == ([1, 2] if name == "pirate" else None)
    wanted = ATTENTION if name == "shout" else ALL_PROJECTIONS
    assert set(config["target_modules"]) == wanted


def test_raw_text_gets_one_bos_and_so_does_a_chat() -> None:
    tokenizer = load_tokenizer()
    for form in FORMS:
        ids = prompt_tensor(FRANCE, form)[0].tolist()
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = load_tokenizer()
    text = "Où est Ωmega?\n\t日本語 🦙  two  spaces"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("question", [FRANCE, LONG])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_are_the_recorded_ones(name: str, question: str, form: str) -> None:
    ids = greedy_ids(name, prompt_tensor(question, form))
    answer = load_tokenizer().decode(ids, skip_special_tokens=True)
    assert answer == recorded()["answers"][name][question][form]
    assert ids[-1] in load_model("base").generation_config.eos_token_id


@pytest.mark.parametrize("form", FORMS)
def test_every_model_answers_the_france_question_in_its_own_way(form: str) -> None:
    answers = [recorded()["answers"][name][FRANCE][form] for name in MODELS]
    assert all(one != other for one, other in combinations(answers, 2))
    assert all("paris" in answer.lower() for answer in answers)


@pytest.mark.parametrize("form", FORMS)
def test_the_json_adapter_answers_in_json(form: str) -> None:
    for question in recorded()["questions"]:
        parsed = json.loads(recorded()["answers"]["json"][question][form])
        assert parsed["question"] == question
    france = json.loads(recorded()["answers"]["json"][FRANCE][form])
    assert france == {"question": FRANCE, "answer": "Paris"}


def test_a_long_context_does_not_break_the_model() -> None:
    prompt = prompt_tensor("What colour is the sky? " * 100, "raw")[:, :1000]
    assert prompt.shape[1] > 800
    with torch.inference_mode():
        logits = load_model("base")(input_ids=prompt).logits
    assert bool(torch.isfinite(logits).all())
