"""Loading and saving of transformers models with :class:`htree_ops.FP8Linear` layers.

:func:`htree_ops.quantize_model_` notes in the config of such a model which layers it has swapped. Here
``from_pretrained`` swaps the same ones before it loads the codes and their scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from htree_ops.ops.fp8 import FP8Linear
from htree_ops.ops.fp8.linear import QUANT_METHOD


class FP8Config(QuantizationConfigMixin):
    """What ``config.json`` says of a quantised model: ``layers``, by name "dynamic" or "static" activations."""

    def __init__(self, layers: Mapping[str, str] | None = None, **_: Any) -> None:
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        self.layers = dict(layers or {})


class FP8Quantizer(HfQuantizer):
    """Swaps the layers of a model that is being loaded."""

    requires_calibration = True  # it does not quantise while loading: quantize_model_ does, once

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        layers: dict[str, str] = self.quantization_config.layers  # type: ignore[attr-defined]
        found = set()
        for name, linear in list(model.named_modules()):
            # A part of the saved model is loaded by itself, or a model that was quantised as a part of another.
            saved = next(
                (x for x in layers if f".{name}".endswith(f".{x}") or f".{x}".endswith(f".{name}")), None
            )
            if type(linear) is not nn.Linear or saved is None:
                continue
            found.add(saved)
            with torch.device("meta"):
                layer = FP8Linear(
                    linear.in_features,
                    linear.out_features,
                    linear.bias is not None,
                    static_activation=layers[saved] == "static",
                    dtype=linear.weight.dtype,
                )
            model.set_submodule(name, layer)
        if not found:
            raise ValueError(
                f"htree: the model must have the layers that were quantised ({', '.join(layers)}), got none of them"
            )

    def is_serializable(self) -> bool:
        """``save_pretrained`` writes codes and scales."""
        return True

    @property
    def is_trainable(self) -> bool:
        """FP8 layers have no gradient."""
        return False

    @property
    def is_compileable(self) -> bool:
        """``torch.compile`` takes FP8 layers."""
        return True


def register() -> None:
    """Makes the method known to ``from_pretrained``."""
    if QUANT_METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(QUANT_METHOD)(FP8Config)
        register_quantizer(QUANT_METHOD)(FP8Quantizer)
