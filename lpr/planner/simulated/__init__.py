"""How many meshes a service needs, predicted: the engine's own scheduler on a clock of step times, without a model.

`mesh.simulate_mesh` brings three things together. *Arrivals* (`requests`): a Poisson process, or clients that wait for
answers. The *scheduler* (`lpr.engine.scheduler.Scheduler`): the one that serves. A *policy* (`mesh.Policy`): the time
of each step and its tokens per request; the planner's is `costs.StepCosts`. The result are the requests with the times
of their first and last token. `capacity` searches the fewest meshes that keep an SLO. No GPU has confirmed the result.
"""
