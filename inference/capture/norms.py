"""RMS norms in graphs of traced functions, computed as layer norms.

torch has no kernel for an RMS norm on a CPU and computes it in eight operations. Its layer norm is one. Of a row beside its negative the
mean is 0 and the variance is the row's mean square, so that the layer norm of both is the RMS norm of the row: four operations, which for
few rows take half the time.
"""

from __future__ import annotations

from typing import Any

import torch

from headstart.inference.capture.graph_builder import GraphBuilder, constant_tensor


def use_layer_norms(graph: Any) -> None:
    """Replace RMS norms with constant weights over the last dimension."""
    for node in graph.findAllNodes("aten::rms_norm"):
        x, shape, eps = node.inputsAt(0), node.inputsAt(1).toIValue(), node.inputsAt(3)
        weight_D = constant_tensor(node.inputsAt(2))
        if weight_D is None or shape != [len(weight_D)] or eps.node().mustBeNone():
            continue
        build = GraphBuilder(graph, node)
        both = build.node("aten::cat", [build.tensors(x, build.node("aten::neg", [x])), build.constant(-1)])
        twice, nothing = build.constant(torch.cat([weight_D, weight_D])), build.constant(None)
        normed = build.node("aten::layer_norm", [both, build.constant([2 * len(weight_D)]), twice, nothing, eps, build.constant(False)])
        first = build.node("aten::narrow", [normed, build.constant(-1), build.constant(0), build.constant(len(weight_D))])
        node.output().replaceAllUsesWith(build.node("aten::contiguous", [first, build.constant(0)]))  # 0: in the order of the dimensions
        node.destroy()
