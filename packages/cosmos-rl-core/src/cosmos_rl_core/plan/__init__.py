"""The plan of a run, from its recipe and its model's sizes alone: processes, memory and traffic. Nothing is loaded.

    ModelShape -> estimate -> MemoryEstimate of a rank -> memory -> Needs of each process -> RunPlan
                  traffic: collectives of a rank          changes: of a recipe whose policy does not fit

A domain describes its model as a `ModelShape`, and adds the parts of a process that it alone knows as `MemoryPart`.
`live_bytes` measures what operators keep, of a model without memory.
"""
