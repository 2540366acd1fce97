"""Every field that others publish is served, refused by its name, or changes nothing."""

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from deployments.ingress.embeddings import EmbeddingsBody
from deployments.ingress.openai.responses_schema import ResponsesBody
from deployments.ingress.requests.request_fields import (
    IGNORED,
    REFUSED,
    REFUSED_EMBEDDINGS,
    REFUSED_RESPONSES,
)
from deployments.ingress.requests.schema import ChatBody, CompletionBody
from tests.deployments.ingress.openai.openai_http import CHAT, COMPLETIONS, HELLO, post, refused
from tests.fakes import FakeDriver

RESPONSES = "/v1/responses"
BODIES: dict[str, type[BaseModel]] = {
    COMPLETIONS: CompletionBody,
    CHAT: ChatBody,
    RESPONSES: ResponsesBody,
}

# vLLM's, of its protocol.py for completions, chats and responses.
VLLM = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
chat_template_kwargs continue_final_message documents ec_transfer_params echo
enable_response_messages frequency_penalty ignore_eos include_reasoning include_stop_str_in_output
kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs max_completion_tokens
max_tokens media_io_kwargs messages min_p min_tokens mm_processor_kwargs model n
parallel_tool_calls presence_penalty previous_input_messages previous_response priority prompt
prompt_embeds prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id
response_format return_mm_kwargs return_prompt_text return_token_ids return_token_offsets
return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_special_tokens
spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
structured_outputs suffix temperature thinking_token_budget tool_choice tools top_k top_logprobs
top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern best_of
logits_processors detokenize
"""
# SGLang's, of entrypoints/openai/protocol.py.
SGLANG = """
best_of bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs
continue_final_message custom_labels custom_logit_processor custom_params data_parallel_rank
disagg_prefill_dp_rank ebnf echo extra_key frequency_penalty ignore_eos images_config input_ids
json_schema logit_bias logprobs lora_path max_completion_tokens max_dynamic_patch max_tokens
messages min_dynamic_patch min_p min_tokens model n ngram_corpus_id no_stop_trim
parallel_tool_calls presence_penalty priority prompt reasoning reasoning_effort regex
repetition_penalty response_format return_cached_tokens_details return_hidden_states
return_meta_info return_prompt_token_ids return_routed_experts return_token_ids rid routed_dp_rank
routed_experts_start_len seed separate_reasoning session_id session_params skip_special_tokens
stop stop_regex stop_token_ids stream stream_options stream_reasoning suffix task temperature
tool_choice tools top_k top_logprobs top_p use_audio_in_video user
"""
# LoRAX's, in the native routes' `parameters` and in its chats.
LORAX = """
adapter_id adapter_source merged_adapters api_token best_of temperature repetition_penalty
frequency_penalty presence_penalty top_k top_p typical_p do_sample max_new_tokens
ignore_eos_token return_full_text stop truncate watermark details decoder_input_details
return_k_alternatives apply_chat_template seed response_format stop_sequences inputs parameters
guideline tool_prompt top_n_tokens
"""
# transformers' GenerationConfig: what shapes an answer.
TRANSFORMERS = """
max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample
num_beams temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff
repetition_penalty encoder_repetition_penalty length_penalty no_repeat_ngram_size bad_words_ids
suppress_tokens sequence_bias guidance_scale num_return_sequences
encoder_no_repeat_ngram_size
"""
OPENAI = {
    *chat_create_params.CompletionCreateParamsBase.__annotations__,
    *completion_create_params.CompletionCreateParamsBase.__annotations__,
    *response_create_params.ResponseCreateParamsBase.__annotations__,
}
PUBLISHED = sorted(OPENAI.union(*(names.split() for names in (VLLM, SGLANG, LORAX, TRANSFORMERS))))
# Named in the code: they may say the same as `model`.
NAMES_OF_ADAPTERS = {"adapter_id", "lora_path"}


def is_known(path: str, name: str) -> bool:
    """Whether this route serves a field, refuses it, or is known to ignore it."""
    also = {**BODIES[CHAT].model_fields, **REFUSED_RESPONSES} if path == RESPONSES else {}
    known = {*BODIES[path].model_fields, *REFUSED, *IGNORED, *NAMES_OF_ADAPTERS, *also}
    return name in known


@pytest.mark.parametrize("path", BODIES)
def test_every_published_field_is_decided(path: str) -> None:
    assert [name for name in PUBLISHED if not is_known(path, name)] == []


def test_no_field_is_decided_twice() -> None:
    """A row of a field that all routes have would never be looked at."""
    on_all = set.intersection(*({*body.model_fields} for body in BODIES.values()))
    assert on_all & {*REFUSED, *IGNORED} == set()
    assert {*REFUSED} & IGNORED == set()


@pytest.mark.parametrize(
    ("path", "required"),
    [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO}), (RESPONSES, {"input": "a"})],
)
def test_refusals_name_the_field_and_neutral_values_pass(
    http: httpx.Client, driver: FakeDriver, path: str, required: dict[str, object]
) -> None:
    own = {*BODIES[path].model_fields}
    own |= {*CompletionBody.model_fields} if path == COMPLETIONS else {*ChatBody.model_fields}
    rows = {name: row for name, row in REFUSED.items() if name not in own}
    others = {*REFUSED_RESPONSES} if path == RESPONSES else set()
    for name in rows:
        error = refused(http, path, 400, **required, **{name: "7"})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert f"`{name}` is not supported" in error["message"]
    assert driver.requests == []
    for index in range(max(len(row.neutral) for row in rows.values())):
        neutral = {name: row.neutral[index % len(row.neutral)] for name, row in rows.items()}
        body = {name: value for name, value in neutral.items() if name not in others}
        reply = http.post(path, json={"model": "tiny", **required, **body})
        assert reply.status_code == 200, reply.text
    body = {name: "x" for name in IGNORED if name not in own}
    assert http.post(path, json={"model": "tiny", **required, **body}).status_code == 200


def test_embeddings_have_refusals_of_their_own(http: httpx.Client, driver: FakeDriver) -> None:
    path, required = "/v1/embeddings", {"model": "tiny", "input": "a"}
    assert {*REFUSED_EMBEDDINGS} & {*EmbeddingsBody.model_fields} == set()
    for name in REFUSED_EMBEDDINGS:
        error = http.post(path, json={**required, name: "7"}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert driver.requests == []
    neutral = {name: row.neutral[-1] for name, row in REFUSED_EMBEDDINGS.items()}
    assert http.post(path, json={**required, **neutral, "other": 1}).status_code == 200


def test_fields_that_are_served(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = "one END two"
    required = {"prompt": "a", "stop": ["END"], "max_tokens": 30}
    assert post(http, COMPLETIONS, **required)["choices"][0]["text"] == "one "
    kept = post(http, COMPLETIONS, **required, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == "one END"
    encode = driver.tokenizer.encode
    for given in (True, False):
        post(http, COMPLETIONS, prompt="fox", add_special_tokens=given, max_tokens=1)
        ids = encode("fox", add_special_tokens=given).ids
        assert driver.requests[-1].sequences[0].prompt == ids
    post(http, CHAT, messages=HELLO, max_tokens=1)
    plain = list(driver.requests[-1].sequences[0].prompt)
    post(http, CHAT, messages=HELLO, add_special_tokens=True, max_tokens=1)
    assert driver.requests[-1].sequences[0].prompt == [plain[0], *plain]
    stream = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert http.post(CHAT, json={"model": "tiny", "messages": HELLO, **stream}).status_code == 400
