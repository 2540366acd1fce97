"""Five applications behind one front, one of each system, exactly as transformers + PEFT.

LORAY_TEST_SYSTEMS=families (`make families`): decoders made of transformers' modules instead.
"""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.checkpoints import AdapterRecipe, load_oracle, oracle_greedy, write_adapter, write_llama
from tests.checkpoints_experts import EXPERT_ADAPTERS
from tests.checkpoints_generic import COLUMNS, ROWS, write_generic
from tests.checkpoints_others import (
    GPT2_ADAPTERS,
    GPT_NEOX_ADAPTERS,
    OPT_ADAPTERS,
    write_gpt2,
    write_gpt_neox,
    write_opt,
)
from tests.checkpoints_padded import ADAPTERS, write_padded
from tests.checkpoints_stacks import LANGUAGE, write_stack
from tests.end_to_end.serving import PATIENCE_SECONDS, Served, start, stop
from tests.oracle import prompt_truth
from tests.ports import free_port

Ask = Callable[[httpx.AsyncClient], Coroutine[Any, Any, httpx.Response]]

NUM_TOKENS = 16
VOCAB_SIZE = 96
LARGE = "r16"

pytestmark = [pytest.mark.ray, pytest.mark.sweep]


@dataclass(frozen=True)
class System:
    """How to write a tiny model of it, its adapters, and over how many ranks it is served."""

    write: Callable[[Path], Path]
    adapters: Mapping[str, AdapterRecipe]
    ranks: int = 1


LLAMA_ADAPTERS = {
    "r4": AdapterRecipe(r=4, seed=11),
    LARGE: AdapterRecipe(r=16, alpha=32.0, std=0.05, seed=13),
}

SEEDS: Mapping[str, System] = {
    "llama": System(write_llama, LLAMA_ADAPTERS),
    "gpt2": System(write_gpt2, GPT2_ADAPTERS, ranks=2),
    "opt": System(write_opt, OPT_ADAPTERS),
    "neox": System(write_gpt_neox, GPT_NEOX_ADAPTERS, ranks=2),
    "padded": System(partial(write_padded, kind="bert"), ADAPTERS["bert"]),
}
"""By route prefix; two of them over two ranks, for each rank is a process more on two cores."""


def recipes(targets: Sequence[str], std: float = 0.1) -> Mapping[str, AdapterRecipe]:
    """Two adapters of these modules; std: of the larger one's numbers."""
    return {
        "r4": AdapterRecipe(r=4, seed=11, std=0.25, target_modules=targets),
        LARGE: AdapterRecipe(r=16, alpha=32.0, std=std, seed=19, target_modules=targets),
    }


FAMILIES: Mapping[str, System] = {
    "gemma2": System(
        partial(write_generic, variant="gemma2_untied"), recipes((*COLUMNS, *ROWS)), ranks=2
    ),
    "qwen3_5": System(
        partial(write_generic, variant="qwen3_5_text"), recipes((*COLUMNS, *ROWS)), ranks=2
    ),
    "glm4": System(partial(write_generic, variant="glm4"), recipes((*COLUMNS, *ROWS))),
    "qwen3_moe": System(
        partial(write_generic, variant="qwen3_moe"),
        recipes(EXPERT_ADAPTERS["r8"].target_modules),
        ranks=2,
    ),
    "gemma3": System(partial(write_stack, variant="gemma3"), recipes(LANGUAGE, std=0.25)),
}
"""The last one is the text of a vision model, with adapters of the whole model."""

HAS_FAMILIES = os.environ.get("LORAY_TEST_SYSTEMS") == "families"
SYSTEMS = FAMILIES if HAS_FAMILIES else SEEDS

NEIGHBOURS = dict(zip(SYSTEMS, [*list(SYSTEMS)[1:], next(iter(SYSTEMS))], strict=True))
"""The system whose adapters each system gets requests for, and must refuse."""


@dataclass(frozen=True)
class Question:
    """What a client asks of a system, and what transformers + PEFT answer; both token ids."""

    system: str
    model: str
    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Five:
    """The served systems, and every question: the base and both adapters of each."""

    served: Served
    questions: list[Question]


def write_words(folder: Path) -> None:
    """A tokenizer: the text "tK" is token K."""
    vocabulary = {f"t{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    # Without its class, AutoTokenizer takes the one of the model's type, which rewrites the pieces.
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def words(tokens: list[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def write_system(root: Path, name: str) -> list[Question]:
    """Model and adapters on disk, and three questions of different lengths."""
    system = SYSTEMS[name]
    model = system.write(root / name)
    write_words(model)
    folders: list[Path | None] = [None]
    for rank in ("r4", LARGE):
        folder = root / "adapters" / f"{name}-{rank}"
        folders.append(write_adapter(folder, model, system.adapters[rank]))
    questions = []
    for i, adapter in enumerate(folders):
        prompt, truth = prompt_truth(model, adapter, 7 + 9 * i)
        sent = name if adapter is None else adapter.name
        tokens = truth.tokens[:NUM_TOKENS]
        if adapter is not None:
            alone = oracle_greedy(load_oracle(model), prompt, NUM_TOKENS)
            assert alone != tokens, f"no test would notice if {sent} were ignored"
        questions.append(Question(name, sent, prompt, tokens))
    return questions


def application(root: Path, name: str) -> dict[str, Any]:
    """One application of the config: small enough for many of them on two cores."""
    engine = {
        "model": {"id": str(root / name), "dtype": "float32"},
        "tensor_parallel": SYSTEMS[name].ranks,
        "device": "cpu",
        "cache": {"num_blocks": 64},
        "limits": {"max_step_tokens": 128, "max_running": 16, "max_total_tokens": 128},
        "adapters": {
            "default_source": "local",
            "local_roots": [str(root / "adapters")],
            "device_pages": 16,
            "max_device_adapters": 4,
            "max_rank": 16,
            "host_bytes": 2**24,
        },
    }
    cpus = {"driver_cpus": 0.05, "rank_cpus": 0.05, "ingress_cpus": 0.05}
    return {
        "name": name,
        "route_prefix": f"/{name}",
        "import_path": "deployments.app:build",
        "args": {"engine": engine, **cpus},
    }


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Five]:
    root = tmp_path_factory.mktemp("five")
    questions = [question for name in SYSTEMS for question in write_system(root, name)]
    port = free_port()
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application(root, name) for name in SYSTEMS],
    }
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    served = start(path, port)
    yield Five(served, questions)
    stop(served)


def together(five: Five, asks: Sequence[Ask]) -> list[httpx.Response]:
    """All replies to simultaneous requests, in order."""

    async def story() -> list[httpx.Response]:
        url = five.served.url
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
            return await asyncio.gather(*(ask(client) for ask in asks))

    return asyncio.run(story())


async def complete(
    system: str, model: str, prompt: list[int], client: httpx.AsyncClient
) -> httpx.Response:
    """Ask in OpenAI's dialect, by token ids."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    return await client.post(f"/{system}/v1/completions", json=body)


async def generate(
    system: str, adapter: str | None, prompt: list[int], client: httpx.AsyncClient
) -> httpx.Response:
    """Ask in LoRAX's dialect, by text."""
    parameters = {
        "adapter_id": adapter, "max_new_tokens": NUM_TOKENS, "ignore_eos_token": True,
        "details": True,
    }  # fmt: skip
    body = {"inputs": words(prompt), "parameters": parameters}
    return await client.post(f"/{system}/generate", json=body)


def right(question: Question, reply: httpx.Response) -> None:
    """The completion is the oracle's, token for token."""
    where = f"{question.system}, {question.model}"
    assert reply.status_code == 200, f"{where}: {reply.text}"
    [choice] = reply.json()["choices"]
    assert choice["text"].split() == words(question.tokens).split(), where
    assert reply.json()["usage"]["completion_tokens"] == NUM_TOKENS, where


def test_each_answers_under_its_prefix(five: Five) -> None:
    text = "\n".join(five.served.output)
    with httpx.Client(base_url=five.served.url, timeout=PATIENCE_SECONDS) as client:
        for system in SYSTEMS:
            assert f" on {five.served.url}/{system}\n" in text
            assert client.get(f"/{system}/health").status_code == 200
            listed = {model["id"] for model in client.get(f"/{system}/v1/models").json()["data"]}
            assert system in listed
            assert not listed & (SYSTEMS.keys() - {system})
        assert client.get("/missing/health").status_code == 404


def test_bases_and_adapters_of_all_at_once(five: Five) -> None:
    asks = [partial(complete, q.system, q.model, q.prompt) for q in five.questions]
    for question, reply in zip(five.questions, together(five, asks), strict=True):
        right(question, reply)


def test_text_in_the_other_dialect(five: Five) -> None:
    own = [question for question in five.questions if question.system == list(SYSTEMS)[3]]
    asks = [
        partial(generate, q.system, None if q.model == q.system else q.model, q.prompt) for q in own
    ]
    for question, reply in zip(own, together(five, asks), strict=True):
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert answer["generated_text"].split() == words(question.tokens).split()
        assert [token["id"] for token in answer["details"]["tokens"]] == question.tokens


def test_adapters_of_another_system_are_refused_while_others_go_on(five: Five) -> None:
    prompt = five.questions[0].prompt
    strange = [(system, f"{other}-{LARGE}", prompt) for system, other in NEIGHBOURS.items()]
    good = [partial(complete, q.system, q.model, q.prompt) for q in five.questions]
    bad = [partial(ask, *misfit) for misfit in strange for ask in (complete, generate)]
    replies = together(five, [*bad, *good])
    for question, reply in zip(five.questions, replies[len(bad) :], strict=True):
        right(question, reply)
    for i, (system, adapter, _) in enumerate(strange):
        openai, lorax = replies[2 * i : 2 * i + 2]
        error = openai.json()["error"]
        assert (openai.status_code, error["code"]) == (400, "adapter_unsupported")
        assert (lorax.status_code, lorax.json()["code"]) == (424, "adapter_unsupported")
        if HAS_FAMILIES:
            # Their modules have the same names: each adapter is refused for what it lacks there.
            continue
        for message in (error["message"], lorax.json()["error"]):
            assert "belongs to no adaptable module of this model" in message, (system, adapter)
            assert "is the adapter for another base model?" in message
