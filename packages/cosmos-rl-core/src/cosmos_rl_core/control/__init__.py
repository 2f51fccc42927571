"""The controller: a server that passes messages of workers to the ledger and sends the ledger's replies. No torch.

`ledger/` decides (members and meshes, leases, steps), `journal/` makes its records durable, `server` connects both to
the workers. Used by `launch`; `workers.client` is the client.
"""
