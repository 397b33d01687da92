"""cuDNN's frontend for the CPU: the methods of its sources, what those refuse, and what the plans compute.

A plan is given addresses and nothing else: what it reads and writes is what the graph was told about them.
"""

from __future__ import annotations

import ctypes
import math
import types
from enum import Enum
from typing import Any

import torch
from attention_calls import attend
from torch import Tensor

DataType = Enum("DataType", ["HALF", "BFLOAT16", "FLOAT", "NOT_SET"])
HeurMode = Enum("HeurMode", ["A", "B", "FALLBACK"])
Alignment = Enum("Alignment", ["TOP_LEFT", "BOTTOM_RIGHT"])
DTYPES = {DataType.HALF: torch.float16, DataType.BFLOAT16: torch.bfloat16}


class NotSupportedError(Exception):
    """`cudnn.cudnnGraphNotSupportedError`."""


def must(condition: bool, text: str) -> None:
    """What the library's own checks do."""
    if not condition:
        raise NotSupportedError(text)


class Attributes:
    """`cudnn.tensor`."""

    def __init__(self) -> None:
        self.uid = -1
        self.virtual = True
        self.dim: list[int] = []
        self.stride: list[int] = []

    def set_uid(self, uid: int) -> Attributes:
        self.uid = uid
        return self

    def set_output(self, is_output: bool) -> Attributes:
        self.virtual = not is_output
        return self

    def set_dim(self, dim: list[int]) -> Attributes:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Attributes:
        self.stride = stride
        return self

    def at(self, address: int, dtype: torch.dtype) -> Tensor:
        """What lies at an address."""
        must(address % 16 == 0, "misaligned address")
        must(self.stride[-1] == 1, "The stride for the last dimension must be 1")
        must(all(stride > 0 for stride in self.stride), "strides must be positive")
        count = 1 + sum((n - 1) * s for n, s in zip(self.dim, self.stride, strict=True))
        memory = (ctypes.c_char * (count * 2)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(self.dim, self.stride)


class Library:
    """The module `cudnn`, and what was done with it."""

    def __init__(self, sm: int = 90, version: int = 91900, workspace: int = 0) -> None:
        self.sm, self.version, self.workspace = sm, version, workspace
        self.graphs: list[Graph] = []
        self.handles: dict[int, int] = {}
        self.runs: list[tuple[int, int]] = []

    def module(self) -> types.ModuleType:
        """The module."""
        module = types.ModuleType("cudnn")

        def pygraph(
            name: str = "test_graph",
            io_data_type: Any = DataType.NOT_SET,
            intermediate_data_type: Any = DataType.NOT_SET,
            compute_data_type: Any = DataType.NOT_SET,
            handle: int | None = None,
            sm_count: Any = None,
            sm_version: Any = None,
            kernel_cache: Any = None,
        ) -> Graph:
            must(intermediate_data_type is DataType.FLOAT is compute_data_type, "data types need to be set")
            must(handle in self.handles, "no handle")
            self.graphs.append(Graph(self, DTYPES[io_data_type]))
            return self.graphs[-1]

        module.__dict__.update(
            __version__="1.23.0",
            backend_version=lambda: self.version,
            create_handle=self.create_handle,
            set_stream=self.set_stream,
            data_type=DataType,
            heur_mode=HeurMode,
            diagonal_alignment=Alignment,
            pygraph=pygraph,
        )
        return module

    def create_handle(self) -> int:
        handle = 1000 + len(self.handles)
        self.handles[handle] = 0
        return handle

    def set_stream(self, handle: int, stream: int) -> None:
        self.handles[handle] = stream


class Graph:
    """`cudnn.pygraph`."""

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        self.library, self.dtype = library, dtype
        self.inputs: list[Attributes] = []
        self.output = Attributes()
        self.options: dict[str, Any] = {}
        self.built = False

    def tensor(
        self,
        dim: list[int],
        stride: list[int],
        data_type: Any = DataType.NOT_SET,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Any = None,
        name: str = "",
    ) -> Attributes:
        return Attributes().set_dim(dim).set_stride(stride)

    def sdpa(
        self,
        q: Attributes,
        k: Attributes,
        v: Attributes,
        is_inference: bool | None = None,
        attn_scale: float | None = None,
        bias: Any = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Any = None,
        seq_len_kv: Any = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: Any = Alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Any = None,
        rng_dump: Any = None,
        paged_attention_k_table: Any = None,
        paged_attention_v_table: Any = None,
        paged_attention_max_seq_len_kv: int | None = None,
        compute_data_type: Any = DataType.NOT_SET,
        name: str = "",
    ) -> tuple[Attributes, None]:
        must(is_inference is True, "Exactly one of {generate_stats, is_inference} must be set")
        must(isinstance(attn_scale, float), "attn_scale must be a cudnn_tensor or float.")
        self.inputs = [q, k, v]
        self.options = {
            "scale": attn_scale,
            "alignment": diagonal_alignment,
            "left": diagonal_band_left_bound,
            "right": diagonal_band_right_bound,
        }
        return self.output, None

    def build(self, modes: list[Any]) -> None:
        assert modes == [HeurMode.A, HeurMode.FALLBACK]
        (_, heads, seq_q, width), (_, kv_heads, seq_k, _) = self.inputs[0].dim, self.inputs[1].dim
        v_width, left, right = self.inputs[2].dim[3], self.options["left"], self.options["right"]
        must(self.library.sm >= 80, "SDPA FP16/BF16 requires SM80 (Ampere) or newer architecture")
        must(heads % kv_heads == 0, "number of heads for key and query must be a factor")
        must(width % 8 == 0 and v_width % 8 == 0, "hidden_dim should be multiple of 8")
        must(max(width, v_width) <= (256 if self.library.sm >= 90 else 128), "head_dim")
        bottom = self.options["alignment"] is Alignment.BOTTOM_RIGHT
        must(not bottom or right is not None, "the diagonal alignment must be set")
        must(not bottom or seq_q <= seq_k, "Bottom right causal mask does not support max_s_q > max_s_kv.")
        must(left is None or left > 0 and seq_q <= seq_k, "Sliding window attention: max_s_q <= max_s_kv.")
        must(not self.output.virtual and self.output.dim == [*self.inputs[0].dim[:3], v_width], "output")
        assert sorted(t.uid for t in (*self.inputs, self.output)) == [1, 2, 3, 4]
        self.built = True

    def get_workspace_size(self) -> int:
        return self.library.workspace

    def execute(self, tensor_to_device_buffer: dict[int, int], workspace: int, handle: int | None = None) -> None:
        assert self.built and handle is not None and (workspace != 0) is (self.library.workspace > 0)
        self.library.runs.append((handle, self.library.handles[handle]))
        q, k, v = (t.at(tensor_to_device_buffer[t.uid], self.dtype) for t in self.inputs)
        seq_q, seq_k = q.shape[2], k.shape[2]
        shift = seq_k - seq_q if self.options["alignment"] is Alignment.BOTTOM_RIGHT else 0
        diagonal, column = torch.arange(seq_q)[:, None] + shift, torch.arange(seq_k)[None]
        left, right = self.options["left"], self.options["right"]
        allowed = column <= diagonal + (math.inf if right is None else right)
        allowed &= column + (math.inf if left is None else left) > diagonal
        output = self.output.at(tensor_to_device_buffer[self.output.uid], self.dtype)
        output.copy_(attend(q, k, v, allowed, self.options["scale"]).to(self.dtype))
