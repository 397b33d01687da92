"""What else computes the calls of ``layerzero bench cpu``: MKL and oneDNN called by themselves, and OpenVINO.

:data:`PEERS` is the list. A peer is given a function, its arguments and its options, and answers with a call that computes the same, or
with none. Weights are put into the order the library wants before the call. What a library has to copy for that is not timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: The result of a call, as a tensor.
Call = Callable[[], Any]


def mkl(function: str, args: tuple[Any, ...], _: dict[str, Any]) -> Call | None:
    """MKL's product of float32 with a weight in MKL's order, through torch's operator for it."""
    import torch

    here: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if function != "linear" or args[0].dtype != torch.float32 or not here:
        return None
    x, weight, bias = args[0], _plain(args[1]), args[2]
    ordered = torch.ops.mkl._mkl_reorder_linear_weight(weight, x.shape[0])
    return partial(torch.ops.mkl._mkl_linear, x, ordered, weight, bias, x.shape[0])


def onednn(function: str, args: tuple[Any, ...], _: dict[str, Any]) -> Call | None:
    """oneDNN's product with a weight in its order, and its softmax and GELU of tensors in its own memory format."""
    import torch
    import torch.nn.functional as F

    x = args[0]
    halves = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    supported = {
        name: getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: False) for name in halves.values()
    }
    here: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not here or (x.dtype in halves and not supported[halves[x.dtype]]()):
        return None
    if function == "linear":
        ordered = torch.ops.mkldnn._reorder_linear_weight(_plain(args[1]), x.shape[0])
        return partial(torch.ops.mkldnn._linear_pointwise, x, ordered, args[2], "none", [], "")
    if x.dtype != torch.float32:
        return None
    if function == "softmax":
        return partial(torch.softmax, x.to_mkldnn(), -1)
    if function == "gelu" and args[1] == "none":
        return partial(F.gelu, x.to_mkldnn())
    return None


def openvino(function: str, args: tuple[Any, ...], options: dict[str, Any]) -> Call | None:
    """OpenVINO's model of this one operation, of float32. It is given the tensor's own memory."""
    if importlib.util.find_spec("openvino") is None:
        return None
    import openvino as ov
    import torch

    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    if args[0].dtype != torch.float32:
        return None
    inputs = tensors[:3] if function == "attention" else tensors[:1]
    holes = [ov.opset13.parameter(list(one.shape), ov.Type.f32) for one in inputs]
    result = _openvino_result(function, holes, args, options)
    if result is None:
        return None
    how = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    request = (
        ov.Core()
        .compile_model(ov.Model([result], holes), "CPU", {**how, "PERFORMANCE_HINT": "LATENCY"})
        .create_infer_request()
    )
    for index, one in enumerate(inputs):
        request.set_input_tensor(index, ov.Tensor(one.numpy(), shared_memory=True))
    return partial(_infer, request)


def _infer(request: Any) -> Tensor:
    import torch

    request.infer()
    return torch.from_numpy(request.get_output_tensor().data)


def _openvino_result(function: str, holes: list[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The operation in OpenVINO's words; none if it has no such operation."""
    from openvino import opset13 as ops

    x = holes[0]
    if function == "linear":
        product = ops.matmul(x, ops.constant(_plain(args[1]).numpy()), False, True)
        return ops.add(product, ops.constant(args[2].numpy()))
    if function == "softmax":
        return ops.softmax(x, 1)
    if function == "gelu":
        return ops.gelu(x, "tanh" if args[1] == "tanh" else "erf")
    last = ops.constant([-1])
    if function == "layer_norm":
        normal = ops.mvn(x, last, True, float(args[4]), "inside_sqrt")
        return ops.add(ops.multiply(normal, ops.constant(args[2].numpy())), ops.constant(args[3].numpy()))
    if function == "rms_norm":
        mean = ops.reduce_mean(ops.multiply(x, x), last, True)
        root = ops.sqrt(ops.add(mean, ops.constant([[float(args[2])]], dtype="float32")))
        return ops.multiply(ops.divide(x, root), ops.constant(args[1].numpy()))
    plain = not (options.keys() - {"causal", "layout"})
    if function == "attention" and plain and args[0].shape[1] == args[1].shape[1]:
        causal = bool(options["causal"]) and args[0].shape[2] > 1
        return ops.scaled_dot_product_attention(*holes, causal=causal)
    return None


def _plain(weight: Any) -> Tensor:
    """A weight, also of a packed one."""
    return weight.unpack() if hasattr(weight, "unpack") else weight  # type: ignore[no-any-return]


#: Name and peer.
PEERS: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], Call | None]] = {
    "mkl": mkl,
    "onednn": onednn,
    "openvino": openvino,
}


def calls(names: list[str], function: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Call]:
    """The calls of those of these peers that have the function."""
    found = {name: PEERS[name](function, args, options) for name in names}
    return {name: call for name, call in found.items() if call is not None}
