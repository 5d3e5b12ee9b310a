"""Linear layers with FP8 weights and activations, and the swap of a model's layers (docs/semantics/fp8.md §3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from htree_ops.errors import ShapeMismatchError, refuse
from htree_ops.ops.arguments import (
    FLOATING,
    autocast_dtype,
    check_devices,
    check_dtype,
    check_int,
    check_option_dtype,
    check_tensor,
    validate_arguments_as,
)
from htree_ops.ops.fp8.quantize import FP8Format, fp8_quantize
from htree_ops.tuning.select import configured

#: The name of these layers in the config of a transformers model.
QUANT_METHOD = "htree_fp8"


def _is_good(scale: Tensor) -> bool:
    """Whether the values are positive and finite. Those of a meta tensor are unknown and pass."""
    return scale.is_meta or bool((scale.isfinite() & (scale > 0)).all())


def _static_scale(op: str, activation_scale: Tensor | float) -> Tensor:
    """The scale as fp32 []."""
    if isinstance(activation_scale, bool) or not isinstance(activation_scale, (Real, Tensor)):
        came = type(activation_scale).__name__
        raise TypeError(f"{op}: activation_scale must be a number or a Tensor, got {came}")
    place = activation_scale.device if isinstance(activation_scale, Tensor) else "cpu"
    scale = torch.as_tensor(activation_scale, dtype=torch.float32, device=place).detach()
    if scale.numel() != 1:
        raise ShapeMismatchError(
            f"{op}: activation_scale must have one element, got {tuple(scale.shape)}",
            expected=(),
            actual=tuple(scale.shape),
            tensor_name="activation_scale",
        )
    if not _is_good(scale):
        raise ValueError(f"{op}: activation_scale must be positive and finite, got {float(scale)}")
    return scale.reshape(())


class FP8Linear(nn.Module):
    """``y = x @ weight.T + bias`` with x and weight in E4M3, for inference.

    The weight is quantised once, with a scale per output channel. Activations are quantised at each call, by default
    with a scale per row (dynamic), or with one given scale for all (static), which saves the search for the maximum
    and saturates beyond it. The product accumulates in fp32 and is rounded to the dtype of x; the bias is added in
    that dtype. There is no gradient: a backward through it raises RuntimeError.

    ``state_dict`` holds weight (float8_e4m3fn [out, in]), weight_scale (fp32 [out, 1]), bias, and activation_scale
    (fp32 []) where it is static. Both scales multiply when quantising; those of most FP8 checkpoints, under the same
    names, are the reciprocals (:func:`fp8_scale_inv`), which nothing can tell apart. A state dict of an
    ``nn.Linear`` is quantised while it is loaded; a weight of another dtype, a float weight beside a weight_scale, and
    scales that are not positive and finite are refused with the RuntimeError of ``load_state_dict``. ``.to(dtype)``,
    ``.half()`` and the like change the bias alone.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is one.
        static_activation: whether activations have one fixed scale, 1 until it is loaded or set.
        device, dtype: of the initial values, as for ``nn.Linear``; float32, float16 or bfloat16.

    Raises:
        TypeError: a size is not an int. ValueError: it is negative. UnsupportedDtypeError: another dtype.

    Example:
        >>> layer = FP8Linear.from_linear(torch.nn.Linear(64, 32))
        >>> layer(torch.randn(3, 64)).shape
        torch.Size([3, 32])
    """

    weight: Tensor
    weight_scale: Tensor
    activation_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        static_activation: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("FP8Linear", "in_features", in_features, 0)
        check_int("FP8Linear", "out_features", out_features, 0)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_option_dtype("FP8Linear", dtype, FLOATING)
        self._take(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype))
        if static_activation:
            self.activation_scale = torch.ones((), dtype=torch.float32, device=self.weight.device)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws weight and bias anew, as ``nn.Linear`` does; a static activation scale becomes 1."""
        linear = skip_init(
            nn.Linear,
            self.in_features,
            self.out_features,
            bias=False,
            device=self.weight.device,
            dtype=self.initial_dtype,
        )
        linear.bias = self.bias
        linear.reset_parameters()
        weight, scale, _ = fp8_quantize(linear.weight, granularity="channel")
        self.weight.copy_(weight)
        self.weight_scale.copy_(scale)
        if self.activation_scale is not None:
            self.activation_scale.fill_(1.0)

    def _take(self, linear: nn.Linear) -> None:
        """Becomes the quantised ``linear``, with dynamic activation scales."""
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.initial_dtype = linear.weight.dtype
        weight, scale, _ = fp8_quantize(linear.weight.detach(), granularity="channel")
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("activation_scale", None)
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, activation_scale: Tensor | float | None = None) -> FP8Linear:
        """The quantised ``linear``; with ``activation_scale`` (one positive number) its activations are static.

        Activations are multiplied by ``activation_scale``, 448 / max|x|; elsewhere ``input_scale`` is its reciprocal.

        Raises:
            TypeError: not an ``nn.Linear``, or a scale that is not a number.
            UnsupportedDtypeError: its weight is not float32, float16 or bfloat16.
            ValueError: the scale is not positive and finite. ShapeMismatchError: it has several elements.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(
                f"FP8Linear.from_linear: linear must be an nn.Linear, got {type(linear).__name__}"
            )
        return cls._from_linear("FP8Linear.from_linear", linear, activation_scale)

    @classmethod
    def _from_linear(cls, op: str, linear: nn.Linear, activation_scale: Tensor | float | None) -> FP8Linear:
        """:meth:`from_linear` with the words that its messages begin with."""
        check_dtype(op, FLOATING, **{"linear.weight": linear.weight})
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(linear)
        if activation_scale is not None:
            scale = _static_scale(op, activation_scale)
            module.activation_scale = scale.to(module.weight.device)
        module.train(linear.training)
        return module

    @validate_arguments_as("FP8Linear")
    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] in float16, bfloat16 or float32; returns [..., N] in the same dtype.

        Under autocast x takes its dtype first, as in ``nn.Linear``.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError: another K or dtype.
            DeviceError: x lies elsewhere than the weight.
        """
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            refuse(
                ShapeMismatchError,
                f"FP8Linear: the last dim of x must be in_features = {self.in_features}, got {tuple(x.shape)}",
                expected=self.in_features,
                actual=x.shape[-1] if x.dim() else None,
                tensor_name="x",
            )
        if x.device != self.weight.device:
            check_devices("FP8Linear", {"weight": self.weight, "x": x})
        dtype = autocast_dtype(x.device)
        if dtype is not None and x.dtype in FLOATING:
            x = x.to(dtype)
        rows = x.reshape(math.prod(x.shape[:-1]), self.in_features)
        granularity = "channel" if self.activation_scale is None else "tensor"
        q, scale, _ = torch.ops.htree.fp8_quantize(rows, self.activation_scale, granularity)
        operands = (q, self.weight.t(), scale, self.weight_scale.t(), x.dtype)
        config = configured(
            "fp8_gemm",
            (rows.shape[0], self.out_features, self.in_features),
            q,
            lambda tried: torch.ops.htree.fp8_gemm(*operands, tried),
            layout="column-major b",
        )
        y = torch.ops.htree.fp8_gemm(*operands, config)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8Linear:
        """Moves everything. The codes stay FP8 and the scales fp32."""
        before = {name: buffer.dtype for name, buffer in self._buffers.items() if buffer is not None}
        kept = {name: self._buffers[name] for name in before}
        super()._apply(fn, recurse)
        for name, dtype in before.items():
            after, original = self._buffers[name], kept[name]
            if after is not None and original is not None and after.dtype != dtype:
                self._buffers[name] = original.to(after.device)
        return self

    def _state_faults(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """What makes the weight or a scale of a state dict unusable."""
        faults = []
        weight = state_dict.get(prefix + "weight")
        given = state_dict.get(prefix + "weight_scale")
        if isinstance(weight, Tensor):
            if weight.dtype not in (torch.float8_e4m3fn, *FLOATING):
                wanted = " or ".join(map(str, (torch.float8_e4m3fn, *FLOATING)))
                faults.append(f"{prefix}weight must have dtype {wanted}, got {weight.dtype}")
            elif weight.dtype in FLOATING and given is not None:
                faults.append(
                    f"{prefix}weight must be {torch.float8_e4m3fn} where weight_scale is given, got {weight.dtype}"
                )
        for name in ("weight_scale", "activation_scale"):
            scale = state_dict.get(prefix + name)
            if isinstance(scale, Tensor) and not _is_good(scale):
                faults.append(f"{prefix}{name} must be positive and finite")
        return [f"FP8Linear: {fault}" for fault in faults]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        faults = self._state_faults(state_dict, prefix)
        if faults:
            args[-1].extend(faults)  # load_state_dict raises them all
            return
        weight = state_dict.get(prefix + "weight")
        if isinstance(weight, Tensor) and weight.dtype in FLOATING:
            q, scale, _ = fp8_quantize(weight, granularity="channel")
            state_dict[prefix + "weight"] = q
            state_dict[prefix + "weight_scale"] = scale
            if self.activation_scale is not None:
                state_dict.setdefault(prefix + "activation_scale", self.activation_scale)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Sizes and the kind of activation scale, for ``repr``."""
        kind = "dynamic" if self.activation_scale is None else "static"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"activation={kind}"
        )


def _linears(
    op: str, module: nn.Module, wanted: Callable[[str, nn.Linear], bool] | None
) -> dict[nn.Linear, list[str]]:
    """Each layer that can be swapped, with its names, all of which ``wanted`` must accept.

    Subclasses of nn.Linear are left out: their owners use them in other ways.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{op}: module must be an nn.Module, got {type(module).__name__}")
    if wanted is not None and not callable(wanted):
        raise TypeError(f"{op}: filter must be callable or None, got {type(wanted).__name__}")
    names: dict[nn.Linear, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        if type(child) is nn.Linear:
            names.setdefault(child, []).append(name)
    return {
        linear: of_it
        for linear, of_it in names.items()
        if wanted is None or all(wanted(name, linear) for name in of_it)
    }


def quantize_model_(
    module: nn.Module,
    filter: Callable[[str, nn.Linear], bool] | None = None,
    *,
    activation_scales: Mapping[str, Tensor | float] | None = None,
) -> nn.Module:
    """Swaps the ``nn.Linear`` layers inside ``module`` for :class:`FP8Linear`, in place, and returns it.

    A layer that occurs twice becomes one layer that occurs twice. Subclasses of ``nn.Linear``, such as the output
    projection of ``nn.MultiheadAttention``, are left alone: their owners read the weight themselves. Hooks of a swapped
    layer go with it: register them anew. An error leaves the model as it was.

    The config of a transformers model then names the layers, so that ``save_pretrained`` keeps them and
    ``from_pretrained``, after :func:`htree_ops.integrations.transformers.register`, finds codes and scales again.

    Args:
        module: a model that holds linear layers; not itself one.
        filter: called with a layer's name and the layer; layers that it refuses stay, under all their names. By
            default all are swapped.
        activation_scales: static activation scales by name, 448 / max|x| as from
            :func:`calibrate_activation_scales`; the other layers are dynamic. Any name of a layer that occurs twice
            will do.

    Raises:
        TypeError: module is not an ``nn.Module``, or is itself an ``nn.Linear``, which cannot be swapped in place;
            filter is not callable, or activation_scales is not a mapping to numbers.
        UnsupportedDtypeError: a layer's weight is not float32, float16 or bfloat16.
        ValueError: ``activation_scales`` names a layer that is not swapped, has two scales for one layer, or one
            that is not positive and finite.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 16))
        >>> type(quantize_model_(model, filter=lambda name, layer: name == "0")[0]).__name__
        'FP8Linear'
    """
    if isinstance(module, nn.Linear):
        raise TypeError(
            "quantize_model_: module must hold its layers, got an nn.Linear itself: use FP8Linear.from_linear"
        )
    layers = _linears("quantize_model_", module, filter)
    if activation_scales is not None and not isinstance(activation_scales, Mapping):
        raise TypeError(
            f"quantize_model_: activation_scales must map names to scales, got {type(activation_scales).__name__}"
        )
    scales = dict(activation_scales or {})
    unknown = sorted(set(scales) - {name for names in layers.values() for name in names})
    if unknown:
        raise ValueError(
            f"quantize_model_: activation_scales must name swapped layers, got {', '.join(unknown)}"
        )
    swapped: dict[str, FP8Linear] = {}
    for linear, names in layers.items():
        given = {name: scales[name] for name in names if name in scales}
        values = {float(_static_scale(f"quantize_model_: layer {name!r}", given[name])) for name in given}
        if len(values) > 1:
            raise ValueError(
                f"quantize_model_: activation_scales must have one scale for a layer of several names, got {given}"
            )
        op = f"quantize_model_: layer {names[0]!r}"
        layer = FP8Linear._from_linear(op, linear, next(iter(given.values()), None))
        swapped.update(dict.fromkeys(names, layer))
    for name, layer in swapped.items():
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, layer)
    config = getattr(module, "config", None)
    if swapped and hasattr(module, "save_pretrained") and config is not None:
        before = getattr(config, "quantization_config", None) or {}
        kinds = {name: "dynamic" if x.activation_scale is None else "static" for name, x in swapped.items()}
        config.quantization_config = {
            "quant_method": QUANT_METHOD,
            "layers": {**dict(before).get("layers", {}), **kinds},
        }
    return module


def calibrate_activation_scales(
    module: nn.Module,
    batches: Iterable[Any],
    filter: Callable[[str, nn.Linear], bool] | None = None,
) -> dict[str, Tensor]:
    """Runs ``module`` on each batch and returns the scale 448 / max|x| of each linear layer's inputs, by name.

    The model is run as it is, without gradients; layers that see no input are left out.

    Args:
        module: a model with ``nn.Linear`` layers.
        batches: arguments of single calls: a tuple is unpacked, a mapping passed as keywords.
        filter: see :func:`quantize_model_`.

    Raises:
        TypeError: module is not an ``nn.Module``, filter is not callable, or a layer's input is not a tensor.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 16))
        >>> scales = calibrate_activation_scales(model, [torch.ones(3, 64)])
        >>> scales["0"].item()
        448.0
    """
    op = "calibrate_activation_scales"
    largest: dict[str, Tensor] = {}

    def observe(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            x: Any = inputs[0] if inputs else keywords.get("input")
            check_tensor(op, f"the input of layer {name!r}", x)
            if x.numel():
                seen = x.detach().abs().where(x.isfinite(), 0).max().float()
                largest[name] = torch.maximum(largest[name], seen) if name in largest else seen

        return hook

    handles = [
        linear.register_forward_pre_hook(observe(name), with_kwargs=True)
        for linear, names in _linears(op, module, filter).items()
        for name in names
    ]
    try:
        with torch.no_grad():
            for batch in batches:
                if isinstance(batch, Mapping):
                    module(**batch)
                else:
                    module(*(batch if isinstance(batch, tuple) else (batch,)))
    finally:
        for handle in handles:
            handle.remove()
    limit = FP8Format().max_value
    return {
        # A number divided by a tensor would be its rounded reciprocal times the number.
        name: torch.where(seen == 0, 1.0, torch.full_like(seen, limit) / seen).clamp(2.0**-126, 2.0**127)
        for name, seen in largest.items()
    }
