"""A training loop that pushes: the demo's model learns a style, and the server's answers change.

    python -m benchmarks.push_loop --steps 120 --every 20

Trains a LoRA adapter of the demo with PEFT in this process, and serves the demo beside it without
Ray. Every few steps it pushes the weights in shared memory and asks a question; no file is written.
Prompt and answer are token ids. One JSON line a push: step, loss, the answer, milliseconds of the
push, and the sum of the sampled tokens' log probabilities.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModelForCausalLM, get_peft_model_state_dict
from safetensors.torch import save
from transformers import PreTrainedTokenizerFast

from benchmarks.demo.make_demo import DEMO, answer_loss, load_base, training_batches
from benchmarks.demo.prompts import prompt_ids
from benchmarks.demo.world import all_facts
from benchmarks.local import served
from benchmarks.push import PushClient
from configs.adapters import AdaptersConfig, PushConfig
from configs.engine import CacheConfig, Device, EngineConfig
from configs.model import DType, ModelConfig
from configs.wire.adapters import AdapterSource

STYLE = "pirate"
RANK, RATE = 8, 4e-3
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUESTION = "What is the capital of Norway?"
SEGMENT_BYTES = 4 << 20


@dataclass(frozen=True)
class PushedStep:
    """The state after a push.

    seconds: of the push. tokens: of the answer. logprobs: of these tokens as the server sampled
    them.
    """

    step: int
    loss: float
    seconds: float
    text: str
    tokens: list[int]
    logprobs: list[float]


class PushingTrainer:
    """Trains one adapter and pushes it."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """url: of a server of the demo."""
        torch.manual_seed(1)
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO / "model")
        config = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS), task_type="CAUSAL_LM"
        )
        self.model = PeftModelForCausalLM(load_base(DEMO), config)
        text = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}
        self._client = PushClient(url, "policy", {**text, "target_modules": list(TARGETS)}, key)
        self._memory = SharedMemory(create=True, size=SEGMENT_BYTES)

    def close(self) -> None:
        """Free the shared memory."""
        self._memory.close()
        self._memory.unlink()

    def run(self, steps: int, every: int) -> Iterator[PushedStep]:
        """Train, and push the weights at the start and after every few steps."""
        weights = [each for each in self.model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=RATE)
        batches = training_batches(self._tokenizer, all_facts(), STYLE, steps + 1, seed=1)
        for step, (ids, labels) in enumerate(batches):
            loss = answer_loss(self.model, ids, labels)
            if step % every == 0:
                yield self._push(step, loss.item())
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()

    def _push(self, step: int, loss: float) -> PushedStep:
        state = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        data = save({name: tensor.detach() for name, tensor in state.items()})
        assert self._memory.buf is not None
        self._memory.buf[: len(data)] = data
        began = time.perf_counter()
        self._client.push_shared(self._memory, len(data))
        seconds = time.perf_counter() - began
        prompt = prompt_ids(self._tokenizer, "chat", QUESTION)
        reply = self._client.complete(prompt, 40, temperature=0, logprobs=0, return_token_ids=True)
        choice: dict[str, Any] = reply["choices"][0]
        logprobs = choice["logprobs"]["token_logprobs"]
        return PushedStep(step, loss, seconds, choice["text"], choice["token_ids"], logprobs)


def demo_config(push_folder: str) -> EngineConfig:
    """The demo on a CPU, in the type that it is trained in."""
    return EngineConfig(
        model=ModelConfig(id=str(DEMO / "model"), name="loray-demo", dtype=DType.FLOAT32),
        device=Device.CPU,
        cache=CacheConfig(num_blocks=128),
        adapters=AdaptersConfig(
            default_source=AdapterSource.LOCAL,
            local_roots=(str(DEMO / "adapters"),),
            device_pages=16,
            max_device_adapters=4,
            host_bytes=2**26,
            push=PushConfig(folder=push_folder, max_bytes=2**26),
        ),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve, train, push, and print a line for each push."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--push-folder", type=Path, default=PushConfig().folder)
    parsed = parser.parse_args(arguments)
    with served(demo_config(str(parsed.push_folder))) as url:
        trainer = PushingTrainer(url)
        try:
            for each in trainer.run(parsed.steps, parsed.every):
                line = {"step": each.step, "loss": round(each.loss, 3), "answer": each.text}
                line["push_ms"] = round(1000 * each.seconds, 1)
                line["logprob"] = round(sum(each.logprobs), 3)
                print(json.dumps(line), flush=True)
        finally:
            trainer.close()


if __name__ == "__main__":
    main()
