"""Seconds and memory to import large language models from their configuration, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from harness import main, progress

#: Llama 3 70B as published, but for the number of layers.
_ONE = """
import json, resource, sys, time
began = time.perf_counter()
from transformers import LlamaConfig
from placewise import from_transformers
imported, worked = time.perf_counter(), time.process_time()
config = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=int(sys.argv[1]), num_attention_heads=64,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, dtype="bfloat16",
)
graph = from_transformers(config, prompt=512, decode=sys.argv[2] == "decode")
print(json.dumps({
    "ops": int((~graph.is_stored).sum()),
    "GiB of weights": float(graph.resident_bytes.sum()) / 2**30,
    "seconds": time.perf_counter() - imported,
    "CPU seconds": time.process_time() - worked,
    "seconds with imports": time.perf_counter() - began,
    "peak RSS, GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
}))
"""


def measure(options: Any) -> list[dict[str, Any]]:
    rows = []
    for layers, task in ((80, "prefill"), (80, "decode"), (25, "prefill"), (50, "prefill"), (100, "prefill")):
        progress(f"{layers} layers, {task}")
        done = subprocess.run([sys.executable, "-c", _ONE, str(layers), task], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        facts = json.loads(done.stdout)
        rows.append(
            {
                "model": f"Llama, {layers} layers, {task}",
                **facts,
                "CPU ms per layer": facts["CPU seconds"] * 1e3 / layers,
            }
        )
    return rows


if __name__ == "__main__":
    main("Import of large models: hidden 8192, bfloat16, 512 tokens", measure)
