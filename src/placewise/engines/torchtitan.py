"""torchtitan: the names of the modules of each stage."""

from __future__ import annotations

import json

from placewise.engines import engine
from placewise.engines.ranks import note_visible, ranks, shards_of_each, whole_layers
from placewise.plans import Plan


@engine("torchtitan", fit=whole_layers, shards=True, versions="torchtitan>=0.3")
def torchtitan(plan: Plan) -> str:
    """Python with a ParallelismConfig that has module_fqns_per_model_part, in torchtitan's names.

    In 0.2 the same settings were TOML, and the head was called "output" (torchtitan/distributed/pipeline_parallel.py,
    `_generate_llm_fqn_per_model_part` in 0.3.0 and `generate_llm_fqn_per_model_part` in 0.2.2).
    """
    found = ranks(plan, "torchtitan")
    note_visible(plan, found)
    stages = [[f"layers.{number}" for number in stage.layers] for stage in found]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    shards = shards_of_each(plan, found, "torchtitan")
    tensor = f"    tensor_parallel_degree={shards},\n" if shards > 1 else ""
    rows = "".join(f"        {json.dumps(stage)},\n" for stage in stages)
    return (
        "from torchtitan.config import ParallelismConfig\n\nparallelism = ParallelismConfig(\n"
        f"{tensor}    pipeline_parallel_degree={len(stages)},\n    module_fqns_per_model_part=[\n{rows}    ],\n)\n"
    )
