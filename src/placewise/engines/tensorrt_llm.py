"""TensorRT-LLM: layers per rank of a pipeline."""

from __future__ import annotations

from placewise.engines import engine
from placewise.engines.ranks import note_visible, ranks, whole_layers
from placewise.plans import Plan


@engine("tensorrt-llm", fit=whole_layers, versions="TensorRT-LLM of November 2025 and later")
def tensorrt_llm(plan: Plan) -> str:
    """YAML with pp_partition, for the LLM API or `trtllm-serve --extra_llm_api_options`."""
    stages = ranks(plan, "tensorrt-llm")
    note_visible(plan, stages)
    layers = ", ".join(str(len(stage.layers)) for stage in stages)
    return f"pipeline_parallel_size: {len(stages)}\npp_partition: [{layers}]\n"
