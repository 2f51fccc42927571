"""Map of checkpoint tensors to the parameters of a vLLM model.

names     checkpoint name -> layers and shards of the model, by vLLM's own name maps
table     one rule per layer class: the box of the tensor that the layer has, and the view of its parameter
trace     the same result from the model's own `load_weights`, run on tensors without data (place: union of its copies)
chart     the result for all tensors of one rank, as places
twin      the model without memory, for any rank of any layout, in one process
landing   a chart bound to a live model: a manifest, views, and the steps after a commit
"""
