"""A run as one call: check, plan, start workers, observe, report. Used by `cli` and by `cosmos_rl_core.run`.

A placement is one file with a function `start(launch: placement.Launch) -> placement.Workers` and a row in
`run.PLACEMENTS`: `local` starts processes of this machine, `placement` itself has the tasks of `inline`.
"""
