"""The document's rows for OpenAI's routes."""

from collections.abc import Mapping

from deployments.ingress.openapi.openai_replies import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    EmbeddingsReply,
    ModelReply,
    ModelsReply,
    ResponseEvent,
    ResponseReply,
)
from deployments.ingress.openapi.operation import Operation

_GENERATING = (400, 403, 404, 503, 500)
_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/v1/completions"): Operation(
        tag="OpenAI",
        summary="Complete prompts",
        description="With `stream`, events until `[DONE]`.",
        reply=CompletionReply,
        event=CompletionReply,
        errors=_GENERATING,
        request={
            "an adapter": {
                "model": "pirate",
                "prompt": "What is the capital of France?",
                "max_tokens": 20,
                "temperature": 0,
            },
            "two prompts of token ids, with logprobs": {
                "model": "",
                "prompt": [[5, 6, 7], [8, 9]],
                "max_tokens": 4,
                "logprobs": 2,
            },
        },
        answer={
            "id": "cmpl-0f3c",
            "object": "text_completion",
            "created": 1767225600,
            "model": "pirate",
            "choices": [
                {
                    "index": 0,
                    "text": " Arr! The capital of France be Paris, matey!",
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": 7,
                "completion_tokens": 11,
                "total_tokens": 18,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        },
    ),
    ("post", "/v1/chat/completions"): Operation(
        tag="OpenAI",
        summary="Answer a chat",
        description="With `stream`, events until `[DONE]`.",
        reply=ChatReply,
        event=ChatChunk,
        errors=_GENERATING,
        request={
            "an adapter": {
                "model": "pirate", "messages": _MESSAGES, "temperature": 0, "max_tokens": 20,
            },
            "a stream of JSON": {
                "model": "",
                "messages": _MESSAGES,
                "max_tokens": 30,
                "stream": True,
                "stream_options": {"include_usage": True},
                "response_format": {"type": "json_object"},
            },
        },
        answer={
            "id": "chatcmpl-5901",
            "object": "chat.completion",
            "created": 1767225600,
            "model": "pirate",
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "role": "assistant",
                        "content": "Arr! The capital of France be Paris, matey!",
                        "refusal": None,
                    },
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": 11,
                "completion_tokens": 11,
                "total_tokens": 22,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        },
    ),
    ("post", "/v1/responses"): Operation(
        tag="OpenAI",
        summary="Answer with a list of items; nothing is stored",
        description="With `stream`, named events.",
        reply=ResponseReply,
        event=ResponseEvent,
        errors=_GENERATING,
        request={
            "an adapter": {
                "model": "pirate",
                "input": "What is the capital of France?",
                "temperature": 0,
                "max_output_tokens": 20,
            }
        },
        answer={
            "id": "resp_81a4",
            "object": "response",
            "created_at": 1767225600,
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "model": "pirate",
            "output": [
                {
                    "id": "msg_6c0e",
                    "type": "message",
                    "status": "completed",
                    "role": "assistant",
                    "content": [
                        {
                            "type": "output_text",
                            "text": "Arr! The capital of France be Paris, matey!",
                            "annotations": [],
                            "logprobs": [],
                        }
                    ],
                }
            ],
            "store": False,
            "usage": {
                "input_tokens": 11,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": 11,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 22,
            },
        },
    ),
    ("post", "/v1/embeddings"): Operation(
        tag="OpenAI",
        summary="Embeddings of texts",
        description="Pooled hidden states of the model, with the adapter that `model` names.",
        reply=EmbeddingsReply,
        errors=_GENERATING,
        request={
            "two texts": {"model": "", "input": ["Paris", "Rome"]},
            "as base64, with an adapter": {
                "model": "pirate", "input": "Paris", "encoding_format": "base64",
            },
        },
        answer={
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.0123, -0.0456]}],
            "model": "",
            "usage": {"prompt_tokens": 2, "total_tokens": 2},
        },
    ),
    ("get", "/v1/models"): Operation(
        tag="OpenAI",
        summary="The base model and the adapters",
        reply=ModelsReply,
        errors=(503,),
    ),
    ("get", "/v1/models/{id}"): Operation(
        tag="OpenAI",
        summary="One of them",
        reply=ModelReply,
        errors=(404, 503),
    ),
}  # fmt: skip
