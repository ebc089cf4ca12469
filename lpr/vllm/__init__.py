"""lpr's drafts inside vLLM: `--speculative-config '{"model": "lpr.vllm.Proposer", "num_speculative_tokens": 8}'`."""

from lpr.vllm.proposer import Proposer

__all__ = ["Proposer"]
