"""From what a step chose to what its `wait` answers, without stopping the device."""

from collections.abc import Sequence

from configs.sampling import Sampling
from modeling.batch import RowLogprobs, SampledTokens, StepOutput
from modeling.sampling.sampler import Chosen, ChosenLogprobs
from modeling.transfer import HostCopy


def step_output(chosen: Chosen, asked: Sequence[Sampling]) -> StepOutput:
    """Start the tokens' way to the host; `asked` are the sampling rows' parameters."""
    tensors = [chosen.tokens]
    if chosen.logprobs is not None:
        found = chosen.logprobs
        tensors += [found.logprob, found.top_ids, found.top_logprobs]
    copy = HostCopy(tensors)

    def wait() -> SampledTokens:
        tokens, *logprobs = copy.wait()
        if not logprobs:
            return SampledTokens(tokens.tolist())
        return SampledTokens(tokens.tolist(), _rows(ChosenLogprobs(*logprobs), asked))

    return StepOutput(wait)


def _rows(found: ChosenLogprobs, asked: Sequence[Sampling]) -> list[RowLogprobs | None]:
    """Cut the step's logprobs to what each row asked for."""
    columns = (found.logprob.tolist(), found.top_ids.tolist(), found.top_logprobs.tolist())
    return [
        RowLogprobs(own, ids[: row.logprobs], top[: row.logprobs]) if row.logprobs >= 0 else None
        for row, own, ids, top in zip(asked, *columns, strict=True)
    ]
