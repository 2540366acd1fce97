"""Fields of other servers' requests: those that are refused, and those that change nothing.

A field that would change the result, and is not implemented, is refused by its name, with the
remedy. The names are OpenAI's, vLLM's, SGLang's, LoRAX's and transformers'. A name belongs here as
long as some route of this server does not have the field.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from deployments.ingress.http.errors import invalid

NO_SUCH = "unsupported_parameter"


class RefusedField(NamedTuple):
    """A field that is refused unless its value is neutral, i.e. changes nothing.

    remedy: what to send instead, or why there is nothing.
    """

    neutral: tuple[object, ...]
    remedy: str


_NONE, _OFF, _ON, _ZERO, _ONE = (None,), (None, False), (None, True), (None, 0), (None, 1)
_EMPTY_TEXT: tuple[object, ...] = (None, "")
_EMPTY_LIST: tuple[object, ...] = (None, [])
_NO_STRINGS: tuple[object, ...] = (None, [], "")
_EMPTY: tuple[object, ...] = (None, "", [], {})
_UNSET: tuple[object, ...] = (None, False, [], {})
_NO_MEDIA: tuple[object, ...] = (None, False, {}, [])

Rows = tuple[tuple[tuple[object, ...], str, str], ...]


def refused_fields(rows: Rows) -> Mapping[str, RefusedField]:
    """A table by name from rows of neutral values, remedy, and names separated by spaces."""
    return {
        name: RefusedField(neutral, remedy)
        for neutral, remedy, names in rows
        for name in names.split()
    }


REFUSED = refused_fields((
    (_NONE, "use `max_tokens`",
     "max_new_tokens max_output_tokens max_length n_predict num_predict max_time "
     "max_completion_tokens"),
    (_ZERO, "use `min_tokens`", "min_new_tokens min_length"),
    (_NO_STRINGS, "use `stop`", "stop_sequences stop_strings"),
    (_NO_STRINGS, "", "stop_regex custom_logit_processor"),
    (_NONE, "",
     "repetition_detection repeat_last_n top_h task guided_whitespace_pattern prompt_embeds "
     "input_embeds prediction web_search_options bootstrap_host bootstrap_port bootstrap_room "
     "extra_key"),
    ((None, -1), "", "thinking_token_budget thinking_budget"),
    (_ZERO, "",
     "diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size penalty_alpha "
     "epsilon_cutoff eta_cutoff top_a mirostat mirostat_mode dynatemp_range smoothing_factor "
     "xtc_probability dry_multiplier routed_experts_start_len routed_experts_prompt_start"),
    (_ONE, "", "encoder_repetition_penalty tfs guidance_scale"),
    (_EMPTY_LIST, "",
     "samplers logits_processors logprob_token_ids"),
    (_EMPTY_LIST, "use `bad_words`", "bad_words_ids"),
    (_EMPTY, "",
     "custom_params vllm_xargs nvext session_params kv_transfer_params ec_transfer_params"),
    (_EMPTY_TEXT, "", "suffix"),
    (_ON, "", "spaces_between_special_tokens"),
    (_OFF, "use `include_stop_str_in_output`", "no_stop_trim"),
    (_ON, "use `temperature` 0 for the likeliest tokens", "do_sample"),
    ((None, False, 0, 1), "there is no beam search",
     "use_beam_search num_beams early_stopping length_penalty"),
    (_ONE, "use `n`", "num_return_sequences"),
    (_ONE, "it belongs to /v1/completions; use `n`", "best_of"),
    (_ONE, "use `repetition_penalty`", "repeat_penalty"),
    (_ONE, "use `typical_p`", "typical"),
    (_NONE, "use `seed`", "sampling_seed"),
    (_OFF, "use `watermark`", "watermarking"),
    (_EMPTY_LIST, "use `logit_bias`", "suppress_tokens"),
    (_EMPTY, "use `logit_bias`", "sequence_bias"),
    (_EMPTY, "use `response_format` or `structured_outputs`",
     "json_schema regex ebnf grammar format structural_tag"),
    ((None, "medium"), "ask for it in the messages", "verbosity"),
    (_NONE, "use `truncate_prompt_tokens`", "truncate"),
    ((None, "disabled", False), "send a shorter prompt", "truncation"),
    (_NONE, "send `prompt` or `messages`", "input inputs"),
    (_NONE, "send `prompt` to /v1/completions", "input_ids"),
    (_NONE, "it belongs to /v1/completions", "prompt"),
    ((None, "", []), "send it as a message", "system"),
    (_EMPTY_TEXT, "send it as a message", "instructions"),
    (_EMPTY, "write its fields beside `model`", "parameters options extra_body"),
    (_EMPTY_TEXT, "put it into the messages", "guideline tool_prompt"),
    (_EMPTY_LIST, "it belongs to /v1/chat/completions", "messages documents tools functions"),
    (_OFF, "it belongs to /v1/chat/completions",
     "chat_template continue_final_message add_generation_prompt"),
    (_EMPTY, "it belongs to /v1/chat/completions", "chat_template_kwargs"),
    ((None, "none", "auto"), "it belongs to /v1/chat/completions", "tool_choice function_call"),
    (_NONE, "it belongs to /v1/chat/completions", "reasoning_effort"),
    (_ZERO, "use `logprobs`", "top_logprobs top_n_tokens n_probs"),
    (_OFF, "use `logprobs`", "details return_logprob"),
    (_NONE, "use `logprobs`", "return_k_alternatives"),
    (_OFF, "use `continue_final_message`, and write the message before the answer", "echo"),
    (_EMPTY, "use `reasoning_effort` or `chat_template_kwargs`", "reasoning"),
    (_ON, "it belongs to /v1/chat/completions", "include_reasoning separate_reasoning"),
    (_NONE, "set it in `chat_template_kwargs`", "thinking enable_thinking"),
    (_UNSET, "it belongs to /v1/responses",
     "access_programs background background_options context_management conversation include "
     "max_tool_calls previous_response_id text enable_response_messages previous_input_messages "
     "previous_response"),
    (_OFF, "it belongs to the native routes", "apply_chat_template"),
    (_OFF, "use `echo`", "return_full_text"),
    (_OFF, "use `prompt_logprobs`", "decoder_input_details"),
    (_OFF, "use `return_token_ids`", "return_prompt_token_ids"),
    (_OFF, "it is not part of a reply",
     "return_tokens_as_token_ids return_token_offsets "
     "return_prompt_text return_hidden_states return_routed_experts return_cached_tokens_details "
     "return_meta_info"),
    (_NONE, "nothing is moderated here", "moderation"),
    ((None, ["text"]), "only text is served", "modalities"),
    (_NO_MEDIA, "only text is served",
     "audio image images_config media_io_kwargs mm_processor_kwargs max_dynamic_patch "
     "min_dynamic_patch use_audio_in_video"),
    (_ZERO, "priorities are the operator's", "priority"),
))  # fmt: skip
REFUSED_EMBEDDINGS = refused_fields((
    (_NONE, "send shorter inputs", "truncate_prompt_tokens truncation_side"),
    ((None, False, "NONE"), "send shorter inputs", "truncate"),
    (_ON, "send token ids", "add_special_tokens"),
    (_EMPTY_LIST, "send `input`", "messages"),
    (_NONE, "send `input`", "inputs prompt"),
    (_NONE, "", "chat_template"),
    (_EMPTY, "", "chat_template_kwargs"),
    ((None, "float32"), "", "embed_dtype"),
    ((None, "native", "little"), "", "endianness"),
    ((None, "embed"), "", "task"),
    (_NONE, "use `normalize`", "use_activation"),
    (_NONE, "write what the model expects into `input`", "input_type prompt_name"),
    (_NO_MEDIA, "only text is served", "mm_processor_kwargs"),
    (_ZERO, "priorities are the operator's", "priority"),
    (_EMPTY, "write its fields beside `model`", "extra_body"),
))  # fmt: skip
REFUSED_SCORES = refused_fields((
    (_NONE, "send shorter texts", "truncate_prompt_tokens truncation_side max_tokens_per_doc"),
    (_NONE, "send shorter texts", "max_chunks_per_doc"),
    ((None, False, "NONE"), "send shorter texts", "truncate"),
    (_ON, "send texts as the tokenizer joins them", "add_special_tokens"),
    (_EMPTY_LIST, "send texts", "messages"),
    (_EMPTY, "", "chat_template_kwargs rank_fields"),
    (_NONE, "write what the model expects into the texts", "chat_template instruction"),
    ((None, "float32"), "", "embed_dtype"),
    ((None, "native", "little"), "", "endianness"),
    ((None, False), "", "return_embeddings"),
    (_NO_MEDIA, "only text is served", "mm_processor_kwargs"),
    (_ZERO, "priorities are the operator's", "priority"),
    (_EMPTY, "write its fields beside `model`", "extra_body"),
))  # fmt: skip
_STATELESS = "responses are not stored: send the whole conversation in `input`"
REFUSED_RESPONSES = refused_fields((
    (_NONE, _STATELESS, "previous_response_id conversation previous_response"),
    (_EMPTY_LIST, _STATELESS, "previous_input_messages"),
    (_NONE, "prompts are not stored: send `instructions` and `input`", "prompt"),
    (_OFF, "there is nowhere to fetch a response later", "background"),
    (_NONE, "there is nowhere to fetch a response later", "background_options"),
    ((None, "disabled"), "shorten the input yourself", "truncation"),
    (_EMPTY_LIST, "shorten the input yourself", "context_management"),
    (_NONE, "use `parallel_tool_calls`", "max_tool_calls"),
    (_NONE, "nothing is moderated here", "moderation"),
    (_ONE, "a response has one answer", "n"),
    (_EMPTY_LIST, "send them in `input`", "messages"),
    (_OFF, "put `message.output_text.logprobs` into `include`", "logprobs"),
    (_EMPTY_LIST, "there are no such programs", "access_programs"),
    (_NONE, "only text is served", "image"),
    (_OFF, "they are not part of a response", "enable_response_messages return_token_ids"),
    (_NONE, "they are not part of a response", "prompt_logprobs"),
))  # fmt: skip

IGNORED = frozenset({
    # They would matter for storage, bills or logs only.
    "user", "metadata", "store", "service_tier", "safety_identifier", "custom_labels",
    "request_id", "rid", "session_id",
    # They change when or where tokens are computed, never which tokens.
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "stream_interval",
    "ngram_corpus_id", "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank",
    # Reasoning is streamed as it comes; together the pieces are the same.
    "stream_reasoning",
    # They matter on other routes only.
    "return_mm_kwargs", "parallel_tool_calls",
})  # fmt: skip
"""Fields that change no answer. Unknown fields are ignored too."""


def refuse_others(
    extra: Mapping[str, Any] | None, refused: Mapping[str, RefusedField] = REFUSED
) -> None:
    """Raise for a field that would change the result and is not implemented."""
    for name, value in (extra or {}).items():
        row = refused.get(name)
        if row is None or value in row.neutral:
            continue
        remedy = f": {row.remedy}" if row.remedy else ""
        raise invalid(f"`{name}` is not supported{remedy}", name, NO_SUCH)
