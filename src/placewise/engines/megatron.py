"""Megatron-Core: a layout of embedding, layers and loss over the ranks of a pipeline."""

from __future__ import annotations

from placewise.engines import engine
from placewise.engines.ranks import note_visible, ranks, shards_of_each, whole_layers
from placewise.plans import Plan


@engine("megatron", fit=whole_layers, shards=True, versions="megatron-core>=0.13")
def megatron(plan: Plan) -> str:
    """Arguments with --pipeline-model-parallel-layout (E embedding, t layer, L loss).

    `PipelineParallelLayerLayout` reads it (megatron/core/transformer/pipeline_parallel_layer_layout.py, 0.19.2).
    """
    stages = ranks(plan, "megatron")
    note_visible(plan, stages)
    parts = [f"t*{len(stage.layers)}" for stage in stages]
    layout = "E" + "|".join(parts) + ",L"
    shards = shards_of_each(plan, stages, "megatron")
    tensor = f"--tensor-model-parallel-size {shards} --sequence-parallel " if shards > 1 else ""
    return f'{tensor}--pipeline-model-parallel-size {len(parts)} --pipeline-model-parallel-layout "{layout}"\n'
