"""From a step's samples on the device to what its `wait` returns, without stopping the device."""

from collections.abc import Sequence

from configs.wire.plan import TokenLogprobs
from configs.wire.sampling import Sampling
from modeling.batch import SampledTokens, StepOutput
from modeling.runner.guesses import GuessedRows
from modeling.sampling.prompt_scores import PromptScoresOnDevice
from modeling.sampling.sampler import LogprobTensors, SampledStep
from modeling.transfer import HostCopy, StepStart


def step_output(
    sampled: SampledStep,
    sampling: Sequence[Sampling],
    scores: PromptScoresOnDevice | None = None,
    start: StepStart | None = None,
    captured: bool = False,
    faults: list[tuple[int, str]] | None = None,
    guessed: GuessedRows | None = None,
) -> StepOutput:
    """Start to copy a step's results to the host.

    sampling: the sampling rows' parameters.
    scores: what rows report about their prompts; None if none does.
    start: when the step began on the device.
    captured: whether it was a replay.
    faults: rows where the matcher failed.
    guessed: what heads guess; None where the step wants none.
    """
    tensors = [sampled.tokens]
    if sampled.logprobs is not None:
        found = sampled.logprobs
        tensors += [found.logprob, found.top_ids, found.top_logprobs]
    others = scores.tensors if scores is not None else []
    copy = HostCopy(tensors + others + ([guessed.tokens] if guessed is not None else []))
    if start is not None:
        start.clock.end(copy.event)

    def known() -> tuple[list[int], list[list[int]] | None]:
        found, *rest = copy.wait()
        return found.tolist(), guessed.by_row(rest[-1]) if guessed is not None else None

    def wait() -> SampledTokens:
        copied = copy.wait()
        _, *logprobs = copied[: len(tensors)]
        own = copied[len(tensors) : len(tensors) + len(others)]
        prompts = scores.reports(own) if scores is not None else None
        tokens, guesses = known()
        rows = _rows(LogprobTensors(*logprobs), sampling) if logprobs else None
        idle = start.idle_seconds() if start is not None else None
        return SampledTokens(tokens, rows, prompts, idle, captured, faults, guesses)

    return StepOutput(wait, known)


def _rows(found: LogprobTensors, sampling: Sequence[Sampling]) -> list[TokenLogprobs | None]:
    """Cut the step's logprobs to what each row requested."""
    columns = (found.logprob.tolist(), found.top_ids.tolist(), found.top_logprobs.tolist())
    return [
        TokenLogprobs(own, ids[: row.logprobs], top[: row.logprobs]) if row.logprobs >= 0 else None
        for row, own, ids, top in zip(sampling, *columns, strict=True)
    ]
