"""Nodes of the Ray cluster that have a resource: where agent loop workers start, and boxes for grading."""

from __future__ import annotations

from typing import Any


def places(resource: str) -> list[dict[str, Any]]:
    """Return the options that put an actor on each of the nodes that have a Ray resource.

    Raises RuntimeError if there is none.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource, 0) > 0]
    if not nodes:
        raise RuntimeError(f"no node of the Ray cluster has the resource {resource!r} (cluster.*_resource)")
    return [
        # Soft, like verl's own: if the node is gone, another one that has the resource takes its place.
        {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True), "resources": {resource: 0.001}}
        for node in nodes
    ]
