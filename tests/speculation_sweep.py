"""Drafts over HTTP change nothing: `python -m tests.speculation_sweep`.

The demo answers some hundred requests of odd parameters, one after the other, without drafts. Then
it answers them together for each kind of drafts and number of ranks: with blocks for a few of them,
so that requests are preempted, some of them cancelled, and an adapter that is replaced meanwhile
under its name. Drafts are made at each step, whatever they cost. Each token, text, reason and
logprob must be as without. It exits with 1 where one is not.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch

from configs.wire.adapters import AdapterSource
from deployments.ingress.generation.engine import IngressSettings
from scheduler import speculation
from scheduler.draft_costs import DraftCosts
from scheduler.drafts import Drafter
from scheduler.events import Ended, Ending
from scheduler.request import Request
from tests import eagle3, medusa
from tests.checkpoints import load_oracle
from tests.modeling.parity.test_speculation import Find
from tests.oracle import inner_states
from tests.served import demo_app, demo_config, served

DEMO = Path("configs/demo")
RECORDED = json.loads((DEMO / "answers.json").read_text("utf-8"))["answers"]
QUESTIONS = list(RECORDED["base"])
STYLES = ["base", "pirate", "french", "json", "shout", "headed"]
LAYERS = [0, 1, 2]
KINDS = ("prompt_lookup", "medusa", "eagle3")
MOST = 40
"""Tokens of an answer, unless the request says else."""

SCHEMA = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["town", "big"],
}
CONSTRAINTS: list[dict[str, Any]] = [
    {"guided_json": SCHEMA},
    {"guided_regex": "(Paris|Rome|[0-9]{2} ){9}"},
    {"guided_choice": ["Paris", "Rome and more"]},
]
OTHERS: list[dict[str, Any]] = [
    {"n": 3},
    {"stop": ["capital", "is a"]},
    {"stop": [" t"], "include_stop_str_in_output": True},
    {"logprobs": 2},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3},
    {"min_tokens": 12},
    {"ignore_eos": True, "max_tokens": 60},
    {"logit_bias": {"40": 3.0, "41": -100}},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"watermark": True},
    {"bad_words": [" the", " is"]},
    {"stop_token_ids": [33, 34]},
    {"top_p": 0.8, "top_k": 30},
    {"typical_p": 0.9},
    {"min_p": 0.05},
    {"allowed_token_ids": list(range(3, 300))},
    {"prompt_logprobs": 1},
]

Answer = list[dict[str, Any]]


def known_drafts(texts: Sequence[list[int]], look_up: Find) -> Find:
    """Drafts of what answers will be, as far as they are known; every sixth token is wrong."""

    def find(
        drafter: Drafter, tokens: list[int], length: int, guessed: Sequence[int] = ()
    ) -> tuple[int, ...]:
        count = len(tokens)
        own = (text for text in texts if len(text) > count and text[:count] == tokens)
        if (text := next(own, None)) is None:
            return look_up(drafter, tokens, length, guessed)
        first = count + len(guessed)
        found = enumerate(text[first : first + length], first)
        return tuple(token + (position % 6 == 0) for position, token in found)

    return find


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Requests of /v1/completions, greedy and sampled, over the base model and adapters."""
    rnd, made = random.Random(seed), []
    for index in range(count):
        style = STYLES[index % len(STYLES)]
        prompt: Any = rnd.choice([rnd.choice(QUESTIONS), [rnd.randrange(40, 300)]])
        body = {
            "model": "loray-demo" if style == "base" else style,
            "prompt": prompt,
            "max_tokens": MOST,
            "temperature": rnd.choice([0, 0, 0.8, 1.3]),
            "seed": index,
            "return_token_ids": True,
        }
        for field in rnd.sample(OTHERS, rnd.randrange(4)):
            body |= field
        if rnd.random() < 0.25:
            body |= rnd.choice(CONSTRAINTS)
            body.pop("allowed_token_ids", None)
        made.append(body)
    return made


def ask(client: httpx.Client, body: dict[str, Any]) -> Answer:
    """The choices of a reply, or what was wrong."""
    reply = client.post("/v1/completions", json=body)
    found = reply.json()
    if reply.status_code != 200:
        return [{"error": found, "status": reply.status_code}]
    return sorted(found["choices"], key=lambda choice: int(choice["index"]))


def cancel(client: httpx.Client, body: dict[str, Any]) -> None:
    """Begin a stream and leave it behind its first chunk."""
    wanted = {**body, "stream": True, "n": 1, "max_tokens": 80, "ignore_eos": True}
    wanted.pop("prompt_logprobs", None)
    with client.stream("POST", "/v1/completions", json=wanted) as reply:
        next(reply.iter_lines(), None)


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two answers differ; numbers by more than rounding."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{path}[{index}]")
    elif isinstance(one, float) and isinstance(other, float):
        if abs(one - other) > 1e-3:
            yield f"{path}: {one} and {other}"
    elif one != other:
        yield f"{path}: {one!r} and {other!r}"


@contextmanager
def demo(folder: Path, ranks: int, blocks: int, **changes: Any) -> Iterator[httpx.Client]:
    """A client of the demo over the adapters of a folder."""
    adapters = {
        **demo_config().adapters.model_dump(),
        "local_roots": [str(folder)],
        **changes.pop("adapters", {}),
    }
    config = demo_config(
        tensor_parallel=ranks,
        adapters=adapters,
        cache={"num_blocks": blocks, "block_size": 4},
        limits={"max_total_tokens": 160, "max_step_tokens": 96, "max_running": 16},
        **changes,
    )
    settings = IngressSettings(default_source=AdapterSource.LOCAL, loopback=True)
    with served(demo_app(config, settings)) as url, httpx.Client(base_url=url, timeout=600) as one:
        yield one


def write_adapters(folder: Path) -> Path:
    """The demo's adapters, one with heads of its own, and one that will be replaced."""
    for style in ("pirate", "french", "json", "shout"):
        copytree(DEMO / "adapters" / style, folder / style)
    copytree(DEMO / "adapters" / "pirate", folder / "headed")
    torch.manual_seed(2)
    head = load_oracle(DEMO / "model").get_output_embeddings().weight.detach().float()
    heads = medusa.Heads(head, 4)
    for block in heads.blocks:
        for weight in block.parameters():
            torch.nn.init.normal_(weight, std=0.02)
    heads.write(folder / "headed")
    swap(folder, "french")
    return folder


def swap(folder: Path, style: str) -> None:
    """Let the adapter `swapped` be another one: whole files are renamed into it."""
    own = folder / "swapped"
    own.mkdir(exist_ok=True)
    for file in (DEMO / "adapters" / style).iterdir():
        new = own / f"{file.name}.new"
        new.write_bytes(file.read_bytes())
        new.rename(own / file.name)


def write_eagle3(folder: Path, texts: Sequence[list[int]]) -> Path:
    """Train EAGLE-3 heads on some texts of the base model."""
    model = DEMO / "model"
    torch.manual_seed(1)
    heads = eagle3.Heads(load_oracle(model).get_input_embeddings().weight.detach().float())
    heads.train_on([(inner_states(model, None, text, LAYERS), text) for text in texts])
    return heads.write(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": LAYERS})


class Watched:
    """What requests end with: their tokens with the prompt, how many came as drafts, and how many
    requests were preempted."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.skipped = self.preempted = 0
        ended, rewind = Request.ended, Request.rewind

        def end(request: Request, ending: Ending) -> Ended:
            self.texts.append(list(request.tokens))
            self.skipped += len(request.skipped)
            return ended(request, ending)

        def back(request: Request) -> None:
            self.preempted += request.num_generated > 0
            rewind(request)

        Request.ended, Request.rewind = end, back  # type: ignore[assignment, method-assign]


def sweep(options: argparse.Namespace, root: Path) -> int:
    """Return how many answers differ."""
    wanted, watched = bodies(options.requests, options.seed), Watched()
    adapters = write_adapters(root / "adapters")
    swapping = {**wanted[0], "model": "swapped", "prompt": QUESTIONS[0], "temperature": 0, "n": 1}
    with demo(adapters, 1, 2048, speculation={"kind": "none"}) as client:
        plain = [ask(client, body) for body in wanted]
        swaps = [ask(client, {**swapping, "model": each}) for each in ("french", "shout")]
    assert not watched.skipped
    refused = sum("error" in answer[0] for answer in plain)
    print(f"{len(plain)} answers without drafts, {refused} of them errors", flush=True)
    known, look_up, wrong = [t for t in watched.texts if len(t) > 3], Drafter.find, 0
    longest = sorted(known, key=len)[-12:]
    heads: dict[str, dict[str, Any]] = {
        "prompt_lookup": {},
        "medusa": {"model": str(DEMO / "heads")},
        "eagle3": {"model": str(write_eagle3(root / "eagle3", longest)), "max_tokens": 4},
    }
    speculation.MARGIN = 0.0
    DraftCosts.applied = lambda *_: None  # type: ignore[method-assign]
    Drafter.find = known_drafts(known, look_up)  # type: ignore[assignment, method-assign]
    for kind in options.kinds:
        changes: dict[str, Any] = {"speculation": {"kind": kind, **heads[kind]}}
        if kind == "medusa":
            changes["adapters"] = {"draft_heads": 1}
        for ranks in options.ranks:
            watched.skipped = watched.preempted = 0
            swap(adapters, "french")
            with demo(adapters, ranks, options.blocks, **changes) as client:
                found, swapped = together(client, wanted, swapping, adapters)
            bad = [*wrong_answers(wanted, found, plain), *wrong_swaps(swapped, swaps)]
            wrong += len(bad)
            print(
                f"{kind}, {ranks} ranks: {len(found)} answers, {len(bad)} differences, "
                f"{watched.skipped} tokens came as drafts, {watched.preempted} requests were "
                "preempted", *bad[:12], sep="\n", flush=True,
            )  # fmt: skip
    return wrong


def wrong_answers(
    wanted: Sequence[dict[str, Any]], found: Sequence[Answer], plain: Sequence[Answer]
) -> Iterator[str]:
    """Where answers are not those without drafts."""
    for body, one, other in zip(wanted, found, plain, strict=True):
        for difference in islice(differences(one, other), 2):
            yield f"  {body}: {difference}"


def wrong_swaps(swapped: Sequence[Answer], swaps: Sequence[Answer]) -> Iterator[str]:
    """Where answers of the replaced adapter are of neither version, or at last of the first."""
    allowed = [answer[0].get("text") for answer in swaps]
    texts = [answer[0].get("text") for answer in swapped]
    yield from (f"  swapped: {text!r}" for text in texts if text not in allowed)
    if texts[-1] != allowed[-1]:
        yield f"  swapped, at last: {texts[-1]!r}"


def together(
    client: httpx.Client, wanted: Sequence[dict[str, Any]], swapping: dict[str, Any], adapters: Path
) -> tuple[list[Answer], list[Answer]]:
    """All answers, and those of the adapter that is replaced meanwhile."""
    with ThreadPoolExecutor(24) as threads:
        early = [threads.submit(ask, client, swapping) for _ in range(2)]
        late: list[Future[Answer]] = []
        calls: list[Future[Answer]] = []
        for index, body in enumerate(wanted):
            calls.append(threads.submit(ask, client, body))
            if index % 7 == 3:
                threads.submit(cancel, client, body)
            if index == len(wanted) // 2:
                wait(early)
                swap(adapters, "shout")
                late = [threads.submit(ask, client, swapping) for _ in range(3)]
        found = [call.result() for call in calls]
        swapped = [each.result() for each in (*early, *late)]
    # The old version serves until the new one has produced a token.
    for _ in range(40):
        swapped.append(ask(client, swapping))
        if swapped[-1][0].get("text") != swapped[0][0].get("text"):
            break
    return found, swapped


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep over kinds and ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--blocks", type=int, default=56, help="of four tokens")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        sys.exit(1 if sweep(options, Path(folder)) else 0)


if __name__ == "__main__":
    main()
