from dataclasses import dataclass, field
from cosmos_rl_transfer.layout import Manifest, TensorLayout, whole_box
from cosmos_rl_core.types import WeightSpec
import os
@dataclass
class Landing:
    manifest: Manifest
    views: dict
    full: dict
    def settle(self): pass
def landing_of(model, specs, *, vllm_config, rank, how="table"):
    if os.environ.get("STUB_FULL"):
        return Landing(Manifest(()), {}, {s.name: "stub" for s in specs})
    p = dict(model.named_parameters())
    views = {}
    for s in specs:
        n = s.name
        if n in p: views[n] = p[n].data
        else:
            for fused, parts in {"qkv_proj": ["q_proj","k_proj","v_proj"], "gate_up_proj": ["gate_proj","up_proj"]}.items():
                for i, part in enumerate(parts):
                    if f".{part}." in n:
                        at = 0
                        for q in parts[:i]:
                            at += next(x for x in specs if x.name == n.replace(part, q)).shape[0]
                        views[n] = p[n.replace(part, fused)].data.narrow(0, at, s.shape[0])
        if n in views and tuple(views[n].shape) != tuple(s.shape): views[n] = views[n][: s.shape[0]]
    sp = {s.name: WeightSpec(name=s.name, shape=s.shape, dtype=str(views[s.name].dtype)[6:]) for s in specs if s.name in views}
    return Landing(Manifest(tuple(TensorLayout(x, {rank: whole_box(x.shape)}) for x in sp.values())), views, {s.name: "?" for s in specs if s.name not in views})
