"""Shards a model, or a stage of it, over the ranks of its replica, in this order (each step needs the previous one):

    float8 -> oneDNN -> experts (ep) -> matrices (tp) -> recomputation, offload, compile -> fully_shard

A single process runs only the steps that need no other rank.
"""

from __future__ import annotations

from cosmos_rl_core.parallel.axes.fsdp import shard_fully
from cosmos_rl_core.parallel.axes.linear import use_onednn
from cosmos_rl_core.parallel.lora import adapter_layers
from cosmos_rl_core.parallel.memory.float8 import use_float8
from cosmos_rl_core.parallel.memory.remat import save_memory
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_llm.policy.context import check_heads
from cosmos_rl_llm.policy.experts import spread_experts
from cosmos_rl_llm.policy.packing import install_attention
from cosmos_rl_llm.policy.tensor_plan import spread_tensors
from cosmos_rl_llm.policy.token_model import TermModel


def parallelize(terms: TermModel, setup: ModelSetup) -> None:
    """Shard `terms` in place; with a mesh, every trained parameter is a DTensor afterwards.

    Parameters are sharded from the rank's own copy without communication: all ranks must have the same values, or load
    them later. Raises UserError for a model that cannot be sharded according to `setup`.
    """
    mesh = setup.mesh
    head = terms.causal_lm.get_output_embeddings()
    use_float8(terms, setup.precision.fp8, skip=[head, *adapter_layers(terms)])
    if setup.memory.compile:  # torch.compile calls oneDNN itself
        install_attention(terms.causal_lm, traced=False)
    else:
        use_onednn(terms)
    experts = []
    if mesh is not None:
        check_heads(terms.config, tp=mesh.dims.tp, cp=mesh.dims.cp)
        experts = spread_experts(terms.causal_lm, mesh)
    if terms.axis is not None:
        spread_tensors(terms.causal_lm, terms.axis, experts=experts)
    save_memory(terms.blocks, setup.memory)
    if mesh is not None:
        shard_fully(
            terms,
            blocks=terms.blocks,
            mesh=mesh,
            parallel=setup.parallel,
            memory=setup.memory,
            precision=setup.precision,
            compute_dtype=terms.compute_dtype,
            experts=experts,
        )
