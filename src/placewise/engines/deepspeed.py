"""DeepSpeed: the bounds of each stage in a list of layers."""

from __future__ import annotations

from itertools import accumulate

from placewise.engines import engine
from placewise.engines.ranks import note_visible, ranks, whole_layers
from placewise.plans import Plan

_CODE = '''\
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import utils


class PlacedPipeline(PipelineModule):
    """A pipeline whose layer list is: embedding, {layers} layers, norm and head as one."""

    BOUNDS = {bounds}  # stage i has the entries from BOUNDS[i] to BOUNDS[i + 1]

    def _partition_layers(self, method="uniform"):
        assert self.num_stages == {stages} and len(self._layer_specs) == self.BOUNDS[-1], "not the model of this plan"
        uniform, utils.partition_uniform = utils.partition_uniform, lambda num_items, num_parts: list(self.BOUNDS)
        try:
            super()._partition_layers("uniform")
        finally:
            utils.partition_uniform = uniform
'''


@engine("deepspeed", fit=whole_layers, versions="deepspeed>=0.19")
def deepspeed(plan: Plan) -> str:
    """Python with a PipelineModule that has these stages: DeepSpeed takes methods of partitioning, but no list.

    `_partition_layers` asks `partition_uniform` for the bounds (deepspeed/runtime/pipe/module.py, 0.19).
    """
    stages = ranks(plan, "deepspeed")
    note_visible(plan, stages)
    sizes = [len(stage.layers) for stage in stages]
    bounds = [0, *accumulate(sizes)]
    bounds = [0, *(bound + 1 for bound in bounds[1:-1]), bounds[-1] + 2]  # embedding before, norm and head after
    return _CODE.format(layers=sum(sizes), bounds=bounds, stages=len(sizes))
