"""Modules that start on meta under FSDP2 and FSDP1 hold numbers on every rank, and those of a fresh module."""

import fsdp_start_on_ranks
import pytest
import torch

from tests.support.module_makers import NAMED

#: Parameters whose draws DTensor and FSDP1 spread over the ranks in ways of their own.
DRAWN = ("bias", "gate_weight", "up_weight", "proj.weight")


@pytest.mark.parametrize("way", ["FSDP2", "FSDP1"])
@pytest.mark.parametrize("name", NAMED)
def test_a_start_on_meta(name, way, pair):
    found = pair.run(fsdp_start_on_ranks.start_on_meta, name, way)
    fresh = pair.run(fsdp_start_on_ranks.start_alone, name)[0]
    for tensors in found:
        assert tensors.keys() == fresh.keys()
        for key, wanted in fresh.items():
            got = tensors[key]
            assert got.shape == wanted.shape, key
            assert got.isfinite().all(), key
            if key.endswith(DRAWN):
                torch.testing.assert_close(got.abs().max(), wanted.abs().max(), rtol=0.6, atol=0)
            else:
                assert torch.equal(got, wanted), key
