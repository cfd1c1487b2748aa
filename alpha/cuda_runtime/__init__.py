"""CUDA runtime of Alpha: compiler, device, memory, launches, tensor maps, graphs.

Importing it needs neither a GPU nor pycuda; using it without them raises MachineError, which names what is missing.
"""

from alpha.cuda_runtime._bindings import CudaError
from alpha.cuda_runtime.compile import CompileError, Cubin, Resources, Source, compile_all, compile_kernel
from alpha.cuda_runtime.device import Device, Properties, stream_handle
from alpha.cuda_runtime.graph import Graph, capture
from alpha.cuda_runtime.launch import Kernel, Launch
from alpha.cuda_runtime.memory import Arena, Span, aligned, download, fill, pinned, upload
from alpha.cuda_runtime.tensormap import TensorMap

__all__ = [
    "Arena",
    "CompileError",
    "Cubin",
    "CudaError",
    "Device",
    "Graph",
    "Kernel",
    "Launch",
    "Properties",
    "Resources",
    "Source",
    "Span",
    "TensorMap",
    "aligned",
    "capture",
    "compile_all",
    "compile_kernel",
    "download",
    "fill",
    "pinned",
    "stream_handle",
    "upload",
]
