"""Answers that become costly to follow end, by counts: at the same token on every rank."""

import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.attack.constraints import STEEP
from configs.grammars import matcher_of, tokenizer_of
from deployments.ingress.structured.fields import Constrainable
from tests.fakes import EOS, token_id, write_tokenizer

pytest.importorskip("llguidance")


def followed(folder: Path, text: str) -> tuple[list[int], str]:
    """Tokens that a matcher of its own let through, and why it took no more."""
    tokenizer = tokenizer_of(folder, 400)
    matcher = matcher_of(tokenizer, text)
    draw, tokens = random.Random(0), list[int]()
    while not matcher.is_stopped() and len(tokens) < 500:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        fitting = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        going_on = [id for id in fitting.tolist() if id not in tokenizer.eos_tokens]
        if going_on:
            tokens.append(draw.choice(going_on))
            matcher.consume_token(tokens[-1])
    return tokens, matcher.get_error()


@pytest.mark.parametrize("name", STEEP)
def test_what_becomes_costly_ends_alike_everywhere(tmp_path: Path, name: str) -> None:
    written = write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(f'{{"eos_token_id": {token_id(written, EOS)}}}')
    text = Constrainable.model_validate(STEEP[name])._constraint().task.text
    tokens, fault = followed(tmp_path, text)
    assert "too many" in fault.lower() or "max is" in fault
    assert followed(tmp_path, text) == (tokens, fault)
