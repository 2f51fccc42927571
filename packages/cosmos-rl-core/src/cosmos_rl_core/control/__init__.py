"""The controller: a server that passes messages of workers to the ledger and sends the ledger's replies.

No torch. Used by `launch`; `workers.client` is the client.
"""
