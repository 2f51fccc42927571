"""Runs vLLM's Triton kernels without a GPU: for a child process with this folder first in PYTHONPATH.

vLLM's Model Runner V2, which records the experts, needs Triton, and its build for CPUs a Triton with a backend for
them, which no index has. Triton's own interpreter (TRITON_INTERPRET=1) runs kernels on tensors of the CPU and needs no
backend: here is the name of one, by which vLLM takes Triton for usable. vLLM starts processes of its own, which get the
same environment. TRITON_INTERPRET and VLLM_USE_V2_MODEL_RUNNER must be 1 in it.
"""

from types import SimpleNamespace

from triton.backends import backends

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)  # pyright: ignore[reportArgumentType]
