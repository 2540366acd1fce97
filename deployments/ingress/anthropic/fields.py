"""Fields of Anthropic's requests: refused ones, those that change nothing, and their names."""

from deployments.ingress.requests.request_fields import refused_fields

_NONE: tuple[object, ...] = (None,)
_OFF = (None, False)
_ONE = (None, 1)
_EMPTY: tuple[object, ...] = (None, [], {}, "")
# Claude Code sends the last one.
_UNEDITED = (
    *_EMPTY, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)  # fmt: skip
_ELSEWHERE = "it belongs to OpenAI's routes"

REFUSED = refused_fields((
    (_EMPTY, "there are no containers", "container"),
    (_EMPTY, "give the model `tools`, and call the servers yourself", "mcp_servers"),
    (_UNEDITED, "shorten the messages yourself", "context_management"),
    (_NONE, "shorten the messages yourself", "compaction"),
    (_EMPTY, "send another request yourself", "fallbacks"),
    (_ONE, "a message has one answer", "n"),
    (_EMPTY, "use `stop_sequences`", "stop"),
    (_NONE, "use `max_tokens`", "max_completion_tokens"),
    (_EMPTY, "use `output_config.format`", "response_format"),
    (_NONE, "use `output_config.effort`", "reasoning_effort"),
    (_NONE, "use `tool_choice.disable_parallel_tool_use`", "parallel_tool_calls"),
    (_EMPTY, "use `tools`", "functions function_call"),
    (_EMPTY, "end the messages with the assistant's", "continue_final_message"),
    (_NONE, "end the messages with the user's", "add_generation_prompt"),
    (_OFF, _ELSEWHERE, "logprobs echo return_token_ids"),
    ((None, 0), _ELSEWHERE, "top_logprobs"),
    (_NONE, _ELSEWHERE, "prompt_logprobs"),
    (_EMPTY, "the last event has the usage", "stream_options"),
))  # fmt: skip

IGNORED = frozenset({
    # They would matter for bills, logs or regions only.
    "metadata", "service_tier", "inference_geo", "speed", "user_profile_id", "workspace_id",
    "diagnostics", "billing_policy", "fallback_credit_token",
    # The prefix cache takes every prompt by itself.
    "cache_control",
    # What clients send in the body where a header is meant.
    "anthropic_version", "anthropic_beta", "betas",
})  # fmt: skip
"""Fields that change no answer."""

THREADLESS = "thread_unsupported_request"
"""The code on which Anthropic's client sends the whole conversation instead of a `thread`."""

NAMES = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""These routes' names of a chat's fields."""
