"""vLLM: layers per rank of a pipeline, and shards of each."""

from __future__ import annotations

from placewise.engines import engine
from placewise.engines.ranks import counts, ranks, shards_of_each, visible, whole_layers
from placewise.plans import Plan


@engine("vllm", fit=whole_layers, shards=True, versions="vllm>=0.5.4")
def vllm(plan: Plan) -> str:
    """A command line with VLLM_PP_LAYER_PARTITION, for `vllm serve`.

    vLLM refuses a list whose length is not the pipeline's size or whose sum is not the number of layers
    (`get_pp_indices` in vllm/distributed/utils.py, read in 0.33.0; 0.5.4 has it too).
    """
    stages = ranks(plan, "vllm")
    settings = f"{visible(plan, stages)} VLLM_PP_LAYER_PARTITION={counts(stages)}"
    shards = shards_of_each(plan, stages, "vllm")
    tensor = f" --tensor-parallel-size {shards}" if shards > 1 else ""
    return f'{settings} vllm serve "$MODEL" --pipeline-parallel-size {len(stages)}{tensor}\n'
