"""From what a step chose to what its `wait` answers, without stopping the device."""

from collections.abc import Sequence

from configs.wire.plan import TokenLogprobs
from configs.wire.sampling import Sampling
from modeling.batch import SampledTokens, StepOutput
from modeling.sampling.prompt_scores import PromptScoresOnDevice
from modeling.sampling.sampler import ChosenLogprobs, SampledStep
from modeling.transfer import HostCopy, StepStart


def step_output(
    chosen: SampledStep,
    asked: Sequence[Sampling],
    told: PromptScoresOnDevice | None = None,
    start: StepStart | None = None,
    captured: bool = False,
    faults: list[tuple[int, str]] | None = None,
) -> StepOutput:
    """Start the tokens' way to the host; `asked` are the sampling rows' parameters.

    told: what the step tells about prompts, if anything. start: when it began on the device.
    captured: whether it was a replay. faults: rows whose matchers could not go on.
    """
    tensors = [chosen.tokens]
    if chosen.logprobs is not None:
        found = chosen.logprobs
        tensors += [found.logprob, found.top_ids, found.top_logprobs]
    copy = HostCopy(tensors + (told.tensors if told is not None else []))
    if start is not None:
        start.clock.end(copy.event)

    def wait() -> SampledTokens:
        copied = copy.wait()
        tokens, *logprobs = copied[: len(tensors)]
        prompts = told.reports(copied[len(tensors) :]) if told is not None else None
        rows = _rows(ChosenLogprobs(*logprobs), asked) if logprobs else None
        idle = start.idle_seconds() if start is not None else None
        return SampledTokens(tokens.tolist(), rows, prompts, idle, captured, faults)

    return StepOutput(wait)


def _rows(found: ChosenLogprobs, asked: Sequence[Sampling]) -> list[TokenLogprobs | None]:
    """Cut the step's logprobs to what each row asked for."""
    columns = (found.logprob.tolist(), found.top_ids.tolist(), found.top_logprobs.tolist())
    return [
        TokenLogprobs(own, ids[: row.logprobs], top[: row.logprobs]) if row.logprobs >= 0 else None
        for row, own, ids, top in zip(asked, *columns, strict=True)
    ]
