"""The service's HTTP API: routes, answers, streams and middleware."""
