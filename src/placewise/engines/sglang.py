"""SGLang: layers per rank of a pipeline, and shards of each."""

from __future__ import annotations

from placewise.engines import engine
from placewise.engines.ranks import counts, ranks, shards_of_each, visible, whole_layers
from placewise.plans import Plan


@engine("sglang", fit=whole_layers, shards=True, versions="sglang>=0.5")
def sglang(plan: Plan) -> str:
    """A command line with SGLANG_PP_LAYER_PARTITION, for `sglang.launch_server`.

    It is read as vLLM reads its own (`get_pp_indices` in sglang/srt/distributed/utils.py, read in 0.5.23).
    """
    stages = ranks(plan, "sglang")
    settings = f"{visible(plan, stages)} SGLANG_PP_LAYER_PARTITION={counts(stages)}"
    shards = shards_of_each(plan, stages, "sglang")
    tensor = f" --tp-size {shards}" if shards > 1 else ""
    return f'{settings} python -m sglang.launch_server --model-path "$MODEL" --pp-size {len(stages)}{tensor}\n'
