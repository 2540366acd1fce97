"""LoRAX's native requests, and its validation rules in its order."""

from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import ConfigDict, Field

from configs.wire.sampling import LARGEST_TOP_K, Sampling
from deployments.contract import EngineInfo
from deployments.ingress.adapter_names.merges import MergedAdapters, check_merge
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.http.body_lists import Items
from deployments.ingress.http.body_values import Integer, Natural, Typed
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.http.unicode import Unicode
from deployments.ingress.structured.schemas import ResponseFormat
from deployments.ingress.text.tokenizer import Limit

_Range = tuple[Callable[[float], bool], str]

_POSITIVE: _Range = (lambda value: value > 0, "strictly positive")
_PENALTY: _Range = (lambda value: -2 <= value <= 2, ">= -2.0 and <= 2.0")
# LoRAX's message says "< 1.0", but it accepts 1.0; clients match on the message.
_FRACTION: _Range = (lambda value: 0 < value <= 1, "> 0.0 and < 1.0")

_RANGES: Mapping[str, _Range] = {
    "temperature": (lambda value: value >= 0, "non-negative"),
    "repetition_penalty": _POSITIVE,
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "top_p": _FRACTION,
    "typical_p": _FRACTION,
    "top_k": _POSITIVE,
    "return_k_alternatives": _POSITIVE,
    "max_new_tokens": _POSITIVE,
}

# More than in real texts, of which most have four.
_CHARACTERS_A_TOKEN = 16
_FEW_CHARACTERS = 65_536


class _Body(Typed):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="ignore")


class GenerateParameters(_Body):
    """LoRAX's generation parameters; None means the default."""

    adapter_id: Annotated[Unicode, Field(max_length=1024)] | None = None
    adapter_source: Unicode | None = None
    merged_adapters: MergedAdapters | None = None
    api_token: Unicode | None = None
    best_of: Natural | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: Integer | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: Integer | None = None
    ignore_eos_token: bool = False
    return_full_text: bool | None = None
    stop: Items[Unicode] = Field(default=[])
    truncate: Integer | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    return_k_alternatives: Integer | None = None
    apply_chat_template: bool = False
    seed: Annotated[Integer, Field(ge=0, lt=2**64)] | None = None
    response_format: ResponseFormat | None = None

    @property
    def detailed(self) -> bool:
        """Whether a whole reply has details."""
        return self.details or self.decoder_input_details


class GenerateRequestBody(_Body):
    """POST /generate and POST /generate_stream."""

    inputs: Unicode
    parameters: GenerateParameters | None = None

    @property
    def given(self) -> GenerateParameters:
        """The parameters, or the defaults."""
        return self.parameters or GenerateParameters()


class CompatGenerateBody(GenerateRequestBody):
    """POST /: the same with `stream` in the body."""

    stream: bool = False


class TokenizeBody(_Body):
    """POST /tokenize."""

    inputs: Unicode
    add_special_tokens: bool = True


def check(inputs: str, given: GenerateParameters, settings: IngressSettings, streams: bool) -> None:
    """LoRAX's rules in LoRAX's order, up to those that need the tokens."""
    check_adapters(given)
    _check_best_of(given, settings, streams)
    _check_ranges(given)
    if len(given.stop) > settings.max_stop_sequences:
        raise invalid(
            f"`stop` supports up to {settings.max_stop_sequences} stop sequences. "
            f"Given: {len(given.stop)}"
        )
    if not all(0 < len(stop) <= settings.max_stop_length for stop in given.stop):
        raise invalid(f"`stop` sequences must have 1 to {settings.max_stop_length} characters")
    if given.seed is not None and (given.best_of or 1) > 1:
        raise invalid("`seed` must not be set when `best_of` > 1")
    if not inputs:
        raise invalid("`inputs` cannot be empty")
    alternatives = given.return_k_alternatives or 0
    if alternatives > settings.max_logprobs:
        raise invalid(
            f"`return_k_alternatives` must be <= {settings.max_logprobs}. Given: {alternatives}"
        )
    if streams and given.decoder_input_details:
        raise invalid("`decoder_input_details` == true is not supported when streaming tokens")


def check_characters(inputs: str, info: EngineInfo) -> None:
    """Refuse a text that is too long to be encoded, where no limit of tokens applies.

    A reply of /tokenize has about 80 bytes for each token.
    """
    most = max(_FEW_CHARACTERS, _CHARACTERS_A_TOKEN * info.max_total_tokens)
    if len(inputs) > most:
        raise invalid(f"`inputs` must have at most {most} characters. Given: {len(inputs)}")


def input_limit(given: GenerateParameters, info: EngineInfo) -> Limit | None:
    """How many tokens `inputs` may have; None with `truncate`, which cuts any number."""
    if given.truncate is not None:
        return None

    def refusal(size: str) -> RequestError:
        return invalid(
            f"`inputs` must have less than {info.max_input_tokens} tokens. Given: {size}"
        )

    return Limit(min(info.max_input_tokens, info.max_total_tokens), refusal)


def check_known(ids: list[int], info: EngineInfo) -> None:
    """Refuse tokens that the tokenizer has but the model does not."""
    if max(ids, default=0) >= info.vocab_size:
        raise invalid(f"`inputs` has token {max(ids)}; the model has {info.vocab_size}")


def truncated(ids: list[int], given: GenerateParameters, info: EngineInfo) -> list[int]:
    """The last `truncate` ids, or all of them."""
    if given.truncate is None:
        return ids
    if not 0 < given.truncate <= info.max_input_tokens:
        raise invalid(
            f"`truncate` must be strictly positive and less than {info.max_input_tokens}. "
            f"Given: {given.truncate}"
        )
    return ids[-given.truncate :]


def check_lengths(num_input: int, max_new_tokens: int | None, info: EngineInfo) -> int:
    """How many tokens to generate: as requested, else all that fit."""
    left = info.max_total_tokens - num_input
    limit = max_new_tokens if max_new_tokens is not None else max(1, left)
    if limit > left:
        raise invalid(
            f"`inputs` tokens + `max_new_tokens` must be <= {info.max_total_tokens}. "
            f"Given: {num_input} `inputs` tokens and {limit} `max_new_tokens`"
        )
    if num_input > info.max_input_tokens:
        raise invalid(
            f"`inputs` must have less than {info.max_input_tokens} tokens. Given: {num_input}"
        )
    if num_input == 0:
        raise invalid("`inputs` cannot be empty")
    return limit


def sampled(given: GenerateParameters) -> bool:
    """Whether to sample: if any parameter differs from its default, never at temperature 0."""
    if given.temperature == 0:
        return False
    warped = given.temperature not in (None, 1.0) or given.top_k is not None
    cut = given.top_p not in (None, 1.0) or given.typical_p not in (None, 1.0)
    return given.do_sample or warped or cut


def sampling(given: GenerateParameters, seed: int, logprobs: int, schema: str) -> Sampling:
    """The parameters for the driver; logprobs and schema: as in `Sampling`."""
    drawn = sampled(given)
    return Sampling(
        temperature=_or(given.temperature, 1.0) if drawn else 0.0,
        top_k=min(given.top_k or 0, LARGEST_TOP_K) if drawn else 0,
        top_p=_or(given.top_p, 1.0) if drawn else 1.0,
        typical_p=_or(given.typical_p, 1.0) if drawn else 1.0,
        seed=seed,
        logprobs=logprobs,
        repetition_penalty=_or(given.repetition_penalty, 1.0),
        frequency_penalty=given.frequency_penalty or 0.0,
        presence_penalty=given.presence_penalty or 0.0,
        watermark=given.watermark,
        json_schema=schema,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def check_adapters(given: GenerateParameters) -> None:
    """LoRAX's first rules: one adapter, or several with a weight each."""
    if given.merged_adapters is not None and given.adapter_id is not None:
        raise invalid("at most one of `adapter_id` or `adapters` may be provided")
    check_merge(given.merged_adapters)


def _check_best_of(given: GenerateParameters, settings: IngressSettings, streams: bool) -> None:
    best_of = 1 if given.best_of is None else given.best_of
    if settings.max_best_of == 1 != best_of:
        raise invalid("`best_of` != 1 is not allowed for this endpoint")
    if not 1 <= best_of <= settings.max_best_of:
        raise invalid(f"`best_of` must be > 0 and <= {settings.max_best_of}. Given: {best_of}")
    if streams and best_of != 1:
        raise invalid("`best_of` != 1 is not supported when streaming tokens")
    shaping = (given.temperature, given.top_k, given.top_p, given.typical_p)
    if best_of > 1 and not given.do_sample and all(value is None for value in shaping):
        raise invalid("you must use sampling when `best_of` is > 1")


def _check_ranges(given: GenerateParameters) -> None:
    """Rules 5 to 9: refuse the first parameter that is out of range, in LoRAX's order."""
    for name, (is_valid, range) in _RANGES.items():
        value = getattr(given, name)
        if value is not None and not is_valid(value):
            raise invalid(f"`{name}` must be {range}")
