"""Strangers' patterns mean what they mean to `re`, and end soon."""

import random
import re

import pytest

from modeling.adapters.peft.patterns import MatchBudget, Pattern, PatternError

ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\d", r"\W", r"\b", r"\B", "^", "$", r"\.", "q", "(?=a)"]
ATOMS += [
    "(?!b)",
    "(?<=a)",
    "(?<!ab)",
    "(?i:A)",
    "[A-Z]",
    "_",
    r"[^\w.]",
    r"\A",
    r"\Z",
    "(?i:[^Q])",
]
TIMES = ["*", "+", "?", "{2}", "{1,3}", "*?", "{0,2}?", "{,2}", "{3,}"]

UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|dense).*?(?:k_proj|v_proj|q_proj)"
    r".*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
    r"\.(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
)
SWIFT = r"^(model\.layers)(?!.*(lm_head|output|emb|wte|shared)).*"


def effort(steps: int = 10**7) -> MatchBudget:
    return MatchBudget(steps)


def make(rng: random.Random, depth: int) -> str:
    """A random pattern."""
    kind = rng.random()
    if depth == 0 or kind < 0.4:
        return rng.choice(ATOMS)
    one, other = make(rng, depth - 1), make(rng, depth - 1)
    if kind < 0.6:
        return one + other
    if kind < 0.7:
        return f"(?:{one}|{other})"
    if kind < 0.9:
        return f"(?:{one}){rng.choice(TIMES)}"
    return f"(?{rng.choice('=!')}{one})"


@pytest.mark.parametrize("seed", range(8))
def test_random_patterns_match_as_in_re(seed: int) -> None:
    rng = random.Random(seed)
    tried = 0
    while tried < 400:
        text = make(rng, 4)
        try:
            truth = re.compile(text)
        except re.error:
            continue
        tried += 1
        ours = Pattern(text, effort())
        for _ in range(3):
            line = "".join(rng.choice("aab.q_1A") for _ in range(1 + rng.randrange(6)))
            assert ours.fits(line) == bool(truth.fullmatch(line)), (text, line)
            assert ours.begins(line) == bool(truth.match(line)), (text, line)


@pytest.mark.parametrize("pattern", [UNSLOTH, SWIFT])
def test_patterns_of_trainers_match_as_in_re(pattern: str) -> None:
    ours = Pattern(pattern, effort())
    paths = [f"model.layers.{i}.mlp.{name}" for i in (0, 17) for name in ("up_proj", "emb", "act")]
    for path in [*paths, "model.language.attn.q_proj", "lm_head", "model.layers"]:
        assert ours.fits(path) == bool(re.fullmatch(pattern, path)), path


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+b",
        r"(a|a)*b",
        r"(a|aa)*b",
        r"(.*)*x",
        r".*.*.*.*.*.*.*.*x",
        r"(?:a?){40}a{40}b",
        r"((((a*)*)*)*)*b",
        r"(((a{1000}){1000}){1000}){1000}",
        r"(?=(?=(?=(?=.*).*).*).*)*b",
    ],
)
def test_patterns_that_make_re_backtrack_take_few_steps(pattern: str) -> None:
    assert not Pattern(pattern, effort(50_000)).fits("a" * 80)


def test_what_takes_many_steps_ends() -> None:
    spent = effort(2**14)
    with pytest.raises(PatternError, match="too long"):
        Pattern("(((a?){99}){99}){99}b", spent).fits("a" * 80)
    with pytest.raises(PatternError, match="too long"):
        Pattern("q_proj", spent)
    with pytest.raises(PatternError, match="too long"):
        Pattern("x" * 100, effort(99))
    with pytest.raises(PatternError, match="too long"):
        Pattern(f"[{''.join(map(chr, range(200, 3000)))}]", effort(4000)).fits("q_proj")


@pytest.mark.parametrize(
    "pattern", ["(", "a**", r"\m", "(?<=a*)b", r"(a)\1", "a++", "(?>a)", "(?(1)a|b)", "(" * 2000]
)
def test_what_is_no_pattern_here_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        Pattern(pattern, effort()).fits("ab")
