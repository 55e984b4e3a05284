"""torchtitan: the names of the modules of each stage."""

from __future__ import annotations

import json

from placewise.engines import engine
from placewise.engines.ranks import ranks, whole_layers
from placewise.plans import Plan


@engine("torchtitan", fit=whole_layers)
def torchtitan(plan: Plan) -> str:
    """TOML with module_fqns_per_model_part, in the names that torchtitan's language models have."""
    stages = [[f"layers.{number}" for number in stage.layers] for stage in ranks(plan, "torchtitan")]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    rows = ",\n".join(f"  {json.dumps(stage)}" for stage in stages)
    return f"[parallelism]\npipeline_parallel_degree = {len(stages)}\nmodule_fqns_per_model_part = [\n{rows},\n]\n"
