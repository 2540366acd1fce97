"""A model that copies, and prompts with what it copies: `python -m benchmarks.copying`.

For drafts that are looked up, any server's: `write FOLDER` makes a checkpoint of Llama's classes
that any server loads, at the full cost of its shape, whose weights say which token follows which:

    embedding of t = e_t;  row of the head of t's follower = e_t;  e: normal noise

All layers are random, but those whose sums the stream takes add next to nothing. So a greedy answer
goes on along one known ring of tokens from the prompt's last one. `play --url URL` asks with
prompts that hold the next part of the ring with a share of wrong tokens, as an edit or a summary
does: the answer copies the prompt but for these. Both servers get the same prompts, and right
answers are known, so each is checked. `steps` counts the steps that prompt lookup takes for such
answers, without a server: as if every draft of eight tokens were checked.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.serving import Case, run
from benchmarks.workload import SHAPES, config_of, sizes_of, write_model
from scheduler.drafts import Drafter

RING_SEED = 5
FIRST = 2
"""The ring's smallest token."""

OUTSIDE = 256
"""The last tokens of a vocabulary, which are not on the ring: those that end texts are there."""

QUIET = 1e-5
"""The deviation of weights whose sums the stream takes; embeddings have 1."""


def ring_of(vocab_size: int) -> list[int]:
    """Each token's follower is the next one here, and the first one's that of the last."""
    tokens = list(range(FIRST, vocab_size - OUTSIDE))
    random.Random(RING_SEED).shuffle(tokens)
    return tokens


class Noise:
    """Normal noise in bfloat16, made on a GPU where there is one."""

    def __init__(self) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._generator = torch.Generator(self._device).manual_seed(0)

    def __call__(self, *shape: int, std: float) -> Tensor:
        """A tensor of this shape, on the CPU."""
        values = torch.randn(*shape, generator=self._generator, device=self._device)
        return (values * std).to(torch.bfloat16).cpu()


def write_copying(folder: Path, shape: str, layers: int | None = None) -> None:
    """Write config, tokenizer and weights in bfloat16, a file for each layer."""
    write_model(folder, shape, layers=layers)
    config, noise = config_of(shape, layers), Noise()
    files: dict[str, str] = {}
    for layer in range(-1, config["num_hidden_layers"]):
        tensors = ends_of(config, noise) if layer < 0 else layer_of(config, layer, noise)
        name = "ends.safetensors" if layer < 0 else f"layer{layer}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def ends_of(config: dict[str, Any], noise: Noise) -> dict[str, Tensor]:
    """Embedding, head and the norm before it."""
    vocab, size = config["vocab_size"], config["hidden_size"]
    embedding, ring = noise(vocab, size, std=1.0), torch.tensor(ring_of(vocab))
    head = torch.zeros_like(embedding)
    head[ring.roll(-1)] = embedding[ring]
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(size, dtype=torch.bfloat16),
    }


def layer_of(config: dict[str, Any], layer: int, noise: Noise) -> dict[str, Tensor]:
    """One layer, which adds next to nothing to the stream."""
    prefix, size = f"model.layers.{layer}", config["hidden_size"]
    found = {
        f"{prefix}.{name}.weight": torch.ones(size, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    for name, (inputs, outputs) in sizes_of(config).items():
        std = QUIET if name.endswith(("o_proj", "down_proj")) else 0.02
        found[f"{prefix}.{name}.weight"] = noise(outputs, inputs, std=std)
    return found


def prompts(
    ring: Sequence[int], case: Case, wrong: float, seed: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and their answers; wrong: the share of a prompt's tokens that are others."""
    rnd, count = random.Random(seed), case.output_length + 1
    for _ in range(case.requests):
        start = rnd.randrange(len(ring))
        text = [ring[(start + at) % len(ring)] for at in range(count)]
        copied = [rnd.choice(ring) if rnd.random() < wrong else token for token in text]
        before = [rnd.choice(ring) for _ in range(case.input_length - count - 1)]
        yield [*before, *copied, text[0]], text[1:]


def num_steps(prompt: Sequence[int], answer: Sequence[int], length: int = 8) -> int:
    """The steps that an answer takes: each brings the right tokens of its draft, and one more."""
    drafter, known = Drafter(), list(prompt)
    steps = 0
    while rest := list(answer[len(known) - len(prompt) :]):
        draft = drafter.find(known, min(length, len(rest) - 1))
        right = next((i for i, token in enumerate(draft) if token != rest[i]), len(draft))
        drafter.verified(len(draft), right)
        known += rest[: right + 1]
        steps += 1
    return steps


def show_steps(parsed: argparse.Namespace) -> None:
    """Print the tokens a step for each share of wrong tokens."""
    ring = ring_of(SHAPES[parsed.shape]["vocab_size"])
    for wrong in parsed.wrong:
        case = Case("steps", ("",), 1, 64, parsed.input, parsed.output)
        made = list(prompts(ring, case, wrong, seed=0))
        steps = sum(num_steps(prompt, answer) for prompt, answer in made)
        tokens = sum(len(answer) for _, answer in made)
        print(f"{wrong:.0%} wrong: {tokens / steps:.2f} tokens a step")


async def check(url: str, model: str, ring: Sequence[int], vocab: int) -> None:
    """SystemExit where a greedy answer is not the ring's; vocab: of the model."""
    import aiohttp

    case = Case("check", (model,), 1, 1, 128, 64)
    [(prompt, answer)] = prompts(ring, case, 0.1, 1)
    body = {"model": model, "prompt": prompt, "max_tokens": 64, "temperature": 0}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}) as reply,
    ):
        found = await reply.json()
    text = found["choices"][0]["text"].split()
    if text != [f"t{token}" for token in answer]:
        sys.exit(f"this model of {vocab} tokens does not copy: {text[:8]} instead of {answer[:8]}")


async def play(parsed: argparse.Namespace) -> None:
    """Print a row for each concurrency and share of wrong tokens."""
    vocab = SHAPES[parsed.shape]["vocab_size"]
    ring = ring_of(vocab)
    await check(parsed.url, parsed.model, ring, vocab)
    for wrong in parsed.wrong:
        for index, concurrency in enumerate(parsed.concurrency):
            requests = max(3, 4 * concurrency)
            name = f"copy-{1 - wrong:.0%}-c{concurrency}"
            case = Case(name, (parsed.model,), concurrency, requests, parsed.input, parsed.output)
            for seed, own in ((90 + index, warm_up(case)), (index, case)):
                made = bodies(ring, own, wrong, seed)
                row = await run(parsed.url, own, vocab, requests=made)
            print(json.dumps({"server": parsed.name, **row}), flush=True)


def warm_up(case: Case) -> Case:
    """A first round of a case, which does not count."""
    return Case(
        "warm",
        case.models,
        case.concurrency,
        case.concurrency,
        case.input_length,
        case.output_length,
    )


def bodies(ring: Sequence[int], case: Case, wrong: float, seed: int) -> Iterator[dict[str, Any]]:
    """The requests of a case."""
    for prompt, _ in prompts(ring, case, wrong, seed):
        yield {
            "model": case.models[0],
            "prompt": prompt,
            "max_tokens": case.output_length,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the model, or play against a server of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("folder", type=Path)
    write.add_argument("--layers", type=int)
    playing = commands.add_parser("play")
    playing.add_argument("--url", default="http://127.0.0.1:8000")
    playing.add_argument("--model", default="copying", help="its served name")
    playing.add_argument("--name", default="", help="of the server, for the rows")
    playing.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    playing.add_argument("--wrong", type=float, nargs="+", default=[0.05, 1.0])
    playing.add_argument("--input", type=int, default=512)
    playing.add_argument("--output", type=int, default=256)
    counting = commands.add_parser("steps")
    counting.add_argument("--wrong", type=float, nargs="+", default=[0.05, 0.1])
    counting.add_argument("--input", type=int, default=512)
    counting.add_argument("--output", type=int, default=256)
    for each in (write, playing, counting):
        each.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parsed = parser.parse_args(arguments)
    if parsed.command == "write":
        write_copying(parsed.folder, parsed.shape, parsed.layers)
    elif parsed.command == "steps":
        show_steps(parsed)
    else:
        asyncio.run(play(parsed))


if __name__ == "__main__":
    main()
