"""Replicas that know nothing of each other, behind a router: plain data parallelism, each on a clock of its own."""

from __future__ import annotations

from collections.abc import Sequence

from lpr.planner.service.mesh import MeshRun, Policy, Slots
from lpr.planner.service.requests import Arrivals, SimRequest


def simulate_replicas(arrivals: Arrivals, policies: Sequence[Policy], slots: Slots) -> list[SimRequest]:
    """Serve all `arrivals` on a replica per policy; returns the requests as they end.

    The router knows how many requests each replica has, and sends the next one where they are fewest. None does better
    that does not know how long outputs become.
    """
    meshes = [MeshRun(policy, slots) for policy in policies]
    done = list[SimRequest]()
    while True:
        busy = [mesh for mesh in meshes if not mesh.is_idle]
        upcoming = arrivals.upcoming()
        if busy and (upcoming is None or min(mesh.now for mesh in busy) < upcoming):
            mesh = min(busy, key=lambda mesh: mesh.now)
            for request in mesh.step():
                arrivals.ended(request)
                done.append(request)
        elif upcoming is not None:
            for request in arrivals.due(upcoming):
                chosen = min(meshes, key=lambda mesh: mesh.num_requests)
                chosen.now = max(chosen.now, upcoming) if chosen.is_idle else chosen.now
                chosen.add(request)
        else:
            return done
