"""Ask a served driver through its Serve handle, in a process that ends afterwards.

    python -m tests.end_to_end.ask RAY_ADDRESS METHOD        pickled answer on standard output

A process of its own, for Serve's router threads outlive `ray.shutdown`.
"""

import asyncio
import pickle
import sys
from typing import Any

import ray
from ray import serve


async def ask(method: str) -> Any:
    return await getattr(serve.get_deployment_handle("Driver", "loray"), method).remote()


if __name__ == "__main__":
    ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False, logging_level="error")
    answer = ray.nodes() if sys.argv[2] == "nodes" else asyncio.run(ask(sys.argv[2]))
    sys.stdout.buffer.write(b"ANSWER" + pickle.dumps(answer))
    sys.stdout.flush()
