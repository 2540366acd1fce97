"""LoRAX's own client, unmodified, against a real server (install lorax-client with --no-deps)."""

import asyncio

import pytest

from deployments.contract import ErrorKind, Failed
from tests.deployments.ingress.conftest import Server, spoken
from tests.fakes import Unreliable

lorax = pytest.importorskip("lorax")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_generate(server: Server) -> None:
    reply = lorax.Client(server.url).generate("hello", adapter_id="org/pirate")
    assert reply.generated_text == spoken(server.driver)
    assert reply.details.generated_tokens == len(reply.details.tokens)
    assert reply.details.finish_reason == "length"
    assert server.driver.requests[-1].adapter is not None


def test_generate_with_options(server: Server) -> None:
    reply = lorax.Client(server.url).generate(
        "hello", temperature=0.7, seed=5, stop_sequences=["END"], max_new_tokens=200,
        top_k=4, top_p=0.9, return_full_text=True, best_of=1, repetition_penalty=1.3,
        typical_p=0.9, truncate=3, watermark=True, return_k_alternatives=2,
    )  # fmt: skip
    assert all(len(token.alternative_tokens or []) == 2 for token in reply.details.tokens)
    sampling = server.driver.requests[-1].sequences[0].sampling
    assert (sampling.repetition_penalty, sampling.typical_p, sampling.watermark) == (1.3, 0.9, True)
    assert reply.generated_text.startswith("hello")
    assert reply.generated_text.endswith("END")
    assert (reply.details.seed, reply.details.finish_reason) == (5, "stop_sequence")


def test_response_format(server: Server) -> None:
    pytest.importorskip("llguidance")
    lorax.Client(server.url).generate(
        "hello", response_format={"type": "json_object", "schema": {"type": "object"}}
    )
    schema = server.driver.requests[-1].sequences[0].sampling.json_schema
    assert schema.startswith('{"type":"object"')


def test_best_of(server: Server) -> None:
    reply = lorax.Client(server.url).generate("hello", do_sample=True, best_of=2, max_new_tokens=9)
    [other] = reply.details.best_of_sequences
    assert {reply.generated_text, other.generated_text} == {
        spoken(server.driver, index) for index in range(2)
    }
    assert reply.details.seed != other.seed


def test_generate_stream(server: Server) -> None:
    server.driver.link = Unreliable()
    events = list(lorax.Client(server.url).generate_stream("hello", max_new_tokens=40))
    text = "".join(event.token.text for event in events if not event.token.special)
    assert text == events[-1].generated_text == spoken(server.driver)
    assert events[-1].details.generated_tokens == 40


def test_asynchronously(server: Server) -> None:
    async def story() -> tuple[str, str]:
        client = lorax.AsyncClient(server.url)
        whole = (await client.generate("hello", max_new_tokens=20)).generated_text
        events = [event async for event in client.generate_stream("hello", max_new_tokens=20)]
        return whole, events[-1].generated_text

    whole, streamed = asyncio.run(story())
    assert whole == streamed == spoken(server.driver)


def test_errors_are_the_clients_own(server: Server) -> None:
    client = lorax.Client(server.url)
    server.driver.faults["bad"] = Failed(ErrorKind.ADAPTER_NOT_FOUND, "no such adapter")
    server.driver.faults[None] = Failed(ErrorKind.OVERLOADED, "full")
    with pytest.raises(lorax.errors.GenerationError, match="no such adapter"):
        client.generate("hello", adapter_id="bad")
    with pytest.raises(lorax.errors.GenerationError, match="no such adapter"):
        list(client.generate_stream("hello", adapter_id="bad"))
    with pytest.raises(lorax.errors.OverloadedError):
        client.generate("hello")
    merged = lorax.MergedAdapters(
        ids=["a", "b"], weights=[1.0, 1], density=0, merge_strategy="ties"
    )
    with pytest.raises(lorax.errors.ValidationError, match=r"`density` must be > 0\.0"):
        client.generate("hello", merged_adapters=merged)


def test_prefill_details(server: Server) -> None:
    client = lorax.Client(server.url)
    reply = client.generate("hello", adapter_id="poet", decoder_input_details=True)
    ids = server.driver.requests[-1].sequences[0].prompt
    assert [token.id for token in reply.details.prefill] == ids
    assert reply.details.prefill[0].logprob is None
