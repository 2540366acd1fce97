"""Rows as the table writes them, with the figures that a test is about."""

from typing import Any

H200 = {
    "boot": "0badcafe",
    "gpus": ["NVIDIA H200"],
    "driver": "580.159.04",
    "cpus": 16,
    "processor": "x86_64",
    "python": "3.12.3",
    "cuda": "13.0",
    "versions": {"torch": "2.11.0"},
}
SERVER = {
    "attention": "flashinfer (the fastest that imports)",
    "adapter kernel": "triton (CUDA)",
    "http front": "haproxy, throughput mode",
}


def row(group: str, case: str, side: str = "ours", **figures: Any) -> dict[str, Any]:
    """A good row of a case on one H200."""
    return {
        "group": group,
        "side": side,
        "case": case,
        "setup": "llama3-8b, bfloat16, cuda",
        "shape": "llama3-8b",
        "dtype": "bfloat16",
        "device": "cuda",
        "command": "",
        "errors": 0,
        "captured_share": 0.94,
        "server": SERVER,
        "machine": H200,
        "at": "2026-11-20T12:00:00Z",
        **figures,
    }


def rate(case: str, tokens_per_s: float, side: str = "ours", **more: Any) -> dict[str, Any]:
    """A row of the one-GPU group that is measured in tokens a second."""
    return row("one-gpu", case, side, output_tokens_per_s=tokens_per_s, **more)
