"""The tokens of a batch: the sum of what its results report, each in the form of its route."""

import msgspec


class InputDetails(msgspec.Struct):
    """Prompt tokens from the prefix cache, among the input's."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Tokens of the answers' reasoning, among the output's."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Tokens of all results of a batch."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = msgspec.field(default_factory=InputDetails)
    output_tokens: int = 0
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)
    total_tokens: int = 0

    def add(self, result: bytes) -> None:
        """Add the tokens of a line of the output."""
        found = _decode(result).response.body.usage
        cached = found.cache_read_input_tokens
        self.input_tokens += found.prompt_tokens + found.input_tokens + cached
        for details in (found.prompt_tokens_details, found.input_tokens_details):
            cached += details.cached_tokens
        self.input_tokens_details.cached_tokens += cached
        self.output_tokens += found.completion_tokens + found.output_tokens
        for spent in (found.completion_tokens_details, found.output_tokens_details):
            tokens = spent.reasoning_tokens + spent.thinking_tokens
            self.output_tokens_details.reasoning_tokens += tokens
        self.total_tokens = self.input_tokens + self.output_tokens


class _Prompt(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _Answer(msgspec.Struct, frozen=True):
    """reasoning_tokens: OpenAI's name, thinking_tokens: Anthropic's."""

    reasoning_tokens: int = 0
    thinking_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    """Each route has some of these. Anthropic's input_tokens are those that were not cached."""

    prompt_tokens: int = 0
    prompt_tokens_details: _Prompt = _Prompt()
    completion_tokens: int = 0
    completion_tokens_details: _Answer = _Answer()
    input_tokens: int = 0
    input_tokens_details: _Prompt = _Prompt()
    cache_read_input_tokens: int = 0
    output_tokens: int = 0
    output_tokens_details: _Answer = _Answer()


class _Body(msgspec.Struct, frozen=True):
    usage: _Usage = _Usage()


class _Response(msgspec.Struct, frozen=True):
    body: _Body


class _Result(msgspec.Struct, frozen=True):
    response: _Response


_decode = msgspec.json.Decoder(_Result).decode
