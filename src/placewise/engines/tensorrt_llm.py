"""TensorRT-LLM: layers per rank of a pipeline."""

from __future__ import annotations

from placewise.engines import engine
from placewise.engines.ranks import note_visible, ranks, shards_of_each, whole_layers
from placewise.plans import Plan


@engine("tensorrt-llm", fit=whole_layers, shards=True, versions="TensorRT-LLM of November 2025 and later")
def tensorrt_llm(plan: Plan) -> str:
    """YAML with pp_partition, for the LLM API or `trtllm-serve --extra_llm_api_options`."""
    stages = ranks(plan, "tensorrt-llm")
    note_visible(plan, stages)
    layers = ", ".join(str(len(stage.layers)) for stage in stages)
    shards = shards_of_each(plan, stages, "tensorrt-llm")
    tensor = f"tensor_parallel_size: {shards}\n" if shards > 1 else ""
    return f"{tensor}pipeline_parallel_size: {len(stages)}\npp_partition: [{layers}]\n"
