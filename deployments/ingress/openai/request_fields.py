"""Fields of others' requests: which are refused on OpenAI's routes, and which change nothing.

A field that would change a result and is not built is refused by its name; what to do instead
stands beside it. The names are OpenAI's, vLLM's, SGLang's, LoRAX's and transformers'. A row goes
away when its field is built: a route that has the field does not look here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from deployments.ingress.http.errors import invalid

NO_SUCH = "unsupported_parameter"


class Refused(NamedTuple):
    """Values of a field that change nothing, and what to do instead of the others."""

    neutral: tuple[object, ...] = (None,)
    instead: str = ""


_NONE, _OFF, _ON = (None,), (None, False), (None, True)
_EMPTY: tuple[object, ...] = (None, "", [], {})
_CHATS = Refused(_OFF, "it belongs to /v1/chat/completions")
_NATIVE = Refused(_OFF, "it belongs to the native routes")
_NO_MEDIA = Refused((None, False, {}, []), "only text is served")
_NO_BEAMS = Refused((None, False, 0, 1), "there is no beam search")
_NOT_IN_REPLIES = Refused(_OFF, "it is not part of a reply")
_BY_KEYWORDS = Refused(_EMPTY, "use `response_format` or `structured_outputs`")
_THINKING = Refused(_NONE, "set it in `chat_template_kwargs`")

REFUSED: Mapping[str, Refused] = {
    # Lengths and endings
    "max_new_tokens": Refused(instead="use `max_tokens`"),
    "max_output_tokens": Refused(instead="use `max_tokens`"),
    "max_length": Refused(instead="use `max_tokens`"),
    "n_predict": Refused(instead="use `max_tokens`"),
    "num_predict": Refused(instead="use `max_tokens`"),
    "max_time": Refused(instead="use `max_tokens`"),
    "min_new_tokens": Refused((None, 0), "use `min_tokens`"),
    "min_length": Refused((None, 0), "use `min_tokens`"),
    "stop_sequences": Refused((None, [], ""), "use `stop`"),
    "stop_strings": Refused((None, [], ""), "use `stop`"),
    "stop_regex": Refused((None, [], "")),
    "no_stop_trim": Refused(_OFF, "use `include_stop_str_in_output`"),
    "repetition_detection": Refused(),
    "thinking_token_budget": Refused((None, -1)),
    "thinking_budget": Refused((None, -1)),
    # Sampling
    "do_sample": Refused(_ON, "use `temperature` 0 for the likeliest tokens"),
    "use_beam_search": _NO_BEAMS,
    "num_beams": _NO_BEAMS,
    "num_return_sequences": Refused((None, 1), "use `n`"),
    "best_of": Refused((None, 1), "it belongs to /v1/completions; use `n`"),
    "early_stopping": _NO_BEAMS,
    "length_penalty": Refused((None, 1, 0), "there is no beam search"),
    "diversity_penalty": Refused((None, 0)),
    "no_repeat_ngram_size": Refused((None, 0)),
    "encoder_no_repeat_ngram_size": Refused((None, 0)),
    "encoder_repetition_penalty": Refused((None, 1)),
    "repeat_penalty": Refused((None, 1), "use `repetition_penalty`"),
    "repeat_last_n": Refused(),
    "penalty_alpha": Refused((None, 0)),
    "epsilon_cutoff": Refused((None, 0)),
    "eta_cutoff": Refused((None, 0)),
    "top_a": Refused((None, 0)),
    "top_h": Refused(),
    "tfs": Refused((None, 1)),
    "typical": Refused((None, 1), "use `typical_p`"),
    "mirostat": Refused((None, 0)),
    "mirostat_mode": Refused((None, 0)),
    "dynatemp_range": Refused((None, 0)),
    "smoothing_factor": Refused((None, 0)),
    "xtc_probability": Refused((None, 0)),
    "dry_multiplier": Refused((None, 0)),
    "samplers": Refused((None, [])),
    "sampling_seed": Refused(instead="use `seed`"),
    "watermarking": Refused(_OFF, "use `watermark`"),
    "bad_words": Refused((None, [])),
    "bad_words_ids": Refused((None, [])),
    "allowed_token_ids": Refused((None, [])),
    "suppress_tokens": Refused((None, []), "use `logit_bias`"),
    "sequence_bias": Refused(_EMPTY, "use `logit_bias`"),
    "logits_processors": Refused((None, [])),
    "custom_logit_processor": Refused((None, [], "")),
    "custom_params": Refused(_EMPTY),
    "vllm_xargs": Refused(_EMPTY),
    "nvext": Refused(_EMPTY),
    "guidance_scale": Refused((None, 1)),
    "task": Refused(),
    # What an answer must fit
    "json_schema": _BY_KEYWORDS,
    "regex": _BY_KEYWORDS,
    "ebnf": _BY_KEYWORDS,
    "grammar": _BY_KEYWORDS,
    "format": _BY_KEYWORDS,
    "structural_tag": _BY_KEYWORDS,
    "guided_whitespace_pattern": Refused(),
    "verbosity": Refused((None, "medium"), "ask for it in the messages"),
    # Prompts
    "suffix": Refused((None, "")),
    "prompt_embeds": Refused(),
    "input_embeds": Refused(),
    "truncate_prompt_tokens": Refused(instead="send a shorter prompt"),
    "truncation_side": Refused(instead="send a shorter prompt"),
    "truncation": Refused((None, "disabled", False), "send a shorter prompt"),
    "truncate": Refused(instead="send a shorter prompt"),
    "input": Refused(instead="send `prompt` or `messages`"),
    "inputs": Refused(instead="send `prompt` or `messages`"),
    "input_ids": Refused(instead="send `prompt` to /v1/completions"),
    "prompt": Refused(instead="it belongs to /v1/completions"),
    "system": Refused((None, "", []), "send it as a message"),
    "instructions": Refused((None, ""), "send it as a message"),
    "parameters": Refused(_EMPTY, "the native routes have it; its fields stand beside `model`"),
    "options": Refused(_EMPTY, "write its fields beside `model`"),
    "extra_body": Refused(_EMPTY, "write its fields beside `model`"),
    "guideline": Refused((None, ""), "put it into the messages"),
    "tool_prompt": Refused((None, ""), "put it into the messages"),
    # Chats alone
    "messages": Refused((None, []), "it belongs to /v1/chat/completions"),
    "max_completion_tokens": Refused(instead="use `max_tokens`"),
    "top_logprobs": Refused((None, 0), "use `logprobs`"),
    "documents": Refused((None, []), "it belongs to /v1/chat/completions"),
    "chat_template": _CHATS,
    "chat_template_kwargs": Refused(_EMPTY, "it belongs to /v1/chat/completions"),
    "continue_final_message": _CHATS,
    "add_generation_prompt": _CHATS,
    "echo": Refused(_OFF, "use `continue_final_message`, and write the message before the answer"),
    "tools": Refused((None, []), "it belongs to /v1/chat/completions"),
    "tool_choice": Refused((None, "none", "auto"), "it belongs to /v1/chat/completions"),
    "functions": Refused((None, []), "it belongs to /v1/chat/completions"),
    "function_call": Refused((None, "none", "auto"), "it belongs to /v1/chat/completions"),
    "reasoning": Refused(_EMPTY, "use `reasoning_effort` or `chat_template_kwargs`"),
    "reasoning_effort": Refused(instead="it belongs to /v1/chat/completions"),
    "include_reasoning": Refused(_ON, "answers are not taken apart"),
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
        Refused((None, False, [], {}), "it belongs to /v1/responses"),
    ),
    # What a reply contains
    "apply_chat_template": _NATIVE,
    "return_full_text": Refused(_OFF, "use `echo`"),
    "details": Refused(_OFF, "use `logprobs`"),
    "decoder_input_details": Refused(_OFF, "use `prompt_logprobs`"),
    "return_k_alternatives": Refused(instead="use `logprobs`"),
    "top_n_tokens": Refused((None, 0), "use `logprobs`"),
    "n_probs": Refused((None, 0), "use `logprobs`"),
    "logprob_token_ids": Refused((None, [])),
    "return_logprob": Refused(_OFF, "use `logprobs`"),
    "skip_special_tokens": Refused(_ON),
    "spaces_between_special_tokens": Refused(_ON),
    "return_token_ids": _NOT_IN_REPLIES,
    "return_prompt_token_ids": _NOT_IN_REPLIES,
    "return_tokens_as_token_ids": _NOT_IN_REPLIES,
    "return_token_offsets": _NOT_IN_REPLIES,
    "return_prompt_text": _NOT_IN_REPLIES,
    "return_hidden_states": _NOT_IN_REPLIES,
    "return_routed_experts": _NOT_IN_REPLIES,
    "routed_experts_start_len": Refused((None, 0)),
    "routed_experts_prompt_start": Refused((None, 0)),
    "return_cached_tokens_details": _NOT_IN_REPLIES,
    "return_meta_info": _NOT_IN_REPLIES,
    "moderation": Refused(instead="nothing is moderated here"),
    # Other media, other servers
    "modalities": Refused((None, ["text"]), "only text is served"),
    "audio": _NO_MEDIA,
    "image": _NO_MEDIA,
    "images_config": _NO_MEDIA,
    "media_io_kwargs": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "max_dynamic_patch": _NO_MEDIA,
    "min_dynamic_patch": _NO_MEDIA,
    "use_audio_in_video": _NO_MEDIA,
    "prediction": Refused(),
    "web_search_options": Refused(),
    "session_params": Refused(_EMPTY),
    "kv_transfer_params": Refused(_EMPTY),
    "ec_transfer_params": Refused(_EMPTY),
    "bootstrap_host": Refused(),
    "bootstrap_port": Refused(),
    "bootstrap_room": Refused(),
    "priority": Refused((None, 0), "priorities are the operator's"),
    "extra_key": Refused(),
}

_LENGTH = Refused(instead="send shorter inputs")
REFUSED_EMBEDDINGS: Mapping[str, Refused] = {
    "truncate_prompt_tokens": _LENGTH,
    "truncation_side": _LENGTH,
    "truncate": Refused((None, False, "NONE"), "send shorter inputs"),
    "add_special_tokens": Refused(_ON, "send token ids"),
    "messages": Refused((None, []), "send `input`"),
    "inputs": Refused(instead="send `input`"),
    "prompt": Refused(instead="send `input`"),
    "chat_template": Refused(),
    "chat_template_kwargs": Refused(_EMPTY),
    "embed_dtype": Refused((None, "float32")),
    "endianness": Refused((None, "native", "little")),
    "use_activation": Refused(instead="use `normalize`"),
    "task": Refused((None, "embed")),
    "input_type": Refused(instead="write what the model expects into `input`"),
    "prompt_name": Refused(instead="write what the model expects into `input`"),
    "mm_processor_kwargs": _NO_MEDIA,
    "priority": Refused((None, 0), "priorities are the operator's"),
    "extra_body": Refused(_EMPTY, "write its fields beside `model`"),
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
    extra: Mapping[str, Any] | None, refused: Mapping[str, Refused] = REFUSED
) -> None:
    """Raise for a field that would change the result and is not built."""
    for name, value in (extra or {}).items():
        row = refused.get(name)
        if row is None or value in row.neutral:
            continue
        instead = f": {row.instead}" if row.instead else ""
        raise invalid(f"`{name}` is not supported{instead}", name, NO_SUCH)
