"""The demo on a CPU: one driver and one rank in this process, against transformers by itself.

    python -m benchmarks.cpu --requests 128 --lengths 16 256

The same prompts and token counts, greedy, float32. transformers runs `generate` over batches in
the order given, padded on the left, each batch to its longest answer; with --continuous also its
own continuous batching. Sides alternate; the fastest of the rounds counts. One JSON line a case;
`equal` counts requests with the same tokens on both sides.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from configs.engine import CacheConfig, Device, EngineConfig, LimitsConfig
from configs.model import DType, ModelConfig
from configs.wire.sampling import Sampling, Stopping
from deployments.contract import Completion, GenerateRequest, SequenceRequest
from deployments.driver.engine import DriverEngine
from deployments.frames import FrameReceiver
from deployments.rank.local import LocalRanks

MICROSECONDS = 1e6
MODEL = Path(__file__).parent.parent / "configs/demo/model"


@dataclass(frozen=True)
class CpuLoad:
    """Prompts as ids, and how many tokens each answer has."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all."""
        return sum(self.lengths)


Play = Callable[[CpuLoad], list[list[int]]]


def load_of(requests: int, lengths: Sequence[int], seed: int = 0) -> CpuLoad:
    """Questions that the demo knows, answers of lengths from `lengths[0]` to `lengths[1]`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(MODEL))
    questions = json.loads((MODEL.parent / "answers.json").read_text())["questions"]
    chooser = random.Random(seed)
    prompts = [tokenizer(chooser.choice(questions))["input_ids"] for _ in range(requests)]
    return CpuLoad(prompts, [chooser.randint(lengths[0], lengths[1]) for _ in range(requests)])


class Ours:
    """The engine in this process: a rank in a thread, no Ray, no HTTP."""

    def __init__(self, max_running: int, threads: int) -> None:
        """Start it on an event loop of its own."""
        config = EngineConfig(
            model=ModelConfig(id=str(MODEL), name="demo", dtype=DType.FLOAT32),
            device=Device.CPU,
            cpu_threads=threads,
            cache=CacheConfig(num_blocks=4096, prefix_caching=False),
            limits=LimitsConfig(max_running=max_running, max_step_tokens=2048, max_queued=4096),
        )
        self._runner = asyncio.Runner()
        self._engine = DriverEngine(config, MODEL, LocalRanks(config))
        self._receiver = FrameReceiver(lambda frame: None)
        self._runner.run(self._engine.start())
        self._address = self._runner.run(self._receiver.start("127.0.0.1"))

    def __call__(self, load: CpuLoad) -> list[list[int]]:
        """All requests at once."""

        async def run() -> list[Completion]:
            requests = zip(load.prompts, load.lengths, strict=True)
            calls = [
                self._engine.generate(_request(i, *each), self._address)
                for i, each in enumerate(requests)
            ]
            return await asyncio.gather(*calls)

        return [completion.sequences[0].tokens for completion in self._runner.run(run())]

    def close(self) -> None:
        """End the rank and the loop."""
        self._runner.run(self._engine.stop())
        self._runner.run(self._receiver.close())
        self._runner.run(asyncio.sleep(0.1))  # so that both ends see the closed connection
        self._runner.close()


def _request(index: int, prompt: list[int], length: int) -> GenerateRequest:
    sequence = SequenceRequest(prompt, Sampling(), Stopping(length))
    return GenerateRequest(f"r{index}", [sequence])


class Theirs:
    """transformers' model of the same weights."""

    def __init__(self, batch: int) -> None:
        """batch: prompts in one call of `generate`."""
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(MODEL), dtype=torch.float32
        )
        self.model = loaded.eval()
        self._batch = batch

    @torch.inference_mode()
    def __call__(self, load: CpuLoad) -> list[list[int]]:
        """Batch by batch; no answer ends before its length."""
        found = []
        for first in range(0, len(load.prompts), self._batch):
            prompts = load.prompts[first : first + self._batch]
            lengths = load.lengths[first : first + self._batch]
            width = max(map(len, prompts))
            ids = torch.zeros(len(prompts), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(prompts):
                ids[row, width - len(prompt) :] = torch.tensor(prompt)
                mask[row, width - len(prompt) :] = 1
            longest = max(lengths)
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            rows = zip(out[:, width:].tolist(), lengths, strict=True)
            found += [tokens[:length] for tokens, length in rows]
        return found

    def continuous(self, load: CpuLoad) -> list[list[int]]:
        """Its continuous batching, which takes one length for all: the longest."""
        longest = max(load.lengths)
        config: Any = transformers.GenerationConfig
        settings = config(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
        out = self.model.generate_batch(inputs=load.prompts, generation_config=settings)
        answers = [out[key].generated_tokens for key in sorted(out, key=_number)]
        return [tokens[:n] for tokens, n in zip(answers, load.lengths, strict=True)]


def _number(key: str) -> int:
    return int("".join(character for character in key if character.isdigit()))


def timed(play: Play, load: CpuLoad, threads: int) -> tuple[float, float, list[list[int]]]:
    """Seconds, seconds of CPU, and tokens."""
    torch.set_num_threads(threads)
    began, spent = time.perf_counter(), time.process_time()
    tokens = play(load)
    return time.perf_counter() - began, time.process_time() - spent, tokens


def compare(parsed: argparse.Namespace) -> dict[str, object]:
    """Play both sides alternately and keep the fastest of each."""
    load = load_of(parsed.requests, parsed.lengths)
    warm = load_of(8, [4, 8], seed=1)
    ours, theirs = Ours(parsed.batch, parsed.threads), Theirs(parsed.batch)
    sides: dict[str, Play] = {"loray": ours, "generate": theirs}
    if parsed.continuous:
        sides["continuous"] = theirs.continuous
    seconds = dict.fromkeys(sides, float("inf"))
    spent = dict.fromkeys(sides, float("inf"))
    tokens: dict[str, list[list[int]]] = {}
    for play in sides.values():
        timed(play, warm, parsed.threads)
    for _ in range(parsed.rounds):
        for name, play in sides.items():
            took, busy, tokens[name] = timed(play, load, parsed.threads)
            seconds[name], spent[name] = min(seconds[name], took), min(spent[name], busy)
    ours.close()
    equal = sum(a == b for a, b in zip(tokens["loray"], tokens["generate"], strict=True))
    rates = {name: round(load.num_tokens / took) for name, took in seconds.items()}
    best = max(rate for name, rate in rates.items() if name != "loray")
    return {
        "requests": parsed.requests,
        "lengths": parsed.lengths,
        "batch": parsed.batch,
        "threads": parsed.threads,
        "tokens_per_s": rates,
        "cpu_us_per_token": {
            name: round(busy / load.num_tokens * MICROSECONDS) for name, busy in spent.items()
        },
        "loray_over_best": round(rates["loray"] / best, 2),
        "equal": f"{equal}/{parsed.requests}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs=2, default=[16, 256], help="from, to")
    parser.add_argument("--batch", type=int, default=32, help="rows at once, on both sides")
    parser.add_argument("--threads", type=int, default=1, help="torch's, on both sides")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--continuous", action="store_true")
    print(json.dumps(compare(parser.parse_args(arguments))), flush=True)


if __name__ == "__main__":
    main()
