"""What steps know of the rows that draw, penalise or mask tokens, on the device."""

from dataclasses import dataclass

from torch import Tensor

from modeling.sampling.warpers import FilteredRows


@dataclass(frozen=True)
class RandomRows:
    """The rows with a temperature; each tensor is [m] for m rows.

    rows: int64 indices into the step's sampling rows. inverse: float32, one over the
    temperature. keys: int32 [m, 2], see noise_keys. filtered: None where no row drops tokens.
    filters: int32, the rows' indices into the filtered ones; -1 of rows that drop no tokens.
    """

    rows: Tensor
    inverse: Tensor
    keys: Tensor
    filters: Tensor
    filtered: FilteredRows | None


@dataclass(frozen=True)
class Penalties:
    """The rows with penalties; each tensor but `buffer` is [p] for p rows.

    rows: int64 indices into the step's sampling rows.
    buffer: as in TokenHistory.
    starts, lengths, prompt_lengths: int64; a row's tokens in `buffer`, the prompt first.
    longest: the largest length.
    repetition, frequency, presence: float32; 1, 0 and 0 are off.
    """

    rows: Tensor
    buffer: Tensor
    starts: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    longest: int
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True)
class Watermarks:
    """The rows with a watermark: int64 indices, and the tokens before their next one, [w]."""

    rows: Tensor
    previous: Tensor


@dataclass(frozen=True)
class Allowed:
    """Rows with a mask: int64 indices [g], and a bit for each token, int32 [g, words].

    Tokens beyond the bits are not allowed.
    """

    rows: Tensor
    words: Tensor
