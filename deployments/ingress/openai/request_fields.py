"""Fields of others' requests: which are refused on OpenAI's routes, and which change nothing.

A field that would change a result and is not built is refused by its name; what to do instead
stands beside it. The names are OpenAI's, vLLM's, SGLang's, LoRAX's and transformers'. A row goes
away when its field is built: a route that has the field does not look here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from deployments.ingress.http.errors import invalid

NO_SUCH = "unsupported_parameter"


class RefusedField(NamedTuple):
    """Values of a field that change nothing, and what to do instead of the others."""

    neutral: tuple[object, ...] = (None,)
    instead: str = ""


_NONE, _OFF, _ON = (None,), (None, False), (None, True)
_EMPTY: tuple[object, ...] = (None, "", [], {})
_CHATS = RefusedField(_OFF, "it belongs to /v1/chat/completions")
_NATIVE = RefusedField(_OFF, "it belongs to the native routes")
_NO_MEDIA = RefusedField((None, False, {}, []), "only text is served")
_NO_BEAMS = RefusedField((None, False, 0, 1), "there is no beam search")
_NOT_IN_REPLIES = RefusedField(_OFF, "it is not part of a reply")
_BY_KEYWORDS = RefusedField(_EMPTY, "use `response_format` or `structured_outputs`")
_THINKING = RefusedField(_NONE, "set it in `chat_template_kwargs`")

REFUSED: Mapping[str, RefusedField] = {
    # Lengths and endings
    "max_new_tokens": RefusedField(instead="use `max_tokens`"),
    "max_output_tokens": RefusedField(instead="use `max_tokens`"),
    "max_length": RefusedField(instead="use `max_tokens`"),
    "n_predict": RefusedField(instead="use `max_tokens`"),
    "num_predict": RefusedField(instead="use `max_tokens`"),
    "max_time": RefusedField(instead="use `max_tokens`"),
    "min_new_tokens": RefusedField((None, 0), "use `min_tokens`"),
    "min_length": RefusedField((None, 0), "use `min_tokens`"),
    "stop_sequences": RefusedField((None, [], ""), "use `stop`"),
    "stop_strings": RefusedField((None, [], ""), "use `stop`"),
    "stop_regex": RefusedField((None, [], "")),
    "no_stop_trim": RefusedField(_OFF, "use `include_stop_str_in_output`"),
    "repetition_detection": RefusedField(),
    "thinking_token_budget": RefusedField((None, -1)),
    "thinking_budget": RefusedField((None, -1)),
    # Sampling
    "do_sample": RefusedField(_ON, "use `temperature` 0 for the likeliest tokens"),
    "use_beam_search": _NO_BEAMS,
    "num_beams": _NO_BEAMS,
    "num_return_sequences": RefusedField((None, 1), "use `n`"),
    "best_of": RefusedField((None, 1), "it belongs to /v1/completions; use `n`"),
    "early_stopping": _NO_BEAMS,
    "length_penalty": RefusedField((None, 1, 0), "there is no beam search"),
    "diversity_penalty": RefusedField((None, 0)),
    "no_repeat_ngram_size": RefusedField((None, 0)),
    "encoder_no_repeat_ngram_size": RefusedField((None, 0)),
    "encoder_repetition_penalty": RefusedField((None, 1)),
    "repeat_penalty": RefusedField((None, 1), "use `repetition_penalty`"),
    "repeat_last_n": RefusedField(),
    "penalty_alpha": RefusedField((None, 0)),
    "epsilon_cutoff": RefusedField((None, 0)),
    "eta_cutoff": RefusedField((None, 0)),
    "top_a": RefusedField((None, 0)),
    "top_h": RefusedField(),
    "tfs": RefusedField((None, 1)),
    "typical": RefusedField((None, 1), "use `typical_p`"),
    "mirostat": RefusedField((None, 0)),
    "mirostat_mode": RefusedField((None, 0)),
    "dynatemp_range": RefusedField((None, 0)),
    "smoothing_factor": RefusedField((None, 0)),
    "xtc_probability": RefusedField((None, 0)),
    "dry_multiplier": RefusedField((None, 0)),
    "samplers": RefusedField((None, [])),
    "sampling_seed": RefusedField(instead="use `seed`"),
    "watermarking": RefusedField(_OFF, "use `watermark`"),
    "bad_words": RefusedField((None, [])),
    "bad_words_ids": RefusedField((None, [])),
    "allowed_token_ids": RefusedField((None, [])),
    "suppress_tokens": RefusedField((None, []), "use `logit_bias`"),
    "sequence_bias": RefusedField(_EMPTY, "use `logit_bias`"),
    "logits_processors": RefusedField((None, [])),
    "custom_logit_processor": RefusedField((None, [], "")),
    "custom_params": RefusedField(_EMPTY),
    "vllm_xargs": RefusedField(_EMPTY),
    "nvext": RefusedField(_EMPTY),
    "guidance_scale": RefusedField((None, 1)),
    "task": RefusedField(),
    # What an answer must fit
    "json_schema": _BY_KEYWORDS,
    "regex": _BY_KEYWORDS,
    "ebnf": _BY_KEYWORDS,
    "grammar": _BY_KEYWORDS,
    "format": _BY_KEYWORDS,
    "structural_tag": _BY_KEYWORDS,
    "guided_whitespace_pattern": RefusedField(),
    "verbosity": RefusedField((None, "medium"), "ask for it in the messages"),
    # Prompts
    "suffix": RefusedField((None, "")),
    "prompt_embeds": RefusedField(),
    "input_embeds": RefusedField(),
    "truncate_prompt_tokens": RefusedField(instead="send a shorter prompt"),
    "truncation_side": RefusedField(instead="send a shorter prompt"),
    "truncation": RefusedField((None, "disabled", False), "send a shorter prompt"),
    "truncate": RefusedField(instead="send a shorter prompt"),
    "input": RefusedField(instead="send `prompt` or `messages`"),
    "inputs": RefusedField(instead="send `prompt` or `messages`"),
    "input_ids": RefusedField(instead="send `prompt` to /v1/completions"),
    "prompt": RefusedField(instead="it belongs to /v1/completions"),
    "system": RefusedField((None, "", []), "send it as a message"),
    "instructions": RefusedField((None, ""), "send it as a message"),
    "parameters": RefusedField(
        _EMPTY, "the native routes have it; its fields stand beside `model`"
    ),
    "options": RefusedField(_EMPTY, "write its fields beside `model`"),
    "extra_body": RefusedField(_EMPTY, "write its fields beside `model`"),
    "guideline": RefusedField((None, ""), "put it into the messages"),
    "tool_prompt": RefusedField((None, ""), "put it into the messages"),
    # Chats alone
    "messages": RefusedField((None, []), "it belongs to /v1/chat/completions"),
    "max_completion_tokens": RefusedField(instead="use `max_tokens`"),
    "top_logprobs": RefusedField((None, 0), "use `logprobs`"),
    "documents": RefusedField((None, []), "it belongs to /v1/chat/completions"),
    "chat_template": _CHATS,
    "chat_template_kwargs": RefusedField(_EMPTY, "it belongs to /v1/chat/completions"),
    "continue_final_message": _CHATS,
    "add_generation_prompt": _CHATS,
    "echo": RefusedField(
        _OFF, "use `continue_final_message`, and write the message before the answer"
    ),
    "tools": RefusedField((None, []), "it belongs to /v1/chat/completions"),
    "tool_choice": RefusedField((None, "none", "auto"), "it belongs to /v1/chat/completions"),
    "functions": RefusedField((None, []), "it belongs to /v1/chat/completions"),
    "function_call": RefusedField((None, "none", "auto"), "it belongs to /v1/chat/completions"),
    "reasoning": RefusedField(_EMPTY, "use `reasoning_effort` or `chat_template_kwargs`"),
    "reasoning_effort": RefusedField(instead="it belongs to /v1/chat/completions"),
    "include_reasoning": RefusedField(_ON, "answers are not taken apart"),
    "thinking": _THINKING,
    "enable_thinking": _THINKING,
    # Responses alone
    **dict.fromkeys(
        (
            "access_programs",
            "background",
            "background_options",
            "context_management",
            "conversation",
            "include",
            "max_tool_calls",
            "previous_response_id",
            "text",
            "enable_response_messages",
            "previous_input_messages",
            "previous_response",
        ),
        RefusedField((None, False, [], {}), "it belongs to /v1/responses"),
    ),
    # What a reply contains
    "apply_chat_template": _NATIVE,
    "return_full_text": RefusedField(_OFF, "use `echo`"),
    "details": RefusedField(_OFF, "use `logprobs`"),
    "decoder_input_details": RefusedField(_OFF, "use `prompt_logprobs`"),
    "return_k_alternatives": RefusedField(instead="use `logprobs`"),
    "top_n_tokens": RefusedField((None, 0), "use `logprobs`"),
    "n_probs": RefusedField((None, 0), "use `logprobs`"),
    "logprob_token_ids": RefusedField((None, [])),
    "return_logprob": RefusedField(_OFF, "use `logprobs`"),
    "skip_special_tokens": RefusedField(_ON),
    "spaces_between_special_tokens": RefusedField(_ON),
    "return_token_ids": _NOT_IN_REPLIES,
    "return_prompt_token_ids": _NOT_IN_REPLIES,
    "return_tokens_as_token_ids": _NOT_IN_REPLIES,
    "return_token_offsets": _NOT_IN_REPLIES,
    "return_prompt_text": _NOT_IN_REPLIES,
    "return_hidden_states": _NOT_IN_REPLIES,
    "return_routed_experts": _NOT_IN_REPLIES,
    "routed_experts_start_len": RefusedField((None, 0)),
    "routed_experts_prompt_start": RefusedField((None, 0)),
    "return_cached_tokens_details": _NOT_IN_REPLIES,
    "return_meta_info": _NOT_IN_REPLIES,
    "moderation": RefusedField(instead="nothing is moderated here"),
    # Other media, other servers
    "modalities": RefusedField((None, ["text"]), "only text is served"),
    "audio": _NO_MEDIA,
    "image": _NO_MEDIA,
    "images_config": _NO_MEDIA,
    "media_io_kwargs": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "max_dynamic_patch": _NO_MEDIA,
    "min_dynamic_patch": _NO_MEDIA,
    "use_audio_in_video": _NO_MEDIA,
    "prediction": RefusedField(),
    "web_search_options": RefusedField(),
    "session_params": RefusedField(_EMPTY),
    "kv_transfer_params": RefusedField(_EMPTY),
    "ec_transfer_params": RefusedField(_EMPTY),
    "bootstrap_host": RefusedField(),
    "bootstrap_port": RefusedField(),
    "bootstrap_room": RefusedField(),
    "priority": RefusedField((None, 0), "priorities are the operator's"),
    "extra_key": RefusedField(),
}

_LENGTH = RefusedField(instead="send shorter inputs")
REFUSED_EMBEDDINGS: Mapping[str, RefusedField] = {
    "truncate_prompt_tokens": _LENGTH,
    "truncation_side": _LENGTH,
    "truncate": RefusedField((None, False, "NONE"), "send shorter inputs"),
    "add_special_tokens": RefusedField(_ON, "send token ids"),
    "messages": RefusedField((None, []), "send `input`"),
    "inputs": RefusedField(instead="send `input`"),
    "prompt": RefusedField(instead="send `input`"),
    "chat_template": RefusedField(),
    "chat_template_kwargs": RefusedField(_EMPTY),
    "embed_dtype": RefusedField((None, "float32")),
    "endianness": RefusedField((None, "native", "little")),
    "use_activation": RefusedField(instead="use `normalize`"),
    "task": RefusedField((None, "embed")),
    "input_type": RefusedField(instead="write what the model expects into `input`"),
    "prompt_name": RefusedField(instead="write what the model expects into `input`"),
    "mm_processor_kwargs": _NO_MEDIA,
    "priority": RefusedField((None, 0), "priorities are the operator's"),
    "extra_body": RefusedField(_EMPTY, "write its fields beside `model`"),
}

IGNORED = frozenset({
    # Nothing is stored, billed or looked up by them.
    "user", "metadata", "store", "service_tier", "safety_identifier", "custom_labels",
    "request_id", "rid", "session_id",
    # They change when tokens come, or where from, and never which.
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "stream_interval",
    "ngram_corpus_id", "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank",
    # Answers are not taken apart into reasoning and text, so there is nothing to put elsewhere.
    "separate_reasoning", "stream_reasoning",
    # Replies of other routes have it, and nothing is called on /v1/completions.
    "return_mm_kwargs", "parallel_tool_calls",
})  # fmt: skip
"""Fields that change no answer; so do unknown ones."""


def refuse_others(
    extra: Mapping[str, Any] | None, refused: Mapping[str, RefusedField] = REFUSED
) -> None:
    """Raise for a field that would change the result and is not built."""
    for name, value in (extra or {}).items():
        row = refused.get(name)
        if row is None or value in row.neutral:
            continue
        instead = f": {row.instead}" if row.instead else ""
        raise invalid(f"`{name}` is not supported{instead}", name, NO_SUCH)
