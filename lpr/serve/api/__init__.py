"""The service's HTTP: routes, bodies, answers, streams and what wraps them."""
