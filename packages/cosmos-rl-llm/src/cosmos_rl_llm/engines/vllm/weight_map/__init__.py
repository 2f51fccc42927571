"""Where checkpoint tensors land in a vLLM model.

names     checkpoint name -> the layers and shards of the model that take it, by vLLM's own name maps
table     one rule a layer class: which box of the tensor the layer holds, and the view of its parameter
trace     the same answer from the model's own `load_weights`, run on tensors without data (region: its copies)
chart     the answer for all tensors of one rank, as places
twin      the model without memory, for any rank of any layout, in one process
landing   a chart bound to a live model: a manifest, views, and what is left to do after a commit (reload)
"""
