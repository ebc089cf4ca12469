"""How many meshes a service needs: the engine's own scheduler, driven by a clock of step times instead of a model.

Three things meet in `mesh.simulate_mesh`, and each can be replaced by another that has its few methods:

* *arrivals* (`requests.Arrivals`) say when which request comes: a Poisson process, or clients that wait for answers;
* the *scheduler* (`lpr.engine.scheduler.Scheduler`) is the one that serves: slots, prompts in pieces, prefix reuse;
* a *policy* (`mesh.Policy`) says of each step how long it takes and how many tokens it brings to each request.

What comes out are the requests with the times of their first and last token. `costs.StepCosts` is the policy of the
planner, by tables of step times and tokens per step; `capacity` looks for the fewest meshes that keep an SLO.
"""
