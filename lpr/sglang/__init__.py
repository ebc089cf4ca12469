"""lpr's draft trees inside SGLang: `--speculative-algorithm LPR`, an algorithm that SGLang's registry takes.

SGLang loads `register` by the entry point `sglang.srt.plugins` of lpr's installation, in each of its processes.
"""

from typing import Any

NAME = "LPR"


def register() -> None:
    """Register the algorithm, with the properties of NGRAM, whose worker it extends."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

    def like_ngram(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(SpeculativeAlgorithm.NGRAM, name)(*args, **kwargs)

    if get_spec(NAME) is not None:
        return
    own = {"create_worker", "from_string", "register"}
    names = [name for name, value in vars(SpeculativeAlgorithm).items() if callable(value) and name[0] != "_"]
    algorithm = type("LookaheadAlgorithm", (CustomSpecAlgo,), {name: like_ngram(name) for name in {*names} - own})

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=algorithm)
    def worker(server_args: Any) -> Any:
        from lpr.sglang.worker import worker_class

        return worker_class()
