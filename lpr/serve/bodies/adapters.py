"""Bodies of the endpoints for adapters, with vLLM's names."""

from typing import Annotated

from pydantic import Field

from lpr.serve.bodies.fields import Body

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]


class LoadAdapterBody(Body):
    """`POST /v1/load_lora_adapter`."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterBody(Body):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Name
    lora_int_id: int | None = None
