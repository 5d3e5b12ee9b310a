"""What vLLM finds of the plug-in, and what it is told where it cannot serve (no engine starts here)."""

import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from htree_ops.integrations.vllm import SUPPORTED, register
from htree_ops.integrations.vllm.versions import is_supported

register()
from htree_ops.integrations.vllm.backend import HTreeBackend, HTreeImpl, HTreeMetadataBuilder  # noqa: E402

OURS = "htree_ops.integrations.vllm.backend.HTreeBackend"
LAYER = AttentionSelectorConfig(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=256)


def choose(backend: Any, **changes: Any) -> str:
    """The path of the class that the CPU platform takes for a layer."""
    return CpuPlatform.get_attn_backend_cls(backend, attn_selector_config=LAYER._replace(**changes))


def test_the_entry_point_is_found():
    (found,) = (x for x in entry_points(group="vllm.general_plugins") if x.name == "htree")
    assert found.load() is register


def test_commands_of_the_page_are_those_of_vllm():
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    commands = re.findall(r"^vllm serve (.*)$", page, re.M)
    assert len(commands) > 1
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    for command in commands:
        arguments = parser.parse_args(["--model", *shlex.split(command, comments=True)])
        assert arguments.attention_backend == "CUSTOM"
    assert arguments.hf_overrides["htree"]["top_k"] == 512
    for flag in re.findall(r"`(--[a-z-]+)", page):
        assert flag in parser.format_help(), flag


def test_the_version_is_in_the_range():
    assert is_supported(vllm.__version__), (vllm.__version__, SUPPORTED)


def test_it_is_taken_where_it_is_asked_for_alone():
    register()  # once more
    assert choose(AttentionBackendEnum.CUSTOM) == OURS
    assert AttentionBackendEnum.CUSTOM.get_class() is HTreeBackend
    for other in (None, AttentionBackendEnum.CPU_ATTN):
        assert choose(other).endswith("CPUAttentionBackend")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_mla": True}, r"\(MLA\).*leave --attention-backend out"),
        ({"use_sparse": True}, "sparse attention of its own"),
        ({"has_sliding_window": True}, "sliding window is not supported: give --hf-overrides"),
        ({"has_sink": True}, "attention sinks"),
        ({"kv_cache_dtype": "fp8"}, "must be auto, float16 or bfloat16, got fp8"),
        ({"attn_type": "encoder_only"}, "only causal attention of a decoder"),
        ({"use_kv_connector": True}, "--kv-transfer-config"),
        ({"use_pcp": True}, "--prefill-context-parallel-size 1"),
        ({"dtype": torch.float64}, "--dtype must be float16, bfloat16 or float32, got torch.float64"),
    ],
    ids=str,
)
def test_layers_are_refused_with_the_reason(changes, words):
    with pytest.raises(ValueError, match=f"^htree: .*{words}"):
        choose(AttentionBackendEnum.CUSTOM, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logits_soft_cap": 30.0}, "soft cap of the scores is not supported, got 30.0"),
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "must be auto, float16 or bfloat16, got fp8_e5m2"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "share the cache"),
    ],
    ids=str,
)
def test_impl_refuses_before_it_looks_at_the_engine(changes, words):
    with pytest.raises(NotImplementedError, match=words):
        HTreeImpl(4, 64, 0.125, 2, **changes)


def test_capabilities():
    """Batch invariance is promised, also where vLLM is told to insist on it; graphs serve uniform batches."""
    assert HTreeBackend.supports_batch_invariance()
    assert choose(AttentionBackendEnum.CUSTOM, use_batch_invariant=True) == OURS
    assert HTreeMetadataBuilder._cudagraph_support == AttentionCGSupport.UNIFORM_BATCH
    assert HTreeBackend.get_preferred_block_size(16) == 256
    assert HTreeBackend.get_kv_cache_block_dim(256, 2, 64) == 0
    assert not HTreeBackend.is_sparse()
    assert not HTreeBackend.supports_kv_connector()
